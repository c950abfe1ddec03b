//! A shard of a map: a small hash table with open addressing and linear probing.
//!
//! A map has many shards, each with its own lock and at most some two hundred keys, so that growing one moves only a
//! few kilobytes and delays no request noticeably. Removal leaves no tombstone: displaced keys move back.

/// Maximum load factor of four fifths; a full shard grows by a quarter.
const KEYS_PER_5_SLOTS: usize = 4;
const SLOTS_MIN: usize = 4;
/// A shard with at least this many entries shrinks when less than a quarter are in use.
const SLOTS_KEPT: usize = 32;

/// Number of shards for `max_keys` keys: enough that each stays small and threads rarely contend.
pub(crate) fn parts(max_keys: usize) -> usize {
    (max_keys / 192).clamp(1, 1 << 16)
}

/// Maps a hash to an index below `count`, by its upper bits.
#[inline]
pub(crate) fn scale(hash: u64, count: usize) -> usize {
    ((u128::from(hash) * count as u128) >> 64) as usize
}

#[derive(Debug)]
pub(crate) struct Part<S> {
    slots: Vec<Slot<S>>,
    keys: usize,
    /// The entry at which the next sweep starts.
    cursor: usize,
}

#[derive(Debug)]
struct Slot<S> {
    hash: u64,
    state: Option<S>,
}

impl<S> Default for Part<S> {
    fn default() -> Part<S> {
        Part { slots: Vec::new(), keys: 0, cursor: 0 }
    }
}

impl<S> Part<S> {
    /// Maximum bytes per key: a shard that has just grown is filled to 64 %.
    pub(crate) const BYTES_PER_KEY_MAX: usize = size_of::<Slot<S>>() * 8 / 5;

