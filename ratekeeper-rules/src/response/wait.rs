//! Waits in whole seconds, always rounded up: a client that waits as stated never retries too early.

use std::time::Duration;

use ratekeeper_core::RetryAfter;

use super::{LimitDecision, ResponseContext};

/// Lengthens waits randomly, so that clients that were denied together do not retry together.
///
/// One random number is used for a whole response: every wait in it grows by the same number of seconds, so
/// `Retry-After` and `t` still agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jitter {
    /// Maximum seconds added.
    pub at_most: u64,
    /// Any random number, a new one for each response.
    pub random: u64,
}

/// A wait in seconds, lengthened by 0 to `at_most` seconds, uniformly distributed if `random` is.
///
/// The addition does not depend on the length of the wait, because a window ends at the same instant for all its
/// clients.
///
/// ```
/// use ratekeeper_rules::response::add_jitter;
///
/// assert_eq!(add_jitter(30, 0, 5), 30);
/// assert_eq!(add_jitter(30, u64::MAX / 2, 5), 32);
/// assert_eq!(add_jitter(30, u64::MAX, 5), 35);
/// ```
pub fn add_jitter(wait: u64, random: u64, at_most: u64) -> u64 {
    // The random number is a fraction of 2^64, so the shifted product is at most `at_most`.
    let more = (u128::from(random) * (u128::from(at_most) + 1)) >> 64;
    wait.saturating_add(more as u64)
}

pub(super) fn seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0))
}

impl LimitDecision<'_> {
    /// How long the client has to wait for this limit: until the same request is allowed if it was denied, else until
    /// the key has its full budget. None if waiting does not help.
    fn wait(&self) -> Option<Duration> {
        if self.decision.allowed {
            return Some(self.decision.reset_after);
        }
        match self.decision.retry_after {
            RetryAfter::After(wait) => Some(wait),
            RetryAfter::Now => Some(Duration::ZERO),
            RetryAfter::Never => None,
        }
    }

    /// The wait in whole seconds, at least one for a denied request.
    fn whole(&self, wait: Duration) -> u64 {
        seconds(wait).max(u64::from(!self.decision.allowed))
    }

    /// Seconds added to the wait if the request was denied or nothing remains; zero otherwise.
    fn added(&self, context: &ResponseContext) -> u64 {
        match context.jitter {
            Some(Jitter { at_most, random }) if !self.decision.allowed || self.decision.remaining == 0 => {
                add_jitter(0, random, at_most)
            }
            _ => 0,
        }
    }

    /// The effective window, `t`. None if waiting does not help.
    pub(super) fn until(&self, context: &ResponseContext) -> Option<u64> {
        let wait = self.whole(self.wait()?);
        Some(wait.saturating_add(self.added(context)))
    }

    /// Time until the limit allows the request, or until the key has its full budget if waiting does not help.
    fn reset(&self) -> Duration {
        self.wait().unwrap_or(self.decision.reset_after)
    }

    /// `reset` in whole seconds.
    pub(super) fn reset_delta(&self, context: &ResponseContext) -> u64 {
        self.whole(self.reset()).saturating_add(self.added(context))
    }

    /// The instant of `reset`, in seconds since the epoch.
    ///
    /// Rounded once, from the exact instant: rounding now and the wait separately could be a second too early, or a
    /// second late for a window that ends on a whole second.
    pub(super) fn reset_epoch(&self, context: &ResponseContext) -> u64 {
        let now = Duration::from_nanos(context.now.as_nanos());
        seconds(now.saturating_add(self.reset())).saturating_add(self.added(context))
    }
}

/// The wait after which every limit allows the request, if any: never shorter than the `t` of a limit that denied.
pub(super) fn retry_after(limits: &[LimitDecision], context: &ResponseContext) -> Option<u64> {
    let denied = || limits.iter().filter(|limit_decision| !limit_decision.decision.allowed);
    if denied().any(|limit_decision| limit_decision.wait().is_none()) {
        return None;
    }
    denied().filter_map(|limit_decision| limit_decision.until(context)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_rounded_up() {
        for (nanos, expected) in
            [(0, 0), (1, 1), (999_999_999, 1), (1_000_000_000, 1), (1_000_000_001, 2), (59_000_000_001, 60)]
        {
            assert_eq!(seconds(Duration::from_nanos(nanos)), expected, "{nanos} ns");
        }
        assert_eq!(seconds(Duration::MAX), u64::MAX);
    }

    #[test]
    fn jitter_is_uniform_up_to_its_maximum_and_never_shortens() {
        let drawn: Vec<u64> = (0..=255u64).map(|random| add_jitter(10, random << 56, 3)).collect();
        for part in 10..=13 {
            assert_eq!(drawn.iter().filter(|wait| **wait == part).count(), 64, "{part}");
        }
        assert_eq!(add_jitter(7, u64::MAX, 0), 7);
        assert_eq!(add_jitter(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(add_jitter(0, u64::MAX, u64::MAX), u64::MAX);
    }
}
