//! Metrics of the HTTP API.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;

use crate::runtime::metrics::{Exposition, families};

/// The endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Check,
    Peek,
    Reset,
    Refund,
    Reserve,
    Settle,
    Authorize,
}

impl Endpoint {
    const ALL: [Endpoint; 7] = [
        Endpoint::Check,
        Endpoint::Peek,
        Endpoint::Reset,
        Endpoint::Refund,
        Endpoint::Reserve,
        Endpoint::Settle,
        Endpoint::Authorize,
    ];

    /// The endpoint's name in metrics, and in the names of idempotency records.
    pub(super) fn name(self) -> &'static str {
        match self {
            Endpoint::Check => "check",
            Endpoint::Peek => "peek",
            Endpoint::Reset => "reset",
            Endpoint::Refund => "refund",
            Endpoint::Reserve => "reserve",
            Endpoint::Settle => "settle",
            Endpoint::Authorize => "authorize",
        }
    }
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndpointOutcome {
    /// It was executed, or a peek found that it would be allowed.
    Allowed,
    /// A limit denies it.
    Denied,
    /// It is malformed or forbidden.
    Rejected,
    /// It could not be executed, or may have been executed without a result.
    Failed,
}

impl EndpointOutcome {
    /// The values of the `result` label, in the order of the variants.
    const NAMES: [&str; 4] = ["allowed", "denied", "rejected", "error"];

    /// The outcome of a request that got an error with this status.
    pub(super) fn of_error(status: StatusCode) -> EndpointOutcome {
        if status.is_server_error() { EndpointOutcome::Failed } else { EndpointOutcome::Rejected }
    }
}

/// Requests by endpoint and outcome. All labels are fixed names.
#[derive(Debug, Default)]
pub struct HttpApiMetrics {
    requests: [[AtomicU64; EndpointOutcome::NAMES.len()]; Endpoint::ALL.len()],
    pub(super) replays: AtomicU64,
    pub(super) expired_reservations: AtomicU64,
    pub(super) lost_refunds: AtomicU64,
    pub(super) dropped_responses: AtomicU64,
}

impl HttpApiMetrics {
    pub(super) fn count(&self, endpoint: Endpoint, outcome: EndpointOutcome) {
        self.requests[endpoint as usize][outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes all metrics in the Prometheus text format.
    #[doc(hidden)]
    pub fn write(&self, out: &mut Exposition) {
        out.family(&families::HTTP_API_REQUESTS);
        for endpoint in Endpoint::ALL {
            for (number, result) in EndpointOutcome::NAMES.iter().enumerate() {
                let count = self.requests[endpoint as usize][number].load(Ordering::Relaxed);
                out.sample(&families::HTTP_API_REQUESTS, &[endpoint.name(), result], count);
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
        metrics.count(Endpoint::Check, EndpointOutcome::Allowed);
        metrics.count(Endpoint::Check, EndpointOutcome::Denied);
        metrics.count(Endpoint::Authorize, EndpointOutcome::Denied);
        metrics.count(Endpoint::Settle, EndpointOutcome::of_error(StatusCode::CONFLICT));
        metrics.count(Endpoint::Settle, EndpointOutcome::of_error(StatusCode::SERVICE_UNAVAILABLE));
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
