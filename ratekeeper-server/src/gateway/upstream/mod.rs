//! Upstreams: load balancing, outlier ejection and retry budgets.
//!
//! | file | what it does |
//! |---|---|
//! | `pool` | pools of connections, one per worker |
//! | `shared` | connections that requests share, for HTTP/2 |
//! | `capacity` | the connection limit of an address, over all workers |
//! | `dial` | opens sockets: name lookup, TCP and TLS |
//! | `health` | active health checks |
//! | `ejection` | outlier ejection by the results of requests |

pub(crate) mod capacity;
mod dial;
mod ejection;
pub(crate) mod health;
pub(crate) mod pool;
mod shared;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::uri::{Authority, Scheme};
use ratekeeper_config as config;
use ratekeeper_config::{Balance, Protocol};
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use self::capacity::ConnectionLimit;
use self::ejection::Ejection;
use self::pool::Pool;
use super::timer::{Ticker, Ticks};
use crate::runtime::tls::{self, TlsError};

/// The cost of 100 retries: the most credit that an upstream accumulates.
const RETRY_CREDIT_MAX: u64 = 100 * RETRY_COST;
/// The cost of one retry. Each request earns the configured percentage as credit.
const RETRY_COST: u64 = 100;

/// A group of equivalent servers.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) config: config::Upstream,
    addresses: Vec<Arc<Address>>,
    /// Rotates through the addresses.
    rotation: AtomicUsize,
    /// Retry budget.
    retry_credit: AtomicU64,
}

