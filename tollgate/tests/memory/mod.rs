//! The memory store's promises: the same answers as the algorithms themselves, exact under contention, bounded
//! under a flood.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bounds;
mod contention;
mod equivalence;
mod renewal;
mod several_limits;
mod verbs;

use std::time::Duration;

use tollgate::{Align, Builder, Count, Edge, Limit, Limiter, ManualClock, Memory, Mode, Rate, Style, Time};

pub(crate) type Tested = Limiter<Memory<ManualClock>>;

pub(crate) const START: Time = Time::from_secs(1_700_000_040);

/// A limiter on a clock of its own, which stands at [`START`].
pub(crate) fn limiter(
    limit: Limit,
    settings: impl FnOnce(Builder<ManualClock>) -> Builder<ManualClock>,
) -> (Tested, ManualClock) {
    let clock = ManualClock::new(START);
    let limiter = settings(Limiter::builder(limit).clock(clock.clone())).build().unwrap();
    (limiter, clock)
}

/// Every variant of every algorithm, `n` in `seconds`, and some whose states need more room than the usual.
pub(crate) fn every_variant(n: u32, seconds: u64) -> Vec<(&'static str, Limit)> {
    let window = Duration::from_secs(seconds);
    let rate = Rate::new(u64::from(n), window).unwrap();
    // One more in a prime number of days: the instants take two words.
    let odd = Rate::new(999_983, Duration::from_secs(86_400)).unwrap();
    vec![
        ("token bucket, smooth", Limit::token_bucket(n, rate, Style::Smooth)),
        ("token bucket, smooth, wide", Limit::token_bucket(n, odd, Style::Smooth)),
        ("token bucket, stepped", Limit::token_bucket(n, rate, Style::Stepped)),
        ("leaky bucket, police", Limit::leaky_bucket(n, rate, Mode::Police)),
        ("leaky bucket, shape", Limit::leaky_bucket(n, rate, Mode::Shape)),
        ("fixed window, clock", Limit::fixed_window(n, window, Align::Clock)),
        ("fixed window, first request", Limit::fixed_window(n, window, Align::FirstRequest)),
        ("log, admitted", Limit::sliding_window_log(n, window, Count::Admitted)),
        ("log, all", Limit::sliding_window_log(n, window, Count::All)),
        ("counter, weigh", Limit::sliding_window_counter(n, window, 1, Edge::Weigh)),
        ("counter, drop, six buckets", Limit::sliding_window_counter(n, window, 6, Edge::Drop)),
        ("counter, keep, sixty buckets", Limit::sliding_window_counter(n, window, 60, Edge::Keep)),
    ]
    .into_iter()
    .map(|(name, limit)| (name, limit.unwrap()))
    .collect()
}
