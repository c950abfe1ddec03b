//! Instants in any order: a clock that steps back, or threads that race.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use ratekeeper_core::{EdgePolicy, Limit, Rate, RetryAfter, Time};

use crate::cases::{Case, VARIANTS, Walk, cases_either_way, check, instant_after};
use crate::key;
use crate::promises::{check_guarantee, most_within};

/// The longest wait for a state at `now`: a window, plus a bucket if the edge bucket counts.
fn one_window(limit: &Limit) -> Duration {
    match limit {
        Limit::Counter(it) if it.edge() != EdgePolicy::Drop => {
            let buckets = u128::from(it.buckets());
            it.window() + Duration::from_nanos(it.window().as_nanos().div_ceil(buckets) as u64)
        }
        _ => limit.window(),
    }
}

/// The longest wait after a step back: a state may lie one window ahead.
fn longest_wait(limit: &Limit) -> Duration {
    limit.window() + one_window(limit)
}

#[test]
fn decisions_stay_within_bounds() {
    for variant in VARIANTS {
        check(&cases_either_way(variant, 20), |case| {
            let longest = longest_wait(&case.limit);
            let mut key = key::fresh(&case.limit);
            let mut walk = Walk::new(&case.limit, case.start);
            for &request in &case.requests {
                let (now, cost) = walk.next(request, &*key);
                let looked = key.peek(now, cost);
                let decision = key.decide(now, cost);
                prop_assert_eq!(looked.allowed, decision.allowed);
                prop_assert!(decision.remaining <= case.limit.limit());
                prop_assert!(decision.reset_after <= longest, "{:?}", decision);
                match decision.retry_after {
                    RetryAfter::Now => prop_assert!(decision.allowed),
                    RetryAfter::After(wait) => {
                        prop_assert!(!decision.allowed && wait <= longest, "{:?}", decision);
                        // The wait is exact from here on, even after a step back.
                        if let Some(then) = instant_after(now, wait) {
                            prop_assert!(key.copy().decide(then, cost).allowed, "{:?}", decision);
                        }
                    }
                    RetryAfter::Never => prop_assert!(!decision.allowed && cost > case.limit.limit()),
                }
                walk.saw(decision);
            }
            Ok(())
        });
    }
}

/// A step back of any size restores no budget, and lengthens a wait by at most its own length or to one window from
/// now.
#[test]
fn step_back_restores_no_budget_and_adds_at_most_its_length() {
    for variant in VARIANTS {
        let strategy = (cases_either_way(variant, 12), vec(0..5_000u64, 3));
        check(&strategy, |(case, steps)| {
            each_key(&case, |key, now| {
                let all = case.limit.limit();
                let remaining = key.peek(now, 0).remaining;
                let window_ns = case.limit.window().as_nanos();
                for &thousandths in &steps {
                    let step = u64::try_from(window_ns * u128::from(thousandths) / 1_000).unwrap_or(u64::MAX);
                    let earlier = Time::from_nanos(now.as_nanos().saturating_sub(step));
                    let then = key.peek(earlier, 0).remaining;
                    prop_assert!(then <= remaining, "{} at {:?}, {} at {:?}", then, earlier, remaining, now);
                    if let Some(more) = remaining.checked_add(1) {
                        prop_assert!(!key.copy().decide(earlier, more).allowed);
                    }
                    let longer = wait(key.peek(now, all).retry_after) + now.saturating_since(earlier);
                    let waits = wait(key.peek(earlier, all).retry_after);
                    prop_assert!(
                        waits <= longer.max(one_window(&case.limit)),
                        "{:?} at {:?}",
                        waits,
                        earlier
                    );
                }
                Ok(())
            })
        });
    }
}

/// Ten units at the end of a window weigh 9 in the first tenth of the next. A clock that then stepped back by ten
/// windows, to the last tenth of one, once made them weigh 1, and allowed eight more than before the step.
#[test]
fn edge_bucket_weighs_no_less_after_a_huge_step_back() {
    let limit = Limit::sliding_window_counter(10, Duration::from_secs(60), 1, EdgePolicy::Weigh).unwrap();
    let mut key = key::fresh(&limit);
    assert!(key.decide(Time::from_secs(1_700_000_099), 10).allowed);
    assert_eq!(key.decide(Time::from_secs(1_700_000_106), 0).remaining, 1);
    let after_the_step = key.decide(Time::from_secs(1_700_000_154 - 600), 0);
    assert!(after_the_step.remaining <= 1, "{after_the_step:?}");
}

