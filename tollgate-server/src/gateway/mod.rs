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
//! | `stall` | a stream of HTTP/2 whose client takes nothing |
//! | `opening` | what comes before the first request, and how long that may take |
//! | `tunnel` | a connection that has become something else, as WebSockets do |
//! | `draining` | how connections learn that the gateway is about to end |
//! | `deadline` | a request that takes too long |
//! | `proxy_protocol`, `tls` | what comes before HTTP |
//! | `request` | the life of a request |
//! | `screen` | refuses what two servers could read in different ways |
//! | `heads` | what is taken off a head on its way, and put on |
//! | `forward`, `upstream` | sends a request on: to which server, and once more if it may |
//! | `pool`, `room`, `dial` | over which connection: one that was kept, or a new one if there may be more |
//! | `health` | asks upstreams how they are |
//! | `body` | bodies on their way |
//! | `record` | what is known of a request when it is over |
//! | `answer` | what the gateway says itself |
//! | `state` | a configuration at work, swapped whole |

mod accept;
mod answer;
mod body;
mod connection;
mod deadline;
mod dial;
mod draining;
mod forward;
mod heads;
mod health;
mod opening;
mod pool;
mod proxy_protocol;
mod record;
mod request;
mod room;
mod screen;
mod stall;
mod state;
mod ticks;
mod tls;
mod tunnel;
mod upstream;
mod watch;
mod worker;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::Failure;
use tollgate_config::{Config, Listener, Redis, Secret, Store};

use self::accept::Listening;
use self::draining::Draining;
use self::record::Ledger;
use self::state::State;
use self::ticks::{Ticker, Ticks};
pub use self::tls::TlsError;
use self::upstream::Upstream;
pub(crate) use self::worker::Shared;
use self::worker::Worker;
use crate::access_log::AccessLog;
use crate::admin::Watched;
use crate::limits::{LimitsError, Stored};
use crate::metrics::{Exposition, Metrics};
use crate::sockets::Sockets;

/// How often unused connections to upstreams are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// How often those are counted that are still there, when the gateway ends.
const DRAIN_STEP: Duration = Duration::from_millis(5);

/// How long clients are taken in that were in the queue when the gateway began to end.
const LAST_ACCEPTS_MAX: Duration = Duration::from_millis(500);
/// How long those are waited for that were cut off.
const LAST_LINES_MAX: Duration = Duration::from_millis(100);
/// How often the store is looked at.
const STORE_EVERY: Duration = Duration::from_millis(250);

/// How long the first connection to the store may take before the gateway starts without it.
const FIRST_REACH: Duration = Duration::from_secs(1);
const AWAY: &str = "the store does not answer; the limits' failure policies decide";

/// What requests without a route are counted as.
const UNROUTED: &str = "";

/// A gateway that runs.
#[derive(Debug)]
pub struct Gateway<S> {
    shared: Arc<Shared<S>>,
    workers: Arc<[Arc<Worker<S>>]>,
    listening: Vec<Arc<Listening>>,
    lasting: Lasting,
    addresses: Vec<SocketAddr>,
    accepting: JoinSet<()>,
    /// What is done now and then.
    tasks: JoinSet<()>,
}

impl<S: Stored> Gateway<S> {
    /// Starts what a configuration says, with a thread for each core. Must be called on a tokio runtime, which accepts
    /// connections and keeps time; requests have the threads of the workers.
    ///
    /// # Errors
    /// If the configuration has neither a gateway nor another door, an address cannot be listened on, or something in it cannot be put to work.
    pub async fn start(config: &Config, sockets: &mut Sockets) -> Result<Gateway<S>, StartError> {
        Gateway::start_on(config, sockets, Box::new(io::stdout())).await
    }

    /// The same, on sockets of its own and with its access log written elsewhere than to stdout.
    ///
    /// # Errors
    /// As [`start`](Gateway::start).
    pub async fn start_with_log(
        config: &Config,
        log: Box<dyn io::Write + Send>,
    ) -> Result<Gateway<S>, StartError> {
        Gateway::start_on(config, &mut Sockets::default(), log).await
    }

