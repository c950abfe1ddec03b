//! Inline limits: one map holds the keys of all of them, however many limits there are.

use std::hash::BuildHasher;
use std::time::Duration;

use ratekeeper_core::{
    Algorithm, Bucket, Decision, FixedWindow, FixedWindowState, Gcra, GcraState, LeakyMode, Limit,
    RetryAfter, SteppedBucket, SteppedBucketState, Time, WindowAlign,
};

use super::Bounds;
use super::budget::Reservation;
use super::overflow::{Quota, WhenFull};
use super::shard::{Shard, scale, shard_count};
use crate::store::InlineLimit;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

/// Entries that a new key scans for idle keys, and how many it scans if the map is full.
const SWEEP: usize = 4;
const SWEEP_WHEN_FULL: usize = 64;

/// A state of a few words, of any supported algorithm.
#[derive(Clone, Copy, Debug)]
enum InlineState {
    Bucket(u128),
    SteppedBucket(SteppedBucketState),
    FixedWindow(FixedWindowState),
    Gcra(GcraState),
}

/// The entry of one key of one limit.
#[derive(Clone, Copy, Debug)]
struct InlineEntry {
    state: InlineState,
    /// From then on the key has its full budget, even if the clock steps back by a window.
    until: Time,
}

/// The keys of inline limits.
#[derive(Debug)]
pub(crate) struct InlineTable {
    shards: Box<[Mutex<Shard<InlineEntry>>]>,
    keys: Quota,
    when_full: WhenFull,
    overflowed: AtomicU64,
    _reserved: Reservation,
}

