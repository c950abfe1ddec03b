//! Outlier ejection: an address with consecutive failures receives no requests for a while.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ratekeeper_config::OutlierEjection;

use crate::gateway::timer::Ticks;

/// The consecutive failures of an address, and its ejection.
#[derive(Debug, Default)]
pub(super) struct Ejection {
    failures: AtomicU32,
    /// End of the ejection, in milliseconds.
    until: AtomicU64,
}

impl Ejection {
    pub(super) fn is_ejected(&self, now: Ticks) -> bool {
        self.until.load(Ordering::Relaxed) > now.as_millis()
    }

    pub(super) fn record_success(&self) {
        // Usually there are no failures, and a read does not take the cache line from other workers.
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Returns true if this failure ejects the address.
    pub(super) fn record_failure(&self, settings: &OutlierEjection, now: Ticks) -> bool {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if failures < settings.after {
            return false;
        }
        self.failures.store(0, Ordering::Relaxed);
        self.until.store(now.after(settings.lasts).as_millis(), Ordering::Relaxed);
        true
    }
}
