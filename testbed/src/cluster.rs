//! A local Redis Cluster, with node failures, restarts, failovers and hash slot migration.

mod slot_move;
#[cfg(test)]
mod tests;
mod view;

use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::view::{SLOTS, SeenNode, View};
use crate::RedisServer;
use crate::process::free_port;
use crate::wait::block_until;

pub use self::slot_move::SlotMove;

/// Masters at the start; each has one replica.
const MASTERS: usize = 3;
/// Far longer than a start takes: a test that waits this long fails.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Redis aborts a manual failover after five seconds.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(6);
const FAILOVER_TRIES: usize = 5;
/// A free port may be taken by another process before the node binds it.
const PORT_TRIES: usize = 5;

/// A Redis Cluster of six processes that persist nothing but their cluster configuration.
///
/// At the start nodes 0, 1 and 2 are masters of a third of the hash slots each, and nodes 3, 4 and 5 are their
/// replicas.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    node_timeout: Duration,
    /// When each node last became master by a failover that a test requested.
    elections: Mutex<Vec<Option<Instant>>>,
}

impl RedisCluster {
    /// Default node timeout: how long a node may be silent before the others consider it failed.
    pub const NODE_TIMEOUT: Duration = Duration::from_secs(1);

    /// Starts a cluster and waits until it is [complete](Self::wait_until_whole).
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start, or the nodes do not form a cluster.
    pub fn start() -> io::Result<RedisCluster> {
        RedisCluster::start_with(RedisCluster::NODE_TIMEOUT, &[])
    }

    /// The same, with another node timeout and options of `redis-server` for every node.
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start, or the nodes do not form a cluster.
    pub fn start_with(node_timeout: Duration, options: &[&str]) -> io::Result<RedisCluster> {
        let mut bus_ports = Vec::new();
        let mut nodes = Vec::new();
        for _ in 0..MASTERS * 2 {
            let (node, bus_port) = start_node(node_timeout, options)?;
            nodes.push(node);
            bus_ports.push(bus_port);
        }
        let elections = Mutex::new(vec![None; nodes.len()]);
        let cluster = RedisCluster { nodes, node_timeout, elections };
        cluster.introduce(&bus_ports)?;
        cluster.wait_until_whole(START_TIMEOUT)?;
        Ok(cluster)
    }

