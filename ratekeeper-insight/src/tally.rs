//! Counters: requests, costs, and the longest wait of denied requests.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use ratekeeper::{Decision, RetryAfter, Time};

use crate::Batch;
use crate::batch::{KeyHash, Line};

/// Counts of requests and of their costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) allowed: u64,
    pub(crate) units: u64,
    pub(crate) units_allowed: u64,
    pub(crate) longest_wait: RetryAfter,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally { requests: 0, allowed: 0, units: 0, units_allowed: 0, longest_wait: RetryAfter::Now }
    }
}

impl Tally {
    #[inline]
    pub(crate) fn count(&mut self, cost: u32, decision: &Decision) {
        self.requests += 1;
        self.units = self.units.saturating_add(u64::from(cost));
        if decision.allowed {
            self.allowed += 1;
            self.units_allowed = self.units_allowed.saturating_add(u64::from(cost));
        } else {
            self.longest_wait = self.longest_wait.max(decision.retry_after);
        }
    }

    pub(crate) fn denied(&self) -> u64 {
        self.requests - self.allowed
    }

    pub(crate) fn and(self, other: Tally) -> Tally {
        Tally {
            requests: self.requests + other.requests,
            allowed: self.allowed + other.allowed,
            units: self.units.saturating_add(other.units),
            units_allowed: self.units_allowed.saturating_add(other.units_allowed),
            longest_wait: self.longest_wait.max(other.longest_wait),
        }
    }
}

/// The keys with individual statistics, numbered in order of first appearance.
///
/// Keys are looked up by hash. Names are kept only for the report; comparing them would add a cache miss to each
/// request.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    numbers: HashMap<KeyHash, u32, BuildHasherDefault<Hashed>>,
    names: Vec<Box<str>>,
    bytes: usize,
    is_full: bool,
}

/// A hasher that passes an existing hash through.
#[derive(Debug, Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0 << 8 | u64::from(byte);
        }
    }

    #[inline]
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// Keys with individual statistics.
pub(crate) const KEYS_MAX: usize = 100_000;
/// Total bytes of their names.
const KEY_BYTES_MAX: usize = 64 << 20;

impl Keys {
    /// Replaces `numbers` with those of the batch's keys; `None` for keys first seen after the table was full.
    #[inline]
    pub(crate) fn numbers(&mut self, batch: &Batch, numbers: &mut Vec<Option<u32>>) {
        numbers.clear();
        numbers.extend(batch.lines().iter().map(|line| match self.numbers.get(&line.key) {
            Some(number) => Some(*number),
            None => self.enter(batch, line),
        }));
    }

    #[cold]
    fn enter(&mut self, batch: &Batch, line: &Line) -> Option<u32> {
        let key = batch.key(line);
        if self.names.len() >= KEYS_MAX || self.bytes + key.len() > KEY_BYTES_MAX {
            self.is_full = true;
            return None;
        }
        let number = u32::try_from(self.names.len()).ok()?;
        self.bytes += key.len();
        self.names.push(key.into());
        self.numbers.insert(line.key, number);
        Some(number)
    }

    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    pub(crate) fn name(&self, number: usize) -> &str {
        self.names.get(number).map_or("", |name| name)
    }

    /// Returns true if some keys have no individual statistics because the table is full.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full
    }
}

/// Loads the rows of a batch into the cache before the first is used; the loads do not depend on each other.
#[inline]
pub(crate) fn fetch<T>(rows: &[T], numbers: &[Option<u32>], touch: impl Fn(&T) -> u64) {
    let rows = numbers.iter().filter_map(|number| rows.get((*number)? as usize));
    std::hint::black_box(rows.fold(0, |all, row| all ^ touch(row)));
}

/// The first and last instant of a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) first: Time,
    pub(crate) last: Time,
}

impl Span {
    #[inline]
    pub(crate) fn include(span: &mut Option<Span>, at: Time) {
        let span = span.get_or_insert(Span { first: at, last: at });
        span.first = span.first.min(at);
        span.last = span.last.max(at);
    }
}
