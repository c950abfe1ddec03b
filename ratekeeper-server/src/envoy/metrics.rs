//! Metrics of the Envoy API.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::runtime::metrics::Exposition;

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallOutcome {
    Ok,
    OverLimit,
    /// Allowed only because the limit that would deny it is a shadow limit.
    Shadow,
    Error,
}

const RESULTS: [&str; 4] = ["ok", "over_limit", "shadow", "error"];

/// Calls by outcome.
#[derive(Debug, Default)]
pub struct EnvoyMetrics([AtomicU64; RESULTS.len()]);

impl EnvoyMetrics {
    pub(super) fn count(&self, outcome: CallOutcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the metrics in the Prometheus text format.
    pub fn write(&self, out: &mut Exposition) {
        let name = "ratekeeper_envoy_requests_total";
        out.family(name, "counter", "Envoy API requests, by result.");
        for (outcome, count) in RESULTS.iter().zip(&self.0) {
            out.sample(name, &[("result", outcome)], count.load(Ordering::Relaxed));
        }
    }
}
