//! What has happened.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::metrics::Exposition;

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Ok,
    OverLimit,
    /// It passed, but only because a limit that would deny it just counts.
    Shadow,
    Error,
}

const NAMES: [&str; 4] = ["ok", "over_limit", "shadow", "error"];

/// What has become of the calls, as numbers.
#[derive(Debug, Default)]
pub struct Counts([AtomicU64; NAMES.len()]);

impl Counts {
    pub(super) fn count(&self, outcome: Outcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes them in the text format of Prometheus.
    pub fn write(&self, out: &mut Exposition) {
        let name = "tollgate_rls_requests_total";
        out.family(name, "counter", "What Envoy was told about requests, by outcome.");
        for (outcome, count) in NAMES.iter().zip(&self.0) {
            out.sample(name, &[("outcome", outcome)], count.load(Ordering::Relaxed));
        }
    }
}
