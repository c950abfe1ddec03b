//! Slots that are counted in this process.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::{Counter, Found, Place, Slot, Taken, Wanted};
use crate::sync::{Mutex, MutexGuard, lock};

/// Counts requests that are under way. A key of which none is takes no room.
#[derive(Debug)]
pub(crate) struct Memory {
    /// How many may be under way at once, by rule.
    most: Box<[u32]>,
    /// Each is locked by itself, so that few requests meet.
    parts: Box<[Mutex<Part>]>,
    /// How many keys a part has room for.
    keys_max: usize,
}

#[derive(Debug)]
struct Part {
    /// How many requests of a key are under way: at least 1.
    counts: HashMap<Place, u32, RandomState>,
    /// How many are under way in this part, by rule.
    held: Box<[usize]>,
}

/// Parts: several for each core of a large machine.
const PARTS: usize = 64;

impl Memory {
    /// Room for about so many keys with requests under way; requests of more keys than that are denied.
    pub(crate) fn new(most: impl IntoIterator<Item = u32>, max_keys: usize) -> Memory {
        let most: Box<[u32]> = most.into_iter().collect();
        let part =
            |_| Mutex::new(Part { counts: HashMap::default(), held: vec![0; most.len()].into_boxed_slice() });
        Memory { parts: (0..PARTS).map(part).collect(), most, keys_max: max_keys.div_ceil(PARTS) }
    }

    /// Takes all slots at once. Their parts are locked in order, so that two requests never wait for each other.
    pub(crate) fn take(self: &Arc<Self>, wanted: &[Wanted]) -> Taken {
        let mut numbers: SmallVec<[usize; 2]> = wanted.iter().map(|it| number(it.place)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut parts: SmallVec<[MutexGuard<'_, Part>; 2]> =
            numbers.iter().map(|number| lock(&self.parts[*number])).collect();
        // Each is there.
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

    pub(crate) fn give_back(&self, place: Place) {
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

/// The part of a place. Keys are hashes already; rules of one key are kept apart.
fn number(place: Place) -> usize {
    (place.key as usize).wrapping_add(place.rule) % PARTS
}

impl Part {
    /// How many are under way; None if there is no room to count any.
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
    fn a_key_with_nothing_under_way_takes_no_room() {
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
    fn there_is_room_for_so_many_keys_and_no_more() {
        // One key for each part.
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
