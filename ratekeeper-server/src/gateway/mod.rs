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
//! | `proxy_protocol` | the PROXY protocol, below HTTP |
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
#[cfg(test)]
mod costs;
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
mod tunnel;
mod upstream;
mod worker;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use ratekeeper_config as config;
use ratekeeper_config::Config;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use self::accept::GatewayListener;
use self::access::Recorder;
use self::drain::Drain;
use self::state::{State, StateDraft};
use self::timer::{Ticker, Ticks};
use self::upstream::Upstream;
use self::worker::{GatewayShared, Worker};
use crate::runtime::Sockets;
use crate::runtime::access_log::AccessLog;
use crate::runtime::backend::Backend;
use crate::runtime::engine::EngineState;
use crate::runtime::error::StartError;
use crate::runtime::metrics::{Counters, Exposition, MetricsDraft, families};
use crate::runtime::service::{DrainFuture, PreparedReload, Service, ServiceAddress};

/// Interval between sweeps for idle upstream connections.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between checks for open connections during graceful shutdown.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long connections are accepted that were in the listen queue when draining began.
const ACCEPT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// How long to wait for the access-log lines of tunnels that were cut.
const TUNNEL_LOG_TIMEOUT: Duration = Duration::from_millis(100);

/// Route label of requests without a route in the metrics.
const UNROUTED: &str = "";

/// A running gateway.
#[derive(Debug)]
pub(crate) struct Gateway<S> {
    shared: Arc<GatewayShared<S>>,
    workers: Arc<[Arc<Worker<S>>]>,
    listeners: Vec<(SocketAddr, Arc<GatewayListener>)>,
    tasks: Mutex<GatewayTasks>,
}

#[derive(Debug, Default)]
struct GatewayTasks {
    accepting: JoinSet<()>,
    /// The ticker.
    background: JoinSet<()>,
}

/// The sockets of the gateway, before it serves them.
#[derive(Debug)]
pub(crate) struct GatewaySockets(Vec<(std::net::TcpListener, Arc<GatewayListener>)>);

impl GatewaySockets {
    /// Binds the addresses and reads the certificates.
    pub(crate) fn bind(
        gateway: &config::Gateway,
        sockets: &mut Sockets,
    ) -> Result<GatewaySockets, StartError> {
        let bound: Result<_, _> =
            gateway.listeners.iter().map(|listener| accept::listen(listener, sockets)).collect();
        bound.map(GatewaySockets)
    }
}

/// What of a gateway can fail before it starts.
#[derive(Debug)]
pub(crate) struct GatewayDraft {
    workers: usize,
    ticker: Arc<Ticker>,
    state: StateDraft,
    recorder: Arc<Recorder>,
}

impl GatewayDraft {
    /// `log` receives the access log.
    pub(crate) fn new(
        gateway: &config::Gateway,
        workers: usize,
        metrics: &mut MetricsDraft,
        log: impl FnOnce(usize) -> io::Result<Arc<AccessLog>>,
    ) -> Result<GatewayDraft, StartError> {
        let ticker = Arc::new(Ticker::new());
        let state = StateDraft::new::<()>(gateway, workers, &ticker, metrics, None)?;
        let log = log(workers).map_err(StartError::Thread)?;
        let recorder = Arc::new(Recorder::new(log, metrics.route(UNROUTED)));
        Ok(GatewayDraft { workers, ticker, state, recorder })
    }
}

impl<S: Backend> Gateway<S> {
    /// Starts the gateway that `config` describes, with worker threads. Must be called on a tokio runtime, which
    /// accepts connections and runs timers; requests run on the worker threads.
    pub(crate) fn start(
        config: &Config,
        gateway: &config::Gateway,
        sockets: GatewaySockets,
        draft: GatewayDraft,
        engine: &Arc<EngineState<S>>,
    ) -> Result<Gateway<S>, StartError> {
        let GatewayDraft { workers, ticker, state, recorder } = draft;
        let state = State::new(config, gateway, workers, state, engine.clone());
        state.upstreams.iter().for_each(upstream::health::spawn_checks);
        let shared = Arc::new(GatewayShared {
            state: ArcSwap::from_pointee(state),
            ticker,
            drain: Drain::default(),
            recorder,
            rejected_connections: Counters::default(),
            reaped_connections: AtomicU64::new(0),
            last_reaped: AtomicU64::new(0),
            connection_ended: tokio::sync::Notify::new(),
            clients: Arc::default(),
        });
        let workers: Result<Vec<_>, _> =
            (0..workers).map(|number| Worker::start(number, shared.clone())).collect();
        let workers: Arc<[Arc<Worker<S>>]> = workers.map_err(StartError::Thread)?.into();
        let mut tasks = GatewayTasks::default();
        let mut listeners = Vec::new();
        for (socket, listener) in sockets.0 {
            let socket = TcpListener::from_std(socket).map_err(StartError::Thread)?;
            let address = socket.local_addr().map_err(StartError::Thread)?;
            let draining = shared.drain.wait_begun();
            tasks.accepting.spawn(accept::accept(socket, listener.clone(), workers.clone(), draining));
            listeners.push((address, listener));
        }
        tasks.background.spawn(tick(shared.clone()));
        Ok(Gateway { shared, workers, listeners, tasks: Mutex::new(tasks) })
    }

