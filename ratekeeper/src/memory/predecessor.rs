//! State migration between tables: a limit that needs wider states or more keys than its table has gets a new table,
//! which reads a key's state from its predecessor when it first sees the key. A predecessor may itself have one. All
//! other changes are made in place: see `scale`.
//!
//! No state is copied in advance, so a reload does not block requests. A migrated state is always the key's state for
//! the new limit at the instant of the reload. So a key that the new table has evicted may be migrated again: it had
//! its full budget when it was evicted, and then its older state has expired, too. Requests that the predecessor
//! still decides count for the new limit until it first sees their keys.
//!
//! Lock order: a thread that holds a line may wait for a line of an older table, never for one of a newer table.

use std::sync::{PoisonError, RwLock};

use ratekeeper_core::{
    Algorithm, Bucket, Counter, CounterState, FixedWindow, Limit, Log, NarrowBucket, State, SteppedBucket,
    Time,
};
use smallvec::SmallVec;

use super::pack::{SmallCounter, SmallWindow};
use super::states::States;
use crate::sync::{AtomicU64, Ordering};

/// An algorithm whose states can be migrated.
pub(crate) trait Migratable: Algorithm + Clone {
    /// Whether the meaning of a state depends on the limit's size or rate.
    const HAS_SCALE: bool = false;

    fn any_state(state: Self::State) -> State;
    /// None for a state of another algorithm.
    fn own_state(&self, state: State) -> Option<Self::State>;
}

/// The predecessor of a table, if it has one.
#[derive(Debug, Default)]
pub(crate) struct Predecessor(Option<Box<ReplacedTable>>);

#[derive(Debug)]
struct ReplacedTable {
    /// From then on all migrated states have expired, in nanoseconds since the epoch.
    until_ns: AtomicU64,
    states: RwLock<Option<States>>,
}

impl Predecessor {
    /// The states that `to` replaces at `at`.
    pub(crate) fn new(states: States, to: &Limit, at: Time) -> Predecessor {
        let replaced = ReplacedTable { until_ns: AtomicU64::new(0), states: RwLock::new(Some(states)) };
        let predecessor = Predecessor(Some(Box::new(replaced)));
        predecessor.extend(to, at);
        predecessor
    }

    /// A further limit, which may keep its states for longer, takes over.
    pub(crate) fn extend(&self, to: &Limit, at: Time) {
        if let Some(replaced) = &self.0 {
            let until = at.saturating_add(to.state_lasts());
            replaced.until_ns.fetch_max(until.as_nanos(), Ordering::Relaxed);
            replaced.with_states(|states| states.extend_predecessor(to, at));
        }
    }

    /// The state of a key that has no entry in the new table, migrated through the changes since.
    pub(crate) fn state(&self, hash: u64, now: Time, changes: &[(Limit, Time)]) -> Option<State> {
        let replaced = self.0.as_ref()?;
        if now.as_nanos() >= replaced.until_ns.load(Ordering::Relaxed) {
            replaced.drop_states();
            return None;
        }
        let (mut from, mut state) = replaced.with_states(|states| states.state(hash, now))??;
        for (to, at) in changes {
            state = to.migrate_state(&from, state, *at)?;
            from = to.clone();
        }
        Some(state)
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

impl ReplacedTable {
    fn with_states<R>(&self, read: impl FnOnce(&States) -> R) -> Option<R> {
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        states.as_ref().map(read)
    }

    /// Drops the states, unless readers hold the lock: then a later call does.
    #[cold]
    fn drop_states(&self) {
        drop(self.states.try_write().ok().and_then(|mut states| states.take()));
    }
}

macro_rules! migrate_unchanged {
    ($($algorithm:ty => $kind:ident, $has_scale:literal);*) => {
        $(impl Migratable for $algorithm {
            const HAS_SCALE: bool = $has_scale;

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

migrate_unchanged!(
    Bucket => Bucket, true;
    SteppedBucket => SteppedBucket, true;
    FixedWindow => FixedWindow, false;
    Log => Log, false;
    Counter => Counter, false
);

impl Migratable for NarrowBucket {
    const HAS_SCALE: bool = true;

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
        State::Counter(CounterState { newest: state.newest, counts: state.counts.into_iter().collect() })
    }

    fn own_state(&self, state: State) -> Option<Self::State> {
        let State::Counter(CounterState { newest, counts }) = state else { return None };
        let capped: SmallVec<[u32; 8]> = counts.iter().map(|count| self.capped(count)).collect();
        let mut counts = [0; N];
        let held = capped.len().min(N);
        counts[..held].copy_from_slice(&capped[..held]);
        Some(CounterState { newest, counts })
    }
}
