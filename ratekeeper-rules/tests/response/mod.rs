//! Black-box tests of responses: the output is read back with independent parsers.
//!
//! | file | content |
//! |---|---|
//! | `golden.rs`, `golden/` | every header set in every situation, byte for byte |
//! | `vectors.rs` | the examples of the standards, and edge cases |
//! | `properties.rs` | for any decision, the headers parse and promise no more than the decision |
//! | `waiting.rs` | a client that waits as stated is allowed, for each of the algorithms |
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use ratekeeper_core::{Decision, Limit, RetryAfter, Time, WindowAlign};
use ratekeeper_rules::response::{HeaderSet, LimitDecision, LimitResponse, PolicyName, ResponseContext};

mod golden;
mod properties;
mod vectors;
mod waiting;

use testbed::property::check;

const NOW: Time = Time::from_nanos(1_700_000_000_250_000_000);

fn name(name: &str) -> PolicyName {
    PolicyName::new(name).unwrap()
}

fn fixed(limit: u32, window_secs: u64) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(window_secs), WindowAlign::Clock).unwrap()
}

fn allowed(remaining: u32, reset_after: Duration) -> Decision {
    Decision {
        allowed: true,
        limit: 100,
        remaining,
        retry_after: RetryAfter::Now,
        reset_after,
        delay: Duration::ZERO,
    }
}

fn denied(remaining: u32, retry_after: RetryAfter, reset_after: Duration) -> Decision {
    Decision { allowed: false, retry_after, ..allowed(remaining, reset_after) }
}

fn denied_for(wait: Duration) -> Decision {
    denied(0, RetryAfter::After(wait), wait)
}

fn response(set: &str, limits: &[LimitDecision], context: &ResponseContext) -> LimitResponse {
    let mut response = LimitResponse::default();
    response.write(HeaderSet::named(set).unwrap(), limits, context);
    response
}
