//! The states of one limit's keys, in the narrowest layout that holds them.

use std::sync::Arc;

use ratekeeper_core::{
    Bucket, Counter, Decision, FixedWindow, Limit, Log, NarrowBucket, State, SteppedBucket, Time,
};

use super::Bounds;
use super::budget::Reservation;
use super::map::StateMap;
use super::overflow::{Quota, WhenFull};
use super::pack::{SmallCounter, SmallWindow};
use super::predecessor::Predecessor;
use super::table::Table;

/// The states of one limit's keys. The variant depends on the size of the limit's state.
///
/// Each generation of a limit has its own, on shared memory.
#[derive(Clone, Debug)]
pub(crate) enum States {
    Bucket(Table<NarrowBucket, 1>),
    WideBucket(Table<Bucket, 2>),
    SteppedBucket(Table<SteppedBucket, 2>),
    FixedWindow(Table<SmallWindow, 1>),
    WideFixedWindow(Table<FixedWindow, 2>),
    Counter(Table<SmallCounter<2>, 1>),
    WideCounter(Table<SmallCounter<2>, 2>),
    FineCounter(Table<SmallCounter<8>, 5>),
    FinestCounter(StateMap<Counter>),
    Log(StateMap<Log>),
}

/// Evaluates one expression on the table of any variant.
macro_rules! with {
    ($states:expr, $table:ident => $do:expr) => {
        match $states {
            States::Bucket($table) => $do,
            States::WideBucket($table) => $do,
            States::SteppedBucket($table) => $do,
            States::FixedWindow($table) => $do,
            States::WideFixedWindow($table) => $do,
            States::Counter($table) => $do,
            States::WideCounter($table) => $do,
            States::FineCounter($table) => $do,
            States::FinestCounter($table) => $do,
            States::Log($table) => $do,
        }
    };
}
pub(super) use with;

impl States {
    /// A table of the narrowest layout that holds the limit's states.
    pub(super) fn new(
        limit: &Limit,
        bounds: Bounds,
        reserved: Reservation,
        predecessor: Option<(Predecessor, Time)>,
    ) -> States {
        macro_rules! table {
            ($algorithm:expr) => {
                Table::new($algorithm, limit, bounds, reserved, predecessor)
            };
        }
        match limit {
            Limit::Bucket(it) => match it.narrow() {
                Some(narrow) => States::Bucket(table!(narrow)),
                None => States::WideBucket(table!(it.clone())),
            },
            Limit::SteppedBucket(it) => States::SteppedBucket(table!(it.clone())),
            Limit::FixedWindow(it) => match SmallWindow::new(it) {
                Some(small) => States::FixedWindow(table!(small)),
                None => States::WideFixedWindow(table!(it.clone())),
            },
            Limit::Counter(it) => {
                if let Some(smallest) = SmallCounter::in_a_word(it) {
                    States::Counter(table!(smallest))
                } else if let Some(small) = SmallCounter::new(it) {
                    States::WideCounter(table!(small))
                } else if let Some(fine) = SmallCounter::new(it) {
                    States::FineCounter(table!(fine))
                } else {
                    States::FinestCounter(StateMap::new(it.clone(), bounds, reserved))
                }
            }
            Limit::Log(it) => States::Log(StateMap::new(it.clone(), bounds, reserved)),
        }
    }

    /// The next generation on the same memory, for a compatible limit that replaces the current one at `now`. None if
    /// the layout has no room for the limit's states.
    pub(super) fn next(&self, limit: &Limit, when_full: WhenFull, now: Time) -> Option<States> {
        macro_rules! next {
            ($variant:ident, $table:ident, $algorithm:expr) => {
                Some(States::$variant($table.next($algorithm, limit, when_full, now)))
            };
        }
        match (self, limit) {
            (States::Bucket(table), Limit::Bucket(it)) => next!(Bucket, table, it.narrow()?),
            (States::WideBucket(table), Limit::Bucket(it)) => next!(WideBucket, table, it.clone()),
            (States::SteppedBucket(table), Limit::SteppedBucket(it)) => {
                next!(SteppedBucket, table, it.clone())
            }
            (States::FixedWindow(table), Limit::FixedWindow(it)) => {
                next!(FixedWindow, table, SmallWindow::new(it)?)
            }
            (States::WideFixedWindow(table), Limit::FixedWindow(it)) => {
                next!(WideFixedWindow, table, it.clone())
            }
            (States::Counter(table), Limit::Counter(it)) => {
                next!(Counter, table, SmallCounter::in_a_word(it)?)
            }
            (States::WideCounter(table), Limit::Counter(it)) => {
                next!(WideCounter, table, SmallCounter::new(it)?)
            }
            (States::FineCounter(table), Limit::Counter(it)) => {
                next!(FineCounter, table, SmallCounter::new(it)?)
            }
            (States::FinestCounter(map), Limit::Counter(it)) => {
                Some(States::FinestCounter(map.next(it.clone(), when_full)))
            }
            (States::Log(map), Limit::Log(it)) => Some(States::Log(map.next(it.clone(), when_full))),
            _ => None,
        }
    }

