//! Goal: memory never exceeds its bound, and a flood of new keys never evicts a key in use.

use std::time::Duration;

use ratekeeper::{Limit, LogPolicy, Rate, RefillStyle, RetryAfter, WhenFull, WindowAlign};

use crate::limits::every_variant;
use crate::memory::limiter;

/// A limiter holds `max_keys` keys in use, even if the hash distributes them unevenly over the lines.
#[test]
fn limiter_holds_max_keys_keys_in_use() {
    for (name, limit) in every_variant(2, 60) {
        for max_keys in [1, 10, 1_000, 200_000] {
            let (limiter, _clock) = limiter(limit.clone(), |it| it.max_keys(max_keys));
            let admitted = (0..max_keys).filter(|n| limiter.check_n(n, 2).allowed).count();
            let again = (0..max_keys).filter(|n| limiter.check(n).allowed).count();
            assert_eq!((admitted, again, limiter.overflowed()), (max_keys, 0, 0), "{name}, {max_keys} keys");
        }
    }
}

/// Fills a small limiter with keys in use until one finds no free entry.
fn filled(limit: Limit, when_full: WhenFull) -> (crate::memory::Tested, ratekeeper::ManualClock) {
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
fn full_limiter_applies_the_when_full_policy() {
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
        // The filler key that overflowed has used one of the three units of the shared budget.
        assert_eq!(admitted, found_room + 2, "{name}");
    }
}

#[test]
fn new_keys_evict_idle_keys() {
    for (name, limit) in every_variant(3, 60) {
        let (limiter, clock) = filled(limit, WhenFull::Deny);
        clock.advance(Duration::from_secs(3 * 86_400));
        // All keys are idle now: fifty new keys find an entry and keep their state.
        for n in 0..50u32 {
            assert!(limiter.check_n(&n, 3).allowed, "{name}: key {n} of 50");
        }
        for n in 0..50u32 {
            assert!(!limiter.check(&n).allowed, "{name}: key {n} of 50 again");
        }
    }
}

