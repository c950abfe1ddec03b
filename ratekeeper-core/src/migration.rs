//! State migration: the state of a key when its limit changes.

use crate::{Counter, CounterState, FixedWindowState, Limit, LogState, SteppedBucketState, Time};

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
    Counter(CounterState<Box<[u32]>>),
}

impl Limit {
    /// Whether the state of `from` can be migrated to this limit: algorithm, variant, window and buckets are the
    /// same. All other parameters may differ.
    pub fn is_compatible(&self, from: &Limit) -> bool {
        match (self, from) {
            (Limit::Bucket(to), Limit::Bucket(from)) => {
                (to.is_leaky(), to.mode()) == (from.is_leaky(), from.mode())
            }
            (Limit::SteppedBucket(_), Limit::SteppedBucket(_)) => true,
            (Limit::FixedWindow(to), Limit::FixedWindow(from)) => {
                (to.window(), to.align()) == (from.window(), from.align())
            }
            (Limit::Log(to), Limit::Log(from)) => (to.window(), to.count()) == (from.window(), from.count()),
            (Limit::Counter(to), Limit::Counter(from)) => {
                let own = |it: &Counter| (it.window(), it.buckets(), it.edge());
                own(to) == own(from)
            }
            _ => false,
        }
    }

    /// Converts the state of a key of `from` to this limit, which replaces `from` at the instant `at`. Used units
    /// stay used. None if the limits are not [compatible](Self::is_compatible); the key then starts fresh.
    ///
    /// Windows and logs keep their counts, even above a lower limit. A bucket keeps its missing units, at most twice
    /// its new capacity; a fraction of a unit is rounded down to the new limit's ticks. A stepped bucket keeps its
    /// current period, of which at most one new period counts as elapsed.
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
            (Limit::FixedWindow(_), _, state @ State::FixedWindow(_))
            | (Limit::Log(_), _, state @ State::Log(_))
            | (Limit::Counter(_), _, state @ State::Counter(_)) => state,
            // The state belongs to another algorithm.
            _ => return None,
        })
    }
}
