//! States of before: a limit that has changed asks its predecessor what a key had used, when it first sees the key.
//!
//! Nothing is copied ahead, so nobody waits for a change. What is asked is always the same question: what the key is to
//! the new limit at the instant of the change. So it does no harm to ask again about a key that the new table has
//! meanwhile forgotten: it was as good as new then, and what it had used before is so all the more. Requests that the
//! predecessor still decides count for the new limit until it first sees their keys.
//!
//! Whoever holds a line may wait for one of an older table, and nobody for one of a newer.

use std::sync::{Arc, PoisonError, RwLock};

use smallvec::SmallVec;
use tollgate_core::{
    Algorithm, Bucket, Counter, CounterState, FixedWindow, Limit, Log, NarrowBucket, State, Steps, Time,
};

use super::States;
use super::pack::{SmallCounter, SmallWindow};

/// How many predecessors are asked, one behind the other. More at a time would be as many changes of one limit within
/// a few of its windows; then the oldest is forgotten.
const GENERATIONS_MAX: usize = 8;
/// No carried state counts for longer than so many windows of the new limit: a bucket lacks twice what it holds at most,
/// and a window or its parts may lie one window ahead of the clock.
const WINDOWS_MAX: u32 = 3;

/// An algorithm whose states can be handed on.
pub(crate) trait Kept: Algorithm {
    fn lift(state: Self::State) -> State;
    /// None for a state of another algorithm.
    fn lower(&self, state: State) -> Option<Self::State>;
}

/// What came before a table, if it goes on where another stood.
#[derive(Debug, Default)]
pub(crate) struct Older(Option<Box<Before>>);

#[derive(Debug)]
struct Before {
    from: Limit,
    to: Limit,
    /// When the one took the place of the other.
    at: Time,
    /// From then on nothing in it counts.
    until: Time,
    states: RwLock<Option<Arc<States>>>,
}

impl Older {
    /// The states of `from`, for a limit that [carries on](Limit::carries_on) from it.
    pub(crate) fn new(from: &Limit, states: Arc<States>, to: &Limit, at: Time) -> Older {
        let until = at.saturating_add(to.window().saturating_mul(WINDOWS_MAX));
        let states = RwLock::new(Some(states));
        let older = Older(Some(Box::new(Before { from: from.clone(), to: to.clone(), at, until, states })));
        older.keep_generations(GENERATIONS_MAX);
        older
    }

    fn keep_generations(&self, generations: usize) {
        let Some(before) = &self.0 else { return };
        match generations {
            0 => before.forget(),
            _ => before.ask(|states| states.older().keep_generations(generations - 1)).unwrap_or_default(),
        }
    }

    /// What a key that is nowhere else is to the new limit.
    pub(crate) fn state(&self, hash: u64, now: Time) -> Option<State> {
        let before = self.0.as_ref()?;
        if now >= before.until {
            before.forget();
            return None;
        }
        let state = before.ask(|states| states.state(hash, now))??;
        before.to.carried(&before.from, state, before.at)
    }

    /// Forgets what a key had used.
    pub(crate) fn reset(&self, hash: u64, now: Time) {
        if let Some(before) = &self.0 {
            before.ask(|states| states.reset(hash, now));
        }
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.0.as_ref().and_then(|before| before.ask(States::bytes)).unwrap_or(0)
    }
}

impl Before {
    fn ask<R>(&self, question: impl FnOnce(&States) -> R) -> Option<R> {
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        states.as_deref().map(question)
    }

    /// Whoever comes while others are still asking leaves it to the next.
    #[cold]
    fn forget(&self) {
        let forgotten = self.states.try_write().ok().and_then(|mut states| states.take());
        if let Some(states) = forgotten {
            // A million logs take longer to free than a request should wait. If there is no thread, it has to.
            let _ = std::thread::Builder::new().spawn(move || drop(states));
        }
    }
}

macro_rules! kept_as_they_are {
    ($($algorithm:ty => $kind:ident),*) => {
        $(impl Kept for $algorithm {
            fn lift(state: Self::State) -> State {
                State::$kind(state)
            }

            fn lower(&self, state: State) -> Option<Self::State> {
                match state {
                    State::$kind(state) => Some(state),
                    _ => None,
                }
            }
        })*
    };
}

kept_as_they_are!(Bucket => Bucket, Steps => Steps, FixedWindow => FixedWindow, Log => Log, Counter => Counter);

impl Kept for NarrowBucket {
    fn lift(full_at: u64) -> State {
        State::Bucket(u128::from(full_at))
    }

    fn lower(&self, state: State) -> Option<u64> {
        match state {
            State::Bucket(full_at) => u64::try_from(full_at).ok(),
            _ => None,
        }
    }
}

impl Kept for SmallWindow {
    fn lift(state: Self::State) -> State {
        State::FixedWindow(state)
    }

    fn lower(&self, state: State) -> Option<Self::State> {
        match state {
            State::FixedWindow(state) => Some(self.fitted(state)),
            _ => None,
        }
    }
}

impl<const N: usize> Kept for SmallCounter<N> {
    fn lift(state: Self::State) -> State {
        State::Counter(CounterState { newest: state.newest, counts: Box::new(state.counts) })
    }

    fn lower(&self, state: State) -> Option<Self::State> {
        let State::Counter(CounterState { newest, counts }) = state else { return None };
        let fitted: SmallVec<[u32; 8]> = counts.iter().map(|count| self.fitted(*count)).collect();
        let mut counts = [0; N];
        let held = fitted.len().min(N);
        counts[..held].copy_from_slice(&fitted[..held]);
        Some(CounterState { newest, counts })
    }
}
