//! The gateway: a reverse proxy that forwards what its limits allow.
//!
//! ```text
//! accept -> worker (a thread for each core) -> connection -> request
//! request: screen -> route -> limits -> forward -> answer
//! ```
//!
//! | file | what it does |
//! |---|---|
//! | `accept` | takes connections, and gives each to the worker that has the fewest |
//! | `worker` | a thread with its own runtime and its own connections to upstreams |
//! | `connection`, `watch` | one client's connection, and what happens to one that keeps us waiting |
//! | `proxy_protocol`, `tls` | what comes before HTTP |
//! | `request` | the life of a request |
//! | `screen` | refuses what two servers could read in different ways |
//! | `heads` | what is taken off a head on its way, and put on |
//! | `forward`, `upstream`, `pool` | sends a request on: to which server, over which connection, and once more if it may |
//! | `health` | asks upstreams how they are |
//! | `body` | bodies on their way |
//! | `record` | what is known of a request when it is over |
//! | `answer` | what the gateway says itself |
//! | `state` | a configuration at work, swapped whole |

mod accept;
mod answer;
mod body;
mod connection;
mod forward;
mod heads;
mod health;
mod pool;
mod proxy_protocol;
mod record;
mod request;
mod screen;
mod state;
mod ticks;
mod tls;
mod upstream;
mod watch;
mod worker;

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tokio::sync::watch as channel;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate_config::Config;

use self::accept::Listening;
use self::record::Ledger;
use self::state::State;
use self::ticks::{Ticker, Ticks};
pub use self::tls::TlsError;
use self::upstream::Upstream;
use self::worker::{Shared, Worker};
use crate::access_log::AccessLog;
use crate::admin::Watched;
use crate::limits::{self, LimitsError, Stored};
use crate::metrics::{Exposition, Metrics};

/// How often unused connections to upstreams are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// How often those are counted that are still there, when the gateway ends.
const DRAIN_STEP: Duration = Duration::from_millis(5);

/// What requests without a route are counted as.
const UNROUTED: &str = "";

/// A gateway that runs.
#[derive(Debug)]
pub struct Gateway<S> {
    shared: Arc<Shared<S>>,
    workers: Arc<[Arc<Worker<S>>]>,
    listening: Vec<Arc<Listening>>,
    addresses: Vec<SocketAddr>,
    /// Accepting, and what is done now and then.
    tasks: JoinSet<()>,
}

impl<S: Stored> Gateway<S> {
    /// Starts what a configuration says, with a thread for each core. Must be called on a tokio runtime, which accepts
    /// connections and keeps time; requests have the threads of the workers.
    ///
    /// # Errors
    /// If the configuration has no gateway, an address cannot be listened on, or something in it cannot be put to work.
    pub async fn start(config: &Config) -> Result<Gateway<S>, StartError> {
        Gateway::start_with_log(config, Box::new(io::stdout())).await
    }