/// A clock that was far ahead does not lock a key out: the key waits at most one window from now.
#[test]
fn after_a_huge_step_back_a_key_waits_one_window() {
    for variant in VARIANTS {
        let strategy = (cases_either_way(variant, 12), 1..u64::MAX / 2);
        check(&strategy, |(case, beyond)| {
            each_key(&case, |key, now| {
                if key.is_fresh(now) {
                    return Ok(());
                }
                // The state may itself lie a window ahead of `now`, or have begun up to a window before.
                let step = 2 * case.limit.window().as_nanos() + 1;
                let Some(latest) = u128::from(now.as_nanos()).checked_sub(step) else { return Ok(()) };
                let earlier = Time::from_nanos((latest as u64).saturating_sub(beyond));
                let mut key = key.copy();
                for cost in [1, case.limit.limit()] {
                    if let RetryAfter::After(wait) = key.decide(earlier, cost).retry_after {
                        prop_assert!(wait <= one_window(&case.limit), "{:?} for {}", wait, cost);
                    }
                }
                Ok(())
            })
        });
    }
}

/// For any order of the instants within a window, a key allows at most the guarantee for the time between the first
/// and the last of them. A bucket keeps its guarantee for every interval between.
#[test]
fn racing_requests_within_a_window_stay_within_the_limit() {
    for variant in VARIANTS {
        let strategy = (cases_either_way(variant, 1), vec((0..1_000u64, 1..=1_000u64), 1..40));
        check(&strategy, |(case, requests)| {
            let window_ns = u64::try_from(case.limit.window().as_nanos()).unwrap_or(u64::MAX);
            let instant = |thousandths: u64| {
                let offset = u128::from(window_ns) * u128::from(thousandths) / 1_000;
                Time::from_nanos(case.start.as_nanos().saturating_add(offset as u64))
            };
            let mut key = key::fresh(&case.limit);
            let (mut allowed, mut units) = (Vec::new(), 0);
            let (mut first, mut last) = (Time::MAX, Time::EPOCH);
            for (thousandths, share) in requests {
                let now = instant(thousandths);
                let cost = (u64::from(case.limit.limit()) * share / 1_000).max(1) as u32;
                if key.decide(now, cost).allowed {
                    allowed.push((now.as_nanos(), cost));
                    units += u128::from(cost);
                }
                (first, last) = (first.min(now), last.max(now));
            }
            prop_assert!(
                units <= most_within(&case.limit, last.as_nanos() - first.as_nanos()),
                "{} units",
                units
            );
            if let Limit::Bucket(_) = case.limit {
                allowed.sort_unstable();
                check_guarantee(&case.limit, &allowed)?;
            }
            Ok(())
        });
    }
}

/// The bounds above are reached; one nanosecond further back, the state is moved to now.
#[test]
fn the_longest_wait_is_reached() {
    let second = Duration::from_secs(1);
    let rate = Rate::new(10_000_000, second).unwrap();
    for variant in VARIANTS {
        // A bucket of ten million fills in one second, too.
        let largest = match variant.limit(1, rate, second, 1) {
            Limit::Bucket(_) | Limit::SteppedBucket(_) => 10_000_000,
            Limit::FixedWindow(_) | Limit::Log(_) | Limit::Counter(_) => u32::MAX,
        };
        let limit = variant.limit(largest, rate, second, 1);
        let mut key = key::fresh(&limit);
        assert!(key.decide(Time::from_secs(100), largest).allowed, "{variant:?}");

        let a_window_back = key.peek(Time::from_secs(99), largest).retry_after;
        assert_eq!(a_window_back, RetryAfter::After(longest_wait(&limit)), "{variant:?}");
        let further_back = key.peek(Time::from_nanos(99 * 1_000_000_000 - 1), largest).retry_after;
        assert!(further_back <= RetryAfter::After(one_window(&limit)), "{variant:?}: {further_back:?}");
    }
}

/// How long a request waits; the maximum if it is never allowed.
fn wait(retry_after: RetryAfter) -> Duration {
    match retry_after {
        RetryAfter::Now => Duration::ZERO,
        RetryAfter::After(wait) => wait,
        RetryAfter::Never => Duration::MAX,
    }
}

/// Runs a case and tests the key after each decision.
fn each_key(
    case: &Case,
    test: impl Fn(&dyn key::Key, Time) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut key = key::fresh(&case.limit);
    let mut walk = Walk::new(&case.limit, case.start);
    for &request in &case.requests {
        let (now, cost) = walk.next(request, &*key);
        let decision = key.decide(now, cost);
        test(&*key, now)?;
        walk.saw(decision);
    }
    Ok(())
}
