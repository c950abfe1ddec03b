//! The store in Redis, on real servers that each test starts and stops: the same answers as memory, exact among
//! processes, and an answer in time whatever the server does.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod cluster;
mod deploys;
mod equivalence;
mod expiry;
mod faults;
mod give_back;
mod known_denials;
mod leases;
mod network;
mod processes;
mod raw;
mod records;
mod sharing;
mod ways_in;

use std::time::Duration;

use testbed::RedisServer;
use tollgate::redis::{Redis, Settings};
use tollgate::{Align, Count, Edge, Limit, Limiter, Mode, Rate, Style};

/// Enough for a busy test machine.
const PATIENT: Duration = Duration::from_secs(10);

/// A limiter on a server. Must be called on a runtime.
fn limiter(limits: &[Limit], settings: &Settings) -> Limiter<Redis> {
    let (first, others) = limits.split_first().unwrap();
    let builder = others.iter().cloned().fold(Limiter::builder(first.clone()), |it, limit| it.and(limit));
    builder.redis(settings).unwrap()
}

/// Nothing stays in a server for ever: every test ends with this.
fn all_expire(server: &RedisServer) {
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
}

/// Every algorithm and variant with `n` per `secs` seconds.
fn every_variant(n: u32, secs: u64) -> Vec<Limit> {
    let window = Duration::from_secs(secs);
    let rate = Rate::new(u64::from(n), window).unwrap();
    // A unit is no whole number of nanoseconds.
    let odd = Rate::new(999_983, Duration::from_secs(86_400)).unwrap();
    [
        Limit::token_bucket(n, rate, Style::Smooth),
        Limit::token_bucket(n, odd, Style::Smooth),
        Limit::token_bucket(n, rate, Style::Stepped),
        Limit::token_bucket(n, Rate::new(3, window / 3).unwrap(), Style::Stepped),
        Limit::leaky_bucket(n, rate, Mode::Police),
        Limit::leaky_bucket(n, rate, Mode::Shape),
        Limit::fixed_window(n, window, Align::Clock),
        Limit::fixed_window(n, Duration::from_nanos(secs * 999_999_937), Align::Clock),
        Limit::fixed_window(n, window, Align::FirstRequest),
        Limit::sliding_window_log(n, window, Count::Admitted),
        Limit::sliding_window_log(n, window, Count::All),
        Limit::sliding_window_counter(n, window, 1, Edge::Weigh),
        Limit::sliding_window_counter(n, window, 1, Edge::Keep),
        Limit::sliding_window_counter(n, window, 7, Edge::Weigh),
        Limit::sliding_window_counter(n, window, 6, Edge::Drop),
        Limit::sliding_window_counter(n, Duration::from_nanos(secs * 999_999_937), 13, Edge::Weigh),
    ]
    .map(Result::unwrap)
    .to_vec()
}

/// The same limit with another size.
fn resized(limit: &Limit, size: u32) -> Limit {
    match limit {
        Limit::Bucket(it) => match it.mode() {
            Some(mode) => Limit::leaky_bucket(size, it.rate(), mode),
            None => Limit::token_bucket(size, it.rate(), Style::Smooth),
        },
        Limit::Steps(it) => Limit::token_bucket(size, it.rate(), Style::Stepped),
        Limit::FixedWindow(it) => Limit::fixed_window(size, it.window(), it.align()),
        Limit::Log(it) => Limit::sliding_window_log(size, it.window(), it.count()),
        Limit::Counter(it) => Limit::sliding_window_counter(size, it.window(), it.buckets(), it.edge()),
    }
    .unwrap()
}
