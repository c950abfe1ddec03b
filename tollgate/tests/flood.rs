//! Goal: a flood of new keys stays within the memory bound and resets nobody. In a binary of its own, so that the
//! process' memory is the limiter's.

use std::time::Duration;

use tollgate::{Align, Count, Edge, Limit, Limiter, ManualClock, Mode, Rate, Style, Time};

/// Resident memory of this process.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells a process its size");
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("the second number is the resident size") * 4096
}

/// Ten million distinct keys come to a limiter with room for one million, while a thousand stay over their limit.
#[test]
fn a_flood_of_keys_stays_within_the_bound_and_resets_nobody() {
    const KEYS: u64 = 10_000_000;
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
        let limiter = Limiter::builder(limit).clock(clock.clone()).max_keys(1_000_000).build().unwrap();
        let over: Vec<(&str, u64)> = (0..1_000).map(|n| ("over", n)).collect();
        for key in &over {
            limiter.check_n(key, 10);
        }
        let mut admitted_early = 0;
        for n in 0..KEYS {
            limiter.check(&n);
            if n % 10_000 == 0 {
                // 1000 steps of a second: no budget of ten a day comes back.
                clock.advance(Duration::from_secs(1));
                let key = &over[(n / 10_000) as usize % 1_000];
                admitted_early += u32::from(limiter.check(key).allowed);
            }
        }
        admitted_early += over.iter().filter(|key| limiter.check(key).allowed).count() as u32;
        assert_eq!(admitted_early, 0, "{name}");
        let grown = resident_bytes().saturating_sub(before);
        let bound = limiter.bytes();
        // The allocator and the test itself have their share.
        assert!(grown <= bound + bound / 10 + (8 << 20), "{name}: {grown} bytes, the bound is {bound}");
        assert!(limiter.overflowed() > KEYS / 2, "{name}: most keys found no room");
        // Two days later everybody is idle, and there is room for new keys.
        clock.advance(2 * day);
        let overflowed = limiter.overflowed();
        let admitted = (0..100_000u64).filter(|n| limiter.check(&("new", n)).allowed).count();
        assert_eq!((admitted, limiter.overflowed()), (100_000, overflowed), "{name}");
    }
}
