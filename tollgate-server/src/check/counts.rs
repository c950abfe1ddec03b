//! What has happened at this door, counted.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::response::Response;

use crate::metrics::Exposition;

/// What can be asked.
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

    /// Its name in metrics, and in what idempotency keys are kept under.
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

/// What a response says, beside its status: it goes with it, in its extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// It was done, or may be.
    Yes,
    /// A limit denies it.
    No,
}

/// How the answers are told apart.
const ANSWERS: [&str; 4] = ["allowed", "denied", "refused", "failed"];

/// What was asked, and what was answered. All labels are names of ours.
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

    /// Writes all of it in the text format of Prometheus.
    #[doc(hidden)]
    pub fn write(&self, out: &mut Exposition) {
        out.family(
            "tollgate_check_requests_total",
            "counter",
            "Requests to the check API, by what was answered.",
        );
        for endpoint in Endpoint::ALL {
            for (number, answer) in ANSWERS.iter().enumerate() {
                let count = self.requests[endpoint as usize][number].load(Ordering::Relaxed);
                let labels = [("endpoint", endpoint.name()), ("answer", answer)];
                out.sample("tollgate_check_requests_total", &labels, count);
            }
        }
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let help = "Requests that got the answer to an earlier one with the same idempotency key.";
        out.single("tollgate_check_repeated_total", "counter", help, read(&self.repeated));
        let help = "Reservations that nobody has settled in time.";
        out.single("tollgate_check_reservations_expired_total", "counter", help, read(&self.expired));
        let help = "Charges that should have been given back, and the store did not do it.";
        out.single("tollgate_check_give_backs_lost_total", "counter", help, read(&self.lost));
        let help = "Answers that could not be remembered under their idempotency key.";
        out.single("tollgate_check_unremembered_total", "counter", help, read(&self.unremembered));
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn answers_are_told_apart() {
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
            r#"tollgate_check_requests_total{endpoint="check",answer="allowed"} 1"#,
            r#"tollgate_check_requests_total{endpoint="check",answer="denied"} 1"#,
            r#"tollgate_check_requests_total{endpoint="authorize",answer="denied"} 1"#,
            r#"tollgate_check_requests_total{endpoint="settle",answer="refused"} 1"#,
            r#"tollgate_check_requests_total{endpoint="settle",answer="failed"} 1"#,
            r#"tollgate_check_requests_total{endpoint="peek",answer="allowed"} 0"#,
            "tollgate_check_reservations_expired_total 0",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }
}