/// One server and its state.
pub(crate) struct Address {
    pub(crate) config: config::Address,
    pub(crate) authority: Authority,
    pub(crate) scheme: Scheme,
    pub(crate) protocol: Protocol,
    pub(crate) tls: Option<(TlsConnector, ServerName<'static>)>,
    pub(crate) connect_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) ping_after: Duration,
    /// Connection pools, one per worker.
    pools: Box<[Arc<Pool>]>,
    /// Connection limit, over all workers.
    connection_limit: Arc<ConnectionLimit>,
    in_flight: AtomicUsize,
    /// Result of the health checks.
    is_healthy: AtomicBool,
    ejection: Ejection,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Upstream {
    pub(crate) fn new(
        config: &config::Upstream,
        workers: usize,
        ticker: &Arc<Ticker>,
    ) -> Result<Upstream, TlsError> {
        let addresses = config.addresses.iter().map(|address| Address::new(config, address, workers, ticker));
        Ok(Upstream {
            addresses: addresses.map(|it| it.map(Arc::new)).collect::<Result<_, _>>()?,
            config: config.clone(),
            rotation: AtomicUsize::new(0),
            retry_credit: AtomicU64::new(RETRY_CREDIT_MAX / 10),
        })
    }

    pub(crate) fn addresses(&self) -> &[Arc<Address>] {
        &self.addresses
    }

    /// Chooses the address for the next attempt: one that is healthy, not ejected and not yet tried, if there is one.
    ///
    /// If none is healthy, all receive requests: an attempt may succeed, a rejection cannot.
    pub(crate) fn choose(&self, tried: &[usize], now: Ticks) -> Option<(usize, &Arc<Address>)> {
        if let [only] = &*self.addresses {
            return Some((0, only));
        }
        let (first, count) = (self.rotation.fetch_add(1, Ordering::Relaxed), self.addresses.len());
        let rotated = || (0..count).map(|step| first.wrapping_add(step) % count);
        let in_flight = |at: &usize| self.addresses[*at].in_flight.load(Ordering::Relaxed);
        let best = |is_eligible: &dyn Fn(usize) -> bool| {
            let mut eligible = rotated().filter(|at| is_eligible(*at));
            match self.config.balance {
                Balance::RoundRobin => eligible.next(),
                Balance::LeastRequests => eligible.min_by_key(in_flight),
            }
        };
        let is_healthy = |at: usize| self.addresses[at].is_available(now);
        let is_new = |at: usize| !tried.contains(&at);
        let at =
            best(&|at| is_new(at) && is_healthy(at)).or_else(|| best(&is_new)).or_else(|| best(&|_| true))?;
        Some((at, &self.addresses[at]))
    }

    /// Counts a request in flight, if the balancer needs the count: workers contend for it.
    pub(crate) fn count_in_flight(&self, address: &Arc<Address>) -> Option<InFlightGuard> {
        let is_needed = self.addresses.len() > 1 && self.config.balance == Balance::LeastRequests;
        is_needed.then(|| address.count_in_flight())
    }

    /// Credits the retry budget for one request.
    pub(crate) fn credit_retry(&self) {
        let earned = u64::from(self.config.retry_percent);
        let more = |credit: u64| (credit < RETRY_CREDIT_MAX && earned > 0).then_some(credit + earned);
        let _ = self.retry_credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Takes one retry from the budget; false if the budget is exhausted.
    pub(crate) fn take_retry(&self) -> bool {
        let take = |credit: u64| credit.checked_sub(RETRY_COST);
        self.config.retry_percent > 0
            && self.retry_credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

impl Address {
    fn new(
        upstream: &config::Upstream,
        address: &config::Address,
        workers: usize,
        ticker: &Arc<Ticker>,
    ) -> Result<Address, TlsError> {
        let host = &address.host;
        let is_bare_v6 = host.contains(':') && !host.starts_with('[');
        let host = if is_bare_v6 { format!("[{host}]") } else { host.clone() };
        let scheme = if address.is_tls { Scheme::HTTPS } else { Scheme::HTTP };
        let default_port = if address.is_tls { 443 } else { 80 };
        let text = if address.port == default_port { host } else { format!("{host}:{}", address.port) };
        let authority = Authority::try_from(text.as_str()).map_err(|_| TlsError::Host(text))?;
        let tls = address.is_tls.then(|| tls::connector(upstream, address)).transpose()?;
        let connection_limit = Arc::new(ConnectionLimit::new(upstream.max_connections));
        let pools = (0..workers).map(|_| Arc::new(Pool::new(connection_limit.clone(), ticker.clone())));
        Ok(Address {
            config: address.clone(),
            authority,
            scheme,
            protocol: upstream.protocol,
            tls,
            connect_timeout: upstream.timeouts.connect,
            idle_timeout: upstream.timeouts.idle,
            ping_after: upstream.ping_after,
            pools: pools.collect(),
            connection_limit,
            in_flight: AtomicUsize::new(0),
            is_healthy: AtomicBool::new(true),
            ejection: Ejection::default(),
        })
    }

    pub(crate) fn pool(&self, worker: usize) -> &Arc<Pool> {
        &self.pools[worker]
    }

    /// The pools of all workers.
    pub(crate) fn pools(&self) -> &[Arc<Pool>] {
        &self.pools
    }

    /// Number of open connections.
    pub(crate) fn connections(&self) -> usize {
        self.connection_limit.in_use()
    }

    /// Closes connections that were last used before `oldest`.
    pub(crate) fn sweep(&self, oldest: Ticks) {
        self.pools.iter().for_each(|pool| pool.sweep(oldest));
    }

    pub(crate) fn is_available(&self, now: Ticks) -> bool {
        self.is_healthy.load(Ordering::Relaxed) && !self.ejection.is_ejected(now)
    }

    /// Sets the result of the health checks. Returns whether it changed.
    pub(crate) fn set_healthy(&self, is_healthy: bool) -> bool {
        self.is_healthy.swap(is_healthy, Ordering::Relaxed) != is_healthy
    }

    pub(crate) fn record_success(&self) {
        self.ejection.record_success();
    }

    /// Records a failed attempt, and ejects the address after too many in a row.
    pub(crate) fn record_failure(&self, upstream: &config::Upstream, error: &dyn fmt::Display, now: Ticks) {
        let config::Upstream { name: upstream, outlier_ejection: settings, .. } = upstream;
        let address = &self.authority;
        tracing::debug!(upstream, %address, %error, "upstream attempt failed");
        if let Some(settings) = settings
            && self.ejection.record_failure(settings, now)
        {
            let (consecutive_failures, duration) = (settings.after, settings.lasts);
            tracing::warn!(upstream, %address, %error, consecutive_failures, ?duration, "upstream ejected");
        }
    }

    fn count_in_flight(self: &Arc<Address>) -> InFlightGuard {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightGuard(self.clone())
    }
}

/// A request in flight at an address, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlightGuard(Arc<Address>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
