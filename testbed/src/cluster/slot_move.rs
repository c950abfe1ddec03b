//! Migration of a hash slot from one master to another, in the steps of `redis-cli --cluster reshard`.

use std::io;
use std::time::Duration;

use super::RedisCluster;

/// Keys per command.
const BATCH: usize = 100;
/// Timeout of gossip among the nodes, which usually takes a fraction of a second.
const GOSSIP_TIMEOUT: Duration = Duration::from_secs(20);

/// The migration of a hash slot between two masters.
///
/// Until it ends, the old master serves the keys that it still has and replies `ASK` for all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a slot whose move does not end stays half moved"]
pub struct SlotMove {
    /// The hash slot.
    pub slot: u16,
    /// The old master.
    pub from: usize,
    /// The new master.
    pub to: usize,
}

impl RedisCluster {
    /// Migrates a hash slot with all its keys, while both masters serve it.
    ///
    /// # Errors
    /// If `from` is not its master, `to` is not a master, or one of them does not reply.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) -> io::Result<()> {
        let slot_move = self.begin_move(slot, from, to)?;
        self.move_keys(slot_move, usize::MAX)?;
        self.end_move(slot_move)
    }

    /// Marks the hash slot as migrating on both masters; no key moves yet.
    ///
    /// Only these two nodes store the mark: if one of them dies, its replica does not have it.
    ///
    /// # Errors
    /// If `from` is not its master, `to` is not a master, or one of them does not reply.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) -> io::Result<SlotMove> {
        if self.master_of(slot)? != from {
            return Err(io::Error::other(format!("node {from} is not the master of slot {slot}")));
        }
        let (old, new) = (&self.nodes[from], &self.nodes[to]);
        let number = slot.to_string();
        // In this order: the new master must be importing before the old one redirects clients to it.
        new.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &old.command(&["CLUSTER", "MYID"])?])?;
        old.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &new.command(&["CLUSTER", "MYID"])?])?;
        Ok(SlotMove { slot, from, to })
    }

    /// Migrates at most `at_most` keys of the hash slot, and returns how many were migrated.
    ///
    /// # Errors
    /// If one of the two masters does not reply.
    pub fn move_keys(&self, slot_move: SlotMove, at_most: usize) -> io::Result<usize> {
        let mut old = self.nodes[slot_move.from].client()?;
        let slot = slot_move.slot.to_string();
        let port = self.nodes[slot_move.to].port().to_string();
        let mut moved = 0;
        loop {
            let batch = BATCH.min(at_most - moved).to_string();
            // Bytes, because a key need not be valid UTF-8.
            let keys = old.command(&["CLUSTER", "GETKEYSINSLOT", &slot, &batch])?;
            if keys.is_empty() {
                return Ok(moved);
            }
            let command = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            let words = command.iter().map(|word| word.as_bytes());
            old.command(&words.chain(keys.iter().map(Vec::as_slice)).collect::<Vec<_>>())?;
            moved += keys.len();
        }
    }

    /// Assigns the hash slot to the new master on all masters that reply, and waits until the replicas know.
    ///
    /// # Errors
    /// If the old master still has keys of the hash slot, or one of the two does not reply.
    pub fn end_move(&self, slot_move: SlotMove) -> io::Result<()> {
        let SlotMove { slot, from, to } = slot_move;
        // The old master would reject the command, but only after the new one has accepted it.
        if self.nodes[from].command(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()])? != "0" {
            return Err(io::Error::other(format!("node {from} still has keys of slot {slot}")));
        }
        let id = self.nodes[to].command(&["CLUSTER", "MYID"])?;
        let views = self.views();
        let others = views.masters().map(|(index, _)| index).filter(|&index| index != from && index != to);
        // The new master first: otherwise each of the two would redirect clients to the other for a moment.
        for index in [to, from].into_iter().chain(others) {
            self.nodes[index].command(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &id])?;
        }
        // Replicas learn it by gossip only. If the new master died before its replica knows, neither would own the
        // hash slot.
        let port = self.nodes[to].port();
        self.wait("all nodes know the new master of the slot", GOSSIP_TIMEOUT, |views| {
            views.seen_nodes().all(|seen| seen.owns(slot) == (seen.port == port))
        })
    }
}
