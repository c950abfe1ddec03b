//! Limits of every kind, and decisions with a state of any kind. The tests of the stores include this file, too.

use std::time::Duration;

use ratekeeper_core::{
    Algorithm, Decision, EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RefillStyle, State, Time, WindowAlign,
};

/// Every variant of every algorithm, `n` in `secs` seconds, and some whose states are unusual: wide, or with windows and
/// rates that no whole number of microseconds divides.
pub(crate) fn every_variant(n: u32, secs: u64) -> Vec<(&'static str, Limit)> {
    let window = Duration::from_secs(secs);
    let odd_window = Duration::from_nanos(secs * 999_999_937);
    let rate = Rate::new(u64::from(n), window).unwrap();
    // The count is prime: a unit is not a whole number of nanoseconds, and the bucket's state takes two words.
    let odd_rate = Rate::new(999_983, Duration::from_secs(86_400)).unwrap();
    let thirds = Rate::new(3, window / 3).unwrap();
    let counter = Limit::sliding_window_counter;
    [
        ("token bucket, smooth", Limit::token_bucket(n, rate, RefillStyle::Smooth)),
        ("token bucket, smooth, wide", Limit::token_bucket(n, odd_rate, RefillStyle::Smooth)),
        ("token bucket, stepped", Limit::token_bucket(n, rate, RefillStyle::Stepped)),
        ("token bucket, stepped, in thirds", Limit::token_bucket(n, thirds, RefillStyle::Stepped)),
        ("leaky bucket, police", Limit::leaky_bucket(n, rate, LeakyMode::Police)),
        ("leaky bucket, shape", Limit::leaky_bucket(n, rate, LeakyMode::Shape)),
        ("fixed window, clock", Limit::fixed_window(n, window, WindowAlign::Clock)),
        ("fixed window, clock, odd", Limit::fixed_window(n, odd_window, WindowAlign::Clock)),
        ("fixed window, first request", Limit::fixed_window(n, window, WindowAlign::FirstRequest)),
        ("log, admitted", Limit::sliding_window_log(n, window, LogPolicy::Admitted)),
        ("log, all", Limit::sliding_window_log(n, window, LogPolicy::All)),
        ("counter, weigh", counter(n, window, 1, EdgePolicy::Weigh)),
        ("counter, keep", counter(n, window, 1, EdgePolicy::Keep)),
        ("counter, weigh, seven buckets", counter(n, window, 7, EdgePolicy::Weigh)),
        ("counter, drop, six buckets", counter(n, window, 6, EdgePolicy::Drop)),
        ("counter, keep, sixty buckets", counter(n, window, 60, EdgePolicy::Keep)),
        ("counter, weigh, thirteen buckets, odd", counter(n, odd_window, 13, EdgePolicy::Weigh)),
    ]
    .map(|(name, limit)| (name, limit.unwrap()))
    .to_vec()
}

/// The same without names.
pub(crate) fn every_limit(n: u32, secs: u64) -> Vec<Limit> {
    every_variant(n, secs).into_iter().map(|(_, limit)| limit).collect()
}

/// A limit of the same variant and window, of another size, and of another rate if one is given.
pub(crate) fn resized(limit: &Limit, size: u32, rate: Option<Rate>) -> Limit {
    match limit {
        Limit::Bucket(it) => match it.mode() {
            Some(mode) => Limit::leaky_bucket(size, rate.unwrap_or(it.rate()), mode),
            None => Limit::token_bucket(size, rate.unwrap_or(it.rate()), RefillStyle::Smooth),
        },
        Limit::SteppedBucket(it) => {
            Limit::token_bucket(size, rate.unwrap_or(it.rate()), RefillStyle::Stepped)
        }
        Limit::FixedWindow(it) => Limit::fixed_window(size, it.window(), it.align()),
        Limit::Log(it) => Limit::sliding_window_log(size, it.window(), it.count()),
        Limit::Counter(it) => Limit::sliding_window_counter(size, it.window(), it.buckets(), it.edge()),
    }
    .unwrap()
}

/// The state of a key that was never used.
pub(crate) fn fresh(limit: &Limit) -> State {
    match limit {
        Limit::Bucket(it) => State::Bucket(it.fresh()),
        Limit::SteppedBucket(it) => State::SteppedBucket(it.fresh()),
        Limit::FixedWindow(it) => State::FixedWindow(it.fresh()),
        Limit::Log(it) => State::Log(it.fresh()),
        Limit::Counter(it) => State::Counter(it.fresh()),
    }
}

/// Decides by the plain algorithm, which the stores must equal.
pub(crate) fn decide(limit: &Limit, state: &mut State, now: Time, cost: u32) -> Decision {
    match (limit, state) {
        (Limit::Bucket(it), State::Bucket(state)) => it.decide(state, now, cost),
        (Limit::SteppedBucket(it), State::SteppedBucket(state)) => it.decide(state, now, cost),
        (Limit::FixedWindow(it), State::FixedWindow(state)) => it.decide(state, now, cost),
        (Limit::Log(it), State::Log(state)) => it.decide(state, now, cost),
        (Limit::Counter(it), State::Counter(state)) => it.decide(state, now, cost),
        (limit, state) => panic!("{limit:?} with {state:?}"),
    }
}
