//! Concurrency limits: a request acquires permits when it arrives and releases them when it is finished.
//!
//! | file | where permits are counted |
//! |---|---|
//! | `memory` | in this process |
//! | `redis/slots`, `redis/claim`, `redis/slots.lua` | in Redis, for all processes together |
//!
//! Dropping a permit releases it, so a request cannot leak its permits, however it ends.

mod memory;

use std::sync::Arc;

use smallvec::SmallVec;

pub(crate) use self::memory::Memory;
use crate::store::Key;

/// The counter of a permit: one for each rule and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) rule: usize,
    pub(crate) key: u128,
}

/// A permit that a request needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) place: Place,
    /// Shadow: the permit is taken if one is free, and the request is not denied if none is.
    pub(crate) is_shadow: bool,
}

impl Wanted {
    pub(crate) fn new(rule: usize, key: Key, is_shadow: bool) -> Wanted {
        Wanted { place: Place { rule, key: key.0 }, is_shadow }
    }
}

/// Whether a permit was free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) is_free: bool,
    /// Permits left for other requests, as far as is known.
    pub(crate) left: u32,
}

/// The outcome of an acquisition: all enforced permits or none, and if all, each shadow permit that was free.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) held: Held,
    /// In the order of the permits requested.
    pub(crate) found: SmallVec<[Found; 2]>,
    pub(crate) allowed: bool,
    /// Redis was unavailable, and the failure policy decided.
    pub(crate) is_degraded: bool,
    /// Denied only because Redis was unavailable.
    pub(crate) is_closed: bool,
}

/// The permits that a request holds.
pub(crate) type Held = SmallVec<[Slot; 1]>;

/// A held permit. Dropping it releases it.
#[derive(Debug)]
pub(crate) struct Slot {
    counter: Counter,
    place: Place,
}

impl Slot {
    /// A permit that has already been counted.
    pub(crate) fn new(counter: Counter, place: Place) -> Slot {
        Slot { counter, place }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        match &self.counter {
            Counter::Memory(memory) => memory.refund(self.place),
            #[cfg(feature = "redis")]
            Counter::Redis(redis) => redis.refund(self.place),
        }
    }
}

/// Counts permits.
#[derive(Clone, Debug)]
pub(crate) enum Counter {
    Memory(Arc<Memory>),
    #[cfg(feature = "redis")]
    Redis(Arc<crate::redis::Slots>),
}

impl Counter {
    /// Acquires all of these permits, or none. In memory the future is ready at the first poll.
    pub(crate) async fn take(&self, wanted: &[Wanted]) -> Taken {
        match self {
            Counter::Memory(memory) => memory.take(wanted),
            #[cfg(feature = "redis")]
            Counter::Redis(redis) => redis.take(wanted).await,
        }
    }

    /// Permits that requests of this process hold, by rule.
    pub(crate) fn held(&self) -> Vec<usize> {
        match self {
            Counter::Memory(memory) => memory.held(),
            #[cfg(feature = "redis")]
            Counter::Redis(redis) => redis.held(),
        }
    }
}
