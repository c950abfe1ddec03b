//! Routes a request to its server and follows redirections until it is executed.

use std::sync::Arc;
use std::time::Duration;

use ratekeeper_core::Time;

use super::batcher::{Common, Item, NotDone, StoreError, Task, Told};
use super::cluster::{self, Cluster};
use super::node::Node;
use super::server::Place;
use crate::clock::{Clock, SystemClock};

/// Maximum number of redirections of a request.
const SENT_ON_MAX: usize = 5;
/// A request that is cancelled sooner does not count as a failure of its node.
const DROPPED_AFTER: Duration = Duration::from_millis(10);
/// Pause before a retry while a hash slot is split between two nodes.
const BETWEEN: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct Servers {
    all: All,
    clock: SystemClock,
}

#[derive(Debug)]
enum All {
    One(Arc<Node>),
    Cluster(Cluster),
}

impl Servers {
    /// Must be called on a tokio runtime.
    pub(crate) fn new(place: Place, links: usize, common: Common) -> Servers {
        let all = match place {
            Place::One(server) => All::One(Arc::new(Node::new(None, &server, links, &common))),
            Place::Cluster { seeds, way } => All::Cluster(Cluster::new(seeds, way, links, common)),
        };
        Servers { all, clock: SystemClock::new() }
    }

    /// The hash slot of a key; 0 for all keys of a single server.
    pub(crate) fn slot(&self, name: &str) -> u16 {
        match &self.all {
            All::One(_) => 0,
            All::Cluster(_) => cluster::slot(name),
        }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.all, All::Cluster(_))
    }

    /// The hash slot of all keys of a request, if they share one.
    pub(crate) fn slot_of_all(&self, items: &[Item]) -> Option<u16> {
        let mut slots = items.iter().map(|item| self.slot(&item.key));
        let first = slots.next().unwrap_or(0);
        slots.all(|slot| slot == first).then_some(first)
    }

    /// Executes a task on the node of its hash slot, within `patience`.
    pub(crate) async fn carry_out(
        &self,
        slot: u16,
        task: Task,
        patience: Duration,
    ) -> Result<Told, StoreError> {
        let (node, since) = (self.node(slot), self.clock.now());
        if !node.breaker.lets_ask(since) {
            self.look_again();
            return Err(StoreError::Away);
        }
        let mut waiting = Waiting { servers: self, node, since, is_over: false };
        let told = tokio::time::timeout(patience, self.follow(&mut waiting.node, slot, task)).await;
        let told = told.unwrap_or(Err(StoreError::TimedOut));
        waiting.is_over = true;
        match &told {
            // An unexpected reply is still a reply.
            Ok(_) | Err(StoreError::Garbled) => waiting.node.breaker.answered(),
            Err(_) => waiting.failed(),
        }
        told
    }

    /// Calls the node and follows redirections. `node` is the node being called.
    async fn follow(&self, node: &mut Arc<Node>, slot: u16, task: Task) -> Result<Told, StoreError> {
        let All::Cluster(cluster) = &self.all else {
            return node.ask(slot, false, task).await.map_err(StoreError::from);
        };
        if node.is_nobody() {
            *node = cluster.wait_for(slot).await?;
        }
        let (mut is_guest, mut sent_on) = (false, 0);
        while sent_on < SENT_ON_MAX {
            let (address, this_time) = match node.ask(slot, is_guest, task.clone()).await {
                Err(NotDone::Elsewhere { address, this_time }) => (address, this_time),
                Err(NotDone::Between) => {
                    tokio::time::sleep(BETWEEN).await;
                    (*node, is_guest, sent_on) = (cluster.node(slot), false, 0);
                    continue;
                }
                told => return told.map_err(StoreError::from),
            };
            // The node answered and has executed nothing, so another node may be called.
            node.breaker.answered();
            if !this_time {
                cluster.look_again();
            }
            (*node, is_guest) = (cluster.node_at(&address, node)?, this_time);
            if !node.breaker.lets_ask(self.clock.now()) {
                return Err(StoreError::Away);
            }
            sent_on += 1;
        }
        Err(StoreError::Refused(format!("slot {slot} is sent from node to node")))
    }

    fn node(&self, slot: u16) -> Arc<Node> {
        match &self.all {
            All::One(node) => node.clone(),
            All::Cluster(cluster) => cluster.node(slot),
        }
    }

    fn look_again(&self) {
        if let All::Cluster(cluster) = &self.all {
            cluster.look_again();
        }
    }

    pub(crate) fn is_degraded(&self) -> bool {
        match &self.all {
            All::One(node) => node.breaker.is_open(),
            All::Cluster(cluster) => cluster.is_degraded(),
        }
    }
}

/// A call in flight. If it is cancelled, that counts as a failure of the node; otherwise callers with a short timeout
/// would never detect a node that does not answer.
struct Waiting<'a> {
    servers: &'a Servers,
    node: Arc<Node>,
    since: Time,
    is_over: bool,
}

impl Waiting<'_> {
    fn failed(&self) {
        self.node.breaker.failed(self.servers.clock.now());
        self.servers.look_again();
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.is_over && self.servers.clock.now().saturating_since(self.since) >= DROPPED_AFTER {
            self.failed();
        }
    }
}

impl From<NotDone> for StoreError {
    fn from(not_done: NotDone) -> StoreError {
        match not_done {
            NotDone::Failed(error) => error,
            NotDone::Elsewhere { address, .. } => StoreError::Refused(format!(
                "it is a node of a cluster and sends to {address}; write its address as redis+cluster://"
            )),
            NotDone::Between => {
                StoreError::Refused("it is a node of a cluster that is being changed".to_owned())
            }
        }
    }
}
