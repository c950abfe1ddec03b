//! Metrics of the Envoy API.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::runtime::metrics::{Exposition, families};

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallOutcome {
    Allowed,
    Denied,
    /// Allowed only because the limit that would deny it is a shadow limit.
    WouldDeny,
    Error,
}

const RESULTS: [&str; 4] = ["allowed", "denied", "would_deny", "error"];

/// Calls by outcome.
#[derive(Debug, Default)]
pub struct EnvoyMetrics([AtomicU64; RESULTS.len()]);

impl EnvoyMetrics {
    pub(super) fn count(&self, outcome: CallOutcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the metrics in the Prometheus text format.
    pub fn write(&self, out: &mut Exposition) {
        out.family(&families::ENVOY_API_REQUESTS);
        for (result, count) in RESULTS.iter().zip(&self.0) {
            out.sample(&families::ENVOY_API_REQUESTS, &[result], count.load(Ordering::Relaxed));
        }
    }
}
