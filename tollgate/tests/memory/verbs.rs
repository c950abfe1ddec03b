//! What each verb of a limiter does.

use std::time::Duration;

use tollgate::{Align, Limit, Limiter, RetryAfter, SystemClock};

use crate::memory::{every_variant, limiter};

#[test]
fn a_peek_takes_nothing_and_tells_what_a_check_would() {
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
fn a_reset_key_is_as_good_as_new() {
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
fn a_batch_is_so_many_checks() {
    for (name, limit) in every_variant(2, 60) {
        let (limiter, _clock) = limiter(limit, |it| it);
        let keys: Vec<u32> = (0..100).map(|n| n % 40).collect();
        let mut told = Vec::new();
        limiter.check_many(&keys, |index, decision| told.push((index, decision.allowed)));
        let expected: Vec<(usize, bool)> = (0..100).map(|n| (n, n < 80)).collect();
        assert_eq!(told, expected, "{name}");
    }
}

#[test]
fn any_key_that_hashes_will_do() {
    let (limiter, _clock) =
        limiter(Limit::fixed_window(1, Duration::from_secs(1), Align::Clock).unwrap(), |it| it);
    assert!(limiter.check(&7u64).allowed);
    assert!(limiter.check("seven").allowed);
    assert!(!limiter.check(&String::from("seven")).allowed, "a String hashes as its text");
    assert!(limiter.check(&("tuple", 7)).allowed);
    assert!(limiter.check(b"bytes".as_slice()).allowed);
    assert!(limiter.check(&std::net::Ipv4Addr::LOCALHOST).allowed);
}

#[test]
fn settings_without_room_are_refused() {
    let limit = || Limit::fixed_window(1, Duration::from_secs(1), Align::Clock).unwrap();
    let error = Limiter::builder(limit()).max_keys(0).build().unwrap_err();
    assert_eq!(error.to_string(), "max_keys is 0: a limiter needs room for at least one key");
    let error = Limiter::builder(limit()).and(limit()).max_bytes(100).build().unwrap_err();
    assert_eq!(error.to_string(), "max_bytes is 100: with these limits it must be at least 32768");
}

#[test]
fn limiters_are_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>(_: &T) {}
    shared(
        &Limiter::builder(Limit::fixed_window(1, Duration::from_secs(1), Align::Clock).unwrap())
            .build()
            .unwrap(),
    );
    shared(&SystemClock::new());
}

/// Whoever is told a decision may ask the limiter again, about the same key, too: nothing is held meanwhile.
#[test]
fn who_is_told_may_ask_again() {
    for (name, limit) in every_variant(3, 60) {
        let (limiter, _clock) = limiter(limit, |it| it.max_keys(100));
        let keys = ["a", "b", "a", "c", "a"];
        for _ in 0..2 {
            let mut told = 0;
            limiter.check_many(&keys, |index, _| {
                limiter.prefetch(keys[index]);
                limiter.peek(keys[index]);
                limiter.check_n(keys[index], 0);
                told += 1;
            });
            assert_eq!(told, keys.len(), "{name}");
        }
    }
}
