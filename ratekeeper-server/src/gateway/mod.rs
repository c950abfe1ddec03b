//! The gateway: a reverse proxy that forwards the requests its limits allow.
//!
//! ```text
//! accept -> worker (a thread for each core) -> connection -> request
//! request: screen -> route -> limits -> forward -> response
//! ```
//!
//! | file | what it does |
//! |---|---|
//! | `accept` | accepts connections and assigns each to the worker with the fewest |
//! | `worker` | a thread with its own runtime and its own connections to upstreams |
//! | `connection`, `connection_setup` | one client connection: setup before the first request, then HTTP |
//! | `client_connections` | connections per client, and which ones to close when there are too many |
//! | `client_socket` | the socket, watched for clients that disconnect while they wait |
//! | `client_timeouts` | the header and idle timeouts of client connections |
//! | `min_rate` | the minimum rate of clients that send or read |
//! | `frame_meter` | ends HTTP/2 connections that send floods of control frames |
//! | `stream_stall` | resets HTTP/2 streams whose client does not read |
//! | `tunnel` | connections that have switched protocols, for example to WebSocket |
//! | `drain` | signals graceful shutdown to connections |
//! | `request_timeout` | the timeout of a request to its upstream |
//! | `timer` | a coarse clock for idle connections, slow clients and ejected upstreams |
//! | `proxy_protocol`, `tls` | the PROXY protocol and TLS, below HTTP |
//! | `request` | the lifecycle of a request |
//! | `screen` | rejects requests that two servers could parse differently |
//! | `hop_headers` | removes hop-by-hop headers, sets forwarding headers |
//! | `forward` | forwards a request to its upstream, with retries |
//! | `upstream` | load balancing, outlier ejection, health checks and connection pools |
//! | `body` | request and response bodies |
//! | `access` | access log and metrics of each request |
//! | `response` | responses that the gateway itself generates |
//! | `state` | the active configuration, swapped atomically on reload |

mod accept;
mod access;
mod body;
mod client_connections;
mod client_socket;
mod client_timeouts;
mod connection;
mod connection_setup;
mod drain;
mod forward;
mod frame_meter;
mod framing;
mod hop_headers;
mod min_rate;
mod proxy_protocol;
mod request;
mod request_timeout;
mod response;
mod screen;
mod state;
mod stream_stall;
mod timer;
mod tls;
mod tunnel;
mod upstream;
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
use ratekeeper::FailurePolicy;
use ratekeeper_config::{Config, Listener, Redis, Secret, Store};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use self::accept::GatewayListener;
use self::access::Recorder;
use self::drain::Drain;
use self::state::State;
use self::timer::{Ticker, Ticks};
pub use self::tls::TlsError;
use self::upstream::Upstream;
pub(crate) use self::worker::GatewayShared;
use self::worker::Worker;
use crate::admin::StatusSource;
use crate::backend::{Backend, Incidents, LimitsError};
use crate::runtime::Sockets;
use crate::runtime::access_log::{AccessLog, LogStyle};
use crate::runtime::metrics::{Exposition, Metrics, families};
pub use crate::runtime::metrics::{LimitTraffic, Traffic};

/// Interval between sweeps for idle upstream connections.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between checks for open connections during graceful shutdown.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long connections are accepted that were in the listen queue when draining began.
const ACCEPT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// How long to wait for the access-log lines of tunnels that were cut.
const TUNNEL_LOG_TIMEOUT: Duration = Duration::from_millis(100);
/// Interval between store availability checks.
const STORE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// How long startup retries the store before the gateway starts without it.
const STORE_STARTUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of log lines about incidents of a store that is available.
const INCIDENT_LOG_INTERVAL: Duration = Duration::from_secs(30);
const STORE_UNAVAILABLE: &str = "store unavailable, applying failure policy";

/// Route label of requests without a route in the metrics.
const UNROUTED: &str = "";

/// A running gateway.
#[derive(Debug)]
pub struct Gateway<S> {
    shared: Arc<GatewayShared<S>>,
    workers: Arc<[Arc<Worker<S>>]>,
    listeners: Vec<Arc<GatewayListener>>,
    restart_settings: RestartSettings,
    addresses: Vec<SocketAddr>,
    accepting: JoinSet<()>,
    /// Background tasks: the ticker and the store watcher.
    tasks: JoinSet<()>,
}

