//! Inline limits: one map holds the keys of all of them, however many limits there are.

use std::hash::BuildHasher;
use std::time::Duration;

use ratekeeper_core::{
    Algorithm, Bucket, Decision, FixedWindow, FixedWindowState, LeakyMode, Limit, RetryAfter, SteppedBucket,
    SteppedBucketState, Time, WindowAlign,
};

use super::Bounds;
use super::overflow::{Quota, WhenFull};
use super::shard::{Part, parts, scale};
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

/// Entries that a new key scans for idle keys, and how many it scans if the map is full.
const SWEEP: usize = 4;
const SWEEP_WHEN_FULL: usize = 64;

/// A state of a few words, of any supported algorithm.
#[derive(Clone, Copy, Debug)]
enum State {
    Bucket(u128),
    SteppedBucket(SteppedBucketState),
    FixedWindow(FixedWindowState),
}

/// The entry of one key of one limit.
#[derive(Clone, Copy, Debug)]
struct Kept {
    state: State,
    /// From then on the key has its full budget, even if the clock steps back by a window.
    until: Time,
}

/// The keys of inline limits.
#[derive(Debug)]
pub(crate) struct Brought {
    parts: Box<[Mutex<Part<Kept>>]>,
    keys: Quota,
    when_full: WhenFull,
    overflowed: AtomicU64,
}