    /// The same, with its access log written elsewhere than to stdout.
    ///
    /// # Errors
    /// As [`start`](Gateway::start).
    pub async fn start_with_log(
        config: &Config,
        log: Box<dyn io::Write + Send>,
    ) -> Result<Gateway<S>, StartError> {
        let workers = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let gateway = config.gateway.as_ref().ok_or(StartError::NoGateway)?;
        let mut listeners = Vec::new();
        for listener in &gateway.listeners {
            listeners.push(accept::listen(listener)?);
        }
        let metrics = Metrics::new(workers);
        let state = State::new(config, gateway, workers, &metrics, None)?;
        let log = AccessLog::start(workers, log).map_err(StartError::Thread)?;
        let ledger = Arc::new(Ledger::new(log, metrics.route(UNROUTED)));
        state.upstreams.iter().for_each(health::watch);
        let shared = Arc::new(Shared {
            state: ArcSwap::from_pointee(state),
            ticker: Arc::new(Ticker::new()),
            draining: channel::Sender::new(false),
            ledger,
            metrics,
            turned_away: AtomicU64::new(0),
        });
        let workers: Result<Vec<_>, _> = (0..workers).map(|number| Worker::start(number, shared.clone())).collect();
        let workers: Arc<[Arc<Worker<S>>]> = workers.map_err(StartError::Thread)?.into();
        let (mut tasks, mut listening, mut addresses) = (JoinSet::new(), Vec::new(), Vec::new());
        for (listener, its) in listeners {
            let listener = TcpListener::from_std(listener).map_err(StartError::Thread)?;
            addresses.push(listener.local_addr().map_err(StartError::Thread)?);
            tasks.spawn(accept::accept(listener, its.clone(), workers.clone()));
            listening.push(its);
        }
        tasks.spawn(tick(shared.clone()));
        Ok(Gateway { shared, workers, listening, addresses, tasks })
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// What the admin listener asks.
    pub fn watched(&self) -> Arc<dyn Watched> {
        Arc::new(View { shared: self.shared.clone(), workers: self.workers.clone() })
    }

    /// Goes on by another configuration: whole, or not at all. Requests that are under way end by the old one.
    ///
    /// # Errors
    /// If something in it cannot be put to work; everything stays as it was then.
    pub fn reload(&self, config: &Config) -> Result<(), StartError> {
        let reloaded = self.replace(config);
        self.shared.metrics.reloaded(reloaded.is_ok());
        reloaded
    }

    fn replace(&self, config: &Config) -> Result<(), StartError> {
        let gateway = config.gateway.as_ref().ok_or(StartError::NoGateway)?;
        let before = self.shared.state.load_full();
        let metrics = &self.shared.metrics;
        let state = State::new(config, gateway, self.workers.len(), metrics, Some(&before))?;
        // All of them are read before one is exchanged.
        let certificates = || self.listening.iter().filter_map(|it| it.certificate.as_ref());
        let fresh: Result<Vec<_>, _> = certificates().map(|it| it.read_again()).collect();
        for (certificate, fresh) in certificates().zip(fresh.map_err(StartError::Tls)?) {
            certificate.exchange(fresh);
        }
        let is_new = |upstream: &&Arc<Upstream>| !before.upstreams.iter().any(|old| Arc::ptr_eq(old, upstream));
        state.upstreams.iter().filter(is_new).for_each(health::watch);
        let is_route = |name: &str| name == UNROUTED || gateway.routes.iter().any(|route| route.id == name);
        let limits: HashSet<String> = limits::names(config).collect();
        metrics.keep(is_route, |name| limits.contains(name));
        self.shared.state.store(Arc::new(state));
        Ok(())
    }

    /// Accepts no more connections, lets requests that are under way end, and tells clients that these were the last.
    /// Ends when all have gone, or when the configured time is over. How many connections were cut off then.
    pub async fn drain(mut self) -> usize {
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
        let ticking = tokio::spawn(tick(self.shared.clone()));
        self.shared.draining.send_replace(true);
        let open = || self.workers.iter().map(|it| it.connections.load(Ordering::Relaxed)).sum::<usize>();
        let all_gone = async {
            while open() > 0 {
                sleep(DRAIN_STEP).await;
            }
        };
        let patience = self.shared.state.load().timeouts.drain;
        let _ = timeout(patience, all_gone).await;
        ticking.abort();
        if let Some(limits) = &self.shared.state.load_full().limits {
            S::release(limits.limiter()).await;
        }
        open()
    }
}

/// What can be asked about a gateway, also while it ends.
#[derive(Debug)]
struct View<S> {
    shared: Arc<Shared<S>>,
    workers: Arc<[Arc<Worker<S>>]>,
}

impl<S: Stored> Watched for View<S> {
    fn metrics(&self) -> String {
        let mut out = Exposition::default();
        let (shared, state) = (&self.shared, self.shared.state.load());
        shared.metrics.write(&mut out);
        let open: usize = self.workers.iter().map(|it| it.connections.load(Ordering::Relaxed)).sum();
        out.single("tollgate_connections", "gauge", "Connections of clients.", open);
        let turned_away = shared.turned_away.load(Ordering::Relaxed);
        let help = "Connections that were closed at once, because there were too many.";
        out.single("tollgate_connections_turned_away_total", "counter", help, turned_away);
        let under_way = shared.ledger.under_way.load(Ordering::Relaxed);
        out.single("tollgate_requests_in_flight", "gauge", "Requests under way.", under_way);
        let dropped = shared.ledger.log.dropped();
        let help = "Lines of the access log that nobody took in time.";
        out.single("tollgate_access_log_dropped_total", "counter", help, dropped);
        let waiting = state.limits.as_ref().map_or(0, |limits| limits.waiting());
        out.single("tollgate_waiters", "gauge", "Requests that wait for a leaky bucket.", waiting);
        if let Some(limits) = &state.limits {
            S::write_metrics(limits.limiter(), &mut out);
            out.family("tollgate_slots_held", "gauge", "Requests under way, by the limits that count them.");
            for (name, held) in limits.slots_held() {
                out.sample("tollgate_slots_held", &[("limit", name)], held);
            }
        }
        out.family("tollgate_upstream_up", "gauge", "Whether an address of an upstream gets requests.");
        let now = shared.ticker.now();
        let each = || state.upstreams.iter().flat_map(|it| it.addresses().iter().map(move |at| (it, at)));
        for (upstream, address) in each() {
            let labels = [("upstream", upstream.config.name.as_str()), ("address", address.authority.as_str())];
            out.sample("tollgate_upstream_up", &labels, u8::from(address.is_available(now)));
        }
        out.family("tollgate_upstream_connections", "gauge", "Connections to an address of an upstream.");
        for (upstream, address) in each() {
            let labels = [("upstream", upstream.config.name.as_str()), ("address", address.authority.as_str())];
            out.sample("tollgate_upstream_connections", &labels, address.connections());
        }
        out.into_text()
    }

    fn is_ready(&self) -> bool {
        !*self.shared.draining.borrow()
    }
}

/// Keeps time, and closes connections to upstreams that nobody uses.
async fn tick<S>(shared: Arc<Shared<S>>) {
    let mut swept = Instant::now();
    loop {
        sleep(Ticker::STEP).await;
        let now = shared.ticker.tick();
        if swept.elapsed() < SWEEP_EVERY {
            continue;
        }
        swept = Instant::now();
        for address in shared.state.load().upstreams.iter().flat_map(|upstream| upstream.addresses()) {
            let oldest = now.since(Ticks::default()).saturating_sub(address.idle_timeout);
            address.sweep(Ticks::default().after(oldest));
        }
    }
}

/// A gateway that cannot be started, or a configuration that it cannot go on by.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The file has no gateway.
    NoGateway,
    /// An address cannot be listened on.
    Listen(SocketAddr, io::Error),
    /// Certificates cannot be used.
    Tls(TlsError),
    /// The limits cannot be put to work.
    Limits(LimitsError),
    /// A thread cannot be started.
    Thread(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::NoGateway => {
                write!(f, "there is no gateway in this file; write `gateway: {{ routes: [...] }}`")
            }
            StartError::Listen(address, error) if error.kind() == io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "{address} is in use by another program; stop that, or write another `listen` in the file"
                )
            }
            StartError::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            StartError::Tls(error) => write!(f, "{error}"),
            StartError::Limits(error) => write!(f, "{error}"),
            StartError::Thread(error) => write!(f, "a thread cannot be started: {error}"),
        }
    }
}

impl std::error::Error for StartError {}
