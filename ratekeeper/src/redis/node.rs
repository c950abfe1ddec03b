//! One Redis server: its connections and its circuit breaker.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::oneshot;

use super::batcher::{Ask, Common, Link, NotDone, StoreError, Task, Told};
use super::breaker::Breaker;
use super::server::{Address, Server};

#[derive(Debug, Default)]
pub(crate) struct Node {
    /// Set for a node of a cluster.
    pub(crate) address: Option<Address>,
    links: Box<[Link]>,
    next_link: AtomicUsize,
    pub(crate) breaker: Breaker,
}

impl Node {
    pub(crate) fn new(address: Option<Address>, server: &Server, links: usize, common: &Common) -> Node {
        let links = (0..links).map(|_| Link::new(server.clone(), common.clone())).collect();
        Node { address, links, ..Node::default() }
    }

    /// Whether this is the placeholder that is used until the cluster's nodes are known.
    pub(crate) fn is_nobody(&self) -> bool {
        self.links.is_empty()
    }

    pub(crate) async fn ask(&self, slot: u16, is_guest: bool, task: Task) -> Result<Told, NotDone> {
        let (tell, told) = oneshot::channel();
        let next = self.next_link.fetch_add(1, Ordering::Relaxed) % self.links.len().max(1);
        let ended = || NotDone::Failed(StoreError::driver_has_ended());
        // Round robin, but a link with an open connection is preferred.
        let mut in_turn = self.links[next..].iter().chain(&self.links[..next]);
        let link = in_turn.find(|link| link.is_connected()).or(self.links.get(next)).ok_or_else(ended)?;
        link.ask(Ask { slot, is_guest, task, tell }).map_err(NotDone::Failed)?;
        told.await.unwrap_or_else(|_| Err(ended()))
    }
}
