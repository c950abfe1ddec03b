//! How many requests are under way: slots that are taken when a request comes, and given back when it is over.
//!
//! | file | where they are counted |
//! |---|---|
//! | `memory` | in this process |
//! | `redis/slots`, `redis/claim`, `redis/slots.lua` | in Redis, for all processes together |
//!
//! A slot is a value, and dropping it gives it back: whatever becomes of a request, its slots do not stay behind.

mod memory;

use std::sync::Arc;

use smallvec::SmallVec;

pub(crate) use self::memory::Memory;
use crate::store::Key;

/// Where a request is counted: by which rule, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) rule: usize,
    pub(crate) key: u128,
}

/// A slot that a request wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) place: Place,
    /// It is counted if there is one, and nobody is denied if there is none.
    pub(crate) is_shadow: bool,
}

impl Wanted {
    pub(crate) fn new(rule: usize, key: Key, is_shadow: bool) -> Wanted {
        Wanted { place: Place { rule, key: key.0 }, is_shadow }
    }
}

/// Whether there was a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) is_free: bool,
    /// How many are left for others, as far as is known.
    pub(crate) left: u32,
}

/// What a request has got: all the slots that it wanted, or none. Of those that are only counted, each that was free.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) held: Held,
    /// In the order of what was wanted.
    pub(crate) found: SmallVec<[Found; 2]>,
    pub(crate) allowed: bool,
    /// Redis did not answer, and its policy did.
    pub(crate) is_degraded: bool,
    /// It is denied only for that.
    pub(crate) is_closed: bool,
}

/// Slots of a request.
pub(crate) type Held = SmallVec<[Slot; 1]>;

/// A slot that is taken. It is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    counter: Counter,
    place: Place,
}

impl Slot {
    /// One that has been counted.
    pub(crate) fn new(counter: Counter, place: Place) -> Slot {
        Slot { counter, place }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        match &self.counter {
            Counter::Memory(memory) => memory.give_back(self.place),
            #[cfg(feature = "redis")]
            Counter::Redis(redis) => redis.give_back(self.place),
        }
    }
}

/// Counts slots.
#[derive(Clone, Debug)]
pub(crate) enum Counter {
    Memory(Arc<Memory>),
    #[cfg(feature = "redis")]
    Redis(Arc<crate::redis::Slots>),
}

impl Counter {
    /// Takes all of these, or none. In memory the answer is there at once.
    pub(crate) async fn take(&self, wanted: &[Wanted]) -> Taken {
        match self {
            Counter::Memory(memory) => memory.take(wanted),
            #[cfg(feature = "redis")]
            Counter::Redis(redis) => redis.take(wanted).await,
        }
    }

    /// How many requests of this process are under way, by rule.
    pub(crate) fn held(&self) -> Vec<usize> {
        match self {
            Counter::Memory(memory) => memory.held(),
            #[cfg(feature = "redis")]
            Counter::Redis(redis) => redis.held(),
        }
    }
}
