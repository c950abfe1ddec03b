//! States of any size: a sharded map, each shard with its own lock.
//!
//! It holds logs and counters with many buckets, whose states own heap memory, under a bound on keys and on bytes.
//! Each insertion of a new key evicts a few idle ones.

use std::time::Duration;

use ratekeeper_core::{Algorithm, Decision, State, Time};

use super::Bounds;
use super::overflow::{HeldOverflow, Overflow, Quota};
use super::predecessor::{Kept, Older};
use super::shard::{Part, parts, scale};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock, lock_if_free};

/// Entries that a new key scans for idle keys, so that idle keys are evicted as fast as new ones arrive.
const SWEEP: usize = 4;
/// Entries that it scans per shard if the map is full, and in how many shards besides its own.
const SWEEP_WHEN_FULL: usize = 64;
const PARTS_SEARCHED: usize = 15;
/// Bounds the searches of a full map: after an unsuccessful search it takes some time until keys become idle.
const SEARCHES_PER_WINDOW: u32 = 10_000;

#[derive(Debug)]
pub(crate) struct Map<A: Algorithm> {
    algorithm: A,
    parts: Box<[Mutex<Part<A::State>>]>,
    keys: Quota,
    bytes: Quota,
    /// The shard that is searched next for idle keys if the map is full.
    searched: AtomicUsize,
    /// After an unsuccessful search through the shards: not repeated before this time, in nanoseconds since the
    /// epoch.
    in_vain_until_ns: AtomicU64,
    overflow: Overflow<A::State>,
    window: Duration,
    older: Older,
}

impl<A: Kept> Map<A> {
    pub(crate) fn new(algorithm: A, bounds: Bounds, older: Older) -> Map<A> {
        let Bounds { max_keys, max_bytes, when_full } = bounds;
        let most_keys = max_keys.min(max_bytes / Part::<A::State>::BYTES_PER_KEY_MAX);
        let parts: Box<[_]> = (0..parts(most_keys)).map(|_| Mutex::new(Part::default())).collect();
        let overflow = algorithm.fresh_in_place();
        let bytes = Quota::new(max_bytes);
        bytes.take(size_of_val(&*parts) + algorithm.heap_bytes(&overflow));
        Map {
            parts,
            keys: Quota::new(max_keys),
            bytes,
            searched: AtomicUsize::new(0),
            in_vain_until_ns: AtomicU64::new(0),
            overflow: Overflow::new(when_full, overflow),
            window: algorithm.window(),
            algorithm,
            older,
        }
    }