impl<S: Backend> Gateway<S> {
    /// Starts the gateway that `config` describes, with one worker thread per core. Must be called on a tokio
    /// runtime, which accepts connections and runs timers; requests run on the worker threads.
    ///
    /// # Errors
    /// If the configuration has neither a gateway nor an API, an address cannot be bound, or certificates, limits,
    /// the store or a thread cannot be set up.
    pub async fn start(
        config: &Config,
        sockets: &mut Sockets,
        log: LogStyle,
    ) -> Result<Gateway<S>, StartError> {
        Gateway::start_on(config, sockets, Box::new(io::stdout()), log).await
    }

    /// Like [`start`](Gateway::start), but with new sockets, and with the access log written to `log` instead of
    /// stdout.
    ///
    /// # Errors
    /// As [`start`](Gateway::start).
    pub async fn start_with_log(
        config: &Config,
        log: Box<dyn io::Write + Send>,
    ) -> Result<Gateway<S>, StartError> {
        Gateway::start_on(config, &mut Sockets::default(), log, LogStyle::Json).await
    }

    async fn start_on(
        config: &Config,
        sockets: &mut Sockets,
        log: Box<dyn io::Write + Send>,
        log_style: LogStyle,
    ) -> Result<Gateway<S>, StartError> {
        let workers = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let gateway = &gateway_config(config)?;
        let mut bound = Vec::new();
        for listener in &gateway.listeners {
            bound.push(accept::listen(listener, sockets)?);
        }
        let metrics = Metrics::new(workers);
        let ticker = Arc::new(Ticker::new());
        let mut draft = metrics.draft();
        let unrouted = draft.route(UNROUTED);
        let state = State::new(config, gateway, workers, &ticker, &mut draft, None)?;
        metrics.publish(draft);
        let is_up = reach_store(config, &state).await?;
        let log = AccessLog::start(workers, log, log_style).map_err(StartError::Thread)?;
        let recorder = Arc::new(Recorder::new(log, unrouted));
        state.upstreams.iter().for_each(upstream::health::spawn_checks);
        let shared = Arc::new(GatewayShared {
            state: ArcSwap::from_pointee(state),
            ticker,
            drain: Drain::default(),
            recorder,
            metrics,
            rejected_connections: AtomicU64::new(0),
            untrusted_connections: AtomicU64::new(0),
            crowded_connections: AtomicU64::new(0),
            reaped_connections: AtomicU64::new(0),
            last_reaped: AtomicU64::new(0),
            connection_ended: tokio::sync::Notify::new(),
            clients: Arc::default(),
        });
        let workers: Result<Vec<_>, _> =
            (0..workers).map(|number| Worker::start(number, shared.clone())).collect();
        let workers: Arc<[Arc<Worker<S>>]> = workers.map_err(StartError::Thread)?.into();
        let (mut accepting, mut listeners, mut addresses) = (JoinSet::new(), Vec::new(), Vec::new());
        for (socket, listener) in bound {
            let socket = TcpListener::from_std(socket).map_err(StartError::Thread)?;
            addresses.push(socket.local_addr().map_err(StartError::Thread)?);
            let draining = shared.drain.wait_begun();
            accepting.spawn(accept::accept(socket, listener.clone(), workers.clone(), draining));
            listeners.push(listener);
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(tick(shared.clone()));
        tasks.spawn(monitor_store(shared.clone(), is_up));
        let restart_settings = RestartSettings::of(config, gateway);
        Ok(Gateway { shared, workers, listeners, restart_settings, addresses, accepting, tasks })
    }

    /// Addresses that the gateway listens on.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// State that the other APIs share with the gateway: they check the same limits.
    pub(crate) fn shared(&self) -> &Arc<GatewayShared<S>> {
        &self.shared
    }

    /// Metrics, readiness and token for the admin listener.
    pub fn status(&self) -> Arc<dyn StatusSource> {
        Arc::new(GatewayStatus { shared: self.shared.clone(), workers: self.workers.clone() })
    }

    /// Returns totals of the traffic, also after [`drain`](Gateway::drain).
    pub fn traffic(&self) -> impl Fn() -> Traffic + use<S> {
        let shared = self.shared.clone();
        move || shared.metrics.traffic()
    }

    /// Replaces the configuration atomically. Requests in flight finish under the old one.
    ///
    /// # Errors
    /// If the new configuration cannot be applied or needs a restart; the old one then stays in effect.
    pub fn reload(&self, config: &Config) -> Result<(), StartError> {
        let reloaded = self.replace(config);
        self.shared.metrics.count_reload(reloaded.is_ok());
        reloaded
    }

    /// Counts a failed reload whose configuration could not be read.
    pub fn count_failed_reload(&self) {
        self.shared.metrics.count_reload(false);
    }

    fn replace(&self, config: &Config) -> Result<(), StartError> {
        let gateway = &gateway_config(config)?;
        self.restart_settings.check(&RestartSettings::of(config, gateway))?;
        let before = self.shared.state.load_full();
        let GatewayShared { metrics, ticker, .. } = &*self.shared;
        // All certificates are read before any is replaced, so that a bad file changes nothing.
        let certificates = || self.listeners.iter().filter_map(|it| it.certificate.as_ref());
        let fresh: Result<Vec<_>, _> = certificates().map(|it| it.reread()).collect();
        let (fresh, mut draft) = (fresh.map_err(StartError::Tls)?, metrics.draft());
        draft.route(UNROUTED);
        let state = State::new(config, gateway, self.workers.len(), ticker, &mut draft, Some(&before))?;
        for (certificate, fresh) in certificates().zip(fresh) {
            certificate.replace(fresh);
        }
        let is_new =
            |upstream: &&Arc<Upstream>| !before.upstreams.iter().any(|old| Arc::ptr_eq(old, upstream));
        state.upstreams.iter().filter(is_new).for_each(upstream::health::spawn_checks);
        metrics.publish(draft);
        self.shared.state.store(Arc::new(state));
        Ok(())
    }

    /// Shuts down gracefully: accepts no more connections, lets requests in flight finish and announces the close to
    /// clients. Returns when all connections are closed or the drain timeout has passed; the result is the number of
    /// connections that were still open then.
    pub async fn drain(mut self) -> usize {
        self.shared.drain.begin();
        // Connections in the listen queue are still accepted: closing the socket would reset them.
        let _ = timeout(ACCEPT_DRAIN_TIMEOUT, async { while self.accepting.join_next().await.is_some() {} })
            .await;
        self.accepting.shutdown().await;
        let open = || self.workers.iter().map(|it| it.connections.load(Ordering::Relaxed)).sum::<usize>();
        let all_closed = async || {
            while open() > 0 {
                sleep(DRAIN_POLL_INTERVAL).await;
            }
        };
        let drain_timeout = self.shared.state.load().timeouts.drain;
        let _ = timeout(drain_timeout, all_closed()).await;
        let left = open();
        // Cuts tunnels, whose access-log lines follow shortly after.
        self.shared.drain.expire();
        let _ = timeout(TUNNEL_LOG_TIMEOUT, all_closed()).await;
        self.tasks.shutdown().await;
        if let Some(limits) = &self.shared.state.load_full().limits {
            S::release(limits.limiter()).await;
        }
        self.shared.recorder.log.wait_flushed().await;
        left
    }
}

/// The configured gateway, or one without listeners if only APIs are configured.
fn gateway_config(config: &Config) -> Result<Cow<'_, ratekeeper_config::Gateway>, StartError> {
    match &config.gateway {
        Some(gateway) => Ok(Cow::Borrowed(gateway)),
        None if config.apis.are_none() => Err(StartError::NoGateway),
        None => Ok(Cow::Owned(ratekeeper_config::Gateway::none())),
    }
}