/// An algorithm that inline limits support.
pub(crate) enum InlineAlgorithm<'a> {
    Bucket(&'a Bucket),
    SteppedBucket(&'a SteppedBucket),
    FixedWindow(&'a FixedWindow),
    Gcra(&'a Gcra),
}

/// Evaluates one expression on the algorithm of any variant and a state of the same kind.
macro_rules! on {
    ($algorithm:expr, $state:expr, ($it:ident, $own:ident) => $do:expr) => {
        match ($algorithm, $state) {
            (InlineAlgorithm::Bucket($it), InlineState::Bucket($own)) => $do,
            (InlineAlgorithm::SteppedBucket($it), InlineState::SteppedBucket($own)) => $do,
            (InlineAlgorithm::FixedWindow($it), InlineState::FixedWindow($own)) => $do,
            (InlineAlgorithm::Gcra($it), InlineState::Gcra($own)) => $do,
            // The hash of a key includes the kind of its limit; if two hashes collide, the key is reset.
            (InlineAlgorithm::Bucket($it), state) => {
                *state = InlineState::Bucket($it.fresh());
                let InlineState::Bucket($own) = state else { return None };
                $do
            }
            (InlineAlgorithm::SteppedBucket($it), state) => {
                *state = InlineState::SteppedBucket($it.fresh());
                let InlineState::SteppedBucket($own) = state else { return None };
                $do
            }
            (InlineAlgorithm::FixedWindow($it), state) => {
                *state = InlineState::FixedWindow($it.fresh());
                let InlineState::FixedWindow($own) = state else { return None };
                $do
            }
            (InlineAlgorithm::Gcra($it), state) => {
                *state = InlineState::Gcra($it.fresh());
                let InlineState::Gcra($own) = state else { return None };
                $do
            }
        }
    };
}

impl<'a> InlineAlgorithm<'a> {
    /// None for algorithms whose states have no fixed size.
    pub(crate) fn of(limit: InlineLimit<'a>) -> Option<InlineAlgorithm<'a>> {
        match limit {
            InlineLimit::Limit(Limit::Bucket(it)) => Some(InlineAlgorithm::Bucket(it)),
            InlineLimit::Limit(Limit::SteppedBucket(it)) => Some(InlineAlgorithm::SteppedBucket(it)),
            InlineLimit::Limit(Limit::FixedWindow(it)) => Some(InlineAlgorithm::FixedWindow(it)),
            InlineLimit::Limit(Limit::Log(_) | Limit::Counter(_)) => None,
            InlineLimit::Gcra(it) => Some(InlineAlgorithm::Gcra(it)),
        }
    }

    fn fresh(&self) -> InlineState {
        match self {
            InlineAlgorithm::Bucket(it) => InlineState::Bucket(it.fresh()),
            InlineAlgorithm::SteppedBucket(it) => InlineState::SteppedBucket(it.fresh()),
            InlineAlgorithm::FixedWindow(it) => InlineState::FixedWindow(it.fresh()),
            InlineAlgorithm::Gcra(it) => InlineState::Gcra(it.fresh()),
        }
    }

    fn window(&self) -> Duration {
        match self {
            InlineAlgorithm::Bucket(it) => it.window(),
            InlineAlgorithm::SteppedBucket(it) => Algorithm::window(*it),
            InlineAlgorithm::FixedWindow(it) => it.window(),
            InlineAlgorithm::Gcra(it) => it.window(),
        }
    }

    fn decide(&self, state: &mut InlineState, now: Time, cost: u32) -> Option<Decision> {
        Some(on!(self, state, (it, own) => it.decide(own, now, cost)))
    }

    fn peek(&self, mut state: InlineState, now: Time, cost: u32) -> Option<Decision> {
        Some(on!(self, &mut state, (it, own) => it.peek(own, now, cost)))
    }

    fn refund(&self, state: &mut InlineState, now: Time, cost: u32, at: Option<Time>) -> Option<()> {
        on!(self, state, (it, own) => it.refund(own, now, cost, at));
        Some(())
    }
}

impl InlineTable {
    /// Bytes of a key, including its share of the shards.
    const BYTES_PER_KEY: usize = Shard::<InlineEntry>::BYTES_PER_KEY_MAX + 1;

    pub(crate) fn new(bounds: Bounds, mut reserved: Reservation) -> InlineTable {
        let Bounds { max_keys, when_full, .. } = bounds;
        let max_entries = max_keys.min(reserved.bytes() / Self::BYTES_PER_KEY).max(1);
        reserved.shrink_to(max_entries * Self::BYTES_PER_KEY);
        InlineTable {
            _reserved: reserved,
            shards: (0..shard_count(max_entries)).map(|_| Mutex::new(Shard::default())).collect(),
            keys: Quota::new(max_entries),
            when_full,
            overflowed: AtomicU64::new(0),
        }
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard<InlineEntry>> {
        &self.shards[scale(hash, self.shards.len())]
    }

    /// Decides a request, and charges it unless `is_peek` is set. None only if a state is of another kind, which
    /// never happens.
    pub(crate) fn decide(
        &self,
        hasher: &impl BuildHasher,
        algorithm: &InlineAlgorithm<'_>,
        key: u64,
        now: Time,
        cost: u32,
        is_peek: bool,
    ) -> Option<Decision> {
        let hash = hash_of(hasher, algorithm, key);
        let mut shard = lock(self.shard(hash));
        if is_peek {
            let state = shard.get(hash).map_or_else(|| algorithm.fresh(), |entry| entry.state);
            return algorithm.peek(state, now, cost);
        }
        if let Some(entry) = shard.get_mut(hash) {
            let decision = algorithm.decide(&mut entry.state, now, cost)?;
            entry.until = entry.until.max(until(algorithm, now, &decision));
            return Some(decision);
        }
        let mut state = algorithm.fresh();
        let decision = algorithm.decide(&mut state, now, cost)?;
        // A key that is not charged needs no entry.
        if !decision.allowed || cost == 0 {
            return Some(decision);
        }
        if !self.reserve_key(&mut shard, now) {
            self.overflowed.fetch_add(1, Ordering::Relaxed);
            // Limits of different kinds cannot share one budget, so `Share` denies.
            return Some(match self.when_full {
                WhenFull::Allow => decision,
                WhenFull::Deny | WhenFull::Share => denial_when_full(algorithm, &decision),
            });
        }
        shard.insert(hash, InlineEntry { state, until: until(algorithm, now, &decision) });
        Some(decision)
    }

    /// Refunds a charge.
    pub(crate) fn refund(
        &self,
        hasher: &impl BuildHasher,
        limit: &Limit,
        key: u64,
        now: Time,
        cost: u32,
        at: Option<Time>,
    ) {
        let Some(algorithm) = InlineAlgorithm::of(InlineLimit::Limit(limit)) else { return };
        let hash = hash_of(hasher, &algorithm, key);
        if let Some(entry) = lock(self.shard(hash)).get_mut(hash) {
            algorithm.refund(&mut entry.state, now, cost, at);
        }
    }

    fn reserve_key(&self, shard: &mut Shard<InlineEntry>, now: Time) -> bool {
        let mut sweep = |entries: usize| {
            shard.sweep(
                entries,
                |entry| entry.until <= now,
                |_, _| {
                    self.keys.refund(1);
                    true
                },
            );
            shard.shrink();
        };
        sweep(SWEEP);
        self.keys.take(1) || {
            sweep(SWEEP_WHEN_FULL);
            self.keys.take(1)
        }
    }

    pub(crate) fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Number of keys, including idle ones that no sweep has removed yet.
    pub(crate) fn keys(&self) -> usize {
        self.keys.used()
    }

    /// Current bytes of the entries and of the array of shards.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.shards) + self.shards.iter().map(|shard| lock(shard).bytes()).sum::<usize>()
    }
}

/// The hash includes the limit's parameters except its size, so that a key keeps its used units when a request states
/// a higher or a lower limit. The hash of a [`Bucket`] includes the capacity, too: a small bucket would take a large
/// bucket's deficit for a clock error and discard it.
fn hash_of(hasher: &impl BuildHasher, algorithm: &InlineAlgorithm<'_>, key: u64) -> u64 {
    match algorithm {
        InlineAlgorithm::Bucket(it) => {
            let mode = (it.is_leaky(), it.mode() == Some(LeakyMode::Shape));
            hasher.hash_one((0, mode, it.ticks_per_ns(), it.ticks_per_unit(), it.capacity(), key))
        }
        InlineAlgorithm::SteppedBucket(it) => {
            hasher.hash_one((1, it.rate().count(), it.rate().period(), key))
        }
        InlineAlgorithm::FixedWindow(it) => {
            hasher.hash_one((2, it.window(), it.align() == WindowAlign::Clock, key))
        }
        // One instant, whatever the parameters.
        InlineAlgorithm::Gcra(_) => hasher.hash_one((3, key)),
    }
}

/// When the entry of a key with this decision expires. One window is added, because a clock may step back by a
/// window.
fn until(algorithm: &InlineAlgorithm<'_>, now: Time, decision: &Decision) -> Time {
    now.saturating_add(decision.reset_after).saturating_add(algorithm.window())
}

fn denial_when_full(algorithm: &InlineAlgorithm<'_>, fresh: &Decision) -> Decision {
    let wait = algorithm.window();
    Decision {
        allowed: false,
        remaining: 0,
        retry_after: RetryAfter::After(wait),
        reset_after: wait,
        delay: Duration::ZERO,
        ..*fresh
    }
}
