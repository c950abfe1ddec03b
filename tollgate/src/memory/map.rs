//! States of any size: a map in parts, each behind its own lock.
//!
//! It holds the logs and the counters with many buckets, whose states own memory, under a bound on keys and on
//! bytes. Idle keys are dropped a few at a time, by whoever brings a new key.

use std::hash::{BuildHasherDefault, Hasher};

use indexmap::IndexMap;
use tollgate_core::{Algorithm, Decision, Time};

use super::full::{HeldOverflow, Overflow, Quota, WhenFull};
use crate::sync::{Mutex, MutexGuard, lock};

/// How many keys a new key looks at for idle ones, so that they go as fast as new ones come.
const SWEEP: usize = 2;
/// How many it looks at when there is no room: about a microsecond's worth.
const SWEEP_WHEN_FULL: usize = 64;

/// Keys are hashed already; the parts are chosen by the upper bits, so the map is given the lower ones on top.
#[derive(Default)]
pub(crate) struct Rehash(u64);

impl Hasher for Rehash {
    fn finish(&self) -> u64 {
        self.0.rotate_left(32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0 << 8 | u64::from(byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// Part of a map: states by key, and where the next look for idle ones begins.
#[derive(Debug)]
pub(crate) struct Part<S> {
    states: IndexMap<u64, S, BuildHasherDefault<Rehash>>,
    cursor: usize,
}

impl<S> Part<S> {
    pub(crate) fn with_capacity(keys: usize) -> Part<S> {
        Part { states: IndexMap::with_capacity_and_hasher(keys, BuildHasherDefault::default()), cursor: 0 }
    }

    pub(crate) fn get(&self, hash: u64) -> Option<&S> {
        self.states.get(&hash)
    }

    pub(crate) fn get_mut(&mut self, hash: u64) -> Option<&mut S> {
        self.states.get_mut(&hash)
    }

    pub(crate) fn insert(&mut self, hash: u64, state: S) {
        self.states.insert(hash, state);
    }

    pub(crate) fn remove(&mut self, hash: u64) -> Option<S> {
        self.states.swap_remove(&hash)
    }

    /// Looks at the next `n` keys, and removes those that `is_idle` and that `may_go`.
    pub(crate) fn sweep(
        &mut self,
        n: usize,
        is_idle: impl Fn(&S) -> bool,
        mut may_go: impl FnMut(u64, &S) -> bool,
    ) {
        for _ in 0..n.min(self.states.len()) {
            if self.cursor >= self.states.len() {
                self.cursor = 0;
            }
            match self.states.get_index(self.cursor) {
                // The last key takes the place of the removed one, and is the next to be looked at.
                Some((&hash, state)) if is_idle(state) && may_go(hash, state) => {
                    self.states.swap_remove_index(self.cursor);
                }
                _ => self.cursor += 1,
            }
        }
    }
}

/// A part index for a hash: by its upper bits.
#[inline]
pub(crate) fn scale(hash: u64, parts: usize) -> usize {
    ((u128::from(hash) * parts as u128) >> 64) as usize
}

/// How many parts a map of so many keys has: enough that threads rarely meet, few enough that small maps are one.
pub(crate) fn parts(max_keys: usize) -> usize {
    (max_keys / 4096).next_power_of_two().clamp(1, 64)
}

/// Room in each part for its share of the keys and the unevenness of chance, so that none has to grow.
pub(crate) fn part_capacity(max_keys: usize, parts: usize) -> usize {
    let share = max_keys / parts;
    if parts == 1 { share } else { share + share / 16 + 64 }
}

#[derive(Debug)]
pub(crate) struct Map<A: Algorithm> {
    algorithm: A,
    parts: Box<[Mutex<Part<A::State>>]>,
    keys: Quota,
    bytes: Quota,
    overflow: Overflow<A::State>,
}

impl<A: Algorithm> Map<A> {
    /// What a key costs beside the memory that its state owns: key, hash, state, and its index entry at half load.
    pub(crate) const BYTES_PER_KEY: usize =
        2 * size_of::<u64>() + size_of::<A::State>() + 2 * (size_of::<usize>() + 1);

    pub(crate) fn new(algorithm: A, max_keys: usize, max_bytes: usize, when_full: WhenFull) -> Map<A> {
        let max_keys = max_keys.min(max_bytes / Self::BYTES_PER_KEY).max(1);
        let n = parts(max_keys);
        Map {
            parts: (0..n).map(|_| Mutex::new(Part::with_capacity(part_capacity(max_keys, n)))).collect(),
            keys: Quota::new(max_keys),
            bytes: Quota::new(max_bytes),
            overflow: Overflow::new(when_full, algorithm.fresh()),
            algorithm,
        }
    }

    /// Bytes held by the keys that are here now.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.used()
    }

    pub(crate) fn overflowed(&self) -> u64 {
        self.overflow.requests()
    }

    /// A map has no line to fetch ahead.
    pub(crate) fn touch(&self, _hash: u64) -> u64 {
        0
    }

    /// Decides a request, and gives what `told` makes of the decision.
    pub(crate) fn decide<R>(
        &self,
        hash: u64,
        now: impl FnOnce() -> Time,
        cost: u32,
        told: impl FnOnce(Decision) -> R,
    ) -> R {
        self.decide_touched(hash, now(), cost, told)
    }

    /// The same: see [`touch`](Self::touch).
    #[inline(never)]
    pub(crate) fn decide_touched<R>(
        &self,
        hash: u64,
        now: Time,
        cost: u32,
        told: impl FnOnce(Decision) -> R,
    ) -> R {
        told(self.hold(hash, now).decide(cost))
    }

    /// Says what a request would be told.
    pub(crate) fn look(&self, hash: u64, now: Time, cost: u32) -> Decision {
        self.hold(hash, now).look(cost)
    }

    /// Takes hold of a key: nobody else can decide about it until the hold ends.
    #[inline]
    pub(crate) fn hold(&self, hash: u64, now: Time) -> HeldState<'_, A> {
        let mut part = lock(&self.parts[scale(hash, self.parts.len())]);
        let place = match part.states.get_index_of(&hash) {
            Some(index) => self.place_for_known(&mut part, hash, index, now),
            None => self.place_for_new(&mut part, now),
        };
        HeldState { map: self, part, hash, now, place }
    }

    #[inline]
    fn place_for_known(
        &self,
        part: &mut Part<A::State>,
        hash: u64,
        mut index: usize,
        now: Time,
    ) -> Place<'_, A> {
        let growth = self.algorithm.growth_bytes(&part.states[index]);
        if !self.bytes.take(growth) {
            let may_go = |at: u64, state: &A::State| at != hash && self.let_go(state);
            part.sweep(SWEEP_WHEN_FULL, |state| self.algorithm.is_fresh(state, now), may_go);
            // The sweep moves keys.
            index = part.states.get_index_of(&hash).unwrap_or(index);
            if !self.bytes.take(growth) {
                return Place::Stuck(self.overflow.hold());
            }
        }
        Place::Known { index, growth }
    }

    fn place_for_new(&self, part: &mut Part<A::State>, now: Time) -> Place<'_, A> {
        let is_idle = |state: &A::State| self.algorithm.is_fresh(state, now);
        part.sweep(SWEEP, is_idle, |_, state| self.let_go(state));
        let fresh = self.algorithm.fresh();
        let growth =
            Self::BYTES_PER_KEY + self.algorithm.heap_bytes(&fresh) + self.algorithm.growth_bytes(&fresh);
        let take = || {
            self.keys.take(1) && {
                let taken = self.bytes.take(growth);
                if !taken {
                    self.keys.give_back(1);
                }
                taken
            }
        };
        if take() {
            return Place::New { growth };
        }
        part.sweep(SWEEP_WHEN_FULL, is_idle, |_, state| self.let_go(state));
        if take() { Place::New { growth } } else { Place::None(self.overflow.hold()) }
    }