/// Settings that need a restart to change, because sockets and counters depend on them.
#[derive(Debug)]
struct RestartSettings {
    listeners: Vec<Listener>,
    admin: Option<SocketAddr>,
    apis: [Option<SocketAddr>; 3],
    /// Its connections are kept across reloads.
    redis: Option<Box<Redis>>,
}

impl RestartSettings {
    fn of(config: &Config, gateway: &ratekeeper_config::Gateway) -> RestartSettings {
        let redis = match &config.store {
            Store::Redis(redis) => Some(redis.clone()),
            Store::Memory { .. } => None,
        };
        RestartSettings {
            listeners: gateway.listeners.clone(),
            admin: config.admin.as_ref().map(|admin| admin.listen),
            apis: [
                config.apis.http.as_ref().map(|http| http.api.listen),
                config.apis.envoy.as_ref().map(|envoy| envoy.api.listen),
                config.apis.resp.as_ref().map(|resp| resp.api.listen),
            ],
            redis,
        }
    }

    fn check(&self, new: &RestartSettings) -> Result<(), StartError> {
        let changed = [
            ("gateway.listen", self.listeners != new.listeners),
            ("admin", self.admin != new.admin),
            ("apis", self.apis != new.apis),
            ("the type of `store`", self.redis.is_some() != new.redis.is_some()),
            ("store.redis", self.redis != new.redis),
        ];
        match changed.iter().find(|(_, is_changed)| *is_changed) {
            Some((what, _)) => Err(StartError::NeedsRestart(what)),
            None => Ok(()),
        }
    }
}

