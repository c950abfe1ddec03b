//! A slot moves from one master to another, as `redis-cli --cluster reshard` does it, in steps.

use std::io;
use std::time::Duration;

use super::RedisCluster;

/// Keys in one command.
const BATCH: usize = 100;
/// News among the nodes travels in a fraction of a second.
const NEWS_PATIENCE: Duration = Duration::from_secs(20);

/// A slot on its way between two masters.
///
/// Until it ends, the old master serves the keys that it still has and answers `ASK` for all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a slot whose move does not end stays half moved"]
pub struct SlotMove {
    /// Which slot.
    pub slot: u16,
    /// The node that has been its master.
    pub from: usize,
    /// The node that is going to be.
    pub to: usize,
}

impl RedisCluster {
    /// Moves a slot with all its keys, while both masters serve it.
    ///
    /// # Errors
    /// If the first is not its master, the second no master, or one of them does not answer.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) -> io::Result<()> {
        let slot_move = self.begin_move(slot, from, to)?;
        self.move_keys(slot_move, usize::MAX)?;
        self.end_move(slot_move)
    }

    /// Tells both masters; no key has moved yet.
    ///
    /// Only these two know of it: if one of them dies, its replica does not.
    ///
    /// # Errors
    /// If the first is not its master, the second no master, or one of them does not answer.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) -> io::Result<SlotMove> {
        if self.master_of(slot)? != from {
            return Err(io::Error::other(format!("node {from} is not the master of slot {slot}")));
        }
        let (old, new) = (&self.nodes[from], &self.nodes[to]);
        let number = slot.to_string();
        // In this order: the new master must know when the old one begins to send clients there.
        new.ask(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &old.ask(&["CLUSTER", "MYID"])?])?;
        old.ask(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &new.ask(&["CLUSTER", "MYID"])?])?;
        Ok(SlotMove { slot, from, to })
    }

    /// Moves so many of the keys in the slot, or all if there are fewer, and says how many.
    ///
    /// # Errors
    /// If one of the two masters does not answer.
    pub fn move_keys(&self, slot_move: SlotMove, at_most: usize) -> io::Result<usize> {
        let mut old = self.nodes[slot_move.from].conversation()?;
        let slot = slot_move.slot.to_string();
        let port = self.nodes[slot_move.to].port().to_string();
        let mut moved = 0;
        loop {
            let batch = BATCH.min(at_most - moved).to_string();
            // Bytes, not text: a key may hold anything.
            let keys = old.ask(&["CLUSTER", "GETKEYSINSLOT", &slot, &batch])?;
            if keys.is_empty() {
                return Ok(moved);
            }
            let command = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            let words = command.iter().map(|word| word.as_bytes());
            old.ask(&words.chain(keys.iter().map(Vec::as_slice)).collect::<Vec<_>>())?;
            moved += keys.len();
        }
    }

    /// Tells all masters that answer that the slot has moved, and waits until the replicas know as well.
    ///
    /// # Errors
    /// If the old master still has keys of the slot, or one of the two does not answer.
    pub fn end_move(&self, slot_move: SlotMove) -> io::Result<()> {
        let SlotMove { slot, from, to } = slot_move;
        // The old master would refuse, but after the new one has agreed.
        if self.nodes[from].ask(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()])? != "0" {
            return Err(io::Error::other(format!("node {from} still has keys of slot {slot}")));
        }
        let id = self.nodes[to].ask(&["CLUSTER", "MYID"])?;
        let views = self.views();
        let others = views.masters().map(|(index, _)| index).filter(|&index| index != from && index != to);
        // The new one first: with the old one first, there would be a moment when each says it is the other's.
        for index in [to, from].into_iter().chain(others) {
            self.nodes[index].ask(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &id])?;
        }
        // Replicas cannot be told. If the new master died before its replica has heard, the slot would be lost to both.
        let port = self.nodes[to].port();
        self.wait("all nodes know the new master of the slot", NEWS_PATIENCE, |views| {
            views.seen_nodes().all(|seen| seen.owns(slot) == (seen.port == port))
        })
    }
}
