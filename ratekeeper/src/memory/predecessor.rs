//! State migration: after a reload, a changed limit reads a key's state from its predecessor when it first sees the
//! key.
//!
//! No state is copied in advance, so a reload does not block requests. A migrated state is always the key's state for
//! the new limit at the instant of the reload. So a key that the new table has evicted may be migrated again: it had
//! its full budget when it was evicted, and then its older state has expired, too. Requests that the predecessor
//! still decides count for the new limit until it first sees their keys.
//!
//! Lock order: a thread that holds a line may wait for a line of an older table, never for one of a newer table.

use std::sync::{Arc, PoisonError, RwLock};

use ratekeeper_core::{
    Algorithm, Bucket, Counter, CounterState, FixedWindow, Limit, Log, NarrowBucket, State, SteppedBucket,
    Time,
};
use smallvec::SmallVec;

use super::States;
use super::pack::{SmallCounter, SmallWindow};

/// Maximum length of the chain of predecessors. It is exceeded only if one limit changes more often than this within
/// a few of its windows; then the oldest is dropped.
const GENERATIONS_MAX: usize = 8;
/// A migrated state expires after at most this many windows of the new limit: a bucket's deficit is at most twice its
/// capacity, and a window or its buckets may lie one window ahead of the clock.
const WINDOWS_MAX: u32 = 3;

/// An algorithm whose states can be migrated.
pub(crate) trait Migratable: Algorithm {
    fn any_state(state: Self::State) -> State;
    /// None for a state of another algorithm.
    fn own_state(&self, state: State) -> Option<Self::State>;
}

/// The predecessor of a table, if it has one.
#[derive(Debug, Default)]
pub(crate) struct Predecessor(Option<Box<ReplacedLimit>>);

#[derive(Debug)]
struct ReplacedLimit {
    from: Limit,
    to: Limit,
    /// When `to` replaced `from`.
    at: Time,
    /// From then on all migrated states have expired.
    until: Time,
    states: RwLock<Option<Arc<States>>>,
}

impl Predecessor {
    /// The states of `from`, for a limit that is [compatible](Limit::is_compatible) with it.
    pub(crate) fn new(from: &Limit, states: Arc<States>, to: &Limit, at: Time) -> Predecessor {
        let until = at.saturating_add(to.window().saturating_mul(WINDOWS_MAX));
        let states = RwLock::new(Some(states));
        let predecessor = Predecessor(Some(Box::new(ReplacedLimit {
            from: from.clone(),
            to: to.clone(),
            at,
            until,
            states,
        })));
        predecessor.keep_generations(GENERATIONS_MAX);
        predecessor
    }

    fn keep_generations(&self, generations: usize) {
        let Some(replaced) = &self.0 else { return };
        match generations {
            0 => replaced.drop_states(),
            _ => replaced
                .with_states(|states| states.predecessor().keep_generations(generations - 1))
                .unwrap_or_default(),
        }
    }

    /// The migrated state of a key that has no entry in the new table.
    pub(crate) fn state(&self, hash: u64, now: Time) -> Option<State> {
        let replaced = self.0.as_ref()?;
        if now >= replaced.until {
            replaced.drop_states();
            return None;
        }
        let state = replaced.with_states(|states| states.state(hash, now))??;
        replaced.to.migrate_state(&replaced.from, state, replaced.at)
    }

    /// Resets a key in the predecessor.
    pub(crate) fn reset(&self, hash: u64, now: Time) {
        if let Some(replaced) = &self.0 {
            replaced.with_states(|states| states.reset(hash, now));
        }
    }

    /// Bytes of the predecessor's states.
    pub(crate) fn bytes(&self) -> usize {
        self.0.as_ref().and_then(|replaced| replaced.with_states(States::bytes)).unwrap_or(0)
    }
}

impl ReplacedLimit {
    fn with_states<R>(&self, read: impl FnOnce(&States) -> R) -> Option<R> {
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        states.as_deref().map(read)
    }

    /// Drops the states, unless readers hold the lock: then a later call does.
    #[cold]
    fn drop_states(&self) {
        let states = self.states.try_write().ok().and_then(|mut states| states.take());
        if let Some(states) = states {
            // Freeing a million logs takes longer than a request should wait, so another thread does it. If no thread
            // can be started, the request frees them.
            let _ = std::thread::Builder::new().spawn(move || drop(states));
        }
    }
}

macro_rules! migrate_unchanged {
    ($($algorithm:ty => $kind:ident),*) => {
        $(impl Migratable for $algorithm {
            fn any_state(state: Self::State) -> State {
                State::$kind(state)
            }

            fn own_state(&self, state: State) -> Option<Self::State> {
                match state {
                    State::$kind(state) => Some(state),
                    _ => None,
                }
            }
        })*
    };
}

migrate_unchanged!(Bucket => Bucket, SteppedBucket => SteppedBucket, FixedWindow => FixedWindow, Log => Log, Counter => Counter);

impl Migratable for NarrowBucket {
    fn any_state(full_at: u64) -> State {
        State::Bucket(u128::from(full_at))
    }

    fn own_state(&self, state: State) -> Option<u64> {
        match state {
            State::Bucket(full_at) => u64::try_from(full_at).ok(),
            _ => None,
        }
    }
}

impl Migratable for SmallWindow {
    fn any_state(state: Self::State) -> State {
        State::FixedWindow(state)
    }

    fn own_state(&self, state: State) -> Option<Self::State> {
        match state {
            State::FixedWindow(state) => Some(self.capped(state)),
            _ => None,
        }
    }
}

impl<const N: usize> Migratable for SmallCounter<N> {
    fn any_state(state: Self::State) -> State {
        State::Counter(CounterState { newest: state.newest, counts: Box::new(state.counts) })
    }

    fn own_state(&self, state: State) -> Option<Self::State> {
        let State::Counter(CounterState { newest, counts }) = state else { return None };
        let capped: SmallVec<[u32; 8]> = counts.iter().map(|count| self.capped(*count)).collect();
        let mut counts = [0; N];
        let held = capped.len().min(N);
        counts[..held].copy_from_slice(&capped[..held]);
        Some(CounterState { newest, counts })
    }
}