    /// Current bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.used()
    }

    /// Number of keys, including idle ones that no sweep has removed yet.
    pub(crate) fn keys(&self, _now: Time) -> usize {
        self.keys.used()
    }

    pub(crate) fn overflowed(&self) -> u64 {
        self.overflow.requests()
    }

    /// A no-op: a map has no line to prefetch.
    pub(crate) fn touch(&self, _hash: u64) -> u64 {
        0
    }

    /// Decides and charges a request, and returns the result of `told` for the decision.
    pub(crate) fn decide<R>(
        &self,
        hash: u64,
        now: impl FnOnce() -> Time,
        cost: u32,
        told: impl FnOnce(Decision) -> R,
    ) -> R {
        self.decide_touched(hash, now(), cost, told)
    }

    /// The same as `decide`: see [`touch`](Self::touch).
    #[inline(never)]
    pub(crate) fn decide_touched<R>(
        &self,
        hash: u64,
        now: Time,
        cost: u32,
        told: impl FnOnce(Decision) -> R,
    ) -> R {
        let decision = self.hold(hash, now).decide(cost);
        // Called without the lock, because `told` may check a key of the same shard.
        told(decision)
    }

    /// Decides a request without charging it.
    pub(crate) fn peek(&self, hash: u64, now: Time, cost: u32) -> Decision {
        self.hold(hash, now).peek(cost)
    }

    /// Locks a key: no other request for it is decided until the returned value is dropped.
    #[inline]
    pub(crate) fn hold(&self, hash: u64, now: Time) -> HeldState<'_, A> {
        let mut part = lock(&self.parts[scale(hash, self.parts.len())]);
        let place = match part.find(hash) {
            Some(at) => Place::Known { at },
            None => self.place_for_unknown(&mut part, hash, now),
        };
        HeldState { map: self, part, hash, now, place }
    }

    pub(crate) fn older(&self) -> &Older {
        &self.older
    }

    /// A key's state, from this map or from its predecessor.
    pub(crate) fn state(&self, hash: u64, now: Time) -> Option<State> {
        let part = lock(&self.parts[scale(hash, self.parts.len())]);
        part.get(hash).cloned().map(A::lift).or_else(|| self.older.state(hash, now))
    }

    /// An entry for a key that is not in the map, with its migrated state if that still counts.
    fn place_for_unknown(&self, part: &mut Part<A::State>, hash: u64, now: Time) -> Place<'_, A> {
        let place = self.place_for_new(part, now);
        let migrate_state = self.older.state(hash, now).and_then(|state| self.algorithm.lower(state));
        match (migrate_state.filter(|state| !self.algorithm.is_fresh(state, now)), place) {
            (Some(state), Place::New { growth }) => {
                let wanted = part.growth_bytes() + self.algorithm.heap_bytes(&state);
                if !self.bytes.take(wanted.saturating_sub(growth)) {
                    self.keys.refund(1);
                    self.bytes.refund(growth);
                    return Place::None(self.overflow.hold());
                }
                self.bytes.refund(growth.saturating_sub(wanted));
                Place::Known { at: part.insert(hash, state) }
            }
            (_, place) => place,
        }
    }

    fn place_for_new(&self, part: &mut Part<A::State>, now: Time) -> Place<'_, A> {
        // Keys that are idle now, but would not be if the clock stepped back, are kept while the map is not full.
        self.sweep(part, SWEEP, now.saturating_sub(self.window), |_| true);
        let take = |part: &mut Part<A::State>| {
            let fresh = self.algorithm.fresh();
            let growth =
                part.growth_bytes() + self.algorithm.heap_bytes(&fresh) + self.algorithm.growth_bytes(&fresh);
            let taken = self.keys.take(1) && {
                let taken = self.bytes.take(growth);
                self.keys.refund(usize::from(!taken));
                taken
            };
            taken.then_some(Place::New { growth })
        };
        take(part)
            .or_else(|| self.make_room(part, now, |_| true, take))
            .unwrap_or_else(|| Place::None(self.overflow.hold()))
    }

    /// Evicts idle keys from this shard, then from others in round-robin order, until `take` succeeds.
    #[cold]
    fn make_room<T>(
        &self,
        part: &mut Part<A::State>,
        now: Time,
        may_go: impl Fn(u64) -> bool,
        take: impl Fn(&mut Part<A::State>) -> Option<T>,
    ) -> Option<T> {
        self.sweep(part, SWEEP_WHEN_FULL, now, may_go);
        let mut taken = take(part);
        if now.as_nanos() < self.in_vain_until_ns.load(Ordering::Relaxed) {
            return taken;
        }
        for _ in 0..PARTS_SEARCHED.min(self.parts.len() - 1) {
            if taken.is_some() {
                return taken;
            }
            let other = self.searched.fetch_add(1, Ordering::Relaxed) % self.parts.len();
            // The next shard may be this one, or locked by another request: then it is skipped.
            if let Some(mut other) = lock_if_free(&self.parts[other]) {
                self.sweep(&mut other, SWEEP_WHEN_FULL, now, |_| true);
                taken = take(part);
            }
        }
        if taken.is_none() {
            let again = now.saturating_add(self.window / SEARCHES_PER_WINDOW);
            self.in_vain_until_ns.store(again.as_nanos(), Ordering::Relaxed);
        }
        taken
    }

    /// Evicts keys that have been idle since `then`, and releases their share of the bounds.
    fn sweep(&self, part: &mut Part<A::State>, slots: usize, then: Time, may_go: impl Fn(u64) -> bool) {
        let may_go = |hash: u64, state: &A::State| may_go(hash) && self.let_go(state);
        part.sweep(slots, |state| self.algorithm.is_fresh(state, then), may_go);
        self.bytes.refund(part.shrink());
    }

    /// Releases the share of the bounds of a state that is about to be dropped.
    fn let_go(&self, state: &A::State) -> bool {
        self.keys.refund(1);
        self.bytes.refund(self.algorithm.heap_bytes(state));
        true
    }
}

