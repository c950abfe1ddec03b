//! Limits that come with their requests: one map for the keys of all of them, however many there are.

use std::hash::BuildHasher;
use std::time::Duration;

use tollgate_core::{
    Algorithm, Align, Bucket, Decision, FixedWindow, FixedWindowState, Limit, Mode, RetryAfter, Steps,
    StepsState, Time,
};

use super::Bounds;
use super::full::{Quota, WhenFull};
use super::part::{Part, parts, scale};
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

/// How many slots a new key looks at for idle keys, and how many if there is no room.
const SWEEP: usize = 4;
const SWEEP_WHEN_FULL: usize = 64;

/// A state of a few words, whichever the limit.
#[derive(Clone, Copy, Debug)]
enum State {
    Bucket(u128),
    Steps(StepsState),
    FixedWindow(FixedWindowState),
}

/// What is remembered of a key of a limit.
#[derive(Clone, Copy, Debug)]
struct Kept {
    state: State,
    /// From then on it is as good as new, even if the clock has stepped back by a window.
    until: Time,
}

/// The keys of limits that come with requests.
#[derive(Debug)]
pub(crate) struct Brought {
    parts: Box<[Mutex<Part<Kept>>]>,
    keys: Quota,
    when_full: WhenFull,
    overflowed: AtomicU64,
}

/// A limit that can come with a request.
enum Fitting<'a> {
    Bucket(&'a Bucket),
    Steps(&'a Steps),
    FixedWindow(&'a FixedWindow),
}

/// Does the same with whichever it is, on a state of its kind.
macro_rules! on {
    ($fitting:expr, $state:expr, ($it:ident, $own:ident) => $do:expr) => {
        match ($fitting, $state) {
            (Fitting::Bucket($it), State::Bucket($own)) => $do,
            (Fitting::Steps($it), State::Steps($own)) => $do,
            (Fitting::FixedWindow($it), State::FixedWindow($own)) => $do,
            // Keys of limits of another kind are other keys; should two hashes meet, it is as if it were new.
            (Fitting::Bucket($it), state) => {
                *state = State::Bucket($it.fresh());
                let State::Bucket($own) = state else { return None };
                $do
            }
            (Fitting::Steps($it), state) => {
                *state = State::Steps($it.fresh());
                let State::Steps($own) = state else { return None };
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
    /// None for those whose states are of any size.
    fn of(limit: &'a Limit) -> Option<Fitting<'a>> {
        match limit {
            Limit::Bucket(it) => Some(Fitting::Bucket(it)),
            Limit::Steps(it) => Some(Fitting::Steps(it)),
            Limit::FixedWindow(it) => Some(Fitting::FixedWindow(it)),
            Limit::Log(_) | Limit::Counter(_) => None,
        }
    }

    fn fresh(&self) -> State {
        match self {
            Fitting::Bucket(it) => State::Bucket(it.fresh()),
            Fitting::Steps(it) => State::Steps(it.fresh()),
            Fitting::FixedWindow(it) => State::FixedWindow(it.fresh()),
        }
    }

    fn decide(&self, state: &mut State, now: Time, cost: u32) -> Option<Decision> {
        Some(on!(self, state, (it, own) => it.decide(own, now, cost)))
    }

    fn look(&self, mut state: State, now: Time, cost: u32) -> Option<Decision> {
        Some(on!(self, &mut state, (it, own) => it.look(own, now, cost)))
    }

    fn give_back(&self, state: &mut State, now: Time, cost: u32, at: Option<Time>) -> Option<()> {
        on!(self, state, (it, own) => it.give_back(own, now, cost, at));
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

    /// Decides a request, or says what it would be told. None for a limit whose states are of any size.
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
            return fitting.look(state, now, cost);
        }
        if let Some(kept) = part.get_mut(hash) {
            let decision = fitting.decide(&mut kept.state, now, cost)?;
            kept.until = kept.until.max(until(limit, now, &decision));
            return Some(decision);
        }
        let mut state = fitting.fresh();
        let decision = fitting.decide(&mut state, now, cost)?;
        // Whoever has taken nothing needs no place.
        if !decision.allowed || cost == 0 {
            return Some(decision);
        }
        if !self.has_room(&mut part, now) {
            self.overflowed.fetch_add(1, Ordering::Relaxed);
            // There is no budget that limits of different kinds could share.
            return Some(match self.when_full {
                WhenFull::Allow => decision,
                WhenFull::Deny | WhenFull::Share => no_room(limit, &decision),
            });
        }
        part.insert(hash, Kept { state, until: until(limit, now, &decision) });
        Some(decision)
    }

    /// Undoes a charge.
    pub(crate) fn give_back(
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
            fitting.give_back(&mut kept.state, now, cost, at);
        }
    }

    fn has_room(&self, part: &mut Part<Kept>, now: Time) -> bool {
        let mut sweep = |slots: usize| {
            part.sweep(
                slots,
                |kept| kept.until <= now,
                |_, _| {
                    self.keys.give_back(1);
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

    /// How many keys there are, idle ones among them that nobody has looked at since.
    pub(crate) fn keys(&self) -> usize {
        self.keys.used()
    }

    /// Bytes held now, and by the parts.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.parts) + self.parts.iter().map(|part| lock(part).bytes()).sum::<usize>()
    }
}

/// Keys of limits that differ in more than their size are different keys. Whoever comes with a higher or a lower limit
/// than before has still used what was used, but for buckets: a small one would take what a large one lacks for the work of
/// a clock that was wrong, and forget it.
fn hash_of(hasher: &impl BuildHasher, fitting: &Fitting<'_>, key: u64) -> u64 {
    match fitting {
        Fitting::Bucket(it) => {
            let mode = (it.is_leaky(), it.mode() == Some(Mode::Shape));
            hasher.hash_one((0, mode, it.ticks_per_ns(), it.ticks_per_unit(), it.capacity(), key))
        }
        Fitting::Steps(it) => hasher.hash_one((1, it.rate().count(), it.rate().period(), key)),
        Fitting::FixedWindow(it) => hasher.hash_one((2, it.window(), it.align() == Align::Clock, key)),
    }
}

/// Until when a key counts that was told this: a clock may step back by a window.
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
