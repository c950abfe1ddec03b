//! Upstreams: load balancing, outlier ejection and retry budgets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::uri::{Authority, Scheme};
use ratekeeper_config as config;
use ratekeeper_config::{Balance, Protocol};
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use super::capacity::Room;
use super::pool::Pool;
use super::timer::{Ticker, Ticks};
use super::tls::{self, TlsError};

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
    turn: AtomicUsize,
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
    room: Arc<Room>,
    under_way: AtomicUsize,
    /// Result of the health checks.
    is_well: AtomicBool,
    failures: AtomicU32,
    /// End of the ejection, in milliseconds.
    ejected_until: AtomicU64,
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
            turn: AtomicUsize::new(0),
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
        let (turn, of) = (self.turn.fetch_add(1, Ordering::Relaxed), self.addresses.len());
        let in_turn = || (0..of).map(|step| turn.wrapping_add(step) % of);
        let under_way = |at: &usize| self.addresses[*at].under_way.load(Ordering::Relaxed);
        let best = |is_fit: &dyn Fn(usize) -> bool| {
            let mut fit = in_turn().filter(|at| is_fit(*at));
            match self.config.balance {
                Balance::RoundRobin => fit.next(),
                Balance::LeastRequests => fit.min_by_key(under_way),
            }
        };
        let is_well = |at: usize| self.addresses[at].is_available(now);
        let is_new = |at: usize| !tried.contains(&at);
        let at =
            best(&|at| is_new(at) && is_well(at)).or_else(|| best(&is_new)).or_else(|| best(&|_| true))?;
        Some((at, &self.addresses[at]))
    }

    /// Counts a request in flight, if the balancer needs the count: workers contend for it.
    pub(crate) fn enter(&self, address: &Arc<Address>) -> Option<UnderWay> {
        let is_asked = self.addresses.len() > 1 && self.config.balance == Balance::LeastRequests;
        is_asked.then(|| address.enter())
    }

    /// Credits the retry budget for one request.
    pub(crate) fn earn_retry(&self) {
        let earned = u64::from(self.config.retry_percent);
        let more = |credit: u64| (credit < RETRY_CREDIT_MAX && earned > 0).then_some(credit + earned);
        let _ = self.retry_credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Takes one retry from the budget; false if the budget is exhausted.
    pub(crate) fn pay_retry(&self) -> bool {
        let pay = |credit: u64| credit.checked_sub(RETRY_COST);
        self.config.retry_percent > 0
            && self.retry_credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok()
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
        let usual_port = if address.is_tls { 443 } else { 80 };
        let text = if address.port == usual_port { host } else { format!("{host}:{}", address.port) };
        let authority = Authority::try_from(text.as_str()).map_err(|_| TlsError::Host(text))?;
        let tls = address.is_tls.then(|| tls::connector(upstream, address)).transpose()?;
        let room = Arc::new(Room::new(upstream.max_connections));
        let pools = (0..workers).map(|_| Arc::new(Pool::new(room.clone(), ticker.clone())));
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
            room,
            under_way: AtomicUsize::new(0),
            is_well: AtomicBool::new(true),
            failures: AtomicU32::new(0),
            ejected_until: AtomicU64::new(0),
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
        self.room.taken()
    }

    /// Closes connections that were last used before `oldest`.
    pub(crate) fn sweep(&self, oldest: Ticks) {
        self.pools.iter().for_each(|pool| pool.sweep(oldest));
    }

    pub(crate) fn is_available(&self, now: Ticks) -> bool {
        self.is_well.load(Ordering::Relaxed) && self.ejected_until.load(Ordering::Relaxed) <= now.as_millis()
    }

    /// Sets the result of the health checks. Returns whether it changed.
    pub(crate) fn set_well(&self, is_well: bool) -> bool {
        self.is_well.swap(is_well, Ordering::Relaxed) != is_well
    }

    /// Records the outcome of an attempt. Returns whether this failure ejects the address.
    pub(crate) fn tell(&self, went_well: bool, eject: Option<&config::OutlierEjection>, now: Ticks) -> bool {
        if went_well {
            if self.failures.load(Ordering::Relaxed) > 0 {
                self.failures.store(0, Ordering::Relaxed);
            }
            return false;
        }
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let Some(eject) = eject.filter(|eject| failures >= eject.after) else { return false };
        self.failures.store(0, Ordering::Relaxed);
        self.ejected_until.store(now.after(eject.lasts).as_millis(), Ordering::Relaxed);
        true
    }

    /// Counts a request in flight.
    fn enter(self: &Arc<Address>) -> UnderWay {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        UnderWay(self.clone())
    }
}

/// A request in flight at an address, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<Address>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}
