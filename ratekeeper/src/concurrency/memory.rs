//! Permits counted in this process.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::{Acquisition, Permit, PermitAvailability, PermitCounter, PermitKey, PermitRequest};
use crate::sync::{Mutex, MutexGuard, lock};

/// Counts requests in flight. A key without requests in flight has no entry.
#[derive(Debug)]
pub(crate) struct MemoryPermits {
    /// The maximum of requests in flight per key, by rule.
    max: Box<[u32]>,
    /// Shards, each with its own lock to reduce contention.
    shards: Box<[Mutex<PermitShard>]>,
    /// The maximum of keys in a shard.
    keys_max: usize,
}

#[derive(Debug)]
struct PermitShard {
    /// Requests in flight by key: at least 1.
    counts: HashMap<PermitKey, u32, RandomState>,
    /// Requests in flight in this shard, by rule.
    held: Box<[usize]>,
}

/// Number of shards: several for each core of a large machine.
const SHARDS: usize = 64;

impl MemoryPermits {
    /// Counts about `max_keys` keys with requests in flight; requests of further keys are denied.
    pub(crate) fn new(max: impl IntoIterator<Item = u32>, max_keys: usize) -> MemoryPermits {
        let max: Box<[u32]> = max.into_iter().collect();
        let shard = |_| {
            Mutex::new(PermitShard {
                counts: HashMap::default(),
                held: vec![0; max.len()].into_boxed_slice(),
            })
        };
        MemoryPermits { shards: (0..SHARDS).map(shard).collect(), max, keys_max: max_keys.div_ceil(SHARDS) }
    }

    /// Acquires all permits atomically. Lock order: shards by number, so two requests cannot deadlock.
    pub(crate) fn acquire(self: &Arc<Self>, requests: &[PermitRequest]) -> Acquisition {
        let mut numbers: SmallVec<[usize; 2]> = requests.iter().map(|it| number(it.key)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut shards: SmallVec<[MutexGuard<'_, PermitShard>; 2]> =
            numbers.iter().map(|number| lock(&self.shards[*number])).collect();
        // Every requested shard is in `numbers`, so the search always succeeds.
        let at = |key: PermitKey| numbers.binary_search(&number(key)).unwrap_or(0);

        let mut acquired = Acquisition { allowed: true, ..Acquisition::default() };
        for PermitRequest { key, is_shadow } in requests {
            let max = self.max[key.rule];
            let count = shards[at(*key)].count(*key, self.keys_max);
            let is_free = count.is_some_and(|count| count < max);
            acquired
                .found
                .push(PermitAvailability { is_free, left: max.saturating_sub(count.unwrap_or(max)) });
            acquired.allowed &= is_free || *is_shadow;
        }
        if acquired.allowed {
            for (PermitRequest { key, .. }, found) in requests.iter().zip(&mut acquired.found) {
                if found.is_free {
                    let shard = &mut shards[at(*key)];
                    *shard.counts.entry(*key).or_insert(0) += 1;
                    shard.held[key.rule] += 1;
                    found.left -= 1;
                    acquired.held.push(Permit::new(PermitCounter::Memory(self.clone()), *key));
                }
            }
        }
        acquired
    }

    pub(crate) fn release(&self, key: PermitKey) {
        let mut shard = lock(&self.shards[number(key)]);
        shard.held[key.rule] = shard.held[key.rule].saturating_sub(1);
        if let Some(count) = shard.counts.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                shard.counts.remove(&key);
            }
        }
    }

    pub(crate) fn held(&self) -> Vec<usize> {
        let of_shard = |mut sum: Vec<usize>, shard: &Mutex<PermitShard>| {
            sum.iter_mut().zip(&lock(shard).held).for_each(|(sum, held)| *sum += held);
            sum
        };
        self.shards.iter().fold(vec![0; self.max.len()], of_shard)
    }
}

/// The shard of a counter. Keys are already hashes; the rule is added so that one key's rules are in different
/// shards.
fn number(key: PermitKey) -> usize {
    (key.key as usize).wrapping_add(key.rule) % SHARDS
}

impl PermitShard {
    /// Requests in flight; None if the key has no entry and the shard is full.
    fn count(&self, key: PermitKey, keys_max: usize) -> Option<u32> {
        let new = || (self.counts.len() < keys_max).then_some(0);
        self.counts.get(&key).copied().or_else(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Key;

    fn requests(rule: usize, key: u128) -> PermitRequest {
        PermitRequest::new(rule, Key(key), false)
    }

    fn keys(memory: &MemoryPermits) -> usize {
        memory.shards.iter().map(|shard| lock(shard).counts.len()).sum()
    }

    #[test]
    fn key_without_requests_in_flight_has_no_entry() {
        let memory = Arc::new(MemoryPermits::new([2, 1], 1_000));
        let first = memory.acquire(&[requests(0, 7), requests(1, 8)]);
        assert!(first.allowed);
        assert_eq!((keys(&memory), memory.held()), (2, vec![1, 1]));
        let second = memory.acquire(&[requests(0, 7)]);
        assert_eq!(second.found[..], [PermitAvailability { is_free: true, left: 0 }]);
        assert!(!memory.acquire(&[requests(0, 7)]).allowed);
        drop((first, second));
        assert_eq!((keys(&memory), memory.held()), (0, vec![0, 0]));
    }

    #[test]
    fn requests_of_keys_beyond_max_keys_are_denied() {
        // One key for each shard.
        let memory = Arc::new(MemoryPermits::new([5], SHARDS));
        let held: Vec<_> = (0..SHARDS as u128).map(|key| memory.acquire(&[requests(0, key)])).collect();
        assert!(held.iter().all(|acquired| acquired.allowed));
        assert!(!memory.acquire(&[requests(0, 1_000)]).allowed);
        assert!(memory.acquire(&[requests(0, 3)]).allowed, "those that are known go on");
        drop(held);
        assert!(memory.acquire(&[requests(0, 1_000)]).allowed);
        assert_eq!(keys(&memory), 0);
    }
}
