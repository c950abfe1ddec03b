//! Routes a request to its server and follows redirections until it is executed.

use std::sync::Arc;
use std::time::Duration;

use ratekeeper_core::Time;

use super::batcher::{CallError, ConnectionOptions, Item, Reply, StoreError, Task};
use super::cluster::{self, Cluster};
use super::failures::Failures;
use super::node::Node;
use super::server::Topology;
use crate::clock::{Clock, SystemClock};

/// Maximum number of redirections of a request.
const REDIRECTS_MAX: usize = 5;
/// A request that is cancelled sooner does not count as a failure of its node.
const DROPPED_AFTER: Duration = Duration::from_millis(10);
/// Pause before a retry while a hash slot is split between two nodes.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct Servers {
    nodes: Nodes,
    clock: SystemClock,
    pub(crate) failures: Failures,
}

#[derive(Debug)]
enum Nodes {
    One(Arc<Node>),
    Cluster(Cluster),
}

impl Servers {
    /// Must be called on a tokio runtime.
    pub(crate) fn new(topology: Topology, connections: usize, options: ConnectionOptions) -> Servers {
        let nodes = match topology {
            Topology::One(server) => Nodes::One(Arc::new(Node::new(None, &server, connections, &options))),
            Topology::Cluster { seeds, access } => {
                Nodes::Cluster(Cluster::new(seeds, access, connections, options))
            }
        };
        Servers { nodes, clock: SystemClock::new(), failures: Failures::default() }
    }

    /// The hash slot of a key; 0 for all keys of a single server.
    pub(crate) fn slot(&self, name: &str) -> u16 {
        match &self.nodes {
            Nodes::One(_) => 0,
            Nodes::Cluster(_) => cluster::slot(name),
        }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.nodes, Nodes::Cluster(_))
    }

    /// The hash slot of all keys of a request, if they share one.
    pub(crate) fn slot_of_all(&self, items: &[Item]) -> Option<u16> {
        let mut slots = items.iter().map(|item| self.slot(&item.key));
        let first = slots.next().unwrap_or(0);
        slots.all(|slot| slot == first).then_some(first)
    }

    /// Executes a task on the node of its hash slot, within `timeout`.
    pub(crate) async fn execute(
        &self,
        slot: u16,
        task: Task,
        timeout: Duration,
    ) -> Result<Reply, StoreError> {
        let (node, since) = (self.node(slot), self.clock.now());
        if !node.breaker.allows_call(since) {
            self.request_refresh();
            return Err(StoreError::CircuitOpen);
        }
        let mut guard = CallGuard { servers: self, node, since, is_finished: false };
        let reply = tokio::time::timeout(timeout, self.follow(&mut guard.node, slot, task)).await;
        let reply = reply.unwrap_or(Err(StoreError::TimedOut));
        guard.is_finished = true;
        if let Err(error) = &reply {
            self.failures.record(error);
        }
        match &reply {
            // An unexpected reply is still a reply.
            Ok(_) | Err(StoreError::UnexpectedReply) => guard.node.breaker.record_success(),
            Err(_) => guard.failed(),
        }
        reply
    }

    /// Calls the node and follows redirections. `node` is the node being called.
    async fn follow(&self, node: &mut Arc<Node>, slot: u16, task: Task) -> Result<Reply, StoreError> {
        let Nodes::Cluster(cluster) = &self.nodes else {
            return node.call(slot, false, task).await.map_err(StoreError::from);
        };
        if node.is_placeholder() {
            *node = cluster.wait_for(slot).await?;
        }
        let (mut is_guest, mut redirects) = (false, 0);
        while redirects < REDIRECTS_MAX {
            let (address, is_ask) = match node.call(slot, is_guest, task.clone()).await {
                Err(CallError::Redirected { address, is_ask }) => (address, is_ask),
                Err(CallError::TryAgain) => {
                    tokio::time::sleep(TRY_AGAIN_AFTER).await;
                    (*node, is_guest, redirects) = (cluster.node(slot), false, 0);
                    continue;
                }
                reply => return reply.map_err(StoreError::from),
            };
            // The node answered and has executed nothing, so another node may be called.
            node.breaker.record_success();
            if !is_ask {
                cluster.request_refresh();
            }
            (*node, is_guest) = (cluster.node_at(&address, node)?, is_ask);
            if !node.breaker.allows_call(self.clock.now()) {
                return Err(StoreError::CircuitOpen);
            }
            redirects += 1;
        }
        Err(StoreError::ErrorReply(format!("more than {REDIRECTS_MAX} redirections for hash slot {slot}")))
    }

    fn node(&self, slot: u16) -> Arc<Node> {
        match &self.nodes {
            Nodes::One(node) => node.clone(),
            Nodes::Cluster(cluster) => cluster.node(slot),
        }
    }

    fn request_refresh(&self) {
        if let Nodes::Cluster(cluster) = &self.nodes {
            cluster.request_refresh();
        }
    }

    pub(crate) fn is_degraded(&self) -> bool {
        match &self.nodes {
            Nodes::One(node) => node.breaker.is_open(),
            Nodes::Cluster(cluster) => cluster.is_degraded(),
        }
    }
}

/// A call in flight. If it is cancelled, that counts as a failure of the node; otherwise callers with a short timeout
/// would never detect a node that does not answer.
struct CallGuard<'a> {
    servers: &'a Servers,
    node: Arc<Node>,
    since: Time,
    is_finished: bool,
}

impl CallGuard<'_> {
    fn failed(&self) {
        self.node.breaker.record_failure(self.servers.clock.now());
        self.servers.request_refresh();
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        if !self.is_finished && self.servers.clock.now().saturating_since(self.since) >= DROPPED_AFTER {
            self.failed();
        }
    }
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> StoreError {
        match error {
            CallError::Failed(error) => error,
            CallError::Redirected { address, .. } => StoreError::ErrorReply(format!(
                "it is a cluster node and redirects to {address}; write its address as redis+cluster://"
            )),
            CallError::TryAgain => StoreError::ErrorReply(
                "it is a node of a cluster whose hash slots are being migrated".to_owned(),
            ),
        }
    }
}