    /// A table of the same layout for more keys, which replaces this one at `now`. None if the bounds or the bytes that
    /// are left do not allow more keys. A map grows in place.
    pub(super) fn larger(
        &self,
        limit: &Limit,
        bounds: Bounds,
        budget: &Arc<Quota>,
        bytes: usize,
        now: Time,
    ) -> Option<States> {
        macro_rules! larger {
            ($variant:ident, $table:ident, $algorithm:expr) => {{
                let reserved = Reservation::for_replacement(budget, bytes);
                let predecessor = Predecessor::new(self.clone(), limit, now);
                let larger = Table::new($algorithm, limit, bounds, reserved, Some((predecessor, now)));
                (larger.max_keys() > $table.max_keys()).then_some(States::$variant(larger))
            }};
        }
        match (self, limit) {
            (States::Bucket(table), Limit::Bucket(it)) => larger!(Bucket, table, it.narrow()?),
            (States::WideBucket(table), Limit::Bucket(it)) => larger!(WideBucket, table, it.clone()),
            (States::SteppedBucket(table), Limit::SteppedBucket(it)) => {
                larger!(SteppedBucket, table, it.clone())
            }
            (States::FixedWindow(table), Limit::FixedWindow(it)) => {
                larger!(FixedWindow, table, SmallWindow::new(it)?)
            }
            (States::WideFixedWindow(table), Limit::FixedWindow(it)) => {
                larger!(WideFixedWindow, table, it.clone())
            }
            (States::Counter(table), Limit::Counter(it)) => {
                larger!(Counter, table, SmallCounter::in_a_word(it)?)
            }
            (States::WideCounter(table), Limit::Counter(it)) => {
                larger!(WideCounter, table, SmallCounter::new(it)?)
            }
            (States::FineCounter(table), Limit::Counter(it)) => {
                larger!(FineCounter, table, SmallCounter::new(it)?)
            }
            (States::FinestCounter(map), Limit::Counter(_)) => {
                map.grow(bounds, budget, bytes);
                None
            }
            (States::Log(map), Limit::Log(_)) => {
                map.grow(bounds, budget, bytes);
                None
            }
            _ => None,
        }
    }

    /// A key's state at `now`, with the limit that it belongs to.
    pub(super) fn state(&self, hash: u64, now: Time) -> Option<(Limit, State)> {
        match self {
            States::FinestCounter(map) => {
                Some((Limit::Counter(map.algorithm().clone()), State::Counter(map.state(hash)?)))
            }
            States::Log(map) => Some((Limit::Log(map.algorithm().clone()), State::Log(map.state(hash)?))),
            States::Bucket(table) => table.state(hash, now),
            States::WideBucket(table) => table.state(hash, now),
            States::SteppedBucket(table) => table.state(hash, now),
            States::FixedWindow(table) => table.state(hash, now),
            States::WideFixedWindow(table) => table.state(hash, now),
            States::Counter(table) => table.state(hash, now),
            States::WideCounter(table) => table.state(hash, now),
            States::FineCounter(table) => table.state(hash, now),
        }
    }

    /// The states of the table's predecessor, if it has one, count until the states of `to` expire.
    pub(super) fn extend_predecessor(&self, to: &Limit, at: Time) {
        with!(self, table => table.extend_predecessor(to, at));
    }

    pub(super) fn reset(&self, hash: u64, now: Time) {
        with!(self, table => table.hold(hash, now).reset());
    }

    pub(super) fn bytes(&self) -> usize {
        with!(self, table => table.bytes() + table.predecessor_bytes())
    }

    #[inline]
    pub(super) fn decide<R>(
        &self,
        hash: u64,
        now: impl FnOnce() -> Time,
        cost: u32,
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        with!(self, table => table.decide(hash, now, cost, read))
    }
}
