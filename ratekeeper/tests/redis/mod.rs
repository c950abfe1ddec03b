//! The Redis store on real servers that each test starts and stops: same decisions as memory, exact limits across
//! processes, and decisions within the deadline whatever the server does.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bounded_work;
mod cluster;
mod connect;
mod denial_cache;
mod deploys;
mod equivalence;
mod expiry;
mod faults;
mod function_calls;
mod leases;
mod network;
mod processes;
mod records;
mod refund;
mod sharing;

use std::time::Duration;

use ratekeeper::redis::{Redis, Settings};
use ratekeeper::{EdgePolicy, LeakyMode, Limit, Limiter, LogPolicy, Rate, RefillStyle, WindowAlign};
use testbed::RedisServer;

/// Deadline for tests that must not time out on a busy machine.
const PATIENT: Duration = Duration::from_secs(10);

/// A limiter on Redis. Must be called on a tokio runtime.
fn limiter(limits: &[Limit], settings: &Settings) -> Limiter<Redis> {
    let (first, others) = limits.split_first().unwrap();
    let builder = others.iter().cloned().fold(Limiter::builder(first.clone()), |it, limit| it.and(limit));
    builder.redis(settings).unwrap()
}

/// Every test ends with this check: no key may stay in Redis for ever.
fn all_expire(server: &RedisServer) {
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
}

/// Every algorithm and variant with `n` per `secs` seconds.
fn every_variant(n: u32, secs: u64) -> Vec<Limit> {
    let window = Duration::from_secs(secs);
    let rate = Rate::new(u64::from(n), window).unwrap();
    // A unit is not a whole number of nanoseconds.
    let odd = Rate::new(999_983, Duration::from_secs(86_400)).unwrap();
    [
        Limit::token_bucket(n, rate, RefillStyle::Smooth),
        Limit::token_bucket(n, odd, RefillStyle::Smooth),
        Limit::token_bucket(n, rate, RefillStyle::Stepped),
        Limit::token_bucket(n, Rate::new(3, window / 3).unwrap(), RefillStyle::Stepped),
        Limit::leaky_bucket(n, rate, LeakyMode::Police),
        Limit::leaky_bucket(n, rate, LeakyMode::Shape),
        Limit::fixed_window(n, window, WindowAlign::Clock),
        Limit::fixed_window(n, Duration::from_nanos(secs * 999_999_937), WindowAlign::Clock),
        Limit::fixed_window(n, window, WindowAlign::FirstRequest),
        Limit::sliding_window_log(n, window, LogPolicy::Admitted),
        Limit::sliding_window_log(n, window, LogPolicy::All),
        Limit::sliding_window_counter(n, window, 1, EdgePolicy::Weigh),
        Limit::sliding_window_counter(n, window, 1, EdgePolicy::Keep),
        Limit::sliding_window_counter(n, window, 7, EdgePolicy::Weigh),
        Limit::sliding_window_counter(n, window, 6, EdgePolicy::Drop),
        Limit::sliding_window_counter(n, Duration::from_nanos(secs * 999_999_937), 13, EdgePolicy::Weigh),
    ]
    .map(Result::unwrap)
    .to_vec()
}

/// The same limit with another size.
fn resized(limit: &Limit, size: u32) -> Limit {
    match limit {
        Limit::Bucket(it) => match it.mode() {
            Some(mode) => Limit::leaky_bucket(size, it.rate(), mode),
            None => Limit::token_bucket(size, it.rate(), RefillStyle::Smooth),
        },
        Limit::SteppedBucket(it) => Limit::token_bucket(size, it.rate(), RefillStyle::Stepped),
        Limit::FixedWindow(it) => Limit::fixed_window(size, it.window(), it.align()),
        Limit::Log(it) => Limit::sliding_window_log(size, it.window(), it.count()),
        Limit::Counter(it) => Limit::sliding_window_counter(size, it.window(), it.buckets(), it.edge()),
    }
    .unwrap()
}
