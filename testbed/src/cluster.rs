//! A Redis Cluster on this machine, and what happens to one: nodes die and come back, replicas take over, slots move.

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
use crate::patience::wait_until;
use crate::process::free_port;

pub use self::slot_move::SlotMove;

/// Masters at the start; each has one replica.
const MASTERS: usize = 3;
/// Far more than it takes: a test that waits so long fails.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// The nodes give a failover up after five seconds.
const FAILOVER_PATIENCE: Duration = Duration::from_secs(6);
const FAILOVER_TRIES: usize = 5;
/// A port that was free a moment ago may have found another user.
const PORT_TRIES: usize = 5;

/// A Redis Cluster of six processes that keep nothing on disk but who they are.
///
/// At the start nodes 0, 1 and 2 are masters of a third of the slots each, and nodes 3, 4 and 5 are their replicas.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    node_timeout: Duration,
    /// When each node last became master by a failover that a test asked for.
    elections: Mutex<Vec<Option<Instant>>>,
}

impl RedisCluster {
    /// How long a node may say nothing before the others take it for dead, unless a test wants it otherwise.
    pub const NODE_TIMEOUT: Duration = Duration::from_secs(1);

    /// Starts a cluster, and waits until it is [whole](Self::wait_until_whole).
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start, or the nodes do not come together.
    pub fn start() -> io::Result<RedisCluster> {
        RedisCluster::start_with(RedisCluster::NODE_TIMEOUT, &[])
    }

