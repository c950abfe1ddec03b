//! What is counted of requests: how many, how costly, and how long the denied would have to wait.

use foldhash::fast::RandomState;
use indexmap::IndexSet;
use tollgate::{Decision, RetryAfter, Time};

use crate::Request;

/// Counts of requests and of their cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) asked: u64,
    pub(crate) admitted: u64,
    pub(crate) units_asked: u64,
    pub(crate) units_admitted: u64,
    pub(crate) worst_wait: RetryAfter,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally { asked: 0, admitted: 0, units_asked: 0, units_admitted: 0, worst_wait: RetryAfter::Now }
    }
}

impl Tally {
    #[inline]
    pub(crate) fn count(&mut self, cost: u32, decision: &Decision) {
        self.asked += 1;
        self.units_asked = self.units_asked.saturating_add(u64::from(cost));
        if decision.allowed {
            self.admitted += 1;
            self.units_admitted = self.units_admitted.saturating_add(u64::from(cost));
        } else {
            self.worst_wait = self.worst_wait.max(decision.retry_after);
        }
    }

    pub(crate) fn denied(&self) -> u64 {
        self.asked - self.admitted
    }

    pub(crate) fn and(self, other: Tally) -> Tally {
        Tally {
            asked: self.asked + other.asked,
            admitted: self.admitted + other.admitted,
            units_asked: self.units_asked.saturating_add(other.units_asked),
            units_admitted: self.units_admitted.saturating_add(other.units_admitted),
            worst_wait: self.worst_wait.max(other.worst_wait),
        }
    }
}

/// The keys that are followed one by one, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    names: IndexSet<Box<str>, RandomState>,
    bytes: usize,
    is_full: bool,
}

/// So many keys are followed one by one.
pub(crate) const KEYS_MAX: usize = 100_000;
/// So many bytes of their names are kept.
const KEY_BYTES_MAX: usize = 64 << 20;

impl Keys {
    /// The key's number; none if it came when there was room for no more.
    #[inline]
    pub(crate) fn number(&mut self, key: &str) -> Option<usize> {
        match self.names.get_index_of(key) {
            Some(number) => Some(number),
            None => self.enter(key),
        }
    }

    fn enter(&mut self, key: &str) -> Option<usize> {
        if self.names.len() >= KEYS_MAX || self.bytes + key.len() > KEY_BYTES_MAX {
            self.is_full = true;
            return None;
        }
        self.bytes += key.len();
        Some(self.names.insert_full(key.into()).0)
    }

    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    pub(crate) fn name(&self, number: usize) -> &str {
        self.names.get_index(number).map_or("", |name| name)
    }

    /// Whether some keys came too late to be followed.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full
    }
}

/// The first and last instant of a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) first: Time,
    pub(crate) last: Time,
}

impl Span {
    #[inline]
    pub(crate) fn include(span: &mut Option<Span>, request: &Request<'_>) {
        let at = request.time;
        let span = span.get_or_insert(Span { first: at, last: at });
        span.first = span.first.min(at);
        span.last = span.last.max(at);
    }
}
