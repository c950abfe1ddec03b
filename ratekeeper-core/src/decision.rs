use std::time::Duration;

/// How long to wait until the same request is allowed, if no other request is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetryAfter {
    /// The request was allowed.
    Now,
    /// The request is denied at every instant before this wait is over, and allowed at its end.
    After(Duration),
    /// The cost exceeds what the limit can ever hold.
    Never,
}

impl RetryAfter {
    /// For a request to a limit that holds at most `limit` units. `wait` computes the wait of a denied request.
    #[inline(always)]
    pub(crate) fn of(is_allowed: bool, cost: u32, limit: u32, wait: impl FnOnce() -> Duration) -> RetryAfter {
        if is_allowed {
            RetryAfter::Now
        } else if cost > limit {
            RetryAfter::Never
        } else {
            RetryAfter::After(wait())
        }
    }
}

/// The outcome of one limit for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether the request is allowed.
    pub allowed: bool,
    /// The limit or capacity that was applied.
    pub limit: u32,
    /// Units that can still be charged at this instant, after this request; [`UNKNOWN`](Decision::UNKNOWN) if a
    /// failure policy allowed the request without a store.
    pub remaining: u32,
    /// How long to wait before a retry.
    pub retry_after: RetryAfter,
    /// Time until the key has its full budget, rounded up to the nanosecond.
    pub reset_after: Duration,
    /// How long to delay an allowed request. Zero except for a shaping leaky bucket.
    pub delay: Duration,
}

impl Decision {
    /// The value of `remaining` if it is unknown. A limit of this size is never unknown.
    pub const UNKNOWN: u32 = u32::MAX;

    /// Units that can still be charged, if they are known. Otherwise, the time until the full budget is not known
    /// either.
    pub fn known_remaining(&self) -> Option<u32> {
        let is_unknown = self.remaining == Decision::UNKNOWN && self.limit != Decision::UNKNOWN;
        (!is_unknown).then_some(self.remaining)
    }

    /// The combined decision of two limits that both apply to a request.
    ///
    /// It is allowed if both allow it. Waits are the longer of the two. `limit` and `remaining` are those of the
    /// binding limit: the one that denies (with the longer wait if both do), else the one with less remaining.
    #[must_use]
    pub fn and(self, other: Decision) -> Decision {
        let other_binds = match (self.allowed, other.allowed) {
            (true, false) => true,
            (false, true) => false,
            (false, false) => other.retry_after > self.retry_after,
            (true, true) => other.remaining < self.remaining,
        };
        let binding = if other_binds { other } else { self };
        let allowed = self.allowed && other.allowed;
        Decision {
            allowed,
            limit: binding.limit,
            remaining: binding.remaining,
            retry_after: binding.retry_after,
            reset_after: self.reset_after.max(other.reset_after),
            delay: if allowed { self.delay.max(other.delay) } else { Duration::ZERO },
        }
    }
}
