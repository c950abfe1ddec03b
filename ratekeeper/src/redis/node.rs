//! One Redis server: its connections and its circuit breaker.
//!
//! A connection is driven by the runtime that opened it, and a request uses a connection of its own runtime, so that
//! it never waits for another thread. The first request of a runtime opens its connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;

use super::address::Address;
use super::batcher::{Connection, ConnectionOptions};
use super::breaker::Breaker;
use super::call::{CallError, QueuedTask, Reply, Task};
use super::server::Server;
use super::store_error::StoreError;

/// Runtimes with connections of their own. Requests of further runtimes use the connections of these.
const RUNTIMES_MAX: usize = 256;

pub(crate) type ReplyReceiver = oneshot::Receiver<Result<Box<Reply>, CallError>>;

#[derive(Debug, Default)]
pub(crate) struct Node {
    /// Set for a node of a cluster.
    pub(crate) address: Option<Address>,
    /// How connections are opened; absent in the placeholder that is used until the cluster's nodes are known.
    access: Option<(Server, ConnectionOptions)>,
    runtimes: RwLock<Vec<RuntimeConnections>>,
    pub(crate) breaker: Breaker,
}

impl Node {
    /// Opens the connections of the current runtime.
    pub(crate) fn new(address: Option<Address>, server: Server, options: ConnectionOptions) -> Node {
        let node = Node { address, access: Some((server, options)), ..Node::default() };
        node.open_connections();
        node
    }

    pub(crate) fn is_placeholder(&self) -> bool {
        self.access.is_none()
    }

    /// Puts a task into the queue of a connection.
    pub(crate) fn enqueue(&self, slot: u16, is_guest: bool, task: Task) -> Result<ReplyReceiver, CallError> {
        let ended = || CallError::Failed(StoreError::driver_ended());
        let current = Handle::try_current().map_err(|_| ended())?.id();
        let is_own = |it: &&RuntimeConnections| it.id() == current && !it.has_ended();
        let mut runtimes = self.runtimes();
        let has_space =
            || runtimes.len() < RUNTIMES_MAX || runtimes.iter().any(RuntimeConnections::has_ended);
        if runtimes.iter().find(is_own).is_none() && has_space() {
            drop(runtimes);
            self.open_connections();
            runtimes = self.runtimes();
        }
        // If there are too many runtimes, some have no connections of their own.
        let chosen = runtimes.iter().find(is_own).or(runtimes.first()).ok_or_else(ended)?;
        let (sender, reply) = oneshot::channel();
        chosen.next().enqueue(QueuedTask { slot, is_guest, task, sender }).map_err(CallError::Failed)?;
        Ok(reply)
    }

    fn runtimes(&self) -> RwLockReadGuard<'_, Vec<RuntimeConnections>> {
        self.runtimes.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the connections of the current runtime, unless it has some or there are too many runtimes.
    pub(crate) fn open_connections(&self) {
        if let Ok(runtime) = Handle::try_current() {
            self.open_connections_of(&runtime);
        }
    }

    fn open_connections_of(&self, runtime: &Handle) {
        let Some((server, options)) = &self.access else { return };
        let mut runtimes = self.runtimes.write().unwrap_or_else(PoisonError::into_inner);
        runtimes.retain(|runtime| !runtime.has_ended());
        if runtimes.len() < RUNTIMES_MAX && runtimes.iter().all(|it| it.id() != runtime.id()) {
            runtimes.push(RuntimeConnections::open(runtime.clone(), server, options));
        }
    }

    /// Opens connections of all runtimes that have connections to another node.
    pub(crate) fn open_connections_like(&self, other: &Node) {
        let handles: Vec<Handle> = other.runtimes().iter().map(|it| it.handle.clone()).collect();
        handles.iter().for_each(|runtime| self.open_connections_of(runtime));
    }
}

/// The connections that one runtime drives.
#[derive(Debug)]
struct RuntimeConnections {
    handle: Handle,
    /// At least one.
    connections: Box<[Connection]>,
    next: AtomicUsize,
}

impl RuntimeConnections {
    fn open(handle: Handle, server: &Server, options: &ConnectionOptions) -> RuntimeConnections {
        let count = options.connections.unwrap_or_else(|| handle.metrics().num_workers()).max(1);
        let connection = |_| Connection::new(server.clone(), options.clone(), &handle);
        let connections = (0..count).map(connection).collect();
        RuntimeConnections { handle, connections, next: AtomicUsize::new(0) }
    }

    fn id(&self) -> Id {
        self.handle.id()
    }

    /// Whether the runtime has shut down.
    fn has_ended(&self) -> bool {
        self.connections.iter().all(Connection::has_ended)
    }

    /// The connection of the next request: round robin, but an open one is preferred.
    fn next(&self) -> &Connection {
        if let [only] = &*self.connections {
            return only;
        }
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.connections.len();
        let mut in_turn = self.connections[next..].iter().chain(&self.connections[..next]);
        in_turn.find(|connection| connection.is_connected()).unwrap_or(&self.connections[next])
    }
}
