//! Circuit breaker: stops calls to a store that does not answer, and detects when it answers again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ratekeeper_core::Time;

/// Closed while the store answers. It opens after [`FAILURES_MAX`] consecutive failures; then one request per
/// [`PROBE_EVERY`] probes the store. The first answer closes it.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: AtomicU32,
    /// Time of the next probe, in nanoseconds since the epoch.
    next_probe_ns: AtomicU64,
}

/// Consecutive failures that open the breaker.
const FAILURES_MAX: u32 = 5;
/// Interval of probes while the breaker is open.
pub(crate) const PROBE_EVERY: Duration = Duration::from_millis(100);

impl Breaker {
    /// Whether a request may call the store.
    pub(crate) fn allows_call(&self, now: Time) -> bool {
        if self.failures.load(Ordering::Relaxed) < FAILURES_MAX {
            return true;
        }
        let next_probe_ns = self.next_probe_ns.load(Ordering::Relaxed);
        let after = now.saturating_add(PROBE_EVERY).as_nanos();
        now.as_nanos() >= next_probe_ns
            && self
                .next_probe_ns
                .compare_exchange(next_probe_ns, after, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    pub(crate) fn record_success(&self) {
        // Usually zero already: a read keeps the cache line shared among cores, a write would not.
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn record_failure(&self, now: Time) {
        // Only the failure that opens the breaker sets the next probe; late failures of earlier requests must not
        // postpone it.
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 == FAILURES_MAX {
            self.next_probe_ns.store(now.saturating_add(PROBE_EVERY).as_nanos(), Ordering::Relaxed);
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
    fn opens_after_five_failures_and_probes_with_one_request() {
        let breaker = Breaker::default();
        let now = Time::from_secs(1_700_000_000);
        for _ in 1..FAILURES_MAX {
            breaker.record_failure(now);
            assert!(breaker.allows_call(now));
        }
        breaker.record_failure(now);
        assert!(breaker.is_open() && !breaker.allows_call(now));

        let later = now.saturating_add(PROBE_EVERY);
        assert!(breaker.allows_call(later), "one request probes the store");
        assert!(!breaker.allows_call(later), "only one request probes");
        breaker.record_failure(later);
        assert!(!breaker.allows_call(later));
        assert!(breaker.allows_call(later.saturating_add(PROBE_EVERY)));

        breaker.record_success();
        assert!(!breaker.is_open() && breaker.allows_call(later) && breaker.allows_call(later));
    }
}
