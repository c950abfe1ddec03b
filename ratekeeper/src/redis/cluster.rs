//! Redis Cluster: the map from hash slots to nodes, and its refresh.
//!
//! A node that does not own a key redirects the request, so an outdated map costs latency only. The map is refreshed
//! after each redirection and whenever a node does not answer.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::address::Address;
use super::batcher::ConnectionOptions;
use super::node::Node;
use super::resp::{self, RespValue};
use super::server::NodeAccess;
use super::store_error::StoreError;

const HASH_SLOTS: usize = 16_384;
/// Marks a hash slot without a node.
const UNASSIGNED: u16 = u16::MAX;
/// Redis supports at most 1,000 nodes in a cluster.
const NODES_MAX: usize = 1_000;
/// Time limit for one node to return its map.
const REPLY_MAX: Duration = Duration::from_millis(250);
/// Shortest time between two refreshes.
const REFRESH_EVERY: Duration = Duration::from_millis(50);

/// The hash slot of a key, computed from its hash tag.
pub(crate) fn slot(name: &str) -> u16 {
    let tag = name.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or(name, |(tag, _)| tag);
    crc16(tag.as_bytes()) % HASH_SLOTS as u16
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

const TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

/// The nodes of the cluster and their hash slots.
#[derive(Debug)]
struct SlotMap {
    nodes: Vec<Arc<Node>>,
    /// The index in `nodes` of each hash slot.
    slots: Box<[u16]>,
}

impl SlotMap {
    fn empty() -> SlotMap {
        SlotMap { nodes: Vec::new(), slots: vec![UNASSIGNED; HASH_SLOTS].into() }
    }

    fn node(&self, slot: u16) -> Option<&Arc<Node>> {
        self.nodes.get(usize::from(self.slots[usize::from(slot)]))
    }
}

#[derive(Debug)]
pub(crate) struct Cluster {
    map: watch::Receiver<SlotMap>,
    factory: Arc<NodeFactory>,
    /// Placeholder while no node is known.
    placeholder: Arc<Node>,
    /// Requests a refresh.
    refresh: mpsc::Sender<()>,
}

impl Cluster {
    /// Starts the refresh task on the current runtime; it ends when the `Cluster` is dropped.
    pub(crate) fn new(seeds: Vec<Address>, access: NodeAccess, options: ConnectionOptions) -> Cluster {
        let (publish, map) = watch::channel(SlotMap::empty());
        let (refresh, requests) = mpsc::channel(1);
        let factory = Arc::new(NodeFactory { access, options, strays: Mutex::default() });
        tokio::spawn(MapRefresher { seeds, factory: factory.clone(), publish, next: 0 }.run(requests));
        Cluster { map, factory, placeholder: Arc::default(), refresh }
    }

    /// The node of a hash slot in the current map, or the placeholder.
    pub(crate) fn node(&self, slot: u16) -> Arc<Node> {
        self.map.borrow().node(slot).unwrap_or(&self.placeholder).clone()
    }

    /// Waits until the node of a hash slot is known.
    pub(crate) async fn wait_for(&self, slot: u16) -> Result<Arc<Node>, StoreError> {
        self.request_refresh();
        let mut map = self.map.clone();
        let map = map.wait_for(|map| map.node(slot).is_some()).await;
        let missing = || StoreError::Unreachable(format!("no node of the cluster has slot {slot}"));
        map.ok().and_then(|map| map.node(slot).cloned()).ok_or_else(missing)
    }

    /// The node at an address to which another node redirects.
    pub(crate) fn node_at(&self, address: &str, responder: &Node) -> Result<Arc<Node>, StoreError> {
        let wrong =
            || StoreError::ErrorReply(format!("it redirects to {address:?}, which is not an address"));
        let mut address = Address::parse_redirection(address).ok_or_else(wrong)?;
        if is_nameless(&address.host) {
            address.host = responder.address.as_ref().map(|it| it.host.clone()).unwrap_or_default();
        }
        let known = self.map.borrow().nodes.iter().find(|it| it.address.as_ref() == Some(&address)).cloned();
        Ok(known.unwrap_or_else(|| self.factory.stray(&address)))
    }

    /// Opens the connections of the current runtime to all nodes.
    pub(crate) fn open_connections(&self) {
        self.map.borrow().nodes.iter().for_each(|node| node.open_connections());
    }

    /// Requests a refresh of the map.
    pub(crate) fn request_refresh(&self) {
        // If the channel is full, a refresh is already pending.
        let _ = self.refresh.try_send(());
    }

    pub(crate) fn is_degraded(&self) -> bool {
        let map = self.map.borrow();
        map.nodes.iter().any(|node| node.breaker.is_open())
            || (map.nodes.is_empty() && self.placeholder.breaker.is_open())
    }
}

/// Creates nodes.
#[derive(Debug)]
struct NodeFactory {
    access: NodeAccess,
    options: ConnectionOptions,
    /// Nodes known only from redirections, newest last.
    strays: Mutex<Vec<Arc<Node>>>,
}

impl NodeFactory {
    const STRAYS_MAX: usize = 16;

    fn make(&self, address: &Address) -> Arc<Node> {
        Arc::new(Node::new(Some(address.clone()), self.access.to(address), self.options.clone()))
    }

    fn stray(&self, address: &Address) -> Arc<Node> {
        let mut strays = self.strays.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = strays.iter().find(|it| it.address.as_ref() == Some(address)) {
            return known.clone();
        }
        if strays.len() == Self::STRAYS_MAX {
            strays.remove(0);
        }
        let made = self.make(address);
        strays.push(made.clone());
        made
    }

    fn take_stray(&self, address: &Address) -> Option<Arc<Node>> {
        let mut strays = self.strays.lock().unwrap_or_else(PoisonError::into_inner);
        let at = strays.iter().position(|it| it.address.as_ref() == Some(address))?;
        Some(strays.remove(at))
    }
}

/// Refreshes the map.
struct MapRefresher {
    seeds: Vec<Address>,
    factory: Arc<NodeFactory>,
    publish: watch::Sender<SlotMap>,
    /// The node to query next.
    next: usize,
}

impl MapRefresher {
    async fn run(mut self, mut requests: mpsc::Receiver<()>) {
        loop {
            self.refresh().await;
            tokio::time::sleep(REFRESH_EVERY).await;
            if requests.recv().await.is_none() {
                return;
            }
        }
    }

    /// Queries one node after the other until one returns a map.
    async fn refresh(&mut self) {
        let known =
            self.publish.borrow().nodes.iter().filter_map(|node| node.address.clone()).collect::<Vec<_>>();
        let all: Vec<_> = known.iter().chain(&self.seeds).collect();
        for turn in 0..all.len() {
            let address = all[(self.next + turn) % all.len()];
            if let Ok(Some(ranges)) = tokio::time::timeout(REPLY_MAX, self.fetch_ranges(address)).await
                && let Some(map) = self.map(&ranges)
            {
                // The next refresh starts with another node, because this one may be partitioned from the others.
                self.next = (self.next + turn + 1) % all.len();
                self.publish.send_replace(map);
                return;
            }
        }
    }

    async fn fetch_ranges(&self, address: &Address) -> Option<Vec<SlotRange>> {
        let mut link = self.factory.access.to(address).connect().await.ok()?;
        let mut command = Vec::new();
        resp::push_all(&mut command, &[b"CLUSTER", b"SLOTS"]);
        link.send(&command).await.ok()?;
        ranges(&link.receive().await.ok()?, address)
    }

    fn map(&self, ranges: &[SlotRange]) -> Option<SlotMap> {
        let mut map = SlotMap::empty();
        let old = self.publish.borrow();
        for SlotRange { first, last, address } in ranges {
            let is_it = |node: &&Arc<Node>| node.address.as_ref() == Some(address);
            let index = match map.nodes.iter().position(|node| is_it(&node)) {
                Some(index) => index,
                None if map.nodes.len() == NODES_MAX => return None,
                None => {
                    let known = old.nodes.iter().find(is_it).cloned();
                    let known = known.or_else(|| self.factory.take_stray(address));
                    let node = known.unwrap_or_else(|| self.factory.make(address));
                    // A new node gets connections of all runtimes before they need them.
                    old.nodes.iter().for_each(|other| node.open_connections_like(other));
                    map.nodes.push(node);
                    map.nodes.len() - 1
                }
            };
            // Below NODES_MAX.
            map.slots.get_mut(usize::from(*first)..=usize::from(*last))?.fill(index as u16);
        }
        (!map.nodes.is_empty()).then_some(map)
    }
}

/// Whether a node reports that it does not know its own host.
fn is_nameless(host: &str) -> bool {
    host.is_empty() || host == "?"
}

/// Hash slots of one node.
#[derive(Debug, PartialEq, Eq)]
struct SlotRange {
    first: u16,
    last: u16,
    address: Address,
}

/// Parses the reply to CLUSTER SLOTS: for each range the first hash slot, the last, the master and its replicas; each
/// node as host, port and more.
fn ranges(reply: &RespValue<'_>, responder: &Address) -> Option<Vec<SlotRange>> {
    let number = |value: &RespValue<'_>| match value {
        RespValue::Integer(number) => u16::try_from(*number).ok(),
        _ => None,
    };
    let range = |value: &RespValue<'_>| {
        let [first, last, master, ..] = value.elements()? else { return None };
        let [host, port, ..] = master.elements()? else { return None };
        // A missing host means the node that replied.
        let host = host.text().filter(|host| !is_nameless(host)).unwrap_or(&responder.host).to_owned();
        let address = Address { host, port: number(port)? };
        Some(SlotRange { first: number(first)?, last: number(last)?, address })
    };
    reply.elements()?.iter().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_slots_match_redis() {
        // Values of CLUSTER KEYSLOT.
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12_182);
        assert_eq!(slot("rate_limit:x:{foo}:2"), 12_182);
    }

    #[test]
    fn cluster_slots_reply_is_parsed() {
        let node =
            |host, port| RespValue::Array(vec![host, RespValue::Integer(port), RespValue::Bulk(b"id")]);
        let range = |first, last, master| {
            let replica = node(RespValue::Bulk(b"replica"), 9);
            RespValue::Array(vec![RespValue::Integer(first), RespValue::Integer(last), master, replica])
        };
        let responder = Address { host: "responder".to_owned(), port: 1 };
        let reply = RespValue::Array(vec![
            range(0, 10, node(RespValue::Bulk(b"one"), 7)),
            range(11, 16_383, node(RespValue::Nil, 8)),
        ]);
        let address = |host: &str, port| Address { host: host.to_owned(), port };
        assert_eq!(
            ranges(&reply, &responder).unwrap(),
            [
                SlotRange { first: 0, last: 10, address: address("one", 7) },
                SlotRange { first: 11, last: 16_383, address: address("responder", 8) }
            ]
        );
        let wrong = [
            RespValue::Status(b"OK"),
            RespValue::Array(vec![RespValue::Integer(1)]),
            RespValue::Array(vec![range(-1, 70_000, RespValue::Nil)]),
        ];
        for wrong in wrong {
            assert_eq!(ranges(&wrong, &responder), None);
        }
    }
}