    /// Bytes of the entries.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot<S>>()
    }

    /// Bytes by which the next new key makes this shard grow.
    pub(crate) fn growth_bytes(&self) -> usize {
        self.slots_wanted().saturating_sub(self.slots.len()) * size_of::<Slot<S>>()
    }

    fn slots_wanted(&self) -> usize {
        let slots = self.slots.len();
        if (self.keys + 1) * 5 > slots * KEYS_PER_5_SLOTS {
            (slots + slots / 4).max(SLOTS_MIN)
        } else {
            slots
        }
    }

    /// The upper bits select the shard, so the lower bits select the entry.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        scale(hash.rotate_left(32), self.slots.len())
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 < self.slots.len() { at + 1 } else { 0 }
    }

    /// The index of a key, valid until the next insertion or removal.
    #[inline]
    pub(crate) fn find(&self, hash: u64) -> Option<usize> {
        let mut at = self.home(hash);
        while let Some(Slot { hash: there, state: Some(_) }) = self.slots.get(at) {
            if *there == hash {
                return Some(at);
            }
            at = self.after(at);
        }
        None
    }

    pub(crate) fn at(&self, at: usize) -> Option<&S> {
        self.slots.get(at)?.state.as_ref()
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, at: usize) -> Option<&mut S> {
        self.slots.get_mut(at)?.state.as_mut()
    }

    pub(crate) fn get(&self, hash: u64) -> Option<&S> {
        self.at(self.find(hash)?)
    }

    pub(crate) fn get_mut(&mut self, hash: u64) -> Option<&mut S> {
        self.at_mut(self.find(hash)?)
    }

    /// Inserts a key that is not in the shard and returns its index.
    pub(crate) fn insert(&mut self, hash: u64, state: S) -> usize {
        let wanted = self.slots_wanted();
        if wanted > self.slots.len() {
            self.rebuild(wanted);
        }
        self.keys += 1;
        self.put(hash, state)
    }

    fn put(&mut self, hash: u64, state: S) -> usize {
        let mut at = self.home(hash);
        while self.slots[at].state.is_some() {
            at = self.after(at);
        }
        self.slots[at] = Slot { hash, state: Some(state) };
        at
    }

    fn rebuild(&mut self, slots: usize) {
        let mut empty = Vec::with_capacity(slots);
        empty.resize_with(slots, || Slot { hash: 0, state: None });
        for Slot { hash, state } in std::mem::replace(&mut self.slots, empty) {
            if let Some(state) = state {
                self.put(hash, state);
            }
        }
        self.cursor = 0;
    }

    /// Frees memory that a flood of keys has left, and returns the number of bytes.
    pub(crate) fn shrink(&mut self) -> usize {
        let before = self.bytes();
        if self.slots.len() >= SLOTS_KEPT && self.keys * 4 < self.slots.len() {
            self.rebuild(self.keys * 2 + SLOTS_MIN);
        }
        before - self.bytes()
    }

    pub(crate) fn remove(&mut self, hash: u64) -> Option<S> {
        self.take(self.find(hash)?)
    }

    fn take(&mut self, mut hole: usize) -> Option<S> {
        let taken = self.slots.get_mut(hole)?.state.take()?;
        self.keys -= 1;
        let mut at = self.after(hole);
        while self.slots[at].state.is_some() {
            // An entry may move back into the hole unless the hole lies before its home position.
            let way = |from: usize| if at >= from { at - from } else { at + self.slots.len() - from };
            if way(self.home(self.slots[at].hash)) >= way(hole) {
                self.slots.swap(hole, at);
                hole = at;
            }
            at = self.after(at);
        }
        Some(taken)
    }

    /// Scans the next `n` entries and removes the idle keys for which `may_go` returns true.
    pub(crate) fn sweep(
        &mut self,
        n: usize,
        is_idle: impl Fn(&S) -> bool,
        mut may_go: impl FnMut(u64, &S) -> bool,
    ) {
        for _ in 0..n.min(self.slots.len()) {
            match self.slots.get(self.cursor) {
                Some(Slot { hash, state: Some(state) }) if is_idle(state) && may_go(*hash, state) => {
                    // Another entry may have moved into this position, so the cursor stays.
                    self.take(self.cursor);
                }
                _ => self.cursor = self.after(self.cursor),
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64),
        Remove(u64),
        Sweep(usize),
        Shrink,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        // Few hashes, close together at both ends of the range, so that keys collide and wrap around.
        let hash = prop_oneof![
            (0..40u64).prop_map(|n| n.rotate_right(32)),
            (0..40u64).prop_map(|n| (u64::MAX - n).rotate_right(32)),
            any::<u64>()
        ];
        let step = prop_oneof![
            6 => hash.clone().prop_map(Step::Insert),
            3 => hash.prop_map(Step::Remove),
            1 => (0..50usize).prop_map(Step::Sweep),
            1 => Just(Step::Shrink),
        ];
        vec(step, 1..300)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_000) })]

        /// The shard holds the same keys as a map after any steps; an idle key is one with an even state.
        #[test]
        fn shard_holds_the_same_keys_as_a_map(steps in steps()) {
            let (mut part, mut map) = (Part::default(), HashMap::new());
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(hash) => {
                        if let Some(state) = part.get_mut(hash) {
                            *state = number;
                        } else {
                            let growth = part.growth_bytes();
                            let before = part.bytes();
                            let at = part.insert(hash, number);
                            prop_assert_eq!(part.at(at), Some(&number));
                            prop_assert_eq!(part.bytes(), before + growth);
                        }
                        map.insert(hash, number);
                    }
                    Step::Remove(hash) => prop_assert_eq!(part.remove(hash), map.remove(&hash)),
                    Step::Sweep(n) => part.sweep(n, |state| state % 2 == 0, |hash, state| {
                        map.remove(&hash) == Some(*state)
                    }),
                    Step::Shrink => {
                        let before = part.bytes();
                        let freed = part.shrink();
                        prop_assert_eq!(part.bytes(), before - freed);
                    }
                }
                prop_assert_eq!(part.keys, map.len());
                for (hash, state) in &map {
                    prop_assert_eq!(part.get(*hash), Some(state), "{:x}", hash);
                }
            }
            // A full sweep reaches every key.
            part.sweep(2 * part.slots.len(), |_| true, |_, _| true);
            part.sweep(2 * part.slots.len(), |_| true, |_, _| true);
            prop_assert_eq!(part.keys, 0);
        }
    }
}