    /// The same, with another node timeout and options of `redis-server` for every node.
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start, or the nodes do not come together.
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
        cluster.wait_until_whole(START_PATIENCE)?;
        Ok(cluster)
    }

    /// Makes a cluster of nodes that do not know each other.
    fn introduce(&self, bus_ports: &[u16]) -> io::Result<()> {
        for (index, node) in self.nodes.iter().enumerate() {
            // Different from the start, or the nodes would first have to find out that they are not.
            node.ask(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()])?;
        }
        let masters = &self.nodes[..MASTERS];
        for (index, master) in masters.iter().enumerate() {
            let first = usize::from(SLOTS) * index / MASTERS;
            let last = usize::from(SLOTS) * (index + 1) / MASTERS - 1;
            master.ask(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()])?;
        }
        // Each meets each: news of the others through others would take longer.
        for (index, node) in self.nodes.iter().enumerate() {
            for (other, bus_port) in self.nodes.iter().zip(bus_ports).skip(index + 1) {
                let (port, bus_port) = (other.port().to_string(), bus_port.to_string());
                node.ask(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus_port])?;
            }
        }
        for (master, replica) in masters.iter().zip(&self.nodes[MASTERS..]) {
            let id = master.ask(&["CLUSTER", "MYID"])?;
            // Refused until they have met.
            let mut refused = None;
            let follows = || {
                refused = replica.ask(&["CLUSTER", "REPLICATE", &id]).err();
                refused.is_none()
            };
            if !wait_until(START_PATIENCE, follows) {
                return Err(refused.unwrap_or_else(|| io::Error::other("a node follows nobody")));
            }
        }
        Ok(())
    }

    /// All nodes, those that were killed included. Everywhere else, a node is its place in here.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// How long a node may say nothing before the others take it for dead.
    pub fn node_timeout(&self) -> Duration {
        self.node_timeout
    }

    /// Its address as clients take it: three of the nodes, which know the others.
    pub fn url(&self) -> String {
        let seeds: Vec<_> =
            self.nodes[..MASTERS].iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}", seeds.join(","))
    }

    /// The slot of a key.
    ///
    /// # Errors
    /// If no node answers.
    pub fn slot_of(&self, key: &str) -> io::Result<u16> {
        let mut result = Err(nobody_answers());
        for node in &self.nodes {
            result = node.ask(&["CLUSTER", "KEYSLOT", key]);
            if result.is_ok() {
                break;
            }
        }
        result?.parse().map_err(io::Error::other)
    }

    /// The master of a slot. It may be dead, as long as no replica has taken over.
    ///
    /// # Errors
    /// If no node answers, or none that does knows a master of this slot.
    pub fn master_of(&self, slot: u16) -> io::Result<usize> {
        let views = self.views();
        // A node that was away may not have heard yet, but its news is older.
        let newest =
            views.seen_nodes().filter(|seen| seen.is_master && seen.owns(slot)).max_by_key(|seen| seen.epoch);
        newest
            .and_then(|owner| self.index_of(owner.port))
            .ok_or_else(|| io::Error::other(format!("no node knows a master of slot {slot}")))
    }

    /// A replica of a master, as the replica itself has it.
    ///
    /// # Errors
    /// If no node that answers is one.
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
    /// If the system refuses.
    pub fn kill(&mut self, index: usize) -> io::Result<()> {
        self.nodes[index].kill()
    }

    /// Starts a node again, with nothing in it but who it is: on the same port, a member of the cluster, and a replica
    /// if another has taken over its slots meanwhile. It takes [a while](Self::wait_until_whole) to be that.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart(&mut self, index: usize) -> io::Result<()> {
        self.nodes[index].restart()
    }

    /// Makes a replica the master, in agreement with its master, and waits until all nodes know.
    ///
    /// A node stands for election only once in four node timeouts, and in four seconds. If the last time was here and
    /// is not as long ago, this waits first: otherwise its master would hold back writes for seconds, in vain.
    ///
    /// # Errors
    /// If it is no replica, or the nodes do not agree.
    #[expect(clippy::disallowed_methods, reason = "when the real server will listen again")]
    pub fn failover(&self, replica: usize) -> io::Result<()> {
        let pause = (self.node_timeout * 4).max(Duration::from_secs(4));
        let mut elections = self.elections.lock().unwrap_or_else(PoisonError::into_inner);
        wait_until(pause, || elections[replica].is_none_or(|last| last.elapsed() >= pause));
        let mut result = Err(nobody_answers());
        // Again, because it may have stood for election on its own a moment ago, when its master was dead.
        for _ in 0..FAILOVER_TRIES {
            self.nodes[replica].ask(&["CLUSTER", "FAILOVER"])?;
            result = self.wait("the replica is master", FAILOVER_PATIENCE, |views| {
                views.own(replica).is_some_and(|own| own.is_master) && views.are_ok(&self.nodes)
            });
            if result.is_ok() {
                elections[replica] = Some(Instant::now());
                break;
            }
        }
        result
    }

    /// Waits until the nodes that answer agree on the master of every slot, each of these masters answers, and all of
    /// them serve requests.
    ///
    /// So it waits for a replica that takes over, even if nobody has noticed yet that the master is dead.
    ///
    /// # Errors
    /// If it is not so after this time.
    pub fn wait_until_ok(&self, patience: Duration) -> io::Result<()> {
        self.wait("every slot is served", patience, |views| views.are_ok(&self.nodes))
    }

    /// The same, and all nodes answer, know each other, and every master has a replica that follows it.
    ///
    /// # Errors
    /// If it is not so after this time.
    pub fn wait_until_whole(&self, patience: Duration) -> io::Result<()> {
        self.wait("the cluster is whole", patience, |views| views.are_whole(&self.nodes))
    }

    /// Every key without an expiry on any master: there must be none.
    ///
    /// # Errors
    /// If a master does not answer, or a slot has none.
    pub fn keys_without_expiry(&self) -> io::Result<Vec<String>> {
        let views = self.views();
        let masters: Vec<_> = views.masters().collect();
        // What is on a node that does not answer is not `none`.
        if let Some(slot) = (0..SLOTS).find(|&slot| !masters.iter().any(|(_, own)| own.owns(slot))) {
            return Err(io::Error::other(format!("slot {slot} has no master that answers")));
        }
        let mut keys = Vec::new();
        for (index, _) in masters {
            keys.extend(self.nodes[index].keys_without_expiry()?);
        }
        Ok(keys)
    }

    fn wait(&self, what: &str, patience: Duration, is_so: impl Fn(&Views) -> bool) -> io::Result<()> {
        let mut views = Views(Vec::new());
        let is_in_time = wait_until(patience, || {
            views = self.views();
            is_so(&views)
        });
        if is_in_time {
            return Ok(());
        }
        let message = format!("waited {patience:?} in vain until {what}; the nodes say: {views}");
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    fn views(&self) -> Views {
        // All at once: one that stands still does not hold up the others.
        std::thread::scope(|threads| {
            let asked: Vec<_> =
                self.nodes.iter().map(|node| threads.spawn(|| View::of(node.port()).ok())).collect();
            Views(asked.into_iter().map(|view| view.join().ok().flatten()).collect())
        })
    }

    fn index_of(&self, port: u16) -> Option<usize> {
        self.nodes.iter().position(|node| node.port() == port)
    }
}

/// The view of each node, or nothing if it does not answer.
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

    /// What a node says of itself.
    fn own(&self, index: usize) -> Option<&SeenNode> {
        self.0[index].as_ref()?.own()
    }

    /// The nodes that answer and take themselves for masters.
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
                && view.tells_of_all
                && view.followers() == first.followers()
        };
        // A replica says itself whom it follows and whether it has caught up.
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

/// Starts a node that knows no others, and says on which port it talks to them.
fn start_node(node_timeout: Duration, options: &[&str]) -> io::Result<(RedisServer, u16)> {
    let mut result = Err(nobody_answers());
    for _ in 0..PORT_TRIES {
        let bus_port = free_port()?;
        let settings = [
            ("--cluster-enabled", "yes"),
            // By default ten thousand above the other port, where there may be no port.
            ("--cluster-port", &bus_port.to_string()),
            ("--cluster-node-timeout", &node_timeout.as_millis().to_string()),
            // A slot without a master does not stop the others.
            ("--cluster-require-full-coverage", "no"),
            // Otherwise a node learns its address from who meets it, and nobody meets the first.
            ("--cluster-announce-ip", "127.0.0.1"),
            // By default a master waits five seconds for more replicas that want the same.
            ("--repl-diskless-sync-delay", "0"),
            // Nodes tell clients of a replica once it has heard from its master, by default up to ten seconds later.
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
