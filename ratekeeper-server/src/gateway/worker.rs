//! Workers: one thread per core, each with its own runtime, connections and pools.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::accept::Listening;
use super::access::{self, Desk, Ledger};
use super::connection;
use super::draining::Draining;
use super::state::State;
use super::timer::Ticker;
use crate::backend::Backend;
use crate::metrics::Metrics;

/// State that all workers share.
#[derive(Debug)]
pub(crate) struct Shared<S> {
    pub(crate) state: ArcSwap<State<S>>,
    pub(crate) ticker: Arc<Ticker>,
    /// State of the graceful shutdown.
    pub(crate) draining: Draining,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) metrics: Metrics,
    /// Connections closed on accept because `max_connections` was reached.
    pub(crate) turned_away: AtomicU64,
    /// Connections closed on accept because the peer is not a trusted proxy, so its PROXY header does not count.
    pub(crate) untrusted: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Worker<S> {
    pub(crate) number: usize,
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) desk: Arc<Desk>,
    /// Number of open connections.
    pub(crate) connections: AtomicUsize,
    inbox: mpsc::UnboundedSender<Arrival>,
}

#[derive(Debug)]
struct Arrival {
    stream: std::net::TcpStream,
    from: SocketAddr,
    listening: Arc<Listening>,
}

impl<S: Backend> Worker<S> {
    /// Starts the thread. It ends after the last handle to the worker is dropped.
    pub(crate) fn start(number: usize, shared: Arc<Shared<S>>) -> io::Result<Arc<Worker<S>>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (inbox, mut arrivals) = mpsc::unbounded_channel::<Arrival>();
        let desk = Arc::new(Desk::new(shared.ledger.clone(), number));
        let worker = Arc::new(Worker { number, shared, desk, connections: AtomicUsize::new(0), inbox });
        let ending = worker.shared.draining.wait();
        let (weak, name) = (Arc::downgrade(&worker), format!("gateway-{number}"));
        std::thread::Builder::new().name(name).spawn(move || {
            access::set_worker(number);
            runtime.block_on(async move {
                while let Some(arrival) = arrivals.recv().await {
                    let Some(worker) = weak.upgrade() else { break };
                    tokio::spawn(worker.serve(arrival));
                }
                // Each connection holds the worker, so none is left.
                ending.await;
            });
        })?;
        Ok(worker)
    }
}

impl<S> Worker<S> {
    /// Assigns a connection to this worker.
    pub(crate) fn take(self: &Arc<Self>, stream: TcpStream, from: SocketAddr, listening: Arc<Listening>) {
        let Ok(stream) = stream.into_std() else { return };
        self.connections.fetch_add(1, Ordering::Relaxed);
        if self.inbox.send(Arrival { stream, from, listening }).is_err() {
            self.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A connection, counted until it is dropped.
struct Counted<S>(Arc<Worker<S>>);

impl<S> Drop for Counted<S> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<S: Backend> Worker<S> {
    async fn serve(self: Arc<Self>, arrival: Arrival) {
        let counted = Counted(self.clone());
        if let Ok(stream) = TcpStream::from_std(arrival.stream) {
            connection::run(self, stream, arrival.from, arrival.listening).await;
        }
        drop(counted);
    }
}
