//! The operations of a limiter.

use std::time::Duration;

use ratekeeper::{Limit, Limiter, RetryAfter, SystemClock, WindowAlign};

use crate::limits::every_variant;
use crate::memory::{START, limiter};

#[test]
fn peek_charges_nothing_and_decides_as_a_check() {
    for (name, limit) in every_variant(3, 60) {
        let (limiter, _clock) = limiter(limit, |it| it);
        for left in [3, 2, 1] {
            assert_eq!(limiter.peek("key").remaining, left, "{name}");
            assert!(limiter.peek("key").allowed, "{name}");
            assert_eq!(limiter.check("key").remaining, left - 1, "{name}");
        }
        let peeked = limiter.peek("key");
        assert!(!peeked.allowed, "{name}");
        if name != "log, all" {
            assert_eq!(peeked, limiter.check("key"), "{name}");
        }
        assert_eq!(limiter.peek_n("key", 4).retry_after, RetryAfter::Never, "{name}");
    }
}

#[test]
fn reset_restores_the_full_budget_of_a_key() {
    for (name, limit) in every_variant(3, 60) {
        let (limiter, _clock) = limiter(limit, |it| it);
        limiter.check_n("key", 3);
        limiter.check_n("other", 3);
        limiter.reset("key");
        limiter.reset("never seen");
        assert_eq!(limiter.check("key").remaining, 2, "{name}");
        assert_eq!(limiter.peek("other").remaining, 0, "{name}");
    }
}

#[test]
fn check_many_decides_as_single_checks() {
    for (name, limit) in every_variant(2, 60) {
        let (limiter, _clock) = limiter(limit, |it| it);
        let keys: Vec<u32> = (0..100).map(|n| n % 40).collect();
        let mut decided = Vec::new();
        limiter.check_many(&keys, |index, decision| decided.push((index, decision.allowed)));
        let expected: Vec<(usize, bool)> = (0..100).map(|n| (n, n < 80)).collect();
        assert_eq!(decided, expected, "{name}");
    }
}

#[test]
fn any_hashable_value_is_a_key() {
    let (limiter, _clock) =
        limiter(Limit::fixed_window(1, Duration::from_secs(1), WindowAlign::Clock).unwrap(), |it| it);
    assert!(limiter.check(&7u64).allowed);
    assert!(limiter.check("seven").allowed);
    assert!(!limiter.check(&String::from("seven")).allowed, "a String hashes as its text");
    assert!(limiter.check(&("tuple", 7)).allowed);
    assert!(limiter.check(b"bytes".as_slice()).allowed);
    assert!(limiter.check(&std::net::Ipv4Addr::LOCALHOST).allowed);
}

#[test]
fn bounds_without_room_for_a_key_are_an_error() {
    let limit = || Limit::fixed_window(1, Duration::from_secs(1), WindowAlign::Clock).unwrap();
    let error = Limiter::builder(limit()).max_keys(0).build().unwrap_err();
    assert_eq!(error.to_string(), "max_keys is 0: a limiter needs room for at least one key");
    let error = Limiter::builder(limit()).and(limit()).max_bytes(100).build().unwrap_err();
    assert_eq!(error.to_string(), "max_bytes is 100: with these limits it must be at least 32768");
}

#[test]
fn limiters_and_clocks_are_send_and_sync() {
    fn shared<T: Send + Sync + 'static>(_: &T) {}
    shared(
        &Limiter::builder(Limit::fixed_window(1, Duration::from_secs(1), WindowAlign::Clock).unwrap())
            .build()
            .unwrap(),
    );
    shared(&SystemClock::new());
}

/// The callback of a batch may check the same key: the limiter holds no lock while it runs.
#[test]
fn batch_callback_may_check_the_same_key() {
    for (name, limit) in every_variant(3, 60) {
        let (limiter, _clock) = limiter(limit, |it| it.max_keys(100));
        let keys = ["a", "b", "a", "c", "a"];
        for _ in 0..2 {
            let mut decided = 0;
            limiter.check_many(&keys, |index, _| {
                limiter.prefetch(keys[index]);
                limiter.peek(keys[index]);
                limiter.check_n(keys[index], 0);
                decided += 1;
            });
            assert_eq!(decided, keys.len(), "{name}");
        }
    }
}

/// Enough keys that a map is larger than the processor's cache and fetches its states.
#[test]
fn prefetched_keys_are_decided_as_others() {
    let keys: Vec<u32> = (0..20_000).collect();
    for (name, limit) in every_variant(3, 60) {
        let (prefetched, clock) = limiter(limit.clone(), |it| it.max_keys(30_000));
        let (other, other_clock) = limiter(limit, |it| it.max_keys(30_000));
        for step in [0, 1, 30, 70] {
            for clock in [&clock, &other_clock] {
                clock.set(START.saturating_add(Duration::from_secs(step)));
            }
            prefetched.prefetch_many(&keys);
            prefetched.check_many(&keys, |index, decision| {
                // The limiter holds no lock while the callback runs.
                prefetched.prefetch_many(&keys[index..keys.len().min(index + 3)]);
                assert_eq!(decision, other.check(&keys[index]), "{name}");
            });
        }
        assert_eq!(prefetched.overflowed(), 0, "{name}");
    }
}
