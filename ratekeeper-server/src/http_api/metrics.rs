//! Metrics of the HTTP API.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::runtime::metrics::{Counters, Endpoint, EndpointResult, Exposition, LabelType, families};

/// Requests by endpoint and result.
#[derive(Debug, Default)]
pub struct HttpApiMetrics {
    requests: [Counters<EndpointResult>; Endpoint::ALL.len()],
    pub(super) replays: AtomicU64,
    pub(super) expired_reservations: AtomicU64,
    pub(super) lost_refunds: AtomicU64,
    pub(super) dropped_responses: AtomicU64,
}

impl HttpApiMetrics {
    pub(super) fn count(&self, endpoint: Endpoint, result: EndpointResult) {
        self.requests[endpoint.index()].count(result);
    }

    /// Writes all metrics in the text format of Prometheus.
    #[doc(hidden)]
    pub fn write(&self, out: &mut Exposition) {
        let mut requests = out.family(&families::HTTP_API_REQUESTS);
        for (endpoint, results) in Endpoint::ALL.iter().zip(&self.requests) {
            for (result, count) in results.counts() {
                requests.sample([endpoint.name(), result], count);
            }
        }
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        out.single(&families::HTTP_API_REPLAYS, read(&self.replays));
        out.single(&families::HTTP_API_IDEMPOTENCY_DROPPED, read(&self.dropped_responses));
        out.single(&families::HTTP_API_RESERVATIONS_EXPIRED, read(&self.expired_reservations));
        out.single(&families::HTTP_API_REFUNDS_LOST, read(&self.lost_refunds));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_counted_separately() {
        let metrics = HttpApiMetrics::default();
        metrics.count(Endpoint::Check, EndpointResult::Allowed);
        metrics.count(Endpoint::Check, EndpointResult::Denied);
        metrics.count(Endpoint::Authorize, EndpointResult::Denied);
        metrics.count(Endpoint::Settle, EndpointResult::of_error(409));
        metrics.count(Endpoint::Settle, EndpointResult::of_error(503));
        let mut out = Exposition::default();
        metrics.write(&mut out);
        let text = out.into_text();
        for line in [
            r#"ratekeeper_http_api_requests_total{endpoint="check",result="allowed"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="check",result="denied"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="authorize",result="denied"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="settle",result="rejected"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="settle",result="error"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="peek",result="allowed"} 0"#,
            "ratekeeper_http_api_reservations_expired_total 0",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }
}