    fn open_connections(&self) -> usize {
        self.workers.iter().map(|it| it.connections.load(Ordering::Relaxed)).sum()
    }

    async fn drain_connections(&self, drain_timeout: Duration) -> usize {
        self.shared.drain.begin();
        let GatewayTasks { mut accepting, mut background } =
            std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        // Connections in the listen queue are still accepted: closing the socket would reset them.
        let _ = timeout(ACCEPT_DRAIN_TIMEOUT, async { while accepting.join_next().await.is_some() {} }).await;
        accepting.shutdown().await;
        let all_closed = async || {
            while self.open_connections() > 0 {
                sleep(DRAIN_POLL_INTERVAL).await;
            }
        };
        let _ = timeout(drain_timeout, all_closed()).await;
        let left = self.open_connections();
        // Cuts tunnels, whose access-log lines follow shortly after.
        self.shared.drain.expire();
        let _ = timeout(TUNNEL_LOG_TIMEOUT, all_closed()).await;
        background.shutdown().await;
        self.shared.recorder.log.wait_flushed().await;
        left
    }
}

impl<S: Backend> Service<S> for Gateway<S> {
    fn addresses(&self) -> Vec<ServiceAddress> {
        let of = |(address, listener): &(SocketAddr, Arc<GatewayListener>)| {
            let scheme = if listener.tls.is_some() { "https" } else { "http" };
            ServiceAddress { service: "gateway", address: *address, url: format!("{scheme}://{address}") }
        };
        self.listeners.iter().map(of).collect()
    }

    fn prepare<'a>(&'a self, config: &'a Config, metrics: &mut MetricsDraft) -> PreparedReload<'a, S> {
        let Some(gateway) = &config.gateway else { return Err(StartError::NeedsRestart("gateway.listen")) };
        let (workers, before) = (self.workers.len(), self.shared.state.load_full());
        // All certificates are read before any is replaced, so that a bad file changes nothing.
        let certificates = || self.listeners.iter().filter_map(|(_, it)| it.certificate.as_ref());
        let fresh = certificates().map(|it| it.reread()).collect::<Result<Vec<_>, _>>()?;
        metrics.route(UNROUTED);
        let draft = StateDraft::new(gateway, workers, &self.shared.ticker, metrics, Some(&before))?;
        Ok(Box::new(move |engine| {
            for (certificate, fresh) in certificates().zip(fresh) {
                certificate.replace(fresh);
            }
            let is_new =
                |upstream: &&Arc<Upstream>| !before.upstreams.iter().any(|old| Arc::ptr_eq(old, upstream));
            draft.upstreams.iter().filter(is_new).for_each(upstream::health::spawn_checks);
            let state = State::new(config, gateway, workers, draft, engine.clone());
            self.shared.state.store(Arc::new(state));
        }))
    }

    fn write_metrics(&self, out: &mut Exposition) {
        let (shared, state) = (&self.shared, self.shared.state.load());
        out.single(&families::CONNECTIONS, self.open_connections());
        let mut rejected = out.family(&families::CONNECTIONS_REJECTED);
        for (reason, count) in shared.rejected_connections.counts() {
            rejected.sample([reason], count);
        }
        out.single(&families::CONNECTIONS_REAPED, shared.reaped_connections.load(Ordering::Relaxed));
        out.single(&families::REQUESTS_IN_FLIGHT, shared.recorder.in_flight.load(Ordering::Relaxed));
        out.single(&families::ACCESS_LOG_DROPPED, shared.recorder.log.dropped());
        let now = shared.ticker.now();
        let each = || state.upstreams.iter().flat_map(|it| it.addresses().iter().map(move |at| (it, at)));
        let mut up = out.family(&families::UPSTREAM_UP);
        for (upstream, address) in each() {
            let is_up = u8::from(address.is_available(now));
            up.sample([&upstream.config.name, address.authority.as_str()], is_up);
        }
        let mut connections = out.family(&families::UPSTREAM_CONNECTIONS);
        for (upstream, address) in each() {
            connections.sample([&upstream.config.name, address.authority.as_str()], address.connections());
        }
    }

    fn drain(self: Arc<Self>, drain_timeout: Duration) -> DrainFuture {
        Box::pin(async move { self.drain_connections(drain_timeout).await })
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
