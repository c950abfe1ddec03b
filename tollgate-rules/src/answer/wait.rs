//! Waits in whole seconds, always rounded up: nobody who waits as long as told comes too early.

use std::time::Duration;

use tollgate_core::RetryAfter;

use super::{Applied, Situation};

/// Lengthens waits by a random part, so that those who were denied together do not come back together.
///
/// One random number serves a whole answer: every wait in it becomes longer by the same number of seconds, and so
/// `Retry-After` and `t` still agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jitter {
    /// The most seconds that are added.
    pub at_most: u64,
    /// Any random number, a new one for each answer.
    pub random: u64,
}

/// A wait in seconds, lengthened by 0 to `at_most` seconds, each as likely as the others if `random` is.
///
/// The part does not depend on how long the wait is: a window's end is the same instant for whoever waits for it.
///
/// ```
/// use tollgate_rules::answer::lengthened;
///
/// assert_eq!(lengthened(30, 0, 5), 30);
/// assert_eq!(lengthened(30, u64::MAX / 2, 5), 32);
/// assert_eq!(lengthened(30, u64::MAX, 5), 35);
/// ```
pub fn lengthened(wait: u64, random: u64, at_most: u64) -> u64 {
    // Below 2^64: the random number is a fraction of 2^64, and shifted out again.
    let more = (u128::from(random) * (u128::from(at_most) + 1)) >> 64;
    wait.saturating_add(more as u64)
}

pub(super) fn seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0))
}

impl Applied<'_> {
    /// How long its client has to wait for this limit: until the same request passes if it was denied, else until the
    /// key is as good as new. None if waiting does not help.
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

    /// The wait in whole seconds, at least one for who was denied.
    fn whole(&self, wait: Duration) -> u64 {
        seconds(wait).max(u64::from(!self.decision.allowed))
    }

    /// What is added to the wait of those that do wait: who was denied, or has nothing left.
    fn added(&self, situation: &Situation) -> u64 {
        match situation.jitter {
            Some(Jitter { at_most, random }) if !self.decision.allowed || self.decision.remaining == 0 => {
                lengthened(0, random, at_most)
            }
            _ => 0,
        }
    }

    /// The effective window, `t`. None if waiting does not help.
    pub(super) fn until(&self, situation: &Situation) -> Option<u64> {
        let wait = self.whole(self.wait()?);
        Some(wait.saturating_add(self.added(situation)))
    }

    /// Until the limit admits again, or is as good as new where waiting for the former does not help.
    fn reset(&self) -> Duration {
        self.wait().unwrap_or(self.decision.reset_after)
    }

    /// The seconds until then.
    pub(super) fn reset_delta(&self, situation: &Situation) -> u64 {
        self.whole(self.reset()).saturating_add(self.added(situation))
    }

    /// The instant, in seconds since the epoch.
    ///
    /// Rounded once, from the exact instant: now and the wait rounded each for itself could be a second too early, or
    /// a second late for a window that ends on a whole one.
    pub(super) fn reset_epoch(&self, situation: &Situation) -> u64 {
        let now = Duration::from_nanos(situation.now.as_nanos());
        seconds(now.saturating_add(self.reset())).saturating_add(self.added(situation))
    }
}

/// The wait after which every limit admits the request, if there is one: never before the `t` of a limit that denied.
pub(super) fn retry_after(limits: &[Applied], situation: &Situation) -> Option<u64> {
    let denied = || limits.iter().filter(|applied| !applied.decision.allowed);
    if denied().any(|applied| applied.wait().is_none()) {
        return None;
    }
    denied().filter_map(|applied| applied.until(situation)).max()
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
    fn every_part_up_to_the_most_is_drawn_and_none_shortens() {
        let drawn: Vec<u64> = (0..=255u64).map(|random| lengthened(10, random << 56, 3)).collect();
        for part in 10..=13 {
            assert_eq!(drawn.iter().filter(|wait| **wait == part).count(), 64, "{part}");
        }
        assert_eq!(lengthened(7, u64::MAX, 0), 7);
        assert_eq!(lengthened(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(lengthened(0, u64::MAX, u64::MAX), u64::MAX);
    }
}
