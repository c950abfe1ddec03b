//! Routes a request to its server and follows redirections until it is executed.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::Either;
use ratekeeper_core::Time;

use super::batcher::ConnectionOptions;
use super::call::{CallError, Item, Reply, Task};
use super::cluster::{self, Cluster};
use super::failures::Failures;
use super::node::{Node, ReplyReceiver};
use super::server::Topology;
use super::store_error::StoreError;
use crate::clock::{Clock as _, SharedClock};

/// Maximum number of redirections of a request.
const REDIRECTS_MAX: usize = 5;
/// A request that is cancelled sooner does not count as a failure of its node.
const DROPPED_AFTER: Duration = Duration::from_millis(10);
/// Pause before a retry while a hash slot is split between two nodes.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct Servers {
    nodes: Nodes,
    pub(crate) clock: SharedClock,
    pub(crate) failures: Failures,
}

#[derive(Debug)]
enum Nodes {
    One(Node),
    Cluster(Cluster),
}

impl Servers {
    /// Must be called on a tokio runtime. `clock` is the local clock.
    pub(crate) fn new(topology: Topology, options: ConnectionOptions, clock: SharedClock) -> Servers {
        let nodes = match topology {
            Topology::One(server) => Nodes::One(Node::new(None, server, options)),
            Topology::Cluster { seeds, access } => Nodes::Cluster(Cluster::new(seeds, access, options)),
        };
        Servers { nodes, clock, failures: Failures::default() }
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

    /// Executes a task on the node of its hash slot, within `timeout`. For a single server, the task is in the queue
    /// when this returns, so that the future holds only its reply.
    pub(crate) fn execute(
        &self,
        slot: u16,
        task: Task,
        timeout: Duration,
    ) -> impl Future<Output = Result<Box<Reply>, StoreError>> + Send + '_ {
        match &self.nodes {
            Nodes::One(node) => Either::Left(self.call_server(node, task, timeout)),
            Nodes::Cluster(cluster) => {
                Either::Right(Box::pin(self.call_cluster(cluster, slot, task, timeout)))
            }
        }
    }

    /// Calls the only server.
    fn call_server<'a>(
        &'a self,
        node: &'a Node,
        task: Task,
        timeout: Duration,
    ) -> impl Future<Output = Result<Box<Reply>, StoreError>> + Send + 'a {
        let called = self.begin(node).map(|guard| (guard, node.enqueue(0, false, task)));
        async move {
            let (guard, queued) = called?;
            let reply = match queued {
                Ok(receiver) => tokio::time::timeout(timeout, receive(receiver)).await,
                Err(error) => Ok(Err(error)),
            };
            guard.finish(reply.map_or(Err(StoreError::TimedOut), |reply| reply.map_err(StoreError::from)))
        }
    }

    /// Calls the node of a hash slot and follows redirections.
    async fn call_cluster(
        &self,
        cluster: &Cluster,
        slot: u16,
        task: Task,
        timeout: Duration,
    ) -> Result<Box<Reply>, StoreError> {
        let mut guard = self.begin(cluster.node(slot))?;
        let following = self.follow(cluster, &mut guard.node, slot, task);
        let reply = tokio::time::timeout(timeout, following).await;
        guard.finish(reply.unwrap_or(Err(StoreError::TimedOut)))
    }

    /// Begins a call, unless the node's breaker is open.
    fn begin<N: Deref<Target = Node>>(&self, node: N) -> Result<CallGuard<'_, N>, StoreError> {
        let since = self.clock.now();
        if !node.breaker.allows_call(since) {
            self.request_refresh();
            return Err(StoreError::CircuitOpen);
        }
        Ok(CallGuard { servers: self, node, since, is_finished: false })
    }

    /// Calls nodes until one executes the task. `node` is the node being called.
    async fn follow(
        &self,
        cluster: &Cluster,
        node: &mut Arc<Node>,
        slot: u16,
        task: Task,
    ) -> Result<Box<Reply>, StoreError> {
        if node.is_placeholder() {
            *node = cluster.wait_for(slot).await?;
        }
        let (mut is_guest, mut redirects) = (false, 0);
        while redirects < REDIRECTS_MAX {
            let reply = match node.enqueue(slot, is_guest, task.clone()) {
                Ok(receiver) => receive(receiver).await,
                Err(error) => Err(error),
            };
            let (address, is_ask) = match reply {
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

    /// Opens the connections of the current runtime.
    pub(crate) fn open_connections(&self) {
        match &self.nodes {
            Nodes::One(node) => node.open_connections(),
            Nodes::Cluster(cluster) => cluster.open_connections(),
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

async fn receive(receiver: ReplyReceiver) -> Result<Box<Reply>, CallError> {
    receiver.await.unwrap_or_else(|_| Err(CallError::Failed(StoreError::driver_ended())))
}

/// A call in flight. If it is cancelled, that counts as a failure of the node; otherwise callers with a short timeout
/// would never detect a node that does not answer.
struct CallGuard<'a, N: Deref<Target = Node>> {
    servers: &'a Servers,
    node: N,
    since: Time,
    is_finished: bool,
}

impl<N: Deref<Target = Node>> CallGuard<'_, N> {
    /// Records the result of the call.
    fn finish(mut self, reply: Result<Box<Reply>, StoreError>) -> Result<Box<Reply>, StoreError> {
        self.is_finished = true;
        if let Err(error) = &reply {
            self.servers.failures.record(error);
        }
        match &reply {
            // An unexpected reply is still a reply.
            Ok(_) | Err(StoreError::UnexpectedReply) => self.node.breaker.record_success(),
            Err(_) => self.failed(),
        }
        reply
    }

    fn failed(&self) {
        self.node.breaker.record_failure(self.servers.clock.now());
        self.servers.request_refresh();
    }
}

impl<N: Deref<Target = Node>> Drop for CallGuard<'_, N> {
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
