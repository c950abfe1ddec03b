//! Goal: the store's decisions equal the algorithm's, wherever the table stores a state. Method: random requests for
//! a few keys at random instants, to a limiter so small that keys are moved, spilled and evicted, and to the plain
//! algorithm with a map that evicts nothing.

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use ratekeeper::{Decision, Limit, Time};
use ratekeeper_core::Algorithm;

use crate::limits::every_variant;
use crate::memory::{START, limiter};

/// A step of a test: the key, the time since the previous step in milliseconds (may be negative), the cost, and the
/// operation.
type Step = (u8, i64, u32, u8);

/// The number of keys that always find an entry: a line of wide states has three, and at most 31 keys spill from it.
const KEYS: u8 = 34;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let gap_ms = prop_oneof![3 => Just(0), 3 => 1..2_000i64, 1 => 2_000..40_000i64, 2 => -10_000..0i64];
    prop::collection::vec((0..KEYS, gap_ms, 0..4u32, 0..10u8), 1..120)
}

fn run<A: Algorithm>(
    algorithm: &A,
    limit: &Limit,
    max_keys: usize,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let (limiter, clock) = limiter(limit.clone(), |it| it.max_keys(max_keys));
    let mut states: HashMap<u8, A::State> = HashMap::new();
    let (mut now, mut latest) = (START, START);
    for &(key, gap_ms, cost, verb) in steps {
        let gap = Duration::from_millis(gap_ms.unsigned_abs());
        now = if gap_ms < 0 { now.saturating_sub(gap) } else { now.saturating_add(gap) };
        // The clock steps back by at most a window from the latest instant that it showed.
        now = now.max(latest.saturating_sub(limit.window()));
        latest = latest.max(now);
        clock.set(now);
        let state = states.entry(key).or_insert_with(|| algorithm.fresh());
        let (got, expected): (Decision, Decision) = match verb {
            0 => {
                limiter.reset(&key);
                *state = algorithm.fresh();
                continue;
            }
            1 => (limiter.peek_n(&key, cost), algorithm.peek(state, now, cost)),
            _ => (limiter.check_n(&key, cost), algorithm.decide(state, now, cost)),
        };
        prop_assert_eq!(got, expected, "key {} at {:?}, cost {}", key, now, cost);
    }
    prop_assert_eq!(limiter.overflowed(), 0);
    Ok(())
}

proptest! {
    #![proptest_config(testbed::property::cases(2_000))]

    #[test]
    fn store_decides_as_the_algorithm(steps in steps(), max_keys in prop_oneof![Just(1usize), Just(40), Just(5_000)]) {
        for (name, limit) in every_variant(5, 10) {
            // A map holds exactly `max_keys` keys; a table has at least one line and its side map.
            let many = max_keys.max(40);
            match &limit {
                Limit::Bucket(it) => run(it, &limit, max_keys, &steps),
                Limit::SteppedBucket(it) => run(it, &limit, max_keys, &steps),
                Limit::FixedWindow(it) => run(it, &limit, max_keys, &steps),
                Limit::Log(it) => run(it, &limit, many, &steps),
                Limit::Counter(it) => run(it, &limit, many, &steps),
            }
            .map_err(|error| TestCaseError::fail(format!("{name}: {error}")))?;
        }
    }
}

/// Packing a state is lossless at the ends of the documented ranges.
#[test]
fn extreme_limits_decide_as_the_algorithm() {
    let (day, year) = (Duration::from_secs(86_400), Duration::from_secs(366 * 86_400));
    let ms = Duration::from_millis(1);
    let limits = [
        Limit::token_bucket(
            u32::MAX,
            ratekeeper::Rate::new(1, year).unwrap(),
            ratekeeper::RefillStyle::Smooth,
        ),
        Limit::token_bucket(
            u32::MAX,
            ratekeeper::Rate::new(10_000, ms).unwrap(),
            ratekeeper::RefillStyle::Smooth,
        ),
        Limit::token_bucket(
            u32::MAX,
            ratekeeper::Rate::new(999_983, day).unwrap(),
            ratekeeper::RefillStyle::Stepped,
        ),
        Limit::fixed_window(u32::MAX, ms, ratekeeper::WindowAlign::Clock),
        Limit::fixed_window(u32::MAX, year, ratekeeper::WindowAlign::Clock),
        Limit::fixed_window(u32::MAX, year, ratekeeper::WindowAlign::FirstRequest),
        Limit::sliding_window_counter(u32::MAX, ms, 1, ratekeeper::EdgePolicy::Weigh),
        Limit::sliding_window_counter(u32::MAX, year, 1, ratekeeper::EdgePolicy::Weigh),
        Limit::sliding_window_counter(u32::MAX, year, 7, ratekeeper::EdgePolicy::Weigh),
        Limit::sliding_window_counter(u32::MAX, ms, 1024, ratekeeper::EdgePolicy::Keep),
        Limit::sliding_window_log(u32::MAX, year, ratekeeper::LogPolicy::All),
    ];
    for limit in limits.map(Result::unwrap) {
        match &limit {
            Limit::Bucket(it) => at_the_ends_of_time(it, &limit),
            Limit::SteppedBucket(it) => at_the_ends_of_time(it, &limit),
            Limit::FixedWindow(it) => at_the_ends_of_time(it, &limit),
            Limit::Log(it) => at_the_ends_of_time(it, &limit),
            Limit::Counter(it) => at_the_ends_of_time(it, &limit),
        }
    }
}

fn at_the_ends_of_time<A: Algorithm>(algorithm: &A, limit: &Limit) {
    let (limiter, clock) = limiter(limit.clone(), |it| it.max_keys(10));
    let mut state = algorithm.fresh();
    let last = Time::MAX.as_nanos();
    for now in [0, 1, 999_999, START.as_nanos(), last - 1, last, 5, last] {
        clock.set(Time::from_nanos(now));
        for cost in [1, u32::MAX - 1, 1, 0, u32::MAX] {
            let expected = algorithm.decide(&mut state, Time::from_nanos(now), cost);
            assert_eq!(limiter.check_n("key", cost), expected, "{limit:?} at {now}, cost {cost}");
        }
    }
}