    /// Forms a cluster of nodes that do not know each other.
    fn introduce(&self, bus_ports: &[u16]) -> io::Result<()> {
        for (index, node) in self.nodes.iter().enumerate() {
            // Distinct from the start: otherwise the nodes would first have to resolve epoch collisions.
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()])?;
        }
        let masters = &self.nodes[..MASTERS];
        for (index, master) in masters.iter().enumerate() {
            let first = usize::from(SLOTS) * index / MASTERS;
            let last = usize::from(SLOTS) * (index + 1) / MASTERS - 1;
            master.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()])?;
        }
        // Every pair of nodes meets: discovery by gossip would take longer.
        for (index, node) in self.nodes.iter().enumerate() {
            for (other, bus_port) in self.nodes.iter().zip(bus_ports).skip(index + 1) {
                let (port, bus_port) = (other.port().to_string(), bus_port.to_string());
                node.command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus_port])?;
            }
        }
        for (master, replica) in masters.iter().zip(&self.nodes[MASTERS..]) {
            let id = master.command(&["CLUSTER", "MYID"])?;
            // Redis rejects this until the two nodes have met.
            let mut refused = None;
            let follows = || {
                refused = replica.command(&["CLUSTER", "REPLICATE", &id]).err();
                refused.is_none()
            };
            if !block_until(START_TIMEOUT, follows) {
                return Err(refused.unwrap_or_else(|| io::Error::other("a replica follows no master")));
            }
        }
        Ok(())
    }

    /// All nodes, including killed ones. Other methods identify a node by its index in this slice.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// How long a node may be silent before the others consider it failed.
    pub fn node_timeout(&self) -> Duration {
        self.node_timeout
    }

    /// The cluster's URL for clients, with three of the nodes as seeds.
    pub fn url(&self) -> String {
        let seeds: Vec<_> =
            self.nodes[..MASTERS].iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}", seeds.join(","))
    }

    /// The hash slot of a key.
    ///
    /// # Errors
    /// If no node replies.
    pub fn slot_of(&self, key: &str) -> io::Result<u16> {
        let mut result = Err(nobody_answers());
        for node in &self.nodes {
            result = node.command(&["CLUSTER", "KEYSLOT", key]);
            if result.is_ok() {
                break;
            }
        }
        result?.parse().map_err(io::Error::other)
    }

    /// The master of a hash slot. It may be dead, as long as no replica has taken over.
    ///
    /// # Errors
    /// If no node replies, or none that does knows a master of this hash slot.
    pub fn master_of(&self, slot: u16) -> io::Result<usize> {
        let views = self.views();
        // A node that was unavailable may have an outdated view, which has a lower epoch.
        let newest =
            views.seen_nodes().filter(|seen| seen.is_master && seen.owns(slot)).max_by_key(|seen| seen.epoch);
        newest
            .and_then(|owner| self.index_of(owner.port))
            .ok_or_else(|| io::Error::other(format!("no node knows a master of slot {slot}")))
    }

    /// A replica of a master, according to the replica's own view.
    ///
    /// # Errors
    /// If no node that replies is a replica of it.
    pub fn replica_of(&self, master: usize) -> io::Result<usize> {
        let views = self.views();
        let port = self.nodes[master].port();
        let id = views.seen_nodes().find(|seen| seen.port == port).map(|seen| seen.id.as_str());
        let follows = |own: &SeenNode| id.is_some() && own.master.as_deref() == id;
        (0..self.nodes.len())
            .find(|&index| views.own(index).is_some_and(follows))
            .ok_or_else(|| io::Error::other(format!("node {master} has no replica")))
    }

    /// `kill -9`.
    ///
    /// # Errors
    /// If the process cannot be killed.
    pub fn kill(&mut self, index: usize) -> io::Result<()> {
        self.nodes[index].kill()
    }

    /// Restarts a node on the same port, with its cluster configuration but without data. It rejoins the cluster, as
    /// a replica if another node has taken over its hash slots; [`wait_until_whole`](Self::wait_until_whole) waits
    /// for that.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart(&mut self, index: usize) -> io::Result<()> {
        self.nodes[index].restart()
    }

    /// Promotes a replica by a manual failover, coordinated with its master, and waits until all nodes know.
    ///
    /// A node starts an election at most once in four node timeouts, and at most once in four seconds. If its last
    /// one was requested here more recently, this waits first: otherwise its master would block writes for seconds,
    /// and the failover would fail.
    ///
    /// # Errors
    /// If the node is not a replica, or the nodes do not agree.
    #[expect(clippy::disallowed_methods, reason = "when the real server will listen again")]
    pub fn failover(&self, replica: usize) -> io::Result<()> {
        let pause = (self.node_timeout * 4).max(Duration::from_secs(4));
        let mut elections = self.elections.lock().unwrap_or_else(PoisonError::into_inner);
        block_until(pause, || elections[replica].is_none_or(|last| last.elapsed() >= pause));
        let mut result = Err(nobody_answers());
        // Retries, because the replica may have started an election itself shortly before, when its master was dead.
        for _ in 0..FAILOVER_TRIES {
            self.nodes[replica].command(&["CLUSTER", "FAILOVER"])?;
            result = self.wait("the replica is master", FAILOVER_TIMEOUT, |views| {
                views.own(replica).is_some_and(|own| own.is_master) && views.are_ok(&self.nodes)
            });
            if result.is_ok() {
                elections[replica] = Some(Instant::now());
                break;
            }
        }
        result
    }

    /// Waits until the nodes that reply agree on the master of every hash slot, each of these masters replies, and
    /// all of them serve requests.
    ///
    /// So it also waits for a takeover if no node has detected yet that the master is dead.
    ///
    /// # Errors
    /// If `timeout` has passed.
    pub fn wait_until_ok(&self, timeout: Duration) -> io::Result<()> {
        self.wait("every hash slot is served", timeout, |views| views.are_ok(&self.nodes))
    }

    /// The same, and also until all nodes reply and know each other, and every master has a replica that is in sync.
    ///
    /// # Errors
    /// If `timeout` has passed.
    pub fn wait_until_whole(&self, timeout: Duration) -> io::Result<()> {
        self.wait("the cluster is whole", timeout, |views| views.are_whole(&self.nodes))
    }

    /// All keys without an expiry, on any master. Tests assert that there are none.
    ///
    /// # Errors
    /// If a master does not reply, or a hash slot has no master.
    pub fn keys_without_expiry(&self) -> io::Result<Vec<String>> {
        let views = self.views();
        let masters: Vec<_> = views.masters().collect();
        // A master that does not reply may hold keys, so it must not count as empty.
        if let Some(slot) = (0..SLOTS).find(|&slot| !masters.iter().any(|(_, own)| own.owns(slot))) {
            return Err(io::Error::other(format!("slot {slot} has no master that answers")));
        }
        let mut keys = Vec::new();
        for (index, _) in masters {
            keys.extend(self.nodes[index].keys_without_expiry()?);
        }
        Ok(keys)
    }

    fn wait(&self, what: &str, timeout: Duration, is_so: impl Fn(&Views) -> bool) -> io::Result<()> {
        let mut views = Views(Vec::new());
        let is_in_time = block_until(timeout, || {
            views = self.views();
            is_so(&views)
        });
        if is_in_time {
            return Ok(());
        }
        let message = format!("timeout of {timeout:?} while waiting until {what}; the nodes report: {views}");
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    fn views(&self) -> Views {
        // In parallel, so that a paused node does not delay the others.
        std::thread::scope(|threads| {
            let views: Vec<_> =
                self.nodes.iter().map(|node| threads.spawn(|| View::of(node.port()).ok())).collect();
            Views(views.into_iter().map(|view| view.join().ok().flatten()).collect())
        })
    }

    fn index_of(&self, port: u16) -> Option<usize> {
        self.nodes.iter().position(|node| node.port() == port)
    }
}

