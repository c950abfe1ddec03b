//! Guarantees to users as independent properties: they hold under any implementation of the algorithms.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use ratekeeper_core::{EdgePolicy, LeakyMode, Limit, LogPolicy, RetryAfter, Time, WindowAlign};

use crate::cases::{Case, Request, VARIANTS, Variant, Walk, busy_cases, cases, check, instant_after};
use crate::key::{self, Key};

/// The most that a limit allows in any closed interval of `interval_ns` nanoseconds.
pub(crate) fn most_within(limit: &Limit, interval_ns: u64) -> u128 {
    let size = u128::from(limit.limit());
    let interval = u128::from(interval_ns);
    let windows = interval / limit.window().as_nanos();
    match limit {
        Limit::Bucket(it) => size + u128::from(it.rate().count()) * interval / it.rate().period().as_nanos(),
        // As many periods as end in the interval, the first of them at its start.
        Limit::SteppedBucket(it) => {
            size + u128::from(it.rate().count()) * (interval / it.rate().period().as_nanos() + 1)
        }
        Limit::Log(_) => size * (windows + 1),
        Limit::Counter(it) if it.edge() == EdgePolicy::Keep => size * (windows + 1),
        // The known weakness: twice the limit around an edge.
        Limit::FixedWindow(_) | Limit::Counter(_) => size * (windows + 2),
    }
}

/// Runs a case on a fresh key and returns what was allowed: instants and costs.
fn allowed_requests(case: &Case) -> Vec<(u64, u32)> {
    let mut key = key::fresh(&case.limit);
    let mut walk = Walk::new(&case.limit, case.start);
    let mut allowed = Vec::new();
    for &request in &case.requests {
        let (now, cost) = walk.next(request, &*key);
        let decision = key.decide(now, cost);
        if decision.allowed && cost > 0 {
            allowed.push((now.as_nanos(), cost));
        }
        walk.saw(decision);
    }
    allowed
}

/// Every closed interval from one allowed request to another stays within the guarantee. `allowed` is ordered by
/// time.
pub(crate) fn check_guarantee(limit: &Limit, allowed: &[(u64, u32)]) -> TestCaseResult {
    for (first, &(from, _)) in allowed.iter().enumerate() {
        let mut units = 0;
        for &(to, cost) in &allowed[first..] {
            units += u128::from(cost);
            let most = most_within(limit, to - from);
            prop_assert!(units <= most, "{} instead of {} from {} to {}", units, most, from, to);
        }
    }
    Ok(())
}

#[test]
fn never_more_than_the_limit() {
    for variant in VARIANTS {
        check(&busy_cases(variant, 40), |case| check_guarantee(&case.limit, &allowed_requests(&case)));
    }
}

#[test]
fn no_fixed_window_exceeds_the_limit() {
    for align in [WindowAlign::Clock, WindowAlign::FirstRequest] {
        check(&busy_cases(Variant::FixedWindow(align), 40), |case| {
            let window_ns = case.limit.window().as_nanos() as u64;
            let (mut start, mut units) = (None, 0);
            for (at, cost) in allowed_requests(&case) {
                if start.is_none_or(|start| at >= start + window_ns) {
                    let opened = if align == WindowAlign::Clock { at / window_ns * window_ns } else { at };
                    (start, units) = (Some(opened), 0);
                }
                units += u64::from(cost);
                prop_assert!(units <= u64::from(case.limit.limit()));
            }
            Ok(())
        });
    }
}

#[test]
fn denied_until_exactly_retry_after() {
    for variant in VARIANTS {
        check(&cases(variant, 12), |case| {
            each_decision(&case, |seen| {
                match seen.decision.retry_after {
                    RetryAfter::Now => prop_assert!(seen.decision.allowed),
                    RetryAfter::Never => {
                        prop_assert!(seen.cost > case.limit.limit());
                        if let Some(reset) = instant_after(seen.now, seen.decision.reset_after) {
                            prop_assert!(!seen.after.peek(reset, seen.cost).allowed);
                        }
                    }
                    RetryAfter::After(wait) => {
                        let mut patient = seen.after.copy();
                        let almost = wait - Duration::from_nanos(1);
                        for early in [wait / 3, wait / 2, wait / 100 * 99, almost] {
                            let Some(early) = instant_after(seen.now, early) else { break };
                            prop_assert!(!patient.peek(early, seen.cost).allowed, "at {:?}", early);
                            // A denied retry changes nothing, unless denied requests are counted.
                            if !patient.counts_denied() {
                                prop_assert!(!patient.decide(early, seen.cost).allowed, "at {:?}", early);
                            }
                        }
                        if let Some(then) = instant_after(seen.now, wait) {
                            prop_assert!(patient.decide(then, seen.cost).allowed, "at {:?}", then);
                        }
                    }
                }
                Ok(())
            })
        });
    }
}

