//! Parameters at and beyond the ends of their ranges, and a million simulated seconds without drift.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratekeeper_core::{
    BUCKETS_MAX, EdgePolicy, LeakyMode, Limit, LimitError, LogPolicy, Rate, RefillStyle, RetryAfter, Time,
    WINDOW_MAX, WINDOW_MIN, WindowAlign,
};

use crate::cases::{VARIANTS, check};
use crate::key;

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);
const NANO: Duration = Duration::from_nanos(1);

/// An error names the rejected parameter and its valid range.
fn assert_rejected<T>(made: Result<T, LimitError>, expected: LimitError, words: &[&str]) {
    let error = made.err().expect("the parameter is out of range");
    assert_eq!(error, expected);
    for word in words {
        assert!(error.to_string().contains(word), "no {word:?} in {error}");
    }
}

#[test]
fn limit_of_zero_is_rejected() {
    let rate = Rate::new(1, SECOND).unwrap();
    let range = ["1 to 4294967295"];
    let capacity = LimitError::Zero("capacity");
    assert_rejected(
        Limit::token_bucket(0, rate, RefillStyle::Smooth),
        capacity,
        &["capacity is 0", range[0]],
    );
    assert_rejected(Limit::token_bucket(0, rate, RefillStyle::Stepped), capacity, &range);
    assert_rejected(Limit::leaky_bucket(0, rate, LeakyMode::Police), capacity, &range);
    let limit = LimitError::Zero("limit");
    assert_rejected(Limit::fixed_window(0, SECOND, WindowAlign::Clock), limit, &["limit is 0", range[0]]);
    assert_rejected(Limit::sliding_window_log(0, SECOND, LogPolicy::Admitted), limit, &range);
    assert_rejected(Limit::sliding_window_counter(0, SECOND, 1, EdgePolicy::Weigh), limit, &range);
}

#[test]
fn a_window_is_1_ms_to_366_days() {
    for window in [Duration::ZERO, WINDOW_MIN - NANO, WINDOW_MAX + NANO, Duration::MAX] {
        let error = LimitError::WindowOutOfRange(window);
        let words = ["1 ms to 366 days", &format!("{window:?}")];
        assert_rejected(Limit::fixed_window(1, window, WindowAlign::Clock), error, &words);
        assert_rejected(Limit::sliding_window_log(1, window, LogPolicy::Admitted), error, &words);
        assert_rejected(Limit::sliding_window_counter(1, window, 1, EdgePolicy::Weigh), error, &words);
    }
    for window in [WINDOW_MIN, WINDOW_MAX] {
        let made = Limit::fixed_window(1, window, WindowAlign::Clock).unwrap();
        assert_eq!((made.limit(), made.window()), (1, window));
        assert!(Limit::sliding_window_log(1, window, LogPolicy::Admitted).is_ok());
        assert!(Limit::sliding_window_counter(1, window, 1, EdgePolicy::Weigh).is_ok());
    }
}

#[test]
fn a_counter_has_1_to_1024_buckets() {
    for buckets in [0, BUCKETS_MAX + 1, u32::MAX] {
        let made = Limit::sliding_window_counter(1, SECOND, buckets, EdgePolicy::Weigh);
        assert_rejected(made, LimitError::BucketsOutOfRange(buckets), &["1 to 1024", &buckets.to_string()]);
    }
    for buckets in [1, BUCKETS_MAX] {
        assert!(Limit::sliding_window_counter(1, SECOND, buckets, EdgePolicy::Weigh).is_ok());
    }
}

#[test]
fn a_rate_is_1_per_366_days_to_10_million_per_second() {
    assert_rejected(Rate::new(0, SECOND), LimitError::RateZero, &["at least 1 per 366 days"]);
    for period in [Duration::ZERO, WINDOW_MIN - NANO, WINDOW_MAX + NANO, Duration::MAX] {
        let words = ["1 ms to 366 days", &format!("{period:?}")];
        assert_rejected(Rate::new(1, period), LimitError::PeriodOutOfRange(period), &words);
    }
    for (count, period) in [(10_000_001, SECOND), (10_001, WINDOW_MIN), (u64::MAX, WINDOW_MAX)] {
        let words = ["at most 10000000 per second", &count.to_string()];
        assert_rejected(Rate::new(count, period), LimitError::RateTooFast { count, period }, &words);
    }
    let fastest = Rate::MAX_PER_SECOND;
    for (count, period) in
        [(1, WINDOW_MAX), (fastest, SECOND), (10_000, WINDOW_MIN), (fastest * 366 * 86_400, WINDOW_MAX)]
    {
        let rate = Rate::new(count, period).unwrap();
        assert_eq!((rate.count(), rate.period()), (count, period));
    }
}

