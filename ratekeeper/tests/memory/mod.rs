//! The memory store's promises: the same decisions as the algorithms, exact under contention, bounded under a flood.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bounds;
mod contention;
mod equivalence;
mod operations;
mod reload;
mod several_limits;

use std::time::Duration;

use ratekeeper::{
    EdgePolicy, LeakyMode, Limit, Limiter, LimiterBuilder, LogPolicy, ManualClock, Memory, Rate, RefillStyle,
    Time, WindowAlign,
};

pub(crate) type Tested = Limiter<Memory<ManualClock>>;

pub(crate) const START: Time = Time::from_secs(1_700_000_040);

/// A limiter with its own clock, which shows [`START`].
pub(crate) fn limiter(
    limit: Limit,
    settings: impl FnOnce(LimiterBuilder<ManualClock>) -> LimiterBuilder<ManualClock>,
) -> (Tested, ManualClock) {
    let clock = ManualClock::new(START);
    let limiter = settings(Limiter::builder(limit).clock(clock.clone())).build().unwrap();
    (limiter, clock)
}

/// Every variant of every algorithm, `n` in `seconds`, and some whose states need more words than usual.
pub(crate) fn every_variant(n: u32, seconds: u64) -> Vec<(&'static str, Limit)> {
    let window = Duration::from_secs(seconds);
    let rate = Rate::new(u64::from(n), window).unwrap();
    // The count is prime, so the bucket's state takes two words.
    let odd = Rate::new(999_983, Duration::from_secs(86_400)).unwrap();
    vec![
        ("token bucket, smooth", Limit::token_bucket(n, rate, RefillStyle::Smooth)),
        ("token bucket, smooth, wide", Limit::token_bucket(n, odd, RefillStyle::Smooth)),
        ("token bucket, stepped", Limit::token_bucket(n, rate, RefillStyle::Stepped)),
        ("leaky bucket, police", Limit::leaky_bucket(n, rate, LeakyMode::Police)),
        ("leaky bucket, shape", Limit::leaky_bucket(n, rate, LeakyMode::Shape)),
        ("fixed window, clock", Limit::fixed_window(n, window, WindowAlign::Clock)),
        ("fixed window, first request", Limit::fixed_window(n, window, WindowAlign::FirstRequest)),
        ("log, admitted", Limit::sliding_window_log(n, window, LogPolicy::Admitted)),
        ("log, all", Limit::sliding_window_log(n, window, LogPolicy::All)),
        ("counter, weigh", Limit::sliding_window_counter(n, window, 1, EdgePolicy::Weigh)),
        ("counter, drop, six buckets", Limit::sliding_window_counter(n, window, 6, EdgePolicy::Drop)),
        ("counter, keep, sixty buckets", Limit::sliding_window_counter(n, window, 60, EdgePolicy::Keep)),
    ]
    .into_iter()
    .map(|(name, limit)| (name, limit.unwrap()))
    .collect()
}
