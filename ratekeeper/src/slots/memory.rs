//! Permits counted in this process.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::{Counter, Found, Place, Slot, Taken, Wanted};
use crate::sync::{Mutex, MutexGuard, lock};

/// Counts requests in flight. A key without requests in flight has no entry.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The maximum of requests in flight per key, by rule.
    most: Box<[u32]>,
    /// Shards, each with its own lock to reduce contention.
    parts: Box<[Mutex<Part>]>,
    /// The maximum of keys in a shard.
    keys_max: usize,
}

#[derive(Debug)]
struct Part {
    /// Requests in flight by key: at least 1.
    counts: HashMap<Place, u32, RandomState>,
    /// Requests in flight in this shard, by rule.
    held: Box<[usize]>,
}

/// Number of shards: several for each core of a large machine.
const PARTS: usize = 64;

impl Memory {
    /// Counts about `max_keys` keys with requests in flight; requests of further keys are denied.
    pub(crate) fn new(most: impl IntoIterator<Item = u32>, max_keys: usize) -> Memory {
        let most: Box<[u32]> = most.into_iter().collect();
        let part =
            |_| Mutex::new(Part { counts: HashMap::default(), held: vec![0; most.len()].into_boxed_slice() });
        Memory { parts: (0..PARTS).map(part).collect(), most, keys_max: max_keys.div_ceil(PARTS) }
    }

    /// Acquires all permits atomically. Lock order: shards by number, so two requests cannot deadlock.
    pub(crate) fn take(self: &Arc<Self>, wanted: &[Wanted]) -> Taken {
        let mut numbers: SmallVec<[usize; 2]> = wanted.iter().map(|it| number(it.place)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut parts: SmallVec<[MutexGuard<'_, Part>; 2]> =
            numbers.iter().map(|number| lock(&self.parts[*number])).collect();
        // Every requested shard is in `numbers`, so the search always succeeds.
        let at = |place: Place| numbers.binary_search(&number(place)).unwrap_or(0);

        let mut taken = Taken { allowed: true, ..Taken::default() };
        for Wanted { place, is_shadow } in wanted {
            let most = self.most[place.rule];
            let count = parts[at(*place)].count(*place, self.keys_max);
            let is_free = count.is_some_and(|count| count < most);
            taken.found.push(Found { is_free, left: most.saturating_sub(count.unwrap_or(most)) });
            taken.allowed &= is_free || *is_shadow;
        }
        if taken.allowed {
            for (Wanted { place, .. }, found) in wanted.iter().zip(&mut taken.found) {
                if found.is_free {
                    let part = &mut parts[at(*place)];
                    *part.counts.entry(*place).or_insert(0) += 1;
                    part.held[place.rule] += 1;
                    found.left -= 1;
                    taken.held.push(Slot::new(Counter::Memory(self.clone()), *place));
                }
            }
        }
        taken
    }

    pub(crate) fn refund(&self, place: Place) {
        let mut part = lock(&self.parts[number(place)]);
        part.held[place.rule] = part.held[place.rule].saturating_sub(1);
        if let Some(count) = part.counts.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                part.counts.remove(&place);
            }
        }
    }

    pub(crate) fn held(&self) -> Vec<usize> {
        let of_part = |mut sum: Vec<usize>, part: &Mutex<Part>| {
            sum.iter_mut().zip(&lock(part).held).for_each(|(sum, held)| *sum += held);
            sum
        };
        self.parts.iter().fold(vec![0; self.most.len()], of_part)
    }
}

/// The shard of a counter. Keys are already hashes; the rule is added so that one key's rules are in different
/// shards.
fn number(place: Place) -> usize {
    (place.key as usize).wrapping_add(place.rule) % PARTS
}

impl Part {
    /// Requests in flight; None if the key has no entry and the shard is full.
    fn count(&self, place: Place, keys_max: usize) -> Option<u32> {
        let new = || (self.counts.len() < keys_max).then_some(0);
        self.counts.get(&place).copied().or_else(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Key;

    fn wanted(rule: usize, key: u128) -> Wanted {
        Wanted::new(rule, Key(key), false)
    }

    fn keys(memory: &Memory) -> usize {
        memory.parts.iter().map(|part| lock(part).counts.len()).sum()
    }

    #[test]
    fn key_without_requests_in_flight_has_no_entry() {
        let memory = Arc::new(Memory::new([2, 1], 1_000));
        let first = memory.take(&[wanted(0, 7), wanted(1, 8)]);
        assert!(first.allowed);
        assert_eq!((keys(&memory), memory.held()), (2, vec![1, 1]));
        let second = memory.take(&[wanted(0, 7)]);
        assert_eq!(second.found[..], [Found { is_free: true, left: 0 }]);
        assert!(!memory.take(&[wanted(0, 7)]).allowed);
        drop((first, second));
        assert_eq!((keys(&memory), memory.held()), (0, vec![0, 0]));
    }

    #[test]
    fn requests_of_keys_beyond_max_keys_are_denied() {
        // One key for each shard.
        let memory = Arc::new(Memory::new([5], PARTS));
        let held: Vec<_> = (0..PARTS as u128).map(|key| memory.take(&[wanted(0, key)])).collect();
        assert!(held.iter().all(|taken| taken.allowed));
        assert!(!memory.take(&[wanted(0, 1_000)]).allowed);
        assert!(memory.take(&[wanted(0, 3)]).allowed, "those that are known go on");
        drop(held);
        assert!(memory.take(&[wanted(0, 1_000)]).allowed);
        assert_eq!(keys(&memory), 0);
    }
}
