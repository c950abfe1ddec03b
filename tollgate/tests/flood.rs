//! Goal: a flood of new keys stays within the memory bound and resets nobody. In a process of its own, so that the
//! process' memory is the limiter's.

use std::time::Duration;

use crate::child::{self, Worker};
use tollgate::{Align, Count, Edge, Limit, Limiter, ManualClock, Mode, Rate, Style, Time};

/// Resident memory of this process.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells a process its size");
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("the second number is the resident size") * 4096
}

#[test]
fn a_flood_of_keys_stays_within_the_bound_and_resets_nobody() {
    let mut worker = Worker::start("flood::flooded_process", "flood");
    assert_eq!(worker.says(), "held");
}

/// The worker. Does nothing when it is run with the other tests.
#[test]
fn flooded_process() {
    if child::task().is_some() {
        flood(testbed::ordinary_or_long(1_000_000, 10_000_000));
        child::say("held");
    }
}

/// Ten times as many distinct keys come to a limiter as it has room for, while a thousand stay over their limit.
fn flood(keys: u64) {
    let step = keys / 1_000;
    let day = Duration::from_secs(86_400);
    let limits = [
        Limit::token_bucket(10, Rate::new(10, day).unwrap(), Style::Smooth),
        Limit::leaky_bucket(10, Rate::new(7, day).unwrap(), Mode::Police),
        Limit::fixed_window(10, day, Align::FirstRequest),
        Limit::sliding_window_log(10, day, Count::Admitted),
        Limit::sliding_window_counter(10, day, 1, Edge::Weigh),
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
                // 1000 steps of a second: no budget of ten a day comes back.
                clock.advance(Duration::from_secs(1));
                let key = &over[(n / step) as usize % 1_000];
                admitted_early += u32::from(limiter.check(key).allowed);
            }
        }
        admitted_early += over.iter().filter(|key| limiter.check(key).allowed).count() as u32;
        assert_eq!(admitted_early, 0, "{name}");
        let grown = resident_bytes().saturating_sub(before);
        let bound = limiter.bytes();
        // The allocator and the test itself have their share.
        assert!(grown <= bound + bound / 10 + (8 << 20), "{name}: {grown} bytes, the bound is {bound}");
        assert!(limiter.overflowed() > keys / 2, "{name}: most keys found no room");
        // Two days later everybody is idle, and there is room for new keys.
        clock.advance(2 * day);
        let overflowed = limiter.overflowed();
        let admitted = (0..keys / 100).filter(|n| limiter.check(&("new", n)).allowed).count();
        assert_eq!((admitted, limiter.overflowed()), ((keys / 100) as usize, overflowed), "{name}");
    }
}