    async fn start_on(
        config: &Config,
        sockets: &mut Sockets,
        log: Box<dyn io::Write + Send>,
    ) -> Result<Gateway<S>, StartError> {
        let workers = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let gateway = &gateway_of(config)?;
        let mut listeners = Vec::new();
        for listener in &gateway.listeners {
            listeners.push(accept::listen(listener, sockets)?);
        }
        let metrics = Metrics::new(workers);
        let ticker = Arc::new(Ticker::new());
        let mut draft = metrics.draft();
        let unrouted = draft.route(UNROUTED);
        let state = State::new(config, gateway, workers, &ticker, &mut draft, None)?;
        metrics.take(draft);
        let is_up = reach(config, &state).await?;
        let log = AccessLog::start(workers, log).map_err(StartError::Thread)?;
        let ledger = Arc::new(Ledger::new(log, unrouted));
        state.upstreams.iter().for_each(health::watch);
        let shared = Arc::new(Shared {
            state: ArcSwap::from_pointee(state),
            ticker,
            draining: Draining::default(),
            ledger,
            metrics,
            turned_away: AtomicU64::new(0),
            untrusted: AtomicU64::new(0),
        });
        let workers: Result<Vec<_>, _> =
            (0..workers).map(|number| Worker::start(number, shared.clone())).collect();
        let workers: Arc<[Arc<Worker<S>>]> = workers.map_err(StartError::Thread)?.into();
        let (mut accepting, mut listening, mut addresses) = (JoinSet::new(), Vec::new(), Vec::new());
        for (listener, its) in listeners {
            let listener = TcpListener::from_std(listener).map_err(StartError::Thread)?;
            addresses.push(listener.local_addr().map_err(StartError::Thread)?);
            let draining = shared.draining.wait();
            accepting.spawn(accept::accept(listener, its.clone(), workers.clone(), draining));
            listening.push(its);
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(tick(shared.clone()));
        tasks.spawn(watch_store(shared.clone(), is_up));
        let lasting = Lasting::of(config, gateway);
        Ok(Gateway { shared, workers, listening, lasting, addresses, accepting, tasks })
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// What other doors go by, which ask the same limits.
    pub(crate) fn shared(&self) -> &Arc<Shared<S>> {
        &self.shared
    }

    /// What the admin listener asks.
    pub fn watched(&self) -> Arc<dyn Watched> {
        Arc::new(View { shared: self.shared.clone(), workers: self.workers.clone() })
    }

    /// Goes on by another configuration: whole, or not at all. Requests that are under way end by the old one.
    ///
    /// # Errors
    /// If something in it cannot be put to work, or needs a restart; everything stays as it was then.
    pub fn reload(&self, config: &Config) -> Result<(), StartError> {
        let reloaded = self.replace(config);
        self.shared.metrics.reloaded(reloaded.is_ok());
        reloaded
    }

    /// Counts a configuration that could not even be read.
    pub fn kept_old(&self) {
        self.shared.metrics.reloaded(false);
    }

    fn replace(&self, config: &Config) -> Result<(), StartError> {
        let gateway = &gateway_of(config)?;
        self.lasting.check(&Lasting::of(config, gateway))?;
        let before = self.shared.state.load_full();
        let Shared { metrics, ticker, .. } = &*self.shared;
        // All of them are read before one is exchanged, and before anything else is begun.
        let certificates = || self.listening.iter().filter_map(|it| it.certificate.as_ref());
        let fresh: Result<Vec<_>, _> = certificates().map(|it| it.read_again()).collect();
        let (fresh, mut draft) = (fresh.map_err(StartError::Tls)?, metrics.draft());
        draft.route(UNROUTED);
        let state = State::new(config, gateway, self.workers.len(), ticker, &mut draft, Some(&before))?;
        for (certificate, fresh) in certificates().zip(fresh) {
            certificate.exchange(fresh);
        }
        let is_new =
            |upstream: &&Arc<Upstream>| !before.upstreams.iter().any(|old| Arc::ptr_eq(old, upstream));
        state.upstreams.iter().filter(is_new).for_each(health::watch);
        metrics.take(draft);
        self.shared.state.store(Arc::new(state));
        Ok(())
    }

    /// Accepts no more connections, lets requests that are under way end, and tells clients that these were the last.
    /// Ends when all have gone, or when the configured time is over. How many connections were cut off then.
    pub async fn drain(mut self) -> usize {
        self.shared.draining.begin();
        // Who is in the queue already is still taken in: closing the socket would reset them.
        let _ =
            timeout(LAST_ACCEPTS_MAX, async { while self.accepting.join_next().await.is_some() {} }).await;
        self.accepting.shutdown().await;
        let open = || self.workers.iter().map(|it| it.connections.load(Ordering::Relaxed)).sum::<usize>();
        let all_gone = async || {
            while open() > 0 {
                sleep(DRAIN_STEP).await;
            }
        };
        let patience = self.shared.state.load().timeouts.drain;
        let _ = timeout(patience, all_gone()).await;
        let left = open();
        // Tunnels are cut, and a moment later have their lines in the log.
        self.shared.draining.end();
        let _ = timeout(LAST_LINES_MAX, all_gone()).await;
        self.tasks.shutdown().await;
        if let Some(limits) = &self.shared.state.load_full().limits {
            S::release(limits.limiter()).await;
        }
        self.shared.ledger.log.written().await;
        left
    }
}

/// The gateway of a file, or one that listens nowhere if the file has other doors.
fn gateway_of(config: &Config) -> Result<Cow<'_, tollgate_config::Gateway>, StartError> {
    match &config.gateway {
        Some(gateway) => Ok(Cow::Borrowed(gateway)),
        None if config.doors.are_none() => Err(StartError::NoGateway),
        None => Ok(Cow::Owned(tollgate_config::Gateway::none())),
    }
}

/// What lasts as long as the process does, because sockets and counters hang on it.
#[derive(Debug)]
struct Lasting {
    listeners: Vec<Listener>,
    admin: Option<SocketAddr>,
    doors: [Option<SocketAddr>; 3],
    /// Its connections go on from one configuration to the next.
    redis: Option<Box<Redis>>,
}

impl Lasting {
    fn of(config: &Config, gateway: &tollgate_config::Gateway) -> Lasting {
        let redis = match &config.store {
            Store::Redis(redis) => Some(redis.clone()),
            Store::Memory { .. } => None,
        };
        Lasting {
            listeners: gateway.listeners.clone(),
            admin: config.admin.as_ref().map(|admin| admin.listen),
            doors: [
                config.doors.http.as_ref().map(|http| http.door.listen),
                config.doors.grpc.as_ref().map(|grpc| grpc.door.listen),
                config.doors.resp.as_ref().map(|resp| resp.door.listen),
            ],
            redis,
        }
    }

