//! Metrics of the Envoy API.

use crate::runtime::metrics::{CallOutcome, Counters, Exposition, families};

/// Calls by outcome.
#[derive(Debug, Default)]
pub struct EnvoyMetrics(Counters<CallOutcome>);

impl EnvoyMetrics {
    pub(super) fn count(&self, outcome: CallOutcome) {
        self.0.count(outcome);
    }

    /// Writes the metrics in the text format of Prometheus.
    pub fn write(&self, out: &mut Exposition) {
        let mut requests = out.family(&families::ENVOY_API_REQUESTS);
        for (result, count) in self.0.counts() {
            requests.sample([result], count);
        }
    }
}
