//! Concurrency limits: a request acquires permits when it arrives and releases them when it is finished.
//!
//! | file | where permits are counted |
//! |---|---|
//! | `memory` | in this process |
//! | `redis/concurrency`, `redis/claim`, `redis/concurrency.lua` | in Redis, for all processes together |
//!
//! Dropping a permit releases it, so a request cannot leak its permits, however it ends.
//!
//! All configurations of a process count in one place: a permit that a request has taken before a reload counts towards
//! the limit of the same name after it, until the request is finished.

mod memory;

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::sync::Arc;

use foldhash::fast::FixedState;
use smallvec::SmallVec;

pub(crate) use self::memory::MemoryPermits;
use crate::store::Key;

/// Identifies a concurrency limit across reloads: a hash of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LimitId(u64);

impl LimitId {
    pub(crate) fn of(name: &str) -> LimitId {
        LimitId(FixedState::default().hash_one(name))
    }
}

/// The counter of a permit: one for each limit and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PermitKey {
    pub(crate) limit: LimitId,
    pub(crate) key: u128,
}

impl PermitKey {
    /// The shard of a counter. Keys are already hashes; the limit is added so that one key's limits are in different
    /// shards.
    pub(crate) fn shard(self, shards: usize) -> usize {
        (self.key as usize).wrapping_add(self.limit.0 as usize) % shards
    }
}

/// A permit that a request needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PermitRequest {
    /// The index of the limit.
    pub(crate) rule: usize,
    pub(crate) key: PermitKey,
    /// The limit.
    pub(crate) max: u32,
    /// Shadow: the permit is taken if one is free, and the request is not denied if none is.
    pub(crate) is_shadow: bool,
}

impl PermitRequest {
    pub(crate) fn new(rule: usize, limit: LimitId, key: Key, max: u32, is_shadow: bool) -> PermitRequest {
        PermitRequest { rule, key: PermitKey { limit, key: key.0 }, max, is_shadow }
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
    counts: PermitCounts,
    key: PermitKey,
}

impl Permit {
    /// A permit that has already been counted.
    pub(crate) fn new(counts: PermitCounts, key: PermitKey) -> Permit {
        Permit { counts, key }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        match &self.counts {
            PermitCounts::Memory(memory) => memory.release(self.key),
            #[cfg(feature = "redis")]
            PermitCounts::Redis(redis) => redis.release(self.key),
        }
    }
}

/// The permits of all configurations of this process.
#[derive(Debug)]
pub(crate) enum PermitCounts {
    Memory(Arc<MemoryPermits>),
    #[cfg(feature = "redis")]
    Redis(Arc<crate::redis::SharedPermits>),
}

/// Counts the permits of one configuration.
#[derive(Clone, Debug)]
pub(crate) enum PermitCounter {
    Memory(Arc<MemoryPermits>),
    #[cfg(feature = "redis")]
    Redis(Arc<crate::redis::SharedPermits>, Arc<crate::redis::PermitNames>),
}

impl PermitCounter {
    /// Acquires all of these permits, or none. In memory the future is ready at the first poll.
    pub(crate) async fn acquire(&self, requests: &[PermitRequest]) -> Acquisition {
        match self {
            PermitCounter::Memory(memory) => memory.acquire(requests),
            #[cfg(feature = "redis")]
            PermitCounter::Redis(redis, names) => redis.acquire(requests, names).await,
        }
    }

    /// Permits that requests of this process hold, by limit.
    pub(crate) fn held(&self, limits: &[LimitId]) -> Vec<usize> {
        let mut held: HashMap<LimitId, usize> = limits.iter().map(|limit| (*limit, 0)).collect();
        let mut add = |key: &PermitKey, permits: u32| {
            if let Some(held) = held.get_mut(&key.limit) {
                *held += permits as usize;
            }
        };
        match self {
            PermitCounter::Memory(memory) => memory.each(&mut add),
            #[cfg(feature = "redis")]
            PermitCounter::Redis(redis, _) => redis.each(&mut add),
        }
        limits.iter().map(|limit| held.get(limit).copied().unwrap_or(0)).collect()
    }
}
