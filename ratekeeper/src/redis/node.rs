//! One Redis server: its connections and its circuit breaker.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::oneshot;

use super::address::Address;
use super::batcher::{CallError, Connection, ConnectionOptions, QueuedTask, Reply, StoreError, Task};
use super::breaker::Breaker;
use super::server::Server;

#[derive(Debug, Default)]
pub(crate) struct Node {
    /// Set for a node of a cluster.
    pub(crate) address: Option<Address>,
    connections: Box<[Connection]>,
    next_connection: AtomicUsize,
    pub(crate) breaker: Breaker,
}

impl Node {
    pub(crate) fn new(
        address: Option<Address>,
        server: &Server,
        connections: usize,
        options: &ConnectionOptions,
    ) -> Node {
        let connections =
            (0..connections).map(|_| Connection::new(server.clone(), options.clone())).collect();
        Node { address, connections, ..Node::default() }
    }

    /// Whether this is the placeholder that is used until the cluster's nodes are known.
    pub(crate) fn is_placeholder(&self) -> bool {
        self.connections.is_empty()
    }

    pub(crate) async fn call(&self, slot: u16, is_guest: bool, task: Task) -> Result<Reply, CallError> {
        let (sender, reply) = oneshot::channel();
        let next = self.next_connection.fetch_add(1, Ordering::Relaxed) % self.connections.len().max(1);
        let ended = || CallError::Failed(StoreError::driver_ended());
        // Round robin, but an open connection is preferred.
        let mut in_turn = self.connections[next..].iter().chain(&self.connections[..next]);
        let connection = in_turn
            .find(|connection| connection.is_connected())
            .or(self.connections.get(next))
            .ok_or_else(ended)?;
        connection.enqueue(QueuedTask { slot, is_guest, task, sender }).map_err(CallError::Failed)?;
        reply.await.unwrap_or_else(|_| Err(ended()))
    }
}