/// Whether the store answers. With failure policy `closed`, an unavailable store fails startup.
async fn reach_store<S: Backend>(config: &Config, state: &State<S>) -> Result<bool, StartError> {
    let Some(limits) = &state.limits else { return Ok(true) };
    let begun = Instant::now();
    loop {
        let Err(error) = S::reach(limits.limiter()).await else { return Ok(true) };
        if begun.elapsed() < STORE_STARTUP_TIMEOUT {
            sleep(STORE_CHECK_INTERVAL).await;
            continue;
        }
        if matches!(&config.store, Store::Redis(redis) if redis.failure == FailurePolicy::Closed) {
            return Err(StartError::Store(error));
        }
        tracing::warn!(error, "{STORE_UNAVAILABLE}");
        return Ok(false);
    }
}

/// Logs when the store becomes unavailable and when it recovers, also without traffic, and, at a bounded rate, what
/// happens meanwhile.
async fn monitor_store<S: Backend>(shared: Arc<GatewayShared<S>>, mut was_up: bool) {
    let (mut logged, mut logged_at): (u64, Option<Instant>) = (0, None);
    let mut error = None;
    loop {
        sleep(STORE_CHECK_INTERVAL).await;
        let state = shared.state.load_full();
        let Some(limits) = &state.limits else { continue };
        // One late reply is not an outage: the store must also report itself degraded.
        let is_up = S::reach(limits.limiter()).await.is_ok() || (was_up && !S::is_degraded(limits.limiter()));
        let Incidents { count, what, why } = S::incidents(limits.limiter());
        error = why.or(error);
        let is_due = logged_at.is_none_or(|at| at.elapsed() >= INCIDENT_LOG_INTERVAL);
        match (was_up, is_up) {
            (true, false) => {
                tracing::warn!(error = error.as_deref(), "{STORE_UNAVAILABLE}");
                (logged, logged_at) = (count, Some(Instant::now()));
            }
            (false, true) => tracing::info!("store available again"),
            _ if count > logged && is_due => {
                tracing::warn!(error = error.as_deref(), count = count - logged, "{what}");
                (logged, logged_at) = (count, Some(Instant::now()));
            }
            // A reload may have replaced the counters.
            _ => logged = logged.min(count),
        }
        was_up = is_up;
    }
}

/// The gateway as the admin listener sees it, also during graceful shutdown.
#[derive(Debug)]
struct GatewayStatus<S> {
    shared: Arc<GatewayShared<S>>,
    workers: Arc<[Arc<Worker<S>>]>,
}

