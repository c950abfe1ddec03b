//! States of any size: a map in parts, each behind its own lock.
//!
//! It holds the logs and the counters with many buckets, whose states own memory, under a bound on keys and on
//! bytes. Idle keys are dropped a few at a time, by whoever brings a new key.

use tollgate_core::{Algorithm, Decision, Time};

use super::full::{HeldOverflow, Overflow, Quota, WhenFull};
use super::part::{Part, parts, scale};
use crate::sync::{AtomicUsize, Mutex, MutexGuard, Ordering, lock, lock_if_free};

/// How many slots a new key looks at for idle keys, so that they go as fast as new ones come.
const SWEEP: usize = 4;
/// How many it looks at, in its own part and in another, when there is no room: about a microsecond's worth.
const SWEEP_WHEN_FULL: usize = 64;

#[derive(Debug)]
pub(crate) struct Map<A: Algorithm> {
    algorithm: A,
    parts: Box<[Mutex<Part<A::State>>]>,
    keys: Quota,
    bytes: Quota,
    /// The part that is searched next for idle keys when there is no room.
    searched: AtomicUsize,
    overflow: Overflow<A::State>,
}

impl<A: Algorithm> Map<A> {
    pub(crate) fn new(algorithm: A, max_keys: usize, max_bytes: usize, when_full: WhenFull) -> Map<A> {
        let most_keys = max_keys.min(max_bytes / Part::<A::State>::BYTES_PER_KEY_MAX);
        let parts: Box<[_]> = (0..parts(most_keys)).map(|_| Mutex::new(Part::default())).collect();
        let bytes = Quota::new(max_bytes);
        bytes.take(size_of_val(&*parts));
        Map {
            parts,
            keys: Quota::new(max_keys),
            bytes,
            searched: AtomicUsize::new(0),
            overflow: Overflow::new(when_full, algorithm.fresh()),
            algorithm,
        }
    }

    /// Bytes held now.
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
        let place = match part.find(hash) {
            Some(at) => self.place_for_known(&mut part, hash, at, now),
            None => self.place_for_new(&mut part, now),
        };
        HeldState { map: self, part, hash, now, place }
    }

    #[inline]
    fn place_for_known(
        &self,
        part: &mut Part<A::State>,
        hash: u64,
        mut at: usize,
        now: Time,
    ) -> Place<'_, A> {
        let growth = part.at(at).map_or(0, |state| self.algorithm.growth_bytes(state));
        if !self.bytes.take(growth) {
            self.make_room(part, now, |idle| idle != hash);
            if !self.bytes.take(growth) {
                return Place::Stuck(self.overflow.hold());
            }
            // Keys have moved.
            at = part.find(hash).unwrap_or(at);
        }
        Place::Known { at, growth }
    }

    fn place_for_new(&self, part: &mut Part<A::State>, now: Time) -> Place<'_, A> {
        self.sweep(part, SWEEP, now, |_| true);
        let take = |part: &Part<A::State>| {
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
        if let Some(place) = take(part) {
            return place;
        }
        self.make_room(part, now, |_| true);
        take(part).unwrap_or_else(|| Place::None(self.overflow.hold()))
    }

    /// Looks for idle keys in this part and in the next of the others in turn.
    #[cold]
    fn make_room(&self, part: &mut Part<A::State>, now: Time, may_go: impl Fn(u64) -> bool) {
        self.sweep(part, SWEEP_WHEN_FULL, now, may_go);
        let other = self.searched.fetch_add(1, Ordering::Relaxed) % self.parts.len();
        // It may be this very part, or one that another request holds: then it is another's turn.
        if let Some(mut other) = lock_if_free(&self.parts[other]) {
            self.sweep(&mut other, SWEEP_WHEN_FULL, now, |_| true);
        }
    }

    /// Drops idle keys, and gives back the room of their states.
    fn sweep(&self, part: &mut Part<A::State>, slots: usize, now: Time, may_go: impl Fn(u64) -> bool) {
        let may_go = |hash: u64, state: &A::State| may_go(hash) && self.let_go(state);
        part.sweep(slots, |state| self.algorithm.is_fresh(state, now), may_go);
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
    /// The key is here, and room is taken for what its state may grow by.
    Known { at: usize, growth: usize },
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
        match self.part.get(self.hash) {
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
            Place::Known { at, growth } => {
                let Some(state) = part.at_mut(*at) else {
                    return algorithm.look(&algorithm.fresh(), *now, cost);
                };
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
                    let spare = *growth - part.growth_bytes() - algorithm.heap_bytes(&state);
                    *place = Place::Known { at: part.insert(*hash, state), growth: spare };
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
