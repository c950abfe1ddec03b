//! What a user is told, as properties of their own: they would hold under any implementation of the rules.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tollgate_core::{Align, Count, Edge, Limit, Mode, RetryAfter, Time};

use crate::cases::{Case, Request, VARIANTS, Variant, Walk, busy_cases, cases, check, instant_after};
use crate::key::{self, Key};

/// The most that a limit promises to admit in any closed interval of so many nanoseconds.
pub(crate) fn most_within(limit: &Limit, interval_ns: u64) -> u128 {
    let size = u128::from(limit.limit());
    let interval = u128::from(interval_ns);
    let windows = interval / limit.window().as_nanos();
    match limit {
        Limit::Bucket(it) => size + u128::from(it.rate().count()) * interval / it.rate().period().as_nanos(),
        // As many arrivals as fit, the first of them at the interval's start.
        Limit::Steps(it) => {
            size + u128::from(it.rate().count()) * (interval / it.rate().period().as_nanos() + 1)
        }
        Limit::Log(_) => size * (windows + 1),
        Limit::Counter(it) if it.edge() == Edge::Keep => size * (windows + 1),
        // The known flaw: twice the limit around an edge.
        Limit::FixedWindow(_) | Limit::Counter(_) => size * (windows + 2),
    }
}

/// Runs a case on a fresh key, and hands over what was admitted: when, and how much.
fn admitted(case: &Case) -> Vec<(u64, u32)> {
    let mut key = key::fresh(&case.limit);
    let mut walk = Walk::new(&case.limit, case.start);
    let mut admitted = Vec::new();
    for &request in &case.requests {
        let (now, cost) = walk.next(request, &*key);
        let decision = key.decide(now, cost);
        if decision.allowed && cost > 0 {
            admitted.push((now.as_nanos(), cost));
        }
        walk.saw(decision);
    }
    admitted
}

/// Every closed interval from one admitted request to another holds what the limit promises. In order of time.
pub(crate) fn never_too_much(limit: &Limit, admitted: &[(u64, u32)]) -> TestCaseResult {
    for (first, &(from, _)) in admitted.iter().enumerate() {
        let mut units = 0;
        for &(to, cost) in &admitted[first..] {
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
        check(&busy_cases(variant, 40), |case| never_too_much(&case.limit, &admitted(&case)));
    }
}

#[test]
fn each_fixed_window_holds_the_limit() {
    for align in [Align::Clock, Align::FirstRequest] {
        check(&busy_cases(Variant::FixedWindow(align), 40), |case| {
            let window_ns = case.limit.window().as_nanos() as u64;
            let (mut start, mut units) = (None, 0);
            for (at, cost) in admitted(&case) {
                if start.is_none_or(|start| at >= start + window_ns) {
                    let opened = if align == Align::Clock { at / window_ns * window_ns } else { at };
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
                            prop_assert!(!seen.after.look(reset, seen.cost).allowed);
                        }
                    }
                    RetryAfter::After(wait) => {
                        let mut patient = seen.after.copy();
                        let almost = wait - Duration::from_nanos(1);
                        for early in [wait / 3, wait / 2, wait / 100 * 99, almost] {
                            let Some(early) = instant_after(seen.now, early) else { break };
                            prop_assert!(!patient.look(early, seen.cost).allowed, "at {:?}", early);
                            // Trying is harmless, unless the denied are counted.
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
fn what_is_denied_or_only_looks_takes_nothing() {
    for variant in VARIANTS {
        check(&cases(variant, 12), |case| {
            each_decision(&case, |seen| {
                let denied = !seen.decision.allowed && !seen.after.counts_denied();
                if denied || seen.cost == 0 {
                    same_answers(&case.limit, seen.after, seen.before, seen.now, seen.rest)?;
                }
                Ok(())
            })
        });
    }
}

#[test]
fn as_good_as_new_after_reset_after() {
    for variant in VARIANTS {
        check(&cases(variant, 12), |case| {
            each_decision(&case, |seen| {
                if let Some(reset) = instant_after(seen.now, seen.decision.reset_after) {
                    same_answers(&case.limit, seen.after, &*key::fresh(&case.limit), reset, seen.rest)?;
                }
                Ok(())
            })
        });
    }
}

/// In line behind each other, never faster than the leak: what has left before a request goes on had time to.
#[test]
fn a_shaped_outflow_is_never_faster_than_the_leak() {
    check(&busy_cases(Variant::LeakyBucket(Mode::Shape), 40), |case| {
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

/// A client that knocks for ever must not make the log grow for ever.
#[test]
fn a_log_of_all_requests_is_bounded_by_its_limit() {
    let limit = Limit::sliding_window_log(3, Duration::from_secs(60), Count::All).unwrap();
    let mut key = key::fresh(&limit);
    for knock in 0..100_000 {
        key.decide(Time::from_nanos(1_700_000_000_000_000_000 + knock), 1);
    }
    assert!(key.heap_bytes() <= 128, "{} bytes for 4 entries", key.heap_bytes());
}

/// One decision, with the key as it was before and as it is after.
struct Seen<'a> {
    before: &'a dyn Key,
    after: &'a dyn Key,
    now: Time,
    cost: u32,
    decision: tollgate_core::Decision,
    /// The requests that follow.
    rest: &'a [Request],
}

fn each_decision(case: &Case, mut test: impl FnMut(Seen<'_>) -> TestCaseResult) -> TestCaseResult {
    let mut key = key::fresh(&case.limit);
    let mut walk = Walk::new(&case.limit, case.start);
    for (index, &request) in case.requests.iter().enumerate() {
        let (now, cost) = walk.next(request, &*key);
        let before = key.copy();
        let decision = key.decide(now, cost);
        let rest = &case.requests[index + 1..];
        test(Seen { before: &*before, after: &*key, now, cost, decision, rest })?;
        walk.saw(decision);
    }
    Ok(())
}

/// From `start` on, two keys get the same answers.
fn same_answers(
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
