//! State migration when a limit changes: used units stay used.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use proptest::prelude::*;
use ratekeeper_core::{
    Decision, EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RefillStyle, State, Time, WindowAlign,
};

use crate::cases::{VARIANTS, Walk, cases, check};
use crate::key;
use crate::limits::{decide, fresh, resized};

const AT: Time = Time::from_secs(1_700_000_000);
const MINUTE: Duration = Duration::from_secs(60);

fn peek(limit: &Limit, state: &State, now: Time, cost: u32) -> Decision {
    decide(limit, &mut state.clone(), now, cost)
}

fn smooth(capacity: u32, count: u64, period: Duration) -> Limit {
    Limit::token_bucket(capacity, Rate::new(count, period).unwrap(), RefillStyle::Smooth).unwrap()
}

fn stepped(capacity: u32, count: u64, period: Duration) -> Limit {
    Limit::token_bucket(capacity, Rate::new(count, period).unwrap(), RefillStyle::Stepped).unwrap()
}

/// The remaining units of the new limit if `used` units were charged `MINUTE` / 4 ago and the limit changes now.
fn left(from: &Limit, to: &Limit, used: u32) -> Option<u32> {
    let mut state = fresh(from);
    assert!(decide(from, &mut state, AT, used).allowed);
    let now = AT.saturating_add(MINUTE / 4);
    let migrated = to.migrate_state(from, state, now)?;
    Some(peek(to, &migrated, now, 0).remaining)
}

#[test]
fn worked_examples() {
    let window = |limit, align| Limit::fixed_window(limit, MINUTE, align).unwrap();
    let first = |limit, length| Limit::fixed_window(limit, length, WindowAlign::FirstRequest).unwrap();
    let log = |limit, count| Limit::sliding_window_log(limit, MINUTE, count).unwrap();
    let counter = |limit, buckets, edge| Limit::sliding_window_counter(limit, MINUTE, buckets, edge).unwrap();
    let leaky = |capacity, mode| Limit::leaky_bucket(capacity, Rate::new(60, MINUTE).unwrap(), mode).unwrap();
    for (from, to, used, expected) in [
        // A quarter of a minute restores 15 of 60 per minute, at the old rate.
        (smooth(100, 60, MINUTE), smooth(200, 60, MINUTE), 50, Some(165)),
        (smooth(100, 60, MINUTE), smooth(40, 60, MINUTE), 50, Some(5)),
        (smooth(100, 60, MINUTE), smooth(100, 7, MINUTE), 50, Some(65)),
        (smooth(100, 7, MINUTE), smooth(100, 999_983, 1_440 * MINUTE), 51, Some(50)),
        (smooth(100, 60, MINUTE), smooth(10, 60, MINUTE), 100, Some(0)),
        (leaky(100, LeakyMode::Shape), leaky(120, LeakyMode::Shape), 50, Some(85)),
        (leaky(100, LeakyMode::Shape), leaky(120, LeakyMode::Police), 50, None),
        (smooth(100, 60, MINUTE), leaky(100, LeakyMode::Police), 50, None),
        (stepped(100, 5, MINUTE / 6), stepped(60, 9, MINUTE / 6), 50, Some(15)),
        (stepped(100, 5, MINUTE / 6), stepped(60, 9, MINUTE), 50, Some(15)),
        (stepped(100, 60, MINUTE), smooth(100, 60, MINUTE), 50, None),
        (window(100, WindowAlign::FirstRequest), window(60, WindowAlign::FirstRequest), 50, Some(10)),
        (window(100, WindowAlign::Clock), window(100, WindowAlign::FirstRequest), 50, None),
        (window(100, WindowAlign::FirstRequest), first(100, 2 * MINUTE), 50, Some(50)),
        (window(100, WindowAlign::FirstRequest), first(100, MINUTE / 3), 50, Some(50)),
        // A quarter of a minute after its start, a window of ten seconds is over.
        (window(100, WindowAlign::FirstRequest), first(100, MINUTE / 6), 50, Some(100)),
        (first(100, MINUTE / 6), first(100, MINUTE), 50, Some(100)),
        (
            window(100, WindowAlign::Clock),
            Limit::fixed_window(100, 2 * MINUTE, WindowAlign::Clock).unwrap(),
            50,
            None,
        ),
        (log(100, LogPolicy::Admitted), log(20, LogPolicy::Admitted), 50, Some(0)),
        (log(100, LogPolicy::Admitted), log(200, LogPolicy::Admitted), 50, Some(150)),
        (log(100, LogPolicy::Admitted), log(100, LogPolicy::All), 50, None),
        (counter(100, 6, EdgePolicy::Keep), counter(70, 6, EdgePolicy::Keep), 50, Some(20)),
        (counter(100, 6, EdgePolicy::Keep), counter(100, 3, EdgePolicy::Keep), 50, None),
        (counter(100, 6, EdgePolicy::Keep), counter(100, 6, EdgePolicy::Drop), 50, None),
    ] {
        assert_eq!(left(&from, &to, used), expected, "{from:?} -> {to:?}");
        assert_eq!(to.is_compatible(&from), expected.is_some());
    }
}

