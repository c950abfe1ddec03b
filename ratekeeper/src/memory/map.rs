//! States of any size: a sharded map, each shard with its own lock.
//!
//! It holds logs and counters with many buckets, whose states own heap memory, under a bound on keys and on bytes.
//! Each insertion of a new key evicts a few idle ones. The generations of a limit share the map: counts and logged
//! requests mean the same under every [compatible](ratekeeper_core::Limit::is_compatible) limit.

use std::sync::Arc;
use std::time::Duration;

use ratekeeper_core::{Algorithm, Decision, Time};
use smallvec::SmallVec;

use super::Bounds;
use super::budget::Reservation;
use super::overflow::{HeldOverflow, Overflow, Quota, WhenFull};
use super::shard::{Shard, scale, shard_count};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock, lock_if_free};

/// Entries that a new key scans for idle keys, so that idle keys are evicted as fast as new ones arrive.
const SWEEP: usize = 4;
/// Entries that it scans per shard if the map is full, and in how many shards besides its own.
const SWEEP_WHEN_FULL: usize = 64;
const SHARDS_SEARCHED: usize = 15;
/// Bounds the searches of a full map: after an unsuccessful search it takes some time until keys become idle.
const SEARCHES_PER_WINDOW: u32 = 10_000;
/// A map of fewer bytes stays in the processor's cache.
const BYTES_CACHED: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(crate) struct StateMap<A: Algorithm> {
    algorithm: A,
    window: Duration,
    when_full: WhenFull,
    shared: Arc<SharedMap<A::State>>,
}

/// What the generations of a limit share.
#[derive(Debug)]
struct SharedMap<S> {
    shards: Box<[Mutex<Shard<S>>]>,
    keys: Quota,
    bytes: Quota,
    /// The shard that is searched next for idle keys if the map is full.
    searched: AtomicUsize,
    /// After an unsuccessful search through the shards: not repeated before this time, in nanoseconds since the
    /// epoch.
    search_again_at_ns: AtomicU64,
    overflow: Overflow<S>,
    /// The first reservation, and one for each time that the bounds were raised.
    reserved: Mutex<Vec<Reservation>>,
}

impl<A: Algorithm> StateMap<A> {
    pub(crate) fn new(algorithm: A, bounds: Bounds, reserved: Reservation) -> StateMap<A> {
        let Bounds { max_keys, when_full, .. } = bounds;
        let max_bytes = reserved.bytes();
        let max_keys = max_keys.min(max_bytes / Shard::<A::State>::BYTES_PER_KEY_MAX);
        let shards: Box<[_]> = (0..shard_count(max_keys)).map(|_| Mutex::new(Shard::default())).collect();
        let overflow = algorithm.fresh_in_place();
        let bytes = Quota::new(max_bytes);
        bytes.take(size_of_val(&*shards) + algorithm.heap_bytes(&overflow));
        let shared = SharedMap {
            shards,
            keys: Quota::new(max_keys),
            bytes,
            searched: AtomicUsize::new(0),
            search_again_at_ns: AtomicU64::new(0),
            overflow: Overflow::new(overflow),
            reserved: Mutex::new(vec![reserved]),
        };
        StateMap { window: algorithm.window(), when_full, algorithm, shared: Arc::new(shared) }
    }

    /// The next generation, with the same states.
    pub(crate) fn next(&self, algorithm: A, when_full: WhenFull) -> StateMap<A> {
        StateMap { window: algorithm.window(), when_full, algorithm, shared: self.shared.clone() }
    }

    /// Raises the bounds, as far as the budget has bytes left. Lower bounds are ignored: keys in use keep their entries.
    pub(crate) fn grow(&self, bounds: Bounds, budget: &Arc<Quota>, bytes: usize) {
        let SharedMap { keys, bytes: own, reserved, .. } = &*self.shared;
        let mut reserved = lock(reserved);
        let more = Reservation::for_replacement(budget, bytes.saturating_sub(own.max()));
        own.set_max(own.max() + more.bytes());
        reserved.push(more);
        let max_keys = bounds.max_keys.min(own.max() / Shard::<A::State>::BYTES_PER_KEY_MAX);
        keys.set_max(max_keys.max(keys.max()));
    }