    /// Gives back the room of a state that is about to be dropped.
    fn let_go(&self, state: &A::State) -> bool {
        self.keys.give_back(1);
        self.bytes.give_back(Self::BYTES_PER_KEY + self.algorithm.heap_bytes(state));
        true
    }
}

enum Place<'a, A: Algorithm> {
    /// The key is here, and room is taken for what its state may grow by.
    Known { index: usize, growth: usize },
    /// The key is not here, and room is taken for it.
    New { growth: usize },
    /// The key is here, but there is no room for its state to grow.
    Stuck(HeldOverflow<'a, A::State>),
    /// There is no room for the key.
    None(HeldOverflow<'a, A::State>),
}

/// A key that one request has to itself.
pub(crate) struct HeldState<'a, A: Algorithm> {
    map: &'a Map<A>,
    part: MutexGuard<'a, Part<A::State>>,
    hash: u64,
    now: Time,
    place: Place<'a, A>,
}

impl<A: Algorithm> HeldState<'_, A> {
    fn look_at_own(&self, cost: u32) -> Decision {
        let algorithm = &self.map.algorithm;
        match self.part.states.get(&self.hash) {
            Some(state) => algorithm.look(state, self.now, cost),
            None => algorithm.look(&algorithm.fresh(), self.now, cost),
        }
    }

    pub(crate) fn look(&self, cost: u32) -> Decision {
        let own = self.look_at_own(cost);
        match &self.place {
            Place::Stuck(overflow) | Place::None(overflow) if own.allowed => {
                overflow.look(&self.map.algorithm, self.now, cost)
            }
            _ => own,
        }
    }

    #[inline]
    pub(crate) fn decide(&mut self, cost: u32) -> Decision {
        if matches!(self.place, Place::Stuck(_) | Place::None(_)) {
            let own = self.look_at_own(cost);
            if !own.allowed {
                return own;
            }
        }
        let HeldState { map, part, hash, now, place } = self;
        let algorithm = &map.algorithm;
        match place {
            Place::Known { index, growth } => {
                let state = &mut part.states[*index];
                let before = algorithm.heap_bytes(state);
                let decision = algorithm.decide(state, *now, cost);
                // The rest of what was taken for growth goes back at the end of the hold.
                *growth -= algorithm.heap_bytes(state) - before;
                decision
            }
            Place::New { growth } => {
                let mut state = algorithm.fresh();
                let decision = algorithm.decide(&mut state, *now, cost);
                if !algorithm.is_fresh(&state, *now) {
                    let spare = *growth - Map::<A>::BYTES_PER_KEY - algorithm.heap_bytes(&state);
                    let (index, _) = part.states.insert_full(*hash, state);
                    *place = Place::Known { index, growth: spare };
                }
                decision
            }
            Place::Stuck(overflow) | Place::None(overflow) => overflow.decide(algorithm, *now, cost),
        }
    }

    pub(crate) fn reset(&mut self) {
        if let Some(state) = self.part.remove(self.hash) {
            self.map.let_go(&state);
        }
    }

    pub(crate) fn counts_denied(&self) -> bool {
        self.map.algorithm.counts_denied()
    }
}

impl<A: Algorithm> Drop for HeldState<'_, A> {
    fn drop(&mut self) {
        match self.place {
            Place::Known { growth, .. } => self.map.bytes.give_back(growth),
            Place::New { growth } => {
                self.map.keys.give_back(1);
                self.map.bytes.give_back(growth);
            }
            Place::Stuck(_) | Place::None(_) => {}
        }
    }
}
