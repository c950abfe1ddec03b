//! Concurrency limits: a request acquires permits when it arrives and releases them when it is finished.
//!
//! | file | where permits are counted |
//! |---|---|
//! | `memory` | in this process |
//! | `redis/concurrency`, `redis/claim`, `redis/concurrency.lua` | in Redis, for all processes together |
//!
//! Dropping a permit releases it, so a request cannot leak its permits, however it ends.

mod memory;

use std::sync::Arc;

use smallvec::SmallVec;

pub(crate) use self::memory::MemoryPermits;
use crate::store::Key;

/// The counter of a permit: one for each rule and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PermitKey {
    pub(crate) rule: usize,
    pub(crate) key: u128,
}

/// A permit that a request needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PermitRequest {
    pub(crate) key: PermitKey,
    /// Shadow: the permit is taken if one is free, and the request is not denied if none is.
    pub(crate) is_shadow: bool,
}

impl PermitRequest {
    pub(crate) fn new(rule: usize, key: Key, is_shadow: bool) -> PermitRequest {
        PermitRequest { key: PermitKey { rule, key: key.0 }, is_shadow }
    }
}

/// Whether a permit was free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PermitAvailability {
    pub(crate) is_free: bool,
    /// Permits left for other requests, as far as is known.
    pub(crate) left: u32,
}

/// The outcome of an acquisition: all enforced permits or none, and if all, each shadow permit that was free.
#[derive(Debug, Default)]
pub(crate) struct Acquisition {
    pub(crate) held: Permits,
    /// In the order of the permits requested.
    pub(crate) found: SmallVec<[PermitAvailability; 2]>,
    pub(crate) allowed: bool,
    /// Redis was unavailable, and the failure policy decided.
    pub(crate) is_degraded: bool,
    /// Denied only because Redis was unavailable.
    pub(crate) is_closed: bool,
}

/// The permits that a request holds.
pub(crate) type Permits = SmallVec<[Permit; 1]>;

/// A held permit. Dropping it releases it.
#[derive(Debug)]
pub(crate) struct Permit {
    counter: PermitCounter,
    key: PermitKey,
}

impl Permit {
    /// A permit that has already been counted.
    pub(crate) fn new(counter: PermitCounter, key: PermitKey) -> Permit {
        Permit { counter, key }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        match &self.counter {
            PermitCounter::Memory(memory) => memory.release(self.key),
            #[cfg(feature = "redis")]
            PermitCounter::Redis(redis) => redis.release(self.key),
        }
    }
}

/// Counts permits.
#[derive(Clone, Debug)]
pub(crate) enum PermitCounter {
    Memory(Arc<MemoryPermits>),
    #[cfg(feature = "redis")]
    Redis(Arc<crate::redis::SharedPermits>),
}

impl PermitCounter {
    /// Acquires all of these permits, or none. In memory the future is ready at the first poll.
    pub(crate) async fn acquire(&self, requests: &[PermitRequest]) -> Acquisition {
        match self {
            PermitCounter::Memory(memory) => memory.acquire(requests),
            #[cfg(feature = "redis")]
            PermitCounter::Redis(redis) => redis.acquire(requests).await,
        }
    }

    /// Permits that requests of this process hold, by rule.
    pub(crate) fn held(&self) -> Vec<usize> {
        match self {
            PermitCounter::Memory(memory) => memory.held(),
            #[cfg(feature = "redis")]
            PermitCounter::Redis(redis) => redis.held(),
        }
    }
}