#[test]
fn denied_or_zero_cost_requests_charge_nothing() {
    for variant in VARIANTS {
        check(&cases(variant, 12), |case| {
            each_decision(&case, |seen| {
                let denied = !seen.decision.allowed && !seen.after.counts_denied();
                if denied || seen.cost == 0 {
                    check_same_decisions(&case.limit, seen.after, seen.before, seen.now, seen.rest)?;
                }
                Ok(())
            })
        });
    }
}

#[test]
fn key_has_full_budget_after_reset_after() {
    for variant in VARIANTS {
        check(&cases(variant, 12), |case| {
            each_decision(&case, |seen| {
                if let Some(reset) = instant_after(seen.now, seen.decision.reset_after) {
                    check_same_decisions(
                        &case.limit,
                        seen.after,
                        &*key::fresh(&case.limit),
                        reset,
                        seen.rest,
                    )?;
                }
                Ok(())
            })
        });
    }
}

/// Requests leave in order and never faster than the leak rate.
#[test]
fn shaped_outflow_never_exceeds_the_leak_rate() {
    check(&busy_cases(Variant::LeakyBucket(LeakyMode::Shape), 40), |case| {
        let Limit::Bucket(bucket) = &case.limit else { unreachable!("a leaky bucket is a bucket") };
        let (count, period) = (u128::from(bucket.rate().count()), bucket.rate().period().as_nanos());
        let mut departures: Vec<(u128, u128)> = Vec::new();
        each_decision(&case, |seen| {
            if !seen.decision.allowed {
                return Ok(());
            }
            let departure = u128::from(seen.now.as_nanos()) + seen.decision.delay.as_nanos();
            let mut left_since = 0;
            for &(earlier, cost) in departures.iter().rev() {
                left_since += cost;
                // Departures are rounded up to the nanosecond, so a gap may be short by less than one.
                prop_assert!(departure >= earlier, "overtaken");
                prop_assert!(left_since * period < (departure - earlier + 1) * count, "too fast");
            }
            departures.push((departure, seen.cost.into()));
            Ok(())
        })
    });
}

/// A client that retries forever must not make the log grow forever.
#[test]
fn a_log_of_all_requests_is_bounded_by_its_limit() {
    let limit = Limit::sliding_window_log(3, Duration::from_secs(60), LogPolicy::All).unwrap();
    let mut key = key::fresh(&limit);
    for denied in 0..100_000 {
        key.decide(Time::from_nanos(1_700_000_000_000_000_000 + denied), 1);
    }
    assert!(key.heap_bytes() <= 128, "{} bytes for 4 entries", key.heap_bytes());
}

/// One decision, with the key before and after it.
struct DecisionCase<'a> {
    before: &'a dyn Key,
    after: &'a dyn Key,
    now: Time,
    cost: u32,
    decision: ratekeeper_core::Decision,
    /// The requests that follow.
    rest: &'a [Request],
}

fn each_decision(case: &Case, mut test: impl FnMut(DecisionCase<'_>) -> TestCaseResult) -> TestCaseResult {
    let mut key = key::fresh(&case.limit);
    let mut walk = Walk::new(&case.limit, case.start);
    for (index, &request) in case.requests.iter().enumerate() {
        let (now, cost) = walk.next(request, &*key);
        let before = key.copy();
        let decision = key.decide(now, cost);
        let rest = &case.requests[index + 1..];
        test(DecisionCase { before: &*before, after: &*key, now, cost, decision, rest })?;
        walk.saw(decision);
    }
    Ok(())
}

/// From `start` on, two keys get the same decisions.
fn check_same_decisions(
    limit: &Limit,
    one: &dyn Key,
    other: &dyn Key,
    start: Time,
    requests: &[Request],
) -> TestCaseResult {
    let (mut one, mut other) = (one.copy(), other.copy());
    let mut walk = Walk::new(limit, start);
    for &request in requests {
        let (now, cost) = walk.next(request, &*one);
        let decision = one.decide(now, cost);
        prop_assert_eq!(decision, other.decide(now, cost), "at {:?} for {}", now, cost);
        walk.saw(decision);
    }
    Ok(())
}