    fn check(&self, new: &Lasting) -> Result<(), StartError> {
        let changed = [
            ("gateway.listen", self.listeners != new.listeners),
            ("admin", self.admin != new.admin),
            ("doors", self.doors != new.doors),
            ("the kind of the store", self.redis.is_some() != new.redis.is_some()),
            ("store.redis", self.redis != new.redis),
        ];
        match changed.iter().find(|(_, is_changed)| *is_changed) {
            Some((what, _)) => Err(StartError::NeedsRestart(what)),
            None => Ok(()),
        }
    }
}

/// Whether the store answers. If nothing may pass without it, there is no use in starting without it.
async fn reach<S: Stored>(config: &Config, state: &State<S>) -> Result<bool, StartError> {
    let Some(limits) = &state.limits else { return Ok(true) };
    let begun = Instant::now();
    loop {
        let Err(why) = S::reach(limits.limiter()).await else { return Ok(true) };
        if begun.elapsed() < FIRST_REACH {
            sleep(STORE_EVERY).await;
            continue;
        }
        if matches!(&config.store, Store::Redis(redis) if redis.failure == Failure::Closed) {
            return Err(StartError::Store(why));
        }
        tracing::warn!(why, "{AWAY}");
        return Ok(false);
    }
}

/// Tells when the store goes away and when it comes back, also while nobody asks for anything.
async fn watch_store<S: Stored>(shared: Arc<Shared<S>>, mut was_up: bool) {
    loop {
        sleep(STORE_EVERY).await;
        let state = shared.state.load_full();
        let Some(limits) = &state.limits else { continue };
        // One answer that is late says nothing; that it is away is for the store to say.
        let is_up = S::reach(limits.limiter()).await.is_ok() || (was_up && !S::is_degraded(limits.limiter()));
        match (was_up, is_up) {
            (true, false) => tracing::warn!("{AWAY}"),
            (false, true) => tracing::info!("the store answers again"),
            _ => {}
        }
        was_up = is_up;
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
        let untrusted = shared.untrusted.load(Ordering::Relaxed);
        let help = "Connections that were closed at once, because their PROXY header would not be trusted.";
        out.single("tollgate_connections_untrusted_total", "counter", help, untrusted);
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
            let labels =
                [("upstream", upstream.config.name.as_str()), ("address", address.authority.as_str())];
            out.sample("tollgate_upstream_up", &labels, u8::from(address.is_available(now)));
        }
        out.family("tollgate_upstream_connections", "gauge", "Connections to an address of an upstream.");
        for (upstream, address) in each() {
            let labels =
                [("upstream", upstream.config.name.as_str()), ("address", address.authority.as_str())];
            out.sample("tollgate_upstream_connections", &labels, address.connections());
        }
        out.into_text()
    }

    fn is_ready(&self) -> bool {
        !self.shared.draining.has_begun()
    }

    fn token(&self) -> Option<Secret> {
        self.shared.state.load().admin_token.clone()
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
    /// The file has no gateway and no door.
    NoGateway,
    /// An address cannot be listened on.
    Listen(SocketAddr, io::Error),
    /// Certificates cannot be used.
    Tls(TlsError),
    /// The limits cannot be put to work.
    Limits(LimitsError),
    /// The store does not answer, and without it nothing may pass.
    Store(String),
    /// It cannot be changed while the gateway runs.
    NeedsRestart(&'static str),
    /// A thread cannot be started.
    Thread(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::NoGateway => {
                write!(
                    f,
                    "there is neither a gateway nor a door in this file; write `gateway: {{ routes: [...] }}`, or \
                     `doors: {{ http: 127.0.0.1:9181 }}`"
                )
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
            StartError::Store(why) => write!(
                f,
                "{why}; start Redis, or write `failure: local` or `failure: open` to start without it"
            ),
            StartError::NeedsRestart(what) => {
                write!(f, "{what} cannot be changed while the gateway runs; restart to change it")
            }
            StartError::Thread(error) => write!(f, "a thread cannot be started: {error}"),
        }
    }
}

impl std::error::Error for StartError {}
