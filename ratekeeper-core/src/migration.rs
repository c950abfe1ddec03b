//! State migration: the state of a key when its limit changes.

use std::time::Duration;

use crate::{
    CountRing, Counter, CounterState, FixedWindowState, Limit, LogState, SteppedBucketState, Time,
    WindowAlign,
};

/// The state of a key, for any algorithm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// State of a [`Bucket`](crate::Bucket).
    Bucket(u128),
    /// State of a [`SteppedBucket`](crate::SteppedBucket).
    SteppedBucket(SteppedBucketState),
    /// State of a [`FixedWindow`](crate::FixedWindow).
    FixedWindow(FixedWindowState),
    /// State of a [`Log`](crate::Log).
    Log(LogState),
    /// State of a [`Counter`].
    Counter(CounterState<CountRing>),
}

impl Limit {
    /// Whether the state of `from` can be migrated to this limit: algorithm, variant, window and buckets are the
    /// same. All other parameters may differ, and so may the length of windows that begin with the first request.
    pub fn is_compatible(&self, from: &Limit) -> bool {
        match (self, from) {
            (Limit::Bucket(to), Limit::Bucket(from)) => {
                (to.is_leaky(), to.mode()) == (from.is_leaky(), from.mode())
            }
            (Limit::SteppedBucket(_), Limit::SteppedBucket(_)) => true,
            (Limit::FixedWindow(to), Limit::FixedWindow(from)) => {
                to.align() == from.align()
                    && (to.window() == from.window() || to.align() == WindowAlign::FirstRequest)
            }
            (Limit::Log(to), Limit::Log(from)) => (to.window(), to.count()) == (from.window(), from.count()),
            (Limit::Counter(to), Limit::Counter(from)) => {
                let own = |it: &Counter| (it.window(), it.buckets(), it.edge());
                own(to) == own(from)
            }
            _ => false,
        }
    }

    /// This limit as the successor of `from`: states keep the units that were used under the earlier limit, so that a
    /// limit that is lowered and raised again returns nothing. Otherwise a small bucket would take a large bucket's
    /// deficit for a clock error, and a short log would drop what it needs not remember.
    #[must_use]
    pub fn following(&self, from: &Limit) -> Limit {
        match (self, from) {
            (Limit::Bucket(to), Limit::Bucket(from)) => Limit::Bucket(to.following(from)),
            (Limit::Log(to), Limit::Log(from)) => Limit::Log(to.following(from)),
            _ => self.clone(),
        }
    }

    /// This limit as the successor of `from`, beside the limits that it [follows](Self::following) already.
    #[must_use]
    pub fn following_both(&self, from: &Limit) -> Limit {
        match (self, from) {
            (Limit::Bucket(to), Limit::Bucket(from)) => Limit::Bucket(to.following_both(from)),
            (Limit::Log(to), Limit::Log(from)) => Limit::Log(to.following_both(from)),
            _ => self.clone(),
        }
    }

    /// The longest time that a migrated state counts.
    pub fn state_lasts(&self) -> Duration {
        match self {
            Limit::Bucket(it) => it.missing_max(),
            Limit::SteppedBucket(it) => it.missing_max(),
            // The windows and buckets of a state may lie one window ahead of the clock.
            _ => self.window().saturating_mul(3),
        }
    }

    /// Converts the state of a key of `from` to this limit, which replaces `from` at the instant `at`. Used units
    /// stay used. None if the limits are not [compatible](Self::is_compatible); the key then starts fresh.
    ///
    /// Windows and logs keep their counts, even above a lower limit. A window that began with the first request keeps
    /// its start, and from then on it has the new length; one that had ended before `at` stays ended. A bucket keeps its missing units, at most twice
    /// its new capacity, or all of them if the limit [follows](Self::following) `from`; a fraction of a unit is rounded
    /// down to the new limit's ticks. A stepped bucket keeps its missing tokens and its current period, of which at
    /// most one new period counts as elapsed.
    pub fn migrate_state(&self, from: &Limit, state: State, at: Time) -> Option<State> {
        if !self.is_compatible(from) {
            return None;
        }
        Some(match (self, from, state) {
            (Limit::Bucket(to), Limit::Bucket(from), State::Bucket(full_at)) => {
                State::Bucket(to.migrate_state(from, full_at, at))
            }
            (Limit::SteppedBucket(to), Limit::SteppedBucket(from), State::SteppedBucket(state)) => {
                State::SteppedBucket(to.migrate_state(from, state, at))
            }
            (Limit::FixedWindow(to), Limit::FixedWindow(from), State::FixedWindow(state)) => {
                State::FixedWindow(to.migrate_state(from, state, at))
            }
            (Limit::Log(_), _, state @ State::Log(_)) | (Limit::Counter(_), _, state @ State::Counter(_)) => {
                state
            }
            // The state belongs to another algorithm.
            _ => return None,
        })
    }
}
