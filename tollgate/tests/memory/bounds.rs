//! Goal: memory never exceeds its bound, and no flood of new keys makes the store forget a key in use.

use std::time::Duration;

use tollgate::{Align, Count, Limit, Rate, RetryAfter, Style, WhenFull};

use crate::memory::{every_variant, limiter};

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
fn filled(limit: Limit, when_full: WhenFull) -> (crate::memory::Tested, tollgate::ManualClock) {
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

/// A log that cannot grow counts on, less finely: its key still gets no more than its limit, and its budget comes back.
#[test]
fn a_log_without_room_admits_no_more_than_its_limit() {
    for when_full in [WhenFull::Share, WhenFull::Deny, WhenFull::Allow] {
        for limit in [100, 100_000] {
            let hour = Duration::from_secs(3_600);
            let log = Limit::sliding_window_log(limit, hour, Count::Admitted).unwrap();
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

/// The budget that keys without room share is one key's, and its log takes no more memory than the bound.
#[test]
fn the_shared_log_has_a_bound_too() {
    let limit = Limit::sliding_window_log(1_000_000, Duration::from_secs(3_600), Count::Admitted).unwrap();
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

/// A key whose log has left the window needs no more room than it has.
#[test]
fn an_idle_log_is_as_good_as_new_where_there_is_no_room() {
    let limit = Limit::sliding_window_log(3, Duration::from_secs(60), Count::Admitted).unwrap();
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

/// A few idle keys among many in use are found, wherever they are.
#[test]
fn idle_keys_are_found_among_many_in_use() {
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
        assert!(refused <= 20, "{name}: {refused} of 2000 found none of the 2000 places of idle keys");
    }
}

#[test]
fn settings_that_no_machine_can_hold_are_an_error() {
    for (name, limit) in every_variant(3, 60) {
        let built = tollgate::Limiter::builder(limit).max_keys(usize::MAX).max_bytes(usize::MAX).build();
        assert_eq!(built.map(|_| ()), Err(tollgate::BuildError::TooLarge), "{name}");
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
        // Idle keys take no room that others need; those on the side are swept when others come.
        clock.advance(Duration::from_secs(3 * 86_400));
        assert!(limiter.keys() <= 499, "{name}");
    }
    let bucket =
        Limit::token_bucket(2, Rate::new(1, Duration::from_secs(1)).unwrap(), Style::Smooth).unwrap();
    let (limiter, clock) = limiter(bucket, |it| it.max_keys(100_000));
    (0..500).for_each(|n| assert!(limiter.check(&n).allowed));
    clock.advance(Duration::from_secs(2));
    assert_eq!(limiter.keys(), 0);
}

#[test]
fn keys_of_a_large_table_are_estimated() {
    let window = Limit::fixed_window(2, Duration::from_secs(60), Align::FirstRequest).unwrap();
    let (limiter, _clock) = limiter(window, |it| it.max_keys(5_000_000));
    (0..100_000).for_each(|n| assert!(limiter.check(&n).allowed));
    assert!(limiter.keys().abs_diff(100_000) < 5_000, "{}", limiter.keys());
}
