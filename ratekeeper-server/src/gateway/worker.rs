//! Workers: one thread per core, each with its own runtime, connections and pools.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};

use super::accept::GatewayListener;
use super::access::{Recorder, WorkerRecorder};
use super::client_connections::{ClientCounts, ConnectionRegistry};
use super::client_timeouts::ConnectionActivity;
use super::connection;
use super::drain::Drain;
use super::min_rate::MinRate;
use super::state::State;
use super::timer::Ticker;
use crate::runtime::backend::Backend;
use crate::runtime::metrics::{ConnectionRejection, Counters};

/// State that all workers share.
#[derive(Debug)]
pub(crate) struct GatewayShared<S> {
    pub(crate) state: ArcSwap<State<S>>,
    pub(crate) ticker: Arc<Ticker>,
    /// State of the graceful shutdown.
    pub(crate) drain: Drain,
    pub(crate) recorder: Arc<Recorder>,
    /// Connections closed on accept, by reason.
    pub(crate) rejected_connections: Counters<ConnectionRejection>,
    /// Connections closed while they waited for a request, because `max_connections` was near.
    pub(crate) reaped_connections: AtomicU64,
    /// When capacity was last kept free in this way, in milliseconds.
    pub(crate) last_reaped: AtomicU64,
    /// Wakes an accept loop that waits for capacity.
    pub(crate) connection_ended: Notify,
    pub(crate) clients: Arc<ClientCounts>,
}

#[derive(Debug)]
pub(crate) struct Worker<S> {
    pub(crate) number: usize,
    pub(crate) shared: Arc<GatewayShared<S>>,
    pub(crate) recorder: Arc<WorkerRecorder>,
    /// Number of open connections.
    pub(crate) connections: AtomicUsize,
    pub(crate) registry: ConnectionRegistry,
    queue: mpsc::UnboundedSender<AcceptedConnection>,
}

#[derive(Debug)]
struct AcceptedConnection {
    stream: std::net::TcpStream,
    peer: SocketAddr,
    listener: Arc<GatewayListener>,
    activity: Arc<ConnectionActivity>,
}

impl<S: Backend> Worker<S> {
    /// Starts the thread. It ends after the last handle to the worker is dropped.
    pub(crate) fn start(number: usize, shared: Arc<GatewayShared<S>>) -> io::Result<Arc<Worker<S>>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (queue, mut accepted) = mpsc::unbounded_channel::<AcceptedConnection>();
        let recorder = Arc::new(WorkerRecorder::new(shared.recorder.clone(), number));
        let worker = Arc::new(Worker {
            number,
            shared,
            recorder,
            connections: AtomicUsize::new(0),
            registry: ConnectionRegistry::default(),
            queue,
        });
        let draining = worker.shared.drain.wait_begun();
        let (weak, name) = (Arc::downgrade(&worker), format!("gateway-{number}"));
        std::thread::Builder::new().name(name).spawn(move || {
            runtime.block_on(async move {
                // Opened before the first request needs them.
                if let Some(worker) = weak.upgrade()
                    && let Some(layer) = &worker.shared.state.load().engine.layer
                {
                    S::open_connections(layer.limiter());
                }
                while let Some(connection) = accepted.recv().await {
                    let Some(worker) = weak.upgrade() else { break };
                    tokio::spawn(worker.serve(connection));
                }
                // Each connection holds the worker, so none is left.
                draining.await;
            });
        })?;
        Ok(worker)
    }
}

impl<S> Worker<S> {
    /// Assigns a connection to this worker.
    pub(crate) fn assign(
        self: &Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        listener: Arc<GatewayListener>,
    ) {
        let Ok(stream) = stream.into_std() else { return };
        self.connections.fetch_add(1, Ordering::Relaxed);
        let min_rate = MinRate(self.shared.state.load().timeouts.min_rate);
        let activity = ConnectionActivity::new(self.shared.ticker.clone(), min_rate);
        // Registered here and not by its task, so that the accept loop finds all connections that it counts.
        self.registry.add(&activity);
        if self.queue.send(AcceptedConnection { stream, peer, listener, activity }).is_err() {
            self.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A connection, counted until it is dropped.
struct ConnectionGuard<S> {
    worker: Arc<Worker<S>>,
    activity: Arc<ConnectionActivity>,
}

impl<S> Drop for ConnectionGuard<S> {
    fn drop(&mut self) {
        let ConnectionGuard { worker, activity } = self;
        if activity.is_reaped() {
            worker.shared.reaped_connections.fetch_add(1, Ordering::Relaxed);
        }
        activity.end();
        worker.connections.fetch_sub(1, Ordering::Relaxed);
        worker.shared.connection_ended.notify_one();
    }
}

impl<S: Backend> Worker<S> {
    async fn serve(self: Arc<Self>, connection: AcceptedConnection) {
        let guard = ConnectionGuard { worker: self.clone(), activity: connection.activity.clone() };
        if let Ok(stream) = TcpStream::from_std(connection.stream) {
            connection::serve(self, stream, connection.peer, connection.listener, connection.activity).await;
        }
        drop(guard);
    }
}
