use std::time::Duration;

/// How long to wait before the same request would be admitted, if nobody else came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetryAfter {
    /// It was admitted.
    Now,
    /// Denied at every instant before this wait is over, admitted at its end.
    After(Duration),
    /// The cost exceeds what the limit can ever hold.
    Never,
}

/// What a limit says to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether the request may pass.
    pub allowed: bool,
    /// The limit or capacity that was applied.
    pub limit: u32,
    /// How much could still be taken at this instant, after this request.
    pub remaining: u32,
    /// How long to wait before trying again.
    pub retry_after: RetryAfter,
    /// How long until the key is as good as new, rounded up to the nanosecond.
    pub reset_after: Duration,
    /// How long an admitted request must be held back before it goes on. Zero but for a shaping leaky bucket.
    pub delay: Duration,
}

impl Decision {
    /// The decision of two limits that a request must pass together.
    ///
    /// It is allowed if both allow it; waits are the longer of the two; `limit` and `remaining` are those of the
    /// limit that binds: the one that denies (with the longer wait if both do), else the one with less remaining.
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