/// An algorithm that inline limits support.
enum Fitting<'a> {
    Bucket(&'a Bucket),
    SteppedBucket(&'a SteppedBucket),
    FixedWindow(&'a FixedWindow),
}

/// Evaluates one expression on the algorithm of any variant and a state of the same kind.
macro_rules! on {
    ($fitting:expr, $state:expr, ($it:ident, $own:ident) => $do:expr) => {
        match ($fitting, $state) {
            (Fitting::Bucket($it), State::Bucket($own)) => $do,
            (Fitting::SteppedBucket($it), State::SteppedBucket($own)) => $do,
            (Fitting::FixedWindow($it), State::FixedWindow($own)) => $do,
            // The hash of a key includes the kind of its limit; if two hashes collide, the key is reset.
            (Fitting::Bucket($it), state) => {
                *state = State::Bucket($it.fresh());
                let State::Bucket($own) = state else { return None };
                $do
            }
            (Fitting::SteppedBucket($it), state) => {
                *state = State::SteppedBucket($it.fresh());
                let State::SteppedBucket($own) = state else { return None };
                $do
            }
            (Fitting::FixedWindow($it), state) => {
                *state = State::FixedWindow($it.fresh());
                let State::FixedWindow($own) = state else { return None };
                $do
            }
        }
    };
}

impl<'a> Fitting<'a> {
    /// None for algorithms whose states have no fixed size.
    fn of(limit: &'a Limit) -> Option<Fitting<'a>> {
        match limit {
            Limit::Bucket(it) => Some(Fitting::Bucket(it)),
            Limit::SteppedBucket(it) => Some(Fitting::SteppedBucket(it)),
            Limit::FixedWindow(it) => Some(Fitting::FixedWindow(it)),
            Limit::Log(_) | Limit::Counter(_) => None,
        }
    }

    fn fresh(&self) -> State {
        match self {
            Fitting::Bucket(it) => State::Bucket(it.fresh()),
            Fitting::SteppedBucket(it) => State::SteppedBucket(it.fresh()),
            Fitting::FixedWindow(it) => State::FixedWindow(it.fresh()),
        }
    }

    fn decide(&self, state: &mut State, now: Time, cost: u32) -> Option<Decision> {
        Some(on!(self, state, (it, own) => it.decide(own, now, cost)))
    }

    fn peek(&self, mut state: State, now: Time, cost: u32) -> Option<Decision> {
        Some(on!(self, &mut state, (it, own) => it.peek(own, now, cost)))
    }

    fn refund(&self, state: &mut State, now: Time, cost: u32, at: Option<Time>) -> Option<()> {
        on!(self, state, (it, own) => it.refund(own, now, cost, at));
        Some(())
    }
}

impl Brought {
    pub(crate) fn new(bounds: Bounds) -> Brought {
        let Bounds { max_keys, max_bytes, when_full } = bounds;
        let most = max_keys.min(max_bytes / Part::<Kept>::BYTES_PER_KEY_MAX).max(1);
        Brought {
            parts: (0..parts(most)).map(|_| Mutex::new(Part::default())).collect(),
            keys: Quota::new(most),
            when_full,
            overflowed: AtomicU64::new(0),
        }
    }

    fn part(&self, hash: u64) -> &Mutex<Part<Kept>> {
        &self.parts[scale(hash, self.parts.len())]
    }

    /// Decides a request, and charges it unless `is_look` is set. None if the limit's states have no fixed size.
    pub(crate) fn decide(
        &self,
        hasher: &impl BuildHasher,
        limit: &Limit,
        key: u64,
        now: Time,
        cost: u32,
        is_look: bool,
    ) -> Option<Decision> {
        let fitting = Fitting::of(limit)?;
        let hash = hash_of(hasher, &fitting, key);
        let mut part = lock(self.part(hash));
        if is_look {
            let state = part.get(hash).map_or_else(|| fitting.fresh(), |kept| kept.state);
            return fitting.peek(state, now, cost);
        }
        if let Some(kept) = part.get_mut(hash) {
            let decision = fitting.decide(&mut kept.state, now, cost)?;
            kept.until = kept.until.max(until(limit, now, &decision));
            return Some(decision);
        }
        let mut state = fitting.fresh();
        let decision = fitting.decide(&mut state, now, cost)?;
        // A key that is not charged needs no entry.
        if !decision.allowed || cost == 0 {
            return Some(decision);
        }
        if !self.has_room(&mut part, now) {
            self.overflowed.fetch_add(1, Ordering::Relaxed);
            // Limits of different kinds cannot share one budget, so `Share` denies.
            return Some(match self.when_full {
                WhenFull::Allow => decision,
                WhenFull::Deny | WhenFull::Share => no_room(limit, &decision),
            });
        }
        part.insert(hash, Kept { state, until: until(limit, now, &decision) });
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
        let Some(fitting) = Fitting::of(limit) else { return };
        let hash = hash_of(hasher, &fitting, key);
        if let Some(kept) = lock(self.part(hash)).get_mut(hash) {
            fitting.refund(&mut kept.state, now, cost, at);
        }
    }

    fn has_room(&self, part: &mut Part<Kept>, now: Time) -> bool {
        let mut sweep = |slots: usize| {
            part.sweep(
                slots,
                |kept| kept.until <= now,
                |_, _| {
                    self.keys.refund(1);
                    true
                },
            );
            part.shrink();
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
        size_of_val(&*self.parts) + self.parts.iter().map(|part| lock(part).bytes()).sum::<usize>()
    }
}

/// The hash includes the limit's parameters except its size, so that a key keeps its used units when a request states
/// a higher or a lower limit. The hash of a [`Bucket`] includes the capacity, too: a small bucket would take a large
/// bucket's deficit for a clock error and discard it.
fn hash_of(hasher: &impl BuildHasher, fitting: &Fitting<'_>, key: u64) -> u64 {
    match fitting {
        Fitting::Bucket(it) => {
            let mode = (it.is_leaky(), it.mode() == Some(LeakyMode::Shape));
            hasher.hash_one((0, mode, it.ticks_per_ns(), it.ticks_per_unit(), it.capacity(), key))
        }
        Fitting::SteppedBucket(it) => hasher.hash_one((1, it.rate().count(), it.rate().period(), key)),
        Fitting::FixedWindow(it) => hasher.hash_one((2, it.window(), it.align() == WindowAlign::Clock, key)),
    }
}

/// When the entry of a key with this decision expires. One window is added, because a clock may step back by a
/// window.
fn until(limit: &Limit, now: Time, decision: &Decision) -> Time {
    now.saturating_add(decision.reset_after).saturating_add(limit.window())
}

fn no_room(limit: &Limit, fresh: &Decision) -> Decision {
    let wait = limit.window();
    Decision {
        allowed: false,
        remaining: 0,
        retry_after: RetryAfter::After(wait),
        reset_after: wait,
        delay: Duration::ZERO,
        ..*fresh
    }
}