    /// Current bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.shared.bytes.used()
    }

    /// A map has no predecessor: it holds the states of every compatible limit.
    pub(crate) fn predecessor_bytes(&self) -> usize {
        0
    }

    pub(crate) fn extend_predecessor(&self, _to: &ratekeeper_core::Limit, _at: Time) {}

    /// Number of keys, including idle ones that no sweep has removed yet.
    pub(crate) fn keys(&self, _now: Time) -> usize {
        self.shared.keys.used()
    }

    pub(crate) fn overflowed(&self) -> u64 {
        self.shared.overflow.requests()
    }

    pub(crate) fn touch(&self, hash: u64) -> u64 {
        self.touch_many(&[hash])
    }

    /// Fetches the states of some keys from memory, except of keys whose shard is locked. All shards are locked before
    /// the first state is read: an atomic operation waits for the reads before it, so the reads would wait for each
    /// other.
    pub(crate) fn touch_many(&self, hashes: &[u64]) -> u64 {
        let SharedMap { shards, bytes, .. } = &*self.shared;
        if bytes.used() < BYTES_CACHED {
            return 0;
        }
        let shard_of = |&hash: &u64| Some((hash, lock_if_free(&shards[scale(hash, shards.len())])?));
        let locked: SmallVec<[_; 16]> = hashes.iter().filter_map(shard_of).collect();
        let entries = locked.iter().fold(0, |all, (hash, shard)| all ^ shard.touch(*hash));
        locked.iter().fold(entries, |all, (hash, shard)| {
            all ^ shard.get(*hash).map_or(0, |state| self.algorithm.touch(state))
        })
    }

    /// Decides and charges a request, and returns the result of `read` for the decision.
    pub(crate) fn decide<R>(
        &self,
        hash: u64,
        now: impl FnOnce() -> Time,
        cost: u32,
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        self.decide_touched(hash, now(), cost, read)
    }

    /// The same as `decide`: see [`touch`](Self::touch).
    #[inline(never)]
    pub(crate) fn decide_touched<R>(
        &self,
        hash: u64,
        now: Time,
        cost: u32,
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        let decision = self.hold(hash, now).decide(cost);
        // Called without the lock, because `map` may check a key of the same shard.
        read(decision)
    }

    /// Decides a request without charging it.
    pub(crate) fn peek(&self, hash: u64, now: Time, cost: u32) -> Decision {
        self.hold(hash, now).peek(cost)
    }

    /// Locks a key: no other request for it is decided until the returned value is dropped.
    #[inline]
    pub(crate) fn hold(&self, hash: u64, now: Time) -> LockedState<'_, A> {
        let mut shard = lock(&self.shared.shards[scale(hash, self.shared.shards.len())]);
        let entry = match shard.find(hash) {
            Some(at) => MapEntry::Existing { at },
            None => self.entry_for_new(&mut shard, now),
        };
        LockedState { map: self, shard, hash, now, entry }
    }

    pub(crate) fn algorithm(&self) -> &A {
        &self.algorithm
    }

    pub(crate) fn state(&self, hash: u64) -> Option<A::State> {
        lock(&self.shared.shards[scale(hash, self.shared.shards.len())]).get(hash).cloned()
    }

    /// Replaces the state of a key, unless the map is full.
    #[cfg(feature = "tower")]
    pub(crate) fn put(&self, hash: u64, state: ratekeeper_core::State, now: Time)
    where
        A: super::predecessor::Migratable,
    {
        let Some(state) = self.algorithm.own_state(state) else { return };
        self.hold(hash, now).reset();
        if self.algorithm.is_fresh(&state, now) {
            return;
        }
        let mut held = self.hold(hash, now);
        let MapEntry::New { growth } = held.entry else { return };
        let needed = held.shard.growth_bytes() + self.algorithm.heap_bytes(&state);
        if self.shared.bytes.take(needed.saturating_sub(growth)) {
            self.shared.bytes.refund(growth.saturating_sub(needed));
            held.entry = MapEntry::Existing { at: held.shard.insert(hash, state) };
        }
    }

    fn overflow(&self) -> HeldOverflow<'_, A::State> {
        // The states of a map have no scale.
        self.shared.overflow.hold(self.when_full, false, |state| state)
    }

    fn entry_for_new(&self, shard: &mut Shard<A::State>, now: Time) -> MapEntry<'_, A> {
        // Keys that are idle now, but would not be if the clock stepped back, are kept while the map is not full.
        self.sweep(shard, SWEEP, now.saturating_sub(self.window), |_| true);
        let take = |shard: &mut Shard<A::State>| {
            let fresh = self.algorithm.fresh();
            let growth = shard.growth_bytes()
                + self.algorithm.heap_bytes(&fresh)
                + self.algorithm.growth_bytes(&fresh);
            let taken = self.shared.keys.take(1) && {
                let taken = self.shared.bytes.take(growth);
                self.shared.keys.refund(usize::from(!taken));
                taken
            };
            taken.then_some(MapEntry::New { growth })
        };
        take(shard)
            .or_else(|| self.make_room(shard, now, |_| true, take))
            .unwrap_or_else(|| MapEntry::Overflow(self.overflow()))
    }

    /// Evicts idle keys from this shard, then from others in round-robin order, until `take` succeeds.
    #[cold]
    fn make_room<T>(
        &self,
        shard: &mut Shard<A::State>,
        now: Time,
        may_evict: impl Fn(u64) -> bool,
        take: impl Fn(&mut Shard<A::State>) -> Option<T>,
    ) -> Option<T> {
        self.sweep(shard, SWEEP_WHEN_FULL, now, may_evict);
        let mut taken = take(shard);
        if now.as_nanos() < self.shared.search_again_at_ns.load(Ordering::Relaxed) {
            return taken;
        }
        for _ in 0..SHARDS_SEARCHED.min(self.shared.shards.len() - 1) {
            if taken.is_some() {
                return taken;
            }
            let other = self.shared.searched.fetch_add(1, Ordering::Relaxed) % self.shared.shards.len();
            // The next shard may be this one, or locked by another request: then it is skipped.
            if let Some(mut other) = lock_if_free(&self.shared.shards[other]) {
                self.sweep(&mut other, SWEEP_WHEN_FULL, now, |_| true);
                taken = take(shard);
            }
        }
        if taken.is_none() {
            let again = now.saturating_add(self.window / SEARCHES_PER_WINDOW);
            self.shared.search_again_at_ns.store(again.as_nanos(), Ordering::Relaxed);
        }
        taken
    }

    /// Evicts keys that have been idle since `then`, and releases their share of the bounds.
    fn sweep(
        &self,
        shard: &mut Shard<A::State>,
        entries: usize,
        then: Time,
        may_evict: impl Fn(u64) -> bool,
    ) {
        let may_evict = |hash: u64, state: &A::State| may_evict(hash) && self.release(state);
        shard.sweep(entries, |state| self.algorithm.is_fresh(state, then), may_evict);
        self.shared.bytes.refund(shard.shrink());
    }

    /// Releases the share of the bounds of a state that is about to be dropped.
    fn release(&self, state: &A::State) -> bool {
        self.shared.keys.refund(1);
        self.shared.bytes.refund(self.algorithm.heap_bytes(state));
        true
    }
}

