//! Stops waiting for a store that does not answer, and finds out when it does again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tollgate_core::Time;

/// Closed while the store answers. After a few failures in a row it opens: nobody waits for the store then, but for
/// one request every now and then that tries. The first that is answered closes it.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: AtomicU32,
    /// When the next request tries, in nanoseconds since the epoch.
    next_try_ns: AtomicU64,
}

/// Failures in a row that open it.
const FAILURES_MAX: u32 = 5;
/// How often a request tries while it is open.
pub(crate) const TRY_EVERY: Duration = Duration::from_millis(100);

impl Breaker {
    /// Whether a request may ask the store.
    pub(crate) fn lets_ask(&self, now: Time) -> bool {
        if self.failures.load(Ordering::Relaxed) < FAILURES_MAX {
            return true;
        }
        let next_try_ns = self.next_try_ns.load(Ordering::Relaxed);
        let after = now.saturating_add(TRY_EVERY).as_nanos();
        now.as_nanos() >= next_try_ns
            && self
                .next_try_ns
                .compare_exchange(next_try_ns, after, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    pub(crate) fn answered(&self) {
        // Mostly it is zero already, and reading shares the line among cores where writing would not.
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn failed(&self, now: Time) {
        // Those that had asked before it opened come back one after the other: they do not put off the next try.
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 == FAILURES_MAX {
            self.next_try_ns.store(now.saturating_add(TRY_EVERY).as_nanos(), Ordering::Relaxed);
        }
        if self.failures.load(Ordering::Relaxed) > u32::MAX / 2 {
            self.failures.store(FAILURES_MAX, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= FAILURES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_a_few_failures_and_one_request_at_a_time_tries() {
        let breaker = Breaker::default();
        let now = Time::from_secs(1_700_000_000);
        for _ in 1..FAILURES_MAX {
            breaker.failed(now);
            assert!(breaker.lets_ask(now));
        }
        breaker.failed(now);
        assert!(breaker.is_open() && !breaker.lets_ask(now));

        let later = now.saturating_add(TRY_EVERY);
        assert!(breaker.lets_ask(later), "one tries");
        assert!(!breaker.lets_ask(later), "and the others do not");
        breaker.failed(later);
        assert!(!breaker.lets_ask(later));
        assert!(breaker.lets_ask(later.saturating_add(TRY_EVERY)));

        breaker.answered();
        assert!(!breaker.is_open() && breaker.lets_ask(later) && breaker.lets_ask(later));
    }
}