/// The view of each node, or None if it does not reply.
#[derive(Debug)]
struct Views(Vec<Option<View>>);

impl fmt::Display for Views {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, view) in self.0.iter().enumerate() {
            match view {
                Some(view) => write!(to, "({index}: {view}) ")?,
                None => write!(to, "({index}: no answer) ")?,
            }
        }
        Ok(())
    }
}

impl Views {
    fn seen_nodes(&self) -> impl Iterator<Item = &SeenNode> {
        self.0.iter().flatten().flat_map(|view| &view.nodes)
    }

    /// A node's entry for itself.
    fn own(&self, index: usize) -> Option<&SeenNode> {
        self.0[index].as_ref()?.own()
    }

    /// The nodes that reply and consider themselves masters.
    fn masters(&self) -> impl Iterator<Item = (usize, &SeenNode)> {
        (0..self.0.len()).filter_map(|index| Some((index, self.own(index).filter(|own| own.is_master)?)))
    }

    fn are_ok(&self, nodes: &[RedisServer]) -> bool {
        let Some(owners) = self.0.iter().flatten().next().map(View::owners) else { return false };
        let answers =
            |port| nodes.iter().zip(&self.0).any(|(node, view)| node.port() == port && view.is_some());
        owners.iter().all(|owner| owner.is_some())
            && self.0.iter().flatten().all(|view| view.is_serving && view.owners() == owners)
            && self.seen_nodes().all(|seen| !seen.owns_any() || answers(seen.port))
    }

    fn are_whole(&self, nodes: &[RedisServer]) -> bool {
        let Some(Some(first)) = self.0.first() else { return false };
        let knows_all = |view: &View| {
            view.nodes.len() == nodes.len()
                && view.nodes.iter().all(|seen| seen.is_well)
                && view.lists_all
                && view.followers() == first.followers()
        };
        // Only the replica's own view shows its master and whether replication is in sync.
        let has_replica = |master: &SeenNode| {
            self.0.iter().flatten().any(|view| {
                view.is_following
                    && view.own().is_some_and(|own| own.master.as_deref() == Some(master.id.as_str()))
            })
        };
        self.are_ok(nodes)
            && self.0.iter().all(|view| view.as_ref().is_some_and(knows_all))
            && first.nodes.iter().filter(|seen| seen.is_master).all(has_replica)
    }
}

fn nobody_answers() -> io::Error {
    io::Error::other("no node answers")
}

/// Starts a node that knows no other nodes, and returns it with its cluster bus port.
fn start_node(node_timeout: Duration, options: &[&str]) -> io::Result<(RedisServer, u16)> {
    let mut result = Err(nobody_answers());
    for _ in 0..PORT_TRIES {
        let bus_port = free_port()?;
        let settings = [
            ("--cluster-enabled", "yes"),
            // The default is 10000 above the client port, which may exceed the valid range.
            ("--cluster-port", &bus_port.to_string()),
            ("--cluster-node-timeout", &node_timeout.as_millis().to_string()),
            // A hash slot without a master must not stop the others.
            ("--cluster-require-full-coverage", "no"),
            // Otherwise a node learns its address from the node that meets it, and no node meets the first.
            ("--cluster-announce-ip", "127.0.0.1"),
            // By default a master delays a sync by five seconds to serve more replicas with it.
            ("--repl-diskless-sync-delay", "0"),
            // Nodes report a replica to clients once its master has pinged it, by default up to ten seconds later.
            ("--repl-ping-replica-period", "1"),
        ];
        let settings: Vec<_> = settings.iter().flat_map(|&(name, value)| [name, value]).collect();
        result = RedisServer::start_with(&[&settings, options].concat()).map(|node| (node, bus_port));
        if result.is_ok() {
            break;
        }
    }
    result
}