enum Place<'a, A: Algorithm> {
    /// The key has an entry.
    Known { at: usize },
    /// The key has no entry yet; one key and `growth` bytes are reserved for it.
    New { growth: usize },
    /// The map is full.
    None(HeldOverflow<'a, A::State>),
}

/// A key locked by one request.
pub(crate) struct HeldState<'a, A: Algorithm> {
    map: &'a Map<A>,
    part: MutexGuard<'a, Part<A::State>>,
    hash: u64,
    now: Time,
    place: Place<'a, A>,
}

impl<A: Kept> HeldState<'_, A> {
    pub(crate) fn peek(&self, cost: u32) -> Decision {
        let algorithm = &self.map.algorithm;
        match &self.place {
            Place::Known { at } => self
                .part
                .at(*at)
                .map_or_else(|| self.look_fresh(cost), |it| algorithm.peek(it, self.now, cost)),
            Place::New { .. } => self.look_fresh(cost),
            Place::None(overflow) => overflow.peek(algorithm, self.now, cost),
        }
    }

    fn look_fresh(&self, cost: u32) -> Decision {
        self.map.algorithm.peek(&self.map.algorithm.fresh(), self.now, cost)
    }

    #[inline]
    pub(crate) fn decide(&mut self, cost: u32) -> Decision {
        let algorithm = &self.map.algorithm;
        match &mut self.place {
            Place::Known { at } => {
                let at = *at;
                self.decide_known(at, cost)
            }
            Place::New { growth } => {
                let mut state = algorithm.fresh();
                let decision = algorithm.decide(&mut state, self.now, cost);
                if !algorithm.is_fresh(&state, self.now) {
                    let used = self.part.growth_bytes() + algorithm.heap_bytes(&state);
                    self.map.bytes.refund(*growth - used);
                    self.place = Place::Known { at: self.part.insert(self.hash, state) };
                }
                decision
            }
            Place::None(overflow) => overflow.decide(algorithm, self.now, cost),
        }
    }

    #[inline]
    fn decide_known(&mut self, at: usize, cost: u32) -> Decision {
        let HeldState { map, part, now, .. } = self;
        let (algorithm, bytes) = (&map.algorithm, &map.bytes);
        let Some(state) = part.at_mut(at) else { return self.look_fresh(cost) };
        let growth = algorithm.growth_bytes(state);
        if growth == 0 {
            return algorithm.decide(state, *now, cost);
        }
        let at = if bytes.take(growth) { Some(at) } else { self.make_room_to_grow(growth) };
        let HeldState { map, part, hash, now, .. } = self;
        match at {
            Some(at) => {
                let Some(state) = part.at_mut(at) else { return self.look_fresh(cost) };
                let before = algorithm.heap_bytes(state);
                let decision = algorithm.decide(state, *now, cost);
                map.bytes.refund(growth - (algorithm.heap_bytes(state) - before));
                decision
            }
            None => match part.get_mut(*hash) {
                Some(state) => algorithm.decide_in_place(state, *now, cost),
                None => self.look_fresh(cost),
            },
        }
    }

    /// Refunds a charge; a key without an entry has no charges to refund.
    pub(crate) fn refund(&mut self, cost: u32, at: Option<Time>) {
        let HeldState { map, part, now, place, .. } = self;
        match place {
            Place::Known { at: index } => {
                if let Some(state) = part.at_mut(*index) {
                    map.algorithm.refund(state, *now, cost, at);
                }
            }
            Place::New { .. } => {}
            Place::None(overflow) => overflow.refund(&map.algorithm, *now, cost, at),
        }
    }

    /// Makes room for the key's state to grow, and returns the key's index afterwards.
    #[cold]
    fn make_room_to_grow(&mut self, growth: usize) -> Option<usize> {
        let HeldState { map, part, hash, now, .. } = self;
        map.make_room(part, *now, |idle| idle != *hash, |_| map.bytes.take(growth).then_some(()))?;
        // Evictions have moved keys.
        part.find(*hash)
    }

    pub(crate) fn reset(&mut self) {
        self.map.older.reset(self.hash, self.now);
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
        if let Place::New { growth } = self.place {
            self.map.keys.refund(1);
            self.map.bytes.refund(growth);
        }
    }
}
