//! A shard of a map: a small hash table with open addressing and linear probing.
//!
//! A map has many shards, each with its own lock and at most some two hundred keys, so that growing one moves only a
//! few kilobytes and delays no request noticeably. Removal leaves no tombstone: displaced keys move back.

/// Maximum load factor of four fifths; a full shard grows by a quarter.
const KEYS_PER_5_ENTRIES: usize = 4;
const ENTRIES_MIN: usize = 4;
/// A shard with at least this many entries shrinks when less than a quarter are in use.
const SHRINK_ENTRIES_MIN: usize = 32;

/// Number of shards for `max_keys` keys: enough that each stays small and threads rarely contend.
pub(crate) fn shard_count(max_keys: usize) -> usize {
    (max_keys / 192).clamp(1, 1 << 16)
}

/// Maps a hash to an index below `count`, by its upper bits.
#[inline]
pub(crate) fn scale(hash: u64, count: usize) -> usize {
    ((u128::from(hash) * count as u128) >> 64) as usize
}

#[derive(Debug)]
pub(crate) struct Shard<S> {
    entries: Vec<ShardEntry<S>>,
    keys: usize,
    /// The entry at which the next sweep starts.
    cursor: usize,
}

#[derive(Debug)]
struct ShardEntry<S> {
    hash: u64,
    state: Option<S>,
}

impl<S> Default for Shard<S> {
    fn default() -> Shard<S> {
        Shard { entries: Vec::new(), keys: 0, cursor: 0 }
    }
}

impl<S> Shard<S> {
    /// Maximum bytes per key: a shard that has just grown is filled to 64 %.
    pub(crate) const BYTES_PER_KEY_MAX: usize = size_of::<ShardEntry<S>>() * 8 / 5;

