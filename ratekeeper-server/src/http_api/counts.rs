//! Metrics of the HTTP API.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::response::Response;

use crate::metrics::Exposition;

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

/// The outcome of a request, carried in the extensions of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// It was done, or would be allowed.
    Yes,
    /// A limit denies it.
    No,
}

/// The values of the `answer` label.
const ANSWERS: [&str; 4] = ["allowed", "denied", "refused", "failed"];

/// Requests by endpoint and outcome. All labels are fixed names.
#[derive(Debug, Default)]
pub struct Counts {
    requests: [[AtomicU64; ANSWERS.len()]; Endpoint::ALL.len()],
    pub(super) repeated: AtomicU64,
    pub(super) expired: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) unremembered: AtomicU64,
}

impl Counts {
    pub(super) fn count(&self, endpoint: Endpoint, response: &Response) {
        let answer = match response.extensions().get::<Said>() {
            Some(Said::Yes) => 0,
            Some(Said::No) => 1,
            None if response.status().is_server_error() => 3,
            None => 2,
        };
        self.requests[endpoint as usize][answer].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes all metrics in the Prometheus text format.
    #[doc(hidden)]
    pub fn write(&self, out: &mut Exposition) {
        out.family(
            "ratekeeper_http_api_requests_total",
            "counter",
            "HTTP API requests, by endpoint and result.",
        );
        for endpoint in Endpoint::ALL {
            for (number, answer) in ANSWERS.iter().enumerate() {
                let count = self.requests[endpoint as usize][number].load(Ordering::Relaxed);
                let labels = [("endpoint", endpoint.name()), ("answer", answer)];
                out.sample("ratekeeper_http_api_requests_total", &labels, count);
            }
        }
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let help = "Requests answered with the stored response of their idempotency key.";
        out.single("ratekeeper_http_api_idempotent_replays_total", "counter", help, read(&self.repeated));
        let help = "Reservations that expired without being settled.";
        out.single("ratekeeper_http_api_reservations_expired_total", "counter", help, read(&self.expired));
        let help = "Refunds that the store did not perform.";
        out.single("ratekeeper_http_api_refunds_lost_total", "counter", help, read(&self.lost));
        let help = "Responses that could not be stored under their idempotency key.";
        out.single(
            "ratekeeper_http_api_idempotency_dropped_total",
            "counter",
            help,
            read(&self.unremembered),
        );
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn outcomes_are_counted_separately() {
        let counts = Counts::default();
        let response = |status: StatusCode, said: Option<Said>| {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = status;
            said.map(|said| response.extensions_mut().insert(said));
            response
        };
        counts.count(Endpoint::Check, &response(StatusCode::OK, Some(Said::Yes)));
        counts.count(Endpoint::Check, &response(StatusCode::OK, Some(Said::No)));
        counts.count(Endpoint::Authorize, &response(StatusCode::FORBIDDEN, Some(Said::No)));
        counts.count(Endpoint::Settle, &response(StatusCode::CONFLICT, None));
        counts.count(Endpoint::Settle, &response(StatusCode::SERVICE_UNAVAILABLE, None));
        let mut out = Exposition::default();
        counts.write(&mut out);
        let text = out.into_text();
        for line in [
            r#"ratekeeper_http_api_requests_total{endpoint="check",answer="allowed"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="check",answer="denied"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="authorize",answer="denied"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="settle",answer="refused"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="settle",answer="failed"} 1"#,
            r#"ratekeeper_http_api_requests_total{endpoint="peek",answer="allowed"} 0"#,
            "ratekeeper_http_api_reservations_expired_total 0",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }
}
