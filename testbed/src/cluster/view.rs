//! A cluster node's view of itself and the other nodes.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::resp_client::RespClient;

/// Number of hash slots of a cluster.
pub(super) const SLOTS: u16 = 16384;

/// Timeout of a reply, longer than a node on a busy machine needs. A slower node counts as unavailable.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The cluster as one node sees it.
#[derive(Debug)]
pub(super) struct View {
    /// All nodes, including itself.
    pub(super) nodes: Vec<SeenNode>,
    /// Whether the node serves requests.
    pub(super) is_serving: bool,
    /// Whether the node is a replica whose link to its master is up.
    pub(super) is_following: bool,
    /// Whether the node reports all nodes to clients. It omits a replica that its master has not pinged yet.
    pub(super) lists_all: bool,
}

/// A node as another node sees it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SeenNode {
    pub(super) id: String,
    pub(super) port: u16,
    /// Whether this is the node that has the view.
    pub(super) is_self: bool,
    pub(super) is_master: bool,
    /// Whether the node is reachable, not marked as failed, and past the handshake.
    pub(super) is_well: bool,
    /// The id of a replica's master.
    pub(super) master: Option<String>,
    /// If two nodes claim a hash slot, the one with the higher epoch owns it.
    pub(super) epoch: u64,
    slots: Vec<RangeInclusive<u16>>,
}

impl View {
    pub(super) fn of(port: u16) -> io::Result<View> {
        let mut node = RespClient::open(port, TIMEOUT)?;
        let nodes = node.command_text(&["CLUSTER", "NODES"])?;
        let nodes: Vec<SeenNode> = nodes
            .lines()
            .map(|line| SeenNode::parse(line).ok_or_else(|| io::Error::other(format!("not a node: {line}"))))
            .collect::<io::Result<_>>()?;
        let reply = node.command(&["CLUSTER", "SLOTS"])?;
        let has = |text: &str, wanted: &str| text.lines().any(|line| line.trim_end() == wanted);
        Ok(View {
            lists_all: nodes.iter().all(|seen| reply.iter().any(|word| word == seen.id.as_bytes())),
            nodes,
            is_serving: has(&node.command_text(&["CLUSTER", "INFO"])?, "cluster_state:ok"),
            is_following: has(&node.command_text(&["INFO", "replication"])?, "master_link_status:up"),
        })
    }

    /// The entry of the node that has the view.
    pub(super) fn own(&self) -> Option<&SeenNode> {
        self.nodes.iter().find(|node| node.is_self)
    }

    /// The port of each hash slot's master.
    pub(super) fn owners(&self) -> Vec<Option<u16>> {
        let mut owners = vec![None; usize::from(SLOTS)];
        for node in &self.nodes {
            for slot in node.slots.iter().cloned().flatten() {
                owners[usize::from(slot)] = Some(node.port);
            }
        }
        owners
    }

    /// The port of each node with the id of its master, sorted.
    pub(super) fn followers(&self) -> Vec<(u16, Option<&str>)> {
        let mut followers: Vec<_> =
            self.nodes.iter().map(|node| (node.port, node.master.as_deref())).collect();
        followers.sort_unstable();
        followers
    }
}

/// One line, for the message of a timeout.
impl fmt::Display for View {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let View { nodes, is_serving, is_following, lists_all } = self;
        write!(to, "serving {is_serving}, following {is_following}, lists all {lists_all}, sees")?;
        for node in nodes {
            let role = if node.is_master { "master" } else { "replica" };
            let condition = if node.is_well { "" } else { " unwell" };
            write!(to, " [{} {role}{condition} {:?}]", node.port, node.slots)?;
        }
        Ok(())
    }
}

impl SeenNode {
    /// Parses a line of `CLUSTER NODES`: id, address, flags, master, two times, epoch, link, hash slots.
    fn parse(line: &str) -> Option<SeenNode> {
        let mut words = line.split(' ');
        let id = words.next()?.to_owned();
        let (_, address) = words.next()?.split_once(':')?;
        let (port, _bus_port) = address.split_once('@')?;
        let flags: Vec<&str> = words.next()?.split(',').collect();
        let is_flagged = |flag| flags.contains(&flag);
        let master = words.next().filter(|&master| master != "-").map(str::to_owned);
        let epoch = words.nth(2)?.parse().ok()?;
        let is_linked = words.next()? == "connected";
        let slots = words
            // A hash slot in brackets is migrating; the ranges without brackets show its owner.
            .filter(|word| !word.starts_with('['))
            .map(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
                (last < SLOTS).then_some(first..=last)
            })
            .collect::<Option<_>>()?;
        Some(SeenNode {
            id,
            port: port.parse().ok()?,
            is_self: is_flagged("myself"),
            is_master: is_flagged("master"),
            is_well: is_linked && !["fail?", "fail", "handshake", "noaddr"].into_iter().any(is_flagged),
            master,
            epoch,
            slots,
        })
    }

    pub(super) fn owns_any(&self) -> bool {
        !self.slots.is_empty()
    }

    pub(super) fn owns(&self, slot: u16) -> bool {
        self.slots.iter().any(|range| range.contains(&slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_line_of_cluster_nodes() {
        let line =
            "f1 127.0.0.1:7000@17000,name myself,master - 0 1426238317239 4 connected 0-5460 9000 [77->-f2]";
        let seen = SeenNode::parse(line).unwrap();
        assert_eq!((seen.id.as_str(), seen.port, seen.epoch), ("f1", 7000, 4));
        assert!(seen.is_self && seen.is_master && seen.is_well);
        assert_eq!(seen.master, None);
        assert_eq!(seen.slots, [0..=5460, 9000..=9000]);
        assert!(seen.owns(0) && seen.owns(5460) && seen.owns(9000) && !seen.owns(5461));

        let line = "f3 127.0.0.1:7003@17003 slave f1 0 1426238316232 5 connected";
        let seen = SeenNode::parse(line).unwrap();
        assert!(!seen.is_self && !seen.is_master && seen.is_well);
        assert_eq!(seen.master.as_deref(), Some("f1"));

        for trouble in
            ["master,fail - 0 0 1 connected", "slave,fail? f1 0 0 1 connected", "master - 0 0 1 disconnected"]
        {
            assert!(
                !SeenNode::parse(&format!("f3 127.0.0.1:7003@17003 {trouble}")).unwrap().is_well,
                "{trouble}"
            );
        }
        assert_eq!(SeenNode::parse("f3 127.0.0.1:7003@17003 master - 0 0 1 connected 0-16384"), None);
        assert_eq!(SeenNode::parse("ERR no cluster"), None);
    }
}