    /// Bytes of the entries.
    pub(crate) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<ShardEntry<S>>()
    }

    /// Bytes by which the next new key makes this shard grow.
    pub(crate) fn growth_bytes(&self) -> usize {
        self.entries_needed().saturating_sub(self.entries.len()) * size_of::<ShardEntry<S>>()
    }

    fn entries_needed(&self) -> usize {
        let entries = self.entries.len();
        if (self.keys + 1) * 5 > entries * KEYS_PER_5_ENTRIES {
            (entries + entries / 4).max(ENTRIES_MIN)
        } else {
            entries
        }
    }

    /// The upper bits select the shard, so the lower bits select the entry.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        scale(hash.rotate_left(32), self.entries.len())
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 < self.entries.len() { at + 1 } else { 0 }
    }

    /// Reads the entry at which the search for a key begins, so that it is cached by then. The value has no meaning.
    #[inline]
    pub(crate) fn touch(&self, hash: u64) -> u64 {
        self.entries.get(self.home(hash)).map_or(0, |entry| entry.hash)
    }

    /// The index of a key, valid until the next insertion or removal.
    #[inline]
    pub(crate) fn find(&self, hash: u64) -> Option<usize> {
        let mut at = self.home(hash);
        while let Some(ShardEntry { hash: there, state: Some(_) }) = self.entries.get(at) {
            if *there == hash {
                return Some(at);
            }
            at = self.after(at);
        }
        None
    }

    pub(crate) fn at(&self, at: usize) -> Option<&S> {
        self.entries.get(at)?.state.as_ref()
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, at: usize) -> Option<&mut S> {
        self.entries.get_mut(at)?.state.as_mut()
    }

    pub(crate) fn get(&self, hash: u64) -> Option<&S> {
        self.at(self.find(hash)?)
    }

    pub(crate) fn get_mut(&mut self, hash: u64) -> Option<&mut S> {
        self.at_mut(self.find(hash)?)
    }

    /// All keys with their states.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut S)> {
        self.entries.iter_mut().filter_map(|entry| Some((entry.hash, entry.state.as_mut()?)))
    }

    /// Inserts a key that is not in the shard and returns its index.
    pub(crate) fn insert(&mut self, hash: u64, state: S) -> usize {
        let needed = self.entries_needed();
        if needed > self.entries.len() {
            self.rebuild(needed);
        }
        self.keys += 1;
        self.put(hash, state)
    }

    fn put(&mut self, hash: u64, state: S) -> usize {
        let mut at = self.home(hash);
        while self.entries[at].state.is_some() {
            at = self.after(at);
        }
        self.entries[at] = ShardEntry { hash, state: Some(state) };
        at
    }

    fn rebuild(&mut self, entries: usize) {
        let mut empty = Vec::with_capacity(entries);
        empty.resize_with(entries, || ShardEntry { hash: 0, state: None });
        for ShardEntry { hash, state } in std::mem::replace(&mut self.entries, empty) {
            if let Some(state) = state {
                self.put(hash, state);
            }
        }
        self.cursor = 0;
    }

    /// Frees memory that a flood of keys has left, and returns the number of bytes.
    pub(crate) fn shrink(&mut self) -> usize {
        let before = self.bytes();
        if self.entries.len() >= SHRINK_ENTRIES_MIN && self.keys * 4 < self.entries.len() {
            self.rebuild(self.keys * 2 + ENTRIES_MIN);
        }
        before - self.bytes()
    }

    pub(crate) fn remove(&mut self, hash: u64) -> Option<S> {
        self.take(self.find(hash)?)
    }

    fn take(&mut self, mut hole: usize) -> Option<S> {
        let taken = self.entries.get_mut(hole)?.state.take()?;
        self.keys -= 1;
        let mut at = self.after(hole);
        while self.entries[at].state.is_some() {
            // An entry may move back into the hole unless the hole lies before its home position.
            let distance = |from: usize| if at >= from { at - from } else { at + self.entries.len() - from };
            if distance(self.home(self.entries[at].hash)) >= distance(hole) {
                self.entries.swap(hole, at);
                hole = at;
            }
            at = self.after(at);
        }
        Some(taken)
    }

    /// Scans the next `n` entries and removes the idle keys for which `may_evict` returns true.
    pub(crate) fn sweep(
        &mut self,
        n: usize,
        is_idle: impl Fn(&S) -> bool,
        mut may_evict: impl FnMut(u64, &S) -> bool,
    ) {
        for _ in 0..n.min(self.entries.len()) {
            match self.entries.get(self.cursor) {
                Some(ShardEntry { hash, state: Some(state) })
                    if is_idle(state) && may_evict(*hash, state) =>
                {
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
        #![proptest_config(testbed::property::cases(2_000))]

        /// The shard holds the same keys as a map after any steps; an idle key is one with an even state.
        #[test]
        fn shard_holds_the_same_keys_as_a_map(steps in steps()) {
            let (mut shard, mut map) = (Shard::default(), HashMap::new());
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(hash) => {
                        if let Some(state) = shard.get_mut(hash) {
                            *state = number;
                        } else {
                            let growth = shard.growth_bytes();
                            let before = shard.bytes();
                            let at = shard.insert(hash, number);
                            prop_assert_eq!(shard.at(at), Some(&number));
                            prop_assert_eq!(shard.bytes(), before + growth);
                        }
                        map.insert(hash, number);
                    }
                    Step::Remove(hash) => prop_assert_eq!(shard.remove(hash), map.remove(&hash)),
                    Step::Sweep(n) => shard.sweep(n, |state| state % 2 == 0, |hash, state| {
                        map.remove(&hash) == Some(*state)
                    }),
                    Step::Shrink => {
                        let before = shard.bytes();
                        let freed = shard.shrink();
                        prop_assert_eq!(shard.bytes(), before - freed);
                    }
                }
                prop_assert_eq!(shard.keys, map.len());
                for (hash, state) in &map {
                    prop_assert_eq!(shard.get(*hash), Some(state), "{:x}", hash);
                }
            }
            // A full sweep reaches every key.
            shard.sweep(2 * shard.entries.len(), |_| true, |_, _| true);
            shard.sweep(2 * shard.entries.len(), |_| true, |_, _| true);
            prop_assert_eq!(shard.keys, 0);
        }
    }
}
