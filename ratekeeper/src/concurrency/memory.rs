//! Permits counted in this process.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::{Acquisition, Permit, PermitAvailability, PermitCounts, PermitKey, PermitRequest};
use crate::sync::{AtomicUsize, Mutex, MutexGuard, Ordering, lock};

/// Counts requests in flight. A key without requests in flight has no entry.
#[derive(Debug)]
pub(crate) struct MemoryPermits {
    /// Shards, each with its own lock to reduce contention, with the requests in flight by key: at least 1.
    shards: Box<[Mutex<PermitShard>]>,
    /// The maximum of keys in a shard.
    keys_max: AtomicUsize,
}

type PermitShard = HashMap<PermitKey, u32, RandomState>;

/// Number of shards: several for each core of a large machine.
const SHARDS: usize = 64;

impl MemoryPermits {
    /// Counts about `max_keys` keys with requests in flight; requests of further keys are denied.
    pub(crate) fn new(max_keys: usize) -> MemoryPermits {
        let permits = MemoryPermits {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            keys_max: AtomicUsize::new(0),
        };
        permits.set_max_keys(max_keys);
        permits
    }

    pub(crate) fn set_max_keys(&self, max_keys: usize) {
        self.keys_max.store(max_keys.div_ceil(SHARDS), Ordering::Relaxed);
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
        let keys_max = self.keys_max.load(Ordering::Relaxed);

        let mut acquired = Acquisition { allowed: true, ..Acquisition::default() };
        for PermitRequest { key, max, is_shadow, .. } in requests {
            let shard = &shards[at(*key)];
            // None if the key has no entry and the shard is full.
            let new = || (shard.len() < keys_max).then_some(0);
            let count = shard.get(key).copied().or_else(new);
            let is_free = count.is_some_and(|count| count < *max);
            acquired
                .found
                .push(PermitAvailability { is_free, left: max.saturating_sub(count.unwrap_or(*max)) });
            acquired.allowed &= is_free || *is_shadow;
        }
        if acquired.allowed {
            for (PermitRequest { key, .. }, found) in requests.iter().zip(&mut acquired.found) {
                if found.is_free {
                    *shards[at(*key)].entry(*key).or_insert(0) += 1;
                    found.left -= 1;
                    acquired.held.push(Permit::new(PermitCounts::Memory(self.clone()), *key));
                }
            }
        }
        acquired
    }

    pub(crate) fn release(&self, key: PermitKey) {
        let mut shard = lock(&self.shards[number(key)]);
        if let Some(count) = shard.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                shard.remove(&key);
            }
        }
    }

    /// Calls `each` with every key that has requests in flight, and their number.
    pub(crate) fn each(&self, each: &mut impl FnMut(&PermitKey, u32)) {
        for shard in &self.shards {
            lock(shard).iter().for_each(|(key, count)| each(key, *count));
        }
    }
}

fn number(key: PermitKey) -> usize {
    key.shard(SHARDS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::concurrency::{LimitId, PermitCounter};
    use crate::store::Key;

    const NAMES: [&str; 2] = ["first", "second"];

    fn requests(rule: usize, key: u128, max: u32) -> PermitRequest {
        PermitRequest::new(rule, LimitId::of(NAMES[rule]), Key(key), max, false)
    }

    fn keys(memory: &MemoryPermits) -> usize {
        memory.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    fn held(memory: &Arc<MemoryPermits>) -> Vec<usize> {
        PermitCounter::Memory(memory.clone()).held(&NAMES.map(LimitId::of))
    }

    #[test]
    fn key_without_requests_in_flight_has_no_entry() {
        let memory = Arc::new(MemoryPermits::new(1_000));
        let first = memory.acquire(&[requests(0, 7, 2), requests(1, 8, 1)]);
        assert!(first.allowed);
        assert_eq!((keys(&memory), held(&memory)), (2, vec![1, 1]));
        let second = memory.acquire(&[requests(0, 7, 2)]);
        assert_eq!(second.found[..], [PermitAvailability { is_free: true, left: 0 }]);
        assert!(!memory.acquire(&[requests(0, 7, 2)]).allowed);
        drop((first, second));
        assert_eq!((keys(&memory), held(&memory)), (0, vec![0, 0]));
    }

    #[test]
    fn requests_of_keys_beyond_max_keys_are_denied() {
        // One key for each shard.
        let memory = Arc::new(MemoryPermits::new(SHARDS));
        let held: Vec<_> = (0..SHARDS as u128).map(|key| memory.acquire(&[requests(0, key, 5)])).collect();
        assert!(held.iter().all(|acquired| acquired.allowed));
        assert!(!memory.acquire(&[requests(0, 1_000, 5)]).allowed);
        assert!(memory.acquire(&[requests(0, 3, 5)]).allowed, "those that are known go on");
        drop(held);
        assert!(memory.acquire(&[requests(0, 1_000, 5)]).allowed);
        assert_eq!(keys(&memory), 0);
    }
}
