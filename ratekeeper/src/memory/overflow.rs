//! Decisions for requests whose key finds no free entry.

use std::time::Duration;

use ratekeeper_core::{Algorithm, Decision, RetryAfter, Time};

use crate::sync::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock};

/// What decides a request whose key finds no free entry, because all entries belong to keys in use: over their limit
/// or partly used. Keys in use are never evicted. Idle keys are: if the store is full, a new key scans some of the
/// other entries, about a thousand at most, for an idle one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// All keys without an entry share one budget of the limit's size: a flood of new keys gets no more than one key
    /// would. While the flood's keys are in use, up to one window, new keys of other clients share that budget, too.
    #[default]
    Share,
    /// The request is denied, with a `retry_after` of one window.
    Deny,
    /// The request is allowed and not counted.
    Allow,
}

/// Decides requests of keys without an entry.
#[derive(Debug)]
pub(crate) struct Overflow<S> {
    shared: Mutex<SharedBudget<S>>,
    requests: AtomicU64,
}

/// The budget that all keys without an entry share.
#[derive(Debug)]
struct SharedBudget<S> {
    state: S,
    /// The bit of its scale.
    scale: bool,
}

impl<S: Clone> Overflow<S> {
    pub(crate) fn new(fresh: S) -> Overflow<S> {
        Overflow {
            shared: Mutex::new(SharedBudget { state: fresh, scale: false }),
            requests: AtomicU64::new(0),
        }
    }

    /// How many requests found no free entry for their key.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Replaces the state of the shared budget.
    pub(crate) fn rewrite(&self, change: impl FnOnce(S) -> S) {
        let mut shared = lock(&self.shared);
        shared.state = change(shared.state.clone());
    }

    /// Locks the shared budget, and converts it if it is not in the scale with this bit.
    pub(crate) fn hold(
        &self,
        policy: WhenFull,
        scale: bool,
        convert: impl FnOnce(S) -> S,
    ) -> HeldOverflow<'_, S> {
        let shared = (policy == WhenFull::Share).then(|| {
            let mut shared = lock(&self.shared);
            if shared.scale != scale {
                *shared = SharedBudget { state: convert(shared.state.clone()), scale };
            }
            shared
        });
        HeldOverflow { overflow: self, policy, shared }
    }
}

/// The overflow policy, with its shared state locked until the request is decided.
pub(crate) struct HeldOverflow<'a, S> {
    overflow: &'a Overflow<S>,
    policy: WhenFull,
    shared: Option<MutexGuard<'a, SharedBudget<S>>>,
}

impl<S: Clone> HeldOverflow<'_, S> {
    pub(crate) fn peek<A: Algorithm<State = S>>(&self, algorithm: &A, now: Time, cost: u32) -> Decision {
        match &self.shared {
            Some(shared) => algorithm.peek(&shared.state, now, cost),
            None => self.unshared(algorithm, now, cost),
        }
    }

    pub(crate) fn decide<A: Algorithm<State = S>>(
        &mut self,
        algorithm: &A,
        now: Time,
        cost: u32,
    ) -> Decision {
        self.overflow.requests.fetch_add(1, Ordering::Relaxed);
        match &mut self.shared {
            Some(shared) => algorithm.decide_in_place(&mut shared.state, now, cost),
            None => self.unshared(algorithm, now, cost),
        }
    }

    pub(crate) fn refund<A: Algorithm<State = S>>(
        &mut self,
        algorithm: &A,
        now: Time,
        cost: u32,
        at: Option<Time>,
    ) {
        if let Some(shared) = &mut self.shared {
            algorithm.refund(&mut shared.state, now, cost, at);
        }
    }

    /// The decision without shared state: that of a fresh key, or a denial.
    fn unshared<A: Algorithm<State = S>>(&self, algorithm: &A, now: Time, cost: u32) -> Decision {
        let mut state = algorithm.fresh();
        let fresh = algorithm.decide(&mut state, now, cost);
        if self.policy == WhenFull::Allow || !fresh.allowed {
            return fresh;
        }
        // A key that uses its whole budget now occupies its entry the longest.
        let mut spent = algorithm.fresh();
        let window = algorithm.decide(&mut spent, now, fresh.limit).reset_after;
        Decision {
            allowed: false,
            remaining: 0,
            retry_after: RetryAfter::After(window),
            reset_after: window,
            delay: Duration::ZERO,
            ..fresh
        }
    }
}

/// A count that never exceeds its bound.
#[derive(Debug)]
pub(crate) struct Quota {
    used: AtomicUsize,
    max: AtomicUsize,
}

impl Quota {
    pub(crate) fn new(max: usize) -> Quota {
        Quota { used: AtomicUsize::new(0), max: AtomicUsize::new(max) }
    }

    pub(crate) fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    /// Changes the bound. What is in use stays in use.
    pub(crate) fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    pub(crate) fn left(&self) -> usize {
        self.max().saturating_sub(self.used())
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self, amount: usize) -> bool {
        if amount == 0 {
            return true;
        }
        let add = |used: usize| used.checked_add(amount).filter(|&used| used <= self.max());
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    pub(crate) fn refund(&self, amount: usize) {
        if amount > 0 {
            self.used.fetch_sub(amount, Ordering::Relaxed);
        }
    }
}