/// If the current period has lasted longer than several new periods, only one of them counts as elapsed.
#[test]
fn migrated_stepped_bucket_keeps_its_period() {
    let (from, to) = (stepped(100, 5, MINUTE), stepped(100, 5, Duration::from_secs(2)));
    assert_eq!(left(&from, &to, 50), Some(55));
    // Far more than the new capacity: all of it is still missing.
    assert_eq!(left(&from, &stepped(10, 5, MINUTE), 100), Some(0));
    let mut state = fresh(&from);
    decide(&from, &mut state, AT, 100);
    let to = stepped(10, 5, MINUTE);
    let migrated = to.migrate_state(&from, state, AT).unwrap();
    assert_eq!(peek(&to, &migrated, AT, 0).reset_after, 20 * MINUTE);
}

/// A bucket that is lowered and raised again has the same missing units, whatever the rates, also if keys are checked
/// in between.
#[test]
fn limit_that_is_lowered_and_raised_again_returns_no_units() {
    for (large, small) in [
        (smooth(1_000, 7, 1_440 * MINUTE), smooth(1, 7, 1_440 * MINUTE)),
        (smooth(1_000, 7, 1_440 * MINUTE), smooth(10, 999_983, 144_000 * MINUTE)),
        (stepped(1_000, 5, 1_440 * MINUTE), stepped(1, 5, 1_440 * MINUTE)),
    ] {
        let mut state = fresh(&large);
        assert!(decide(&large, &mut state, AT, 1_000).allowed);
        let small = small.following(&large);
        let mut state = small.migrate_state(&large, state, AT).unwrap();
        assert!(!decide(&small, &mut state, AT, 1).allowed);
        let again = large.following(&small);
        let mut state = again.migrate_state(&small, state, AT).unwrap();
        assert_eq!(decide(&again, &mut state, AT, 0).remaining, 0, "{small:?}");
    }
}

fn rate_of(limit: &Limit) -> Option<Rate> {
    match limit {
        Limit::Bucket(it) => Some(it.rate()),
        Limit::SteppedBucket(it) => Some(it.rate()),
        _ => None,
    }
}

#[test]
fn migration_keeps_used_units() {
    let sizes = prop_oneof![1..=12_u32, any::<u32>().prop_map(|size| size.max(1))];
    let rates = (1..50_u64, 1..100_000_u64)
        .prop_map(|(count, millis)| Rate::new(count, Duration::from_millis(millis)).unwrap());
    for variant in VARIANTS {
        let changes = (cases(variant, 12), sizes.clone(), rates.clone(), any::<bool>());
        check(&changes, |(case, size, rate, same_rate)| {
            let from = &case.limit;
            let to = resized(from, size, (!same_rate).then_some(rate));
            let (mut key, mut state) = (key::fresh(from), fresh(from));
            let mut walk = Walk::new(from, case.start);
            let mut now = case.start;
            for &request in &case.requests {
                let cost;
                (now, cost) = walk.next(request, &*key);
                walk.saw(key.decide(now, cost));
                decide(from, &mut state, now, cost);
            }
            let unchanged = from.migrate_state(from, state.clone(), now).unwrap();
            prop_assert_eq!(peek(from, &unchanged, now, 1), peek(from, &state, now, 1));

            let migrated = to.migrate_state(from, state.clone(), now).unwrap();
            let (before, after) = (peek(from, &state, now, 0), peek(&to, &migrated, now, 0));
            let used = from.limit() - before.remaining;
            let least = to.limit().saturating_sub(used);
            // A log of all requests may hold one unit more than its limit.
            let more = u32::from(from.limit() == used && least > 0);
            prop_assert!(after.remaining + more >= least, "{:?} -> {:?}", before, after);
            // A fraction of a unit, or a step that has become due.
            let due = match &to {
                Limit::Bucket(_) => 1,
                Limit::SteppedBucket(_)
                    if rate_of(from).map(Rate::period) == rate_of(&to).map(Rate::period) =>
                {
                    0
                }
                Limit::SteppedBucket(it) => u32::try_from(it.rate().count()).unwrap(),
                _ => 0,
            };
            prop_assert!(after.remaining <= least.saturating_add(due), "{:?} -> {:?}", before, after);
            // A raised limit denies nothing that was allowed.
            let is_raised = to.limit() >= from.limit() && (rate_of(from).is_none() || same_rate);
            let is_allowed = |cost| peek(from, &state, now, cost).allowed;
            for cost in [1, 2, before.remaining].into_iter().filter(|cost| is_raised && is_allowed(*cost)) {
                prop_assert!(peek(&to, &migrated, now, cost).allowed, "{} of {:?}", cost, after);
            }
            Ok(())
        });
    }
}
