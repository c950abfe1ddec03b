//! States of any size: a map in parts, each behind its own lock.
//!
//! It holds the logs and the counters with many buckets, whose states own memory, under a bound on keys and on
//! bytes. Idle keys are dropped a few at a time, by whoever brings a new key.

use std::time::Duration;

use tollgate_core::{Algorithm, Decision, State, Time};

use super::Bounds;
use super::full::{HeldOverflow, Overflow, Quota};
use super::older::{Kept, Older};
use super::part::{Part, parts, scale};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock, lock_if_free};

/// How many slots a new key looks at for idle keys, so that they go as fast as new ones come.
const SWEEP: usize = 4;
/// How many it looks at in a part when there is no room, and in how many parts beside its own.
const SWEEP_WHEN_FULL: usize = 64;
const PARTS_SEARCHED: usize = 15;
/// A full map is not searched on and on: after a search in vain it takes some time until keys are idle again.
const SEARCHES_PER_WINDOW: u32 = 10_000;

#[derive(Debug)]
pub(crate) struct Map<A: Algorithm> {
    algorithm: A,
    parts: Box<[Mutex<Part<A::State>>]>,
    keys: Quota,
    bytes: Quota,
    /// The part that is searched next for idle keys when there is no room.
    searched: AtomicUsize,
    /// A search through the parts was in vain: until then, in nanoseconds since the epoch, nobody repeats it.
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

    /// Bytes held now.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.used()
    }

    /// How many keys there are, idle ones among them that nobody has looked at since.
    pub(crate) fn keys(&self, _now: Time) -> usize {
        self.keys.used()
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
        let decision = self.hold(hash, now).decide(cost);
        // Whoever is told may ask about a key of the same part.
        told(decision)
    }

    /// Says what a request would be told.
    pub(crate) fn look(&self, hash: u64, now: Time, cost: u32) -> Decision {
        self.hold(hash, now).look(cost)
    }

    /// Takes hold of a key: nobody else can decide about it until the hold ends.
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

    /// What a key has used, here or before.
    pub(crate) fn state(&self, hash: u64, now: Time) -> Option<State> {
        let part = lock(&self.parts[scale(hash, self.parts.len())]);
        part.get(hash).cloned().map(A::lift).or_else(|| self.older.state(hash, now))
    }

    /// The place of a key that is not here, with what it had used before if that still counts.
    fn place_for_unknown(&self, part: &mut Part<A::State>, hash: u64, now: Time) -> Place<'_, A> {
        let place = self.place_for_new(part, now);
        let carried = self.older.state(hash, now).and_then(|state| self.algorithm.lower(state));
        match (carried.filter(|state| !self.algorithm.is_fresh(state, now)), place) {
            (Some(state), Place::New { growth }) => {
                let wanted = part.growth_bytes() + self.algorithm.heap_bytes(&state);
                if !self.bytes.take(wanted.saturating_sub(growth)) {
                    self.keys.give_back(1);
                    self.bytes.give_back(growth);
                    return Place::None(self.overflow.hold());
                }
                self.bytes.give_back(growth.saturating_sub(wanted));
                Place::Known { at: part.insert(hash, state) }
            }
            (_, place) => place,
        }
    }

    fn place_for_new(&self, part: &mut Part<A::State>, now: Time) -> Place<'_, A> {
        // Keys that are idle now, but would not be if the clock stepped back, stay while there is room.
        self.sweep(part, SWEEP, now.saturating_sub(self.window), |_| true);
        let take = |part: &mut Part<A::State>| {
            let fresh = self.algorithm.fresh();
            let growth =
                part.growth_bytes() + self.algorithm.heap_bytes(&fresh) + self.algorithm.growth_bytes(&fresh);
            let taken = self.keys.take(1) && {
                let taken = self.bytes.take(growth);
                self.keys.give_back(usize::from(!taken));
                taken
            };
            taken.then_some(Place::New { growth })
        };
        take(part)
            .or_else(|| self.make_room(part, now, |_| true, take))
            .unwrap_or_else(|| Place::None(self.overflow.hold()))
    }

    /// Looks for idle keys in this part and in the next of the others in turn, until there is enough room.
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
            // It may be this very part, or one that another request holds: then it is another's turn.
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

    /// Drops keys that have been idle since `then`, and gives back the room of their states.
    fn sweep(&self, part: &mut Part<A::State>, slots: usize, then: Time, may_go: impl Fn(u64) -> bool) {
        let may_go = |hash: u64, state: &A::State| may_go(hash) && self.let_go(state);
        part.sweep(slots, |state| self.algorithm.is_fresh(state, then), may_go);
        self.bytes.give_back(part.shrink());
    }

    /// Gives back the room of a state that is about to be dropped.
    fn let_go(&self, state: &A::State) -> bool {
        self.keys.give_back(1);
        self.bytes.give_back(self.algorithm.heap_bytes(state));
        true
    }
}

enum Place<'a, A: Algorithm> {
    /// The key is here.
    Known { at: usize },
    /// The key is not here, and room is taken for it.
    New { growth: usize },
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

impl<A: Kept> HeldState<'_, A> {
    pub(crate) fn look(&self, cost: u32) -> Decision {
        let algorithm = &self.map.algorithm;
        match &self.place {
            Place::Known { at } => self
                .part
                .at(*at)
                .map_or_else(|| self.look_fresh(cost), |it| algorithm.look(it, self.now, cost)),
            Place::New { .. } => self.look_fresh(cost),
            Place::None(overflow) => overflow.look(algorithm, self.now, cost),
        }
    }

    fn look_fresh(&self, cost: u32) -> Decision {
        self.map.algorithm.look(&self.map.algorithm.fresh(), self.now, cost)
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
                    self.map.bytes.give_back(*growth - used);
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
                map.bytes.give_back(growth - (algorithm.heap_bytes(state) - before));
                decision
            }
            None => match part.get_mut(*hash) {
                Some(state) => algorithm.decide_in_place(state, *now, cost),
                None => self.look_fresh(cost),
            },
        }
    }

    /// A key that is not here has nothing to give back.
    pub(crate) fn give_back(&mut self, cost: u32, at: Option<Time>) {
        let HeldState { map, part, now, place, .. } = self;
        match place {
            Place::Known { at: index } => {
                if let Some(state) = part.at_mut(*index) {
                    map.algorithm.give_back(state, *now, cost, at);
                }
            }
            Place::New { .. } => {}
            Place::None(overflow) => overflow.give_back(&map.algorithm, *now, cost, at),
        }
    }

    /// Where the key is once there is room for its state to grow.
    #[cold]
    fn make_room_to_grow(&mut self, growth: usize) -> Option<usize> {
        let HeldState { map, part, hash, now, .. } = self;
        map.make_room(part, *now, |idle| idle != *hash, |_| map.bytes.take(growth).then_some(()))?;
        // Keys have moved.
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
            self.map.keys.give_back(1);
            self.map.bytes.give_back(growth);
        }
    }
}