/// Combines the ends of all ranges, at instants from 1970 to 2262 in any order, for any cost. Overflow checks are on
/// in tests, so an overflowing sum would fail this one.
#[test]
fn range_ends_do_not_overflow() {
    let rates: Vec<Rate> = [
        (1, WINDOW_MAX),
        (1, WINDOW_MIN),
        (1, WINDOW_MAX - NANO),
        (10_000, WINDOW_MIN),
        (10_000_000 * 366 * 86_400, WINDOW_MAX),
        (10_000_000 * 366 * 86_400 - 1, WINDOW_MAX),
    ]
    .map(|(count, period)| Rate::new(count, period).unwrap())
    .into();
    let limits = (
        select(&VARIANTS[..]),
        select(vec![1, 2, u32::MAX - 1, u32::MAX]),
        select(rates),
        select(vec![WINDOW_MIN, WINDOW_MIN + NANO, WINDOW_MAX - NANO, WINDOW_MAX]),
        select(vec![1, 2, BUCKETS_MAX - 1, BUCKETS_MAX]),
    )
        .prop_map(|(variant, size, rate, window, buckets)| variant.limit(size, rate, window, buckets));
    let last = Time::MAX.as_nanos();
    let window_max = WINDOW_MAX.as_nanos() as u64;
    let instants =
        prop_oneof![0..=last, 0..=window_max, last - window_max..=last, select(vec![0, 1, last - 1, last]),];
    let costs = prop_oneof![any::<u32>(), select(vec![0, 1, u32::MAX - 1, u32::MAX])];
    check(&(limits, vec((instants, costs), 30)), |(limit, requests)| {
        let mut key = key::fresh(&limit);
        for (now, cost) in requests {
            let now = Time::from_nanos(now);
            let looked = key.peek(now, cost);
            let decision = key.decide(now, cost);
            prop_assert_eq!(looked.allowed, decision.allowed);
            prop_assert_eq!(decision.limit, limit.limit());
            prop_assert!(decision.remaining <= limit.limit());
            prop_assert_eq!(decision.allowed, decision.retry_after == RetryAfter::Now);
            prop_assert_eq!(cost > limit.limit(), decision.retry_after == RetryAfter::Never);
            prop_assert!(decision.reset_after > Duration::ZERO || key.is_fresh(now));
        }
        Ok(())
    });
}

/// Polls a key at irregular instants and charges whatever remains. At every instant exactly `due` units must have
/// been allowed.
fn passes_exactly(limit: &Limit, gap_ns_max: u64, until: Duration, due: impl Fn(u128) -> u128) {
    let start = 1_700_000_000_123_456_789;
    let mut key = key::fresh(limit);
    let (mut elapsed, mut passed) = (0, 0);
    for poll in 1u64.. {
        let now = Time::from_nanos(start + elapsed);
        let there = key.peek(now, 0).remaining;
        assert!(key.decide(now, there).allowed);
        passed += u128::from(there);
        assert_eq!(passed, due(elapsed.into()), "after {:?}", Duration::from_nanos(elapsed));
        if u128::from(elapsed) >= until.as_nanos() {
            break;
        }
        elapsed += 1 + poll.wrapping_mul(0x9E37_79B9_7F4A_7C15) % gap_ns_max;
    }
}

#[test]
fn three_per_second_is_exact_for_a_million_seconds() {
    let rate = Rate::new(3, SECOND).unwrap();
    let until = Duration::from_secs(1_000_000);
    let smooth = |elapsed: u128| 3 + 3 * elapsed / 1_000_000_000;
    let gap_ns_max = 300_000_001;
    passes_exactly(&Limit::token_bucket(3, rate, RefillStyle::Smooth).unwrap(), gap_ns_max, until, smooth);
    passes_exactly(&Limit::leaky_bucket(3, rate, LeakyMode::Police).unwrap(), gap_ns_max, until, smooth);
    passes_exactly(&Limit::leaky_bucket(3, rate, LeakyMode::Shape).unwrap(), gap_ns_max, until, smooth);
    // Never full again after the first second, so its periods stay those of the first request.
    let stepped = |elapsed: u128| 7 + elapsed / 1_000_000_000 * 3;
    passes_exactly(&Limit::token_bucket(7, rate, RefillStyle::Stepped).unwrap(), gap_ns_max, until, stepped);
}

#[test]
fn prime_rate_per_day_is_exact_for_a_thousand_days() {
    let rate = Rate::new(999_983, DAY).unwrap();
    let due = |elapsed: u128| 1_000 + 999_983 * elapsed / DAY.as_nanos();
    for limit in [
        Limit::token_bucket(1_000, rate, RefillStyle::Smooth).unwrap(),
        Limit::leaky_bucket(1_000, rate, LeakyMode::Police).unwrap(),
    ] {
        passes_exactly(&limit, 40_000_000_007, 1_000 * DAY, due);
    }
}
