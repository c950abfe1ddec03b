//! What is kept of a key when its limit changes.

use crate::{Counter, CounterState, FixedWindowState, Limit, LogState, StepsState, Time};

/// The state of a key, whichever the algorithm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Of a [`Bucket`](crate::Bucket).
    Bucket(u128),
    /// Of [`Steps`](crate::Steps).
    Steps(StepsState),
    /// Of a [`FixedWindow`](crate::FixedWindow).
    FixedWindow(FixedWindowState),
    /// Of a [`Log`](crate::Log).
    Log(LogState),
    /// Of a [`Counter`].
    Counter(CounterState<Box<[u32]>>),
}

impl Limit {
    /// Whether use counts on when this limit takes the place of `from`: the algorithm and its variant are the same, and
    /// so is the window, with its buckets. Everything else may change.
    pub fn carries_on(&self, from: &Limit) -> bool {
        match (self, from) {
            (Limit::Bucket(to), Limit::Bucket(from)) => {
                (to.is_leaky(), to.mode()) == (from.is_leaky(), from.mode())
            }
            (Limit::Steps(_), Limit::Steps(_)) => true,
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

    /// What a key of `from` is to this limit, which takes its place at an instant: whatever was used stays used. None if
    /// it [begins anew](Self::carries_on).
    ///
    /// Windows and logs keep their counts, also above a lower limit. A bucket keeps the units that are missing, at most
    /// twice as many as it holds now; a unit in parts is rounded down to the new limit's ticks. Where tokens arrive in
    /// steps the running period goes on, and has lasted one of the new periods at most.
    pub fn carried(&self, from: &Limit, state: State, at: Time) -> Option<State> {
        if !self.carries_on(from) {
            return None;
        }
        Some(match (self, from, state) {
            (Limit::Bucket(to), Limit::Bucket(from), State::Bucket(full_at)) => {
                State::Bucket(to.carried(from, full_at, at))
            }
            (Limit::Steps(to), Limit::Steps(from), State::Steps(state)) => {
                State::Steps(to.carried(from, state, at))
            }
            (Limit::FixedWindow(_), _, state @ State::FixedWindow(_))
            | (Limit::Log(_), _, state @ State::Log(_))
            | (Limit::Counter(_), _, state @ State::Counter(_)) => state,
            // A state of another algorithm.
            _ => return None,
        })
    }
}