impl<S: Backend> StatusSource for GatewayStatus<S> {
    fn metrics(&self) -> String {
        let mut out = Exposition::default();
        let (shared, state) = (&self.shared, self.shared.state.load());
        shared.metrics.write(&mut out);
        let open: usize = self.workers.iter().map(|it| it.connections.load(Ordering::Relaxed)).sum();
        out.single(&families::CONNECTIONS, open);
        out.family(&families::CONNECTIONS_REJECTED);
        for (reason, count) in [
            ("max_connections", &shared.rejected_connections),
            ("max_connections_per_client", &shared.crowded_connections),
            ("untrusted_proxy", &shared.untrusted_connections),
        ] {
            out.sample(&families::CONNECTIONS_REJECTED, &[reason], count.load(Ordering::Relaxed));
        }
        out.single(&families::CONNECTIONS_REAPED, shared.reaped_connections.load(Ordering::Relaxed));
        out.single(&families::REQUESTS_IN_FLIGHT, shared.recorder.in_flight.load(Ordering::Relaxed));
        let delayed = state.limits.as_ref().map_or(0, |limits| limits.waiting());
        out.single(&families::REQUESTS_DELAYED, delayed);
        if let Some(limits) = &state.limits {
            out.family(&families::CONCURRENCY_PERMITS);
            for (name, held) in limits.in_flight() {
                out.sample(&families::CONCURRENCY_PERMITS, &[name], held);
            }
            S::write_metrics(limits.limiter(), &mut out);
        }
        out.single(&families::ACCESS_LOG_DROPPED, shared.recorder.log.dropped());
        let now = shared.ticker.now();
        let each = || state.upstreams.iter().flat_map(|it| it.addresses().iter().map(move |at| (it, at)));
        out.family(&families::UPSTREAM_UP);
        for (upstream, address) in each() {
            let values = [upstream.config.name.as_str(), address.authority.as_str()];
            out.sample(&families::UPSTREAM_UP, &values, u8::from(address.is_available(now)));
        }
        out.family(&families::UPSTREAM_CONNECTIONS);
        for (upstream, address) in each() {
            let values = [upstream.config.name.as_str(), address.authority.as_str()];
            out.sample(&families::UPSTREAM_CONNECTIONS, &values, address.connections());
        }
        out.into_text()
    }

    fn is_ready(&self) -> bool {
        !self.shared.drain.has_begun()
    }

    fn token(&self) -> Option<Secret> {
        self.shared.state.load().admin_token.clone()
    }
}

/// Advances the ticker and closes idle upstream connections.
async fn tick<S>(shared: Arc<GatewayShared<S>>) {
    let mut swept = Instant::now();
    loop {
        sleep(Ticker::STEP).await;
        let now = shared.ticker.tick();
        if swept.elapsed() < SWEEP_INTERVAL {
            continue;
        }
        swept = Instant::now();
        for address in shared.state.load().upstreams.iter().flat_map(|upstream| upstream.addresses()) {
            let oldest = now.since(Ticks::default()).saturating_sub(address.idle_timeout);
            address.sweep(Ticks::default().after(oldest));
        }
    }
}

/// Why a gateway cannot start or cannot reload its configuration.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration has neither a gateway nor an API.
    NoGateway,
    /// The gateway cannot listen on an address.
    Listen(SocketAddr, io::Error),
    /// A certificate cannot be used.
    Tls(TlsError),
    /// The limits cannot be set up.
    Limits(LimitsError),
    /// The store is unavailable and the failure policy is `closed`.
    Store(String),
    /// The named setting cannot be changed without a restart.
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
                    "the configuration has neither a gateway nor an API; write `gateway: {{ routes: [...] }}` or \
                     `apis: {{ http: 127.0.0.1:9181 }}`"
                )
            }
            StartError::Listen(address, error) if error.kind() == io::ErrorKind::AddrInUse => {
                write!(f, "{address} is in use by another program; stop it, or change `listen`")
            }
            StartError::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            StartError::Tls(error) => write!(f, "{error}"),
            StartError::Limits(error) => write!(f, "{error}"),
            StartError::Store(error) => write!(
                f,
                "{error}; start Redis, or write `on_store_failure: local` or `on_store_failure: open` to start without it"
            ),
            StartError::NeedsRestart(what) => {
                write!(f, "{what} cannot be changed while the gateway runs; restart to change it")
            }
            StartError::Thread(error) => write!(f, "cannot start a thread: {error}"),
        }
    }
}

impl std::error::Error for StartError {}
