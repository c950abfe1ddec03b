//! Every field of every decision equals the reference model, for each variant over random limits and requests.
//!
//! Each property runs 10 000 cases of up to 12 requests; `RATEKEEPER_CASES=1000000` runs more.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use ratekeeper_core::{Decision, EdgePolicy, LeakyMode, LogPolicy, RefillStyle, WindowAlign};

use crate::cases::{Case, Variant, Walk, cases, check, instant_after};
use crate::key;
use crate::model::Model;

#[test]
fn token_bucket_smooth() {
    check_variant(Variant::TokenBucket(RefillStyle::Smooth));
}

#[test]
fn token_bucket_stepped() {
    check_variant(Variant::TokenBucket(RefillStyle::Stepped));
}

#[test]
fn leaky_bucket_police() {
    check_variant(Variant::LeakyBucket(LeakyMode::Police));
}

#[test]
fn leaky_bucket_shape() {
    check_variant(Variant::LeakyBucket(LeakyMode::Shape));
}

#[test]
fn fixed_window_clock() {
    check_variant(Variant::FixedWindow(WindowAlign::Clock));
}

#[test]
fn fixed_window_first_request() {
    check_variant(Variant::FixedWindow(WindowAlign::FirstRequest));
}

#[test]
fn sliding_window_log_admitted() {
    check_variant(Variant::SlidingWindowLog(LogPolicy::Admitted));
}

#[test]
fn sliding_window_log_all() {
    check_variant(Variant::SlidingWindowLog(LogPolicy::All));
}

#[test]
fn sliding_window_counter_weigh() {
    check_variant(Variant::SlidingWindowCounter(EdgePolicy::Weigh));
}

#[test]
fn sliding_window_counter_drop() {
    check_variant(Variant::SlidingWindowCounter(EdgePolicy::Drop));
}

#[test]
fn sliding_window_counter_keep() {
    check_variant(Variant::SlidingWindowCounter(EdgePolicy::Keep));
}

fn check_variant(variant: Variant) {
    check(&cases(variant, 12), |case| equals_the_model(&case));
}

fn equals_the_model(case: &Case) -> TestCaseResult {
    let mut key = key::fresh(&case.limit);
    let mut model = Model::new(&case.limit);
    let mut walk = Walk::new(&case.limit, case.start);
    for &request in &case.requests {
        let (now, cost) = walk.next(request, &*key);

        let peeked = key.peek(now, cost);
        prop_assert_eq!(peeked, model.peek(now, cost, &peeked), "peek at {:?} for {}", now, cost);
        let decided = key.decide(now, cost);
        prop_assert_eq!(decided, model.decide(now, cost, &decided), "decide at {:?} for {}", now, cost);

        // A peek predicts the decision. Only if denied requests are counted does the denial itself lengthen the wait.
        let foretold = Decision { remaining: decided.remaining, reset_after: decided.reset_after, ..peeked };
        if key.counts_denied() {
            prop_assert_eq!(Decision { retry_after: decided.retry_after, ..foretold }, decided);
            prop_assert!(peeked.retry_after <= decided.retry_after);
        } else {
            prop_assert_eq!(foretold, decided);
        }

        // The key is fresh from the end of `reset_after` on, and not before.
        if let Some(reset) = instant_after(now, decided.reset_after) {
            prop_assert!(key.is_fresh(reset), "not fresh after {:?}", decided.reset_after);
        }
        if let Some(almost) = decided.reset_after.checked_sub(Duration::from_nanos(1))
            && let Some(almost) = instant_after(now, almost)
        {
            prop_assert!(!key.is_fresh(almost), "fresh before {:?}", decided.reset_after);
        }
        walk.saw(decided);
    }
    Ok(())
}