#[test]
fn memory_stays_within_max_bytes() {
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

/// A log that cannot grow still denies a key that is over its limit.
#[test]
fn log_that_cannot_grow_still_denies_keys_over_their_limit() {
    let limit = Limit::sliding_window_log(8, Duration::from_secs(60), LogPolicy::Admitted).unwrap();
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

/// A log that cannot grow counts with a lower resolution: its key still gets at most its limit, and its budget is
/// restored.
#[test]
fn log_that_cannot_grow_never_exceeds_its_limit() {
    for when_full in [WhenFull::Share, WhenFull::Deny, WhenFull::Allow] {
        for limit in [100, 100_000] {
            let hour = Duration::from_secs(3_600);
            let log = Limit::sliding_window_log(limit, hour, LogPolicy::Admitted).unwrap();
            let (limiter, clock) = limiter(log, |it| it.max_bytes(16 << 10).when_full(when_full));
            limiter.check("known");
            for n in 0..10_000u32 {
                limiter.check(&n);
            }
            let mut admitted = 1;
            for _ in 0..2 * limit {
                clock.advance(Duration::from_nanos(1));
                admitted += u32::from(limiter.check("known").allowed);
            }
            assert_eq!(admitted, limit, "{when_full:?}");
            clock.advance(hour);
            assert!(limiter.check("known").allowed, "{when_full:?}: an hour later all of it is back");
        }
    }
}

/// Keys without an entry share the budget of one key, and its log stays within the memory bound.
#[test]
fn shared_overflow_log_stays_within_max_bytes() {
    let limit =
        Limit::sliding_window_log(1_000_000, Duration::from_secs(3_600), LogPolicy::Admitted).unwrap();
    let (limiter, clock) = limiter(limit, |it| it.max_keys(1).max_bytes(16 << 10));
    limiter.check("first");
    let mut admitted = 0;
    for n in 0..1_100_000u32 {
        clock.advance(Duration::from_nanos(1));
        admitted += u32::from(limiter.check(&n).allowed);
    }
    assert_eq!(admitted, 1_000_000);
    assert!(limiter.bytes() <= 16 << 10);
}

/// A key whose logged requests have all left the window needs no further memory.
#[test]
fn idle_log_has_its_full_budget_if_memory_is_full() {
    let limit = Limit::sliding_window_log(3, Duration::from_secs(60), LogPolicy::Admitted).unwrap();
    let (limiter, clock) = limiter(limit, |it| it.max_bytes(16 << 10).when_full(WhenFull::Deny));
    assert!(
        limiter.check_n("idle", 1).allowed && limiter.check("idle").allowed && limiter.check("idle").allowed
    );
    clock.advance(Duration::from_secs(59));
    for n in 0..10_000u32 {
        limiter.check(&n);
    }
    clock.advance(Duration::from_secs(2));
    assert!(limiter.peek_n("idle", 0).allowed);
    assert_eq!((0..5).filter(|_| limiter.check("idle").allowed).count(), 3);
}

/// New keys find a few idle keys among many in use, in any shard.
#[test]
fn new_keys_find_idle_keys_among_many_in_use() {
    for (name, limit) in every_variant(3, 60) {
        let (limiter, clock) = limiter(limit, |it| it.max_keys(20_000).when_full(WhenFull::Deny));
        for n in 0..2_000u32 {
            limiter.check_n(&("idle", n), 3);
        }
        clock.advance(Duration::from_secs(3 * 86_400));
        for n in 0..18_000u32 {
            limiter.check_n(&("used", n), 3);
        }
        let refused = (0..2_000u32).filter(|n| !limiter.check(&("new", n)).allowed).count();
        assert!(refused <= 20, "{name}: {refused} of 2000 found none of the 2000 entries of idle keys");
    }
}

#[test]
fn bounds_larger_than_any_machine_are_an_error() {
    for (name, limit) in every_variant(3, 60) {
        let built = ratekeeper::Limiter::builder(limit).max_keys(usize::MAX).max_bytes(usize::MAX).build();
        assert_eq!(built.map(|_| ()), Err(ratekeeper::BuildError::TooLarge), "{name}");
    }
}

#[test]
fn keys_in_use_are_counted() {
    for (name, limit) in every_variant(2, 60) {
        let (limiter, clock) = limiter(limit, |it| it.max_keys(100_000));
        assert_eq!(limiter.keys(), 0, "{name}");
        for n in (0..500).chain(0..500) {
            limiter.check(&n);
        }
        assert_eq!(limiter.keys(), 500, "{name}");
        limiter.reset(&0);
        assert_eq!(limiter.keys(), 499, "{name}");
        // Idle keys in lines are not counted; spilled keys and keys of a map are, until a sweep removes them.
        clock.advance(Duration::from_secs(3 * 86_400));
        assert!(limiter.keys() <= 499, "{name}");
    }
    let bucket =
        Limit::token_bucket(2, Rate::new(1, Duration::from_secs(1)).unwrap(), RefillStyle::Smooth).unwrap();
    let (limiter, clock) = limiter(bucket, |it| it.max_keys(100_000));
    (0..500).for_each(|n| assert!(limiter.check(&n).allowed));
    clock.advance(Duration::from_secs(2));
    assert_eq!(limiter.keys(), 0);
}

#[test]
fn keys_of_a_large_table_are_estimated() {
    let window = Limit::fixed_window(2, Duration::from_secs(60), WindowAlign::FirstRequest).unwrap();
    let (limiter, _clock) = limiter(window, |it| it.max_keys(5_000_000));
    (0..100_000).for_each(|n| assert!(limiter.check(&n).allowed));
    assert!(limiter.keys().abs_diff(100_000) < 5_000, "{}", limiter.keys());
}
