//! Goal: memory never exceeds its bound, and no flood of new keys makes the store forget a key in use.

use std::time::Duration;

use tollgate::{Count, Limit, RetryAfter, WhenFull};

use crate::{every_variant, limiter};

/// Room for a million keys is room for a million keys: chance does not fill a line before its time.
#[test]
fn there_is_room_for_as_many_keys_as_promised() {
    for (name, limit) in every_variant(2, 60) {
        for max_keys in [1, 10, 1_000, 200_000] {
            let (limiter, _clock) = limiter(limit.clone(), |it| it.max_keys(max_keys));
            let admitted = (0..max_keys).filter(|n| limiter.check_n(n, 2).allowed).count();
            let again = (0..max_keys).filter(|n| limiter.check(n).allowed).count();
            assert_eq!((admitted, again, limiter.overflowed()), (max_keys, 0, 0), "{name}, {max_keys} keys");
        }
    }
}

/// Fills a small limiter with keys in use until one finds no room.
fn filled(limit: Limit, when_full: WhenFull) -> (crate::Tested, tollgate::ManualClock) {
    let (limiter, clock) = limiter(limit, |it| it.max_keys(50).when_full(when_full));
    let mut n = 0u32;
    while limiter.overflowed() == 0 {
        limiter.check(&("filler", n));
        n += 1;
        assert!(n < 10_000, "there must be a bound");
    }
    (limiter, clock)
}

#[test]
fn when_full_the_policy_answers() {
    for (name, limit) in every_variant(3, 60) {
        let (deny, _clock) = filled(limit.clone(), WhenFull::Deny);
        let denied: Vec<_> = (0..2_000u32).map(|n| deny.check(&n)).filter(|it| !it.allowed).collect();
        assert!(denied.len() > 1_000, "{name}");
        assert!(denied.iter().all(|it| it.remaining == 0 && it.retry_after != RetryAfter::Now), "{name}");

        let (allow, _clock) = filled(limit.clone(), WhenFull::Allow);
        assert!((0..2_000u32).all(|n| allow.check(&n).allowed), "{name}");
        assert!(allow.overflowed() > 1_000, "{name}");

        let (share, _clock) = filled(limit, WhenFull::Share);
        let before = share.overflowed();
        let admitted = (0..2_000u32).filter(|n| share.check(n).allowed).count() as u64;
        let found_room = 2_000 - (share.overflowed() - before);
        // The filler that overflowed was the first of the three that share a budget.
        assert_eq!(admitted, found_room + 2, "{name}");
    }
}

#[test]
fn idle_keys_go_first() {
    for (name, limit) in every_variant(3, 60) {
        let (limiter, clock) = filled(limit, WhenFull::Deny);
        clock.advance(Duration::from_secs(3 * 86_400));
        // Now all are idle: fifty new keys find room, and are remembered.
        for n in 0..50u32 {
            assert!(limiter.check_n(&n, 3).allowed, "{name}: key {n} of 50");
        }
        for n in 0..50u32 {
            assert!(!limiter.check(&n).allowed, "{name}: key {n} of 50 again");
        }
    }
}

#[test]
fn bytes_are_a_bound_too() {
    for (name, limit) in every_variant(1_000, 3_600) {
        let max_bytes = 1 << 20;
        let (limiter, clock) =
            limiter(limit, |it| it.max_keys(1_000_000).max_bytes(max_bytes).when_full(WhenFull::Deny));
        assert!(limiter.bytes() <= max_bytes, "{name}: {} bytes from the start", limiter.bytes());
        for n in 0..200_000u32 {
            limiter.check(&(n % 300));
            limiter.check(&n);
            if n % 1_000 == 0 {
                clock.advance(Duration::from_millis(1));
                assert!(limiter.bytes() <= max_bytes, "{name}: {} bytes", limiter.bytes());
            }
        }
        assert!(limiter.overflowed() > 0, "{name}");
    }
}

/// A log that cannot grow still says no when the key is over its limit.
#[test]
fn a_log_without_room_still_denies_whom_it_knows() {
    let limit = Limit::sliding_window_log(8, Duration::from_secs(60), Count::Admitted).unwrap();
    let (limiter, clock) = limiter(limit, |it| it.max_bytes(16 << 10).when_full(WhenFull::Allow));
    for _ in 0..9 {
        clock.advance(Duration::from_nanos(1));
        limiter.check("over");
    }
    let mut n = 0u32;
    while limiter.overflowed() == 0 {
        limiter.check(&n);
        n += 1;
    }
    assert!(!limiter.check("over").allowed);
    assert!((0..5_000u32).all(|n| limiter.check(&("more", n)).allowed), "and policy speaks for the others");
}
