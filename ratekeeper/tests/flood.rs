//! Goal: a flood of new keys stays within the memory bound and evicts no key in use. Runs in a separate process, so
//! that the memory of the process is the limiter's.

use std::time::Duration;

use crate::child::{self, Worker};
use ratekeeper::{
    EdgePolicy, LeakyMode, Limit, Limiter, LogPolicy, ManualClock, Rate, RefillStyle, Time, WindowAlign,
};

/// Resident memory of this process, in bytes.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has /proc/self/statm");
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("the second number is the resident size") * 4096
}

#[test]
fn flood_of_keys_stays_within_the_memory_bound_and_evicts_no_key_in_use() {
    let mut worker = Worker::start("flood::flooded_process", "flood");
    assert_eq!(worker.read_line(), "held");
}

/// The worker. Does nothing when it runs with the other tests.
#[test]
fn flooded_process() {
    if child::task().is_some() {
        flood(testbed::ordinary_or_long(1_000_000, 10_000_000));
        child::say("held");
    }
}

/// Checks ten times as many distinct keys as the limiter can hold, while a thousand keys stay over their limit.
fn flood(keys: u64) {
    let step = keys / 1_000;
    let day = Duration::from_secs(86_400);
    let limits = [
        Limit::token_bucket(10, Rate::new(10, day).unwrap(), RefillStyle::Smooth),
        Limit::leaky_bucket(10, Rate::new(7, day).unwrap(), LeakyMode::Police),
        Limit::fixed_window(10, day, WindowAlign::FirstRequest),
        Limit::sliding_window_log(10, day, LogPolicy::Admitted),
        Limit::sliding_window_counter(10, day, 1, EdgePolicy::Weigh),
    ];
    for limit in limits.map(Result::unwrap) {
        let name = limit.name();
        let before = resident_bytes();
        let clock = ManualClock::new(Time::from_secs(1_700_000_000));
        let limiter =
            Limiter::builder(limit).clock(clock.clone()).max_keys((keys / 10) as usize).build().unwrap();
        let over: Vec<(&str, u64)> = (0..1_000).map(|n| ("over", n)).collect();
        for key in &over {
            limiter.check_n(key, 10);
        }
        let mut admitted_early = 0;
        for n in 0..keys {
            limiter.check(&n);
            if n % step == 0 {
                // 1000 steps of one second restore none of a budget of ten a day.
                clock.advance(Duration::from_secs(1));
                let key = &over[(n / step) as usize % 1_000];
                admitted_early += u32::from(limiter.check(key).allowed);
            }
        }
        admitted_early += over.iter().filter(|key| limiter.check(key).allowed).count() as u32;
        assert_eq!(admitted_early, 0, "{name}");
        let grown = resident_bytes().saturating_sub(before);
        let bound = limiter.bytes();
        // Allowance for the allocator and for the test itself.
        assert!(grown <= bound + bound / 10 + (8 << 20), "{name}: {grown} bytes, the bound is {bound}");
        assert!(limiter.overflowed() > keys / 2, "{name}: most keys found no room");
        // Two days later all keys are idle, and new keys evict them.
        clock.advance(2 * day);
        let overflowed = limiter.overflowed();
        let admitted = (0..keys / 100).filter(|n| limiter.check(&("new", n)).allowed).count();
        assert_eq!((admitted, limiter.overflowed()), ((keys / 100) as usize, overflowed), "{name}");
    }
}