enum MapEntry<'a, A: Algorithm> {
    /// The key has an entry.
    Existing { at: usize },
    /// The key has no entry yet; one key and `growth` bytes are reserved for it.
    New { growth: usize },
    /// The map is full.
    Overflow(HeldOverflow<'a, A::State>),
}

/// A key locked by one request.
pub(crate) struct LockedState<'a, A: Algorithm> {
    map: &'a StateMap<A>,
    shard: MutexGuard<'a, Shard<A::State>>,
    hash: u64,
    now: Time,
    entry: MapEntry<'a, A>,
}

impl<A: Algorithm> LockedState<'_, A> {
    pub(crate) fn peek(&self, cost: u32) -> Decision {
        let algorithm = &self.map.algorithm;
        match &self.entry {
            MapEntry::Existing { at } => self
                .shard
                .at(*at)
                .map_or_else(|| self.peek_fresh(cost), |it| algorithm.peek(it, self.now, cost)),
            MapEntry::New { .. } => self.peek_fresh(cost),
            MapEntry::Overflow(overflow) => overflow.peek(algorithm, self.now, cost),
        }
    }

    fn peek_fresh(&self, cost: u32) -> Decision {
        self.map.algorithm.peek(&self.map.algorithm.fresh(), self.now, cost)
    }

    #[inline]
    pub(crate) fn decide(&mut self, cost: u32) -> Decision {
        let algorithm = &self.map.algorithm;
        match &mut self.entry {
            MapEntry::Existing { at } => {
                let at = *at;
                self.decide_known(at, cost)
            }
            MapEntry::New { growth } => {
                let mut state = algorithm.fresh();
                let decision = algorithm.decide(&mut state, self.now, cost);
                if !algorithm.is_fresh(&state, self.now) {
                    let used = self.shard.growth_bytes() + algorithm.heap_bytes(&state);
                    self.map.shared.bytes.refund(*growth - used);
                    self.entry = MapEntry::Existing { at: self.shard.insert(self.hash, state) };
                }
                decision
            }
            MapEntry::Overflow(overflow) => overflow.decide(algorithm, self.now, cost),
        }
    }

    #[inline]
    fn decide_known(&mut self, at: usize, cost: u32) -> Decision {
        let LockedState { map, shard, now, .. } = self;
        let (algorithm, bytes) = (&map.algorithm, &map.shared.bytes);
        let Some(state) = shard.at_mut(at) else { return self.peek_fresh(cost) };
        let growth = algorithm.growth_bytes(state);
        if growth == 0 {
            return algorithm.decide(state, *now, cost);
        }
        let at = if bytes.take(growth) { Some(at) } else { self.make_room_to_grow(growth) };
        let LockedState { map, shard, hash, now, .. } = self;
        match at {
            Some(at) => {
                let Some(state) = shard.at_mut(at) else { return self.peek_fresh(cost) };
                let before = algorithm.heap_bytes(state);
                let decision = algorithm.decide(state, *now, cost);
                map.shared.bytes.refund(growth - (algorithm.heap_bytes(state) - before));
                decision
            }
            None => match shard.get_mut(*hash) {
                Some(state) => algorithm.decide_in_place(state, *now, cost),
                None => self.peek_fresh(cost),
            },
        }
    }

    /// Refunds a charge; a key without an entry has no charges to refund.
    pub(crate) fn refund(&mut self, cost: u32, at: Option<Time>) {
        let LockedState { map, shard, now, entry, .. } = self;
        match entry {
            MapEntry::Existing { at: index } => {
                if let Some(state) = shard.at_mut(*index) {
                    map.algorithm.refund(state, *now, cost, at);
                }
            }
            MapEntry::New { .. } => {}
            MapEntry::Overflow(overflow) => overflow.refund(&map.algorithm, *now, cost, at),
        }
    }

    /// Makes room for the key's state to grow, and returns the key's index afterwards.
    #[cold]
    fn make_room_to_grow(&mut self, growth: usize) -> Option<usize> {
        let LockedState { map, shard, hash, now, .. } = self;
        map.make_room(shard, *now, |idle| idle != *hash, |_| map.shared.bytes.take(growth).then_some(()))?;
        // Evictions have moved keys.
        shard.find(*hash)
    }

    pub(crate) fn reset(&mut self) {
        if let Some(state) = self.shard.remove(self.hash) {
            self.map.release(&state);
        }
    }

    pub(crate) fn counts_denied(&self) -> bool {
        self.map.algorithm.counts_denied()
    }
}

impl<A: Algorithm> Drop for LockedState<'_, A> {
    fn drop(&mut self) {
        if let MapEntry::New { growth } = self.entry {
            self.map.shared.keys.refund(1);
            self.map.shared.bytes.refund(growth);
        }
    }
}
