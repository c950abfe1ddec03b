//! Goal: threads that check the same key concurrently get exactly the limit in total.

use std::sync::atomic::{AtomicU64, Ordering};

use ratekeeper::Limit;
use testbed::ordinary_or_long;

use crate::limits::every_variant;
use crate::memory::{Tested, limiter};

const THREADS: u64 = 8;

/// How many of `checks` checks from `THREADS` threads were allowed.
fn admitted_of_all(limiter: &Tested, checks: u64, check: impl Fn(&Tested, u64) -> bool + Sync) -> u64 {
    let admitted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (admitted, check) = (&admitted, &check);
            scope.spawn(move || {
                let mine = (0..checks / THREADS).filter(|_| check(limiter, thread)).count();
                admitted.fetch_add(mine as u64, Ordering::Relaxed);
            });
        }
    });
    admitted.into_inner()
}

#[test]
fn one_key_gets_exactly_its_limit() {
    let most: u32 = ordinary_or_long(100_000, 1_000_000);
    for (name, limit) in every_variant(most, 86_400) {
        let (limiter, _clock) = limiter(limit, |it| it);
        let admitted = admitted_of_all(&limiter, 10 * u64::from(most), |it, _| it.check("hot").allowed);
        assert_eq!(admitted, u64::from(most), "{name}");
    }
}

/// Threads also insert, peek at and reset other keys in the same line (`max_keys` of 1 is one line) or the same shard
/// of a map (which holds exactly `max_keys` keys).
#[test]
fn one_key_gets_exactly_its_limit_in_a_busy_line() {
    for (name, limit) in every_variant(5_000, 86_400) {
        let is_in_a_map = match &limit {
            Limit::Log(_) => true,
            Limit::Counter(counter) => counter.buckets() >= 8,
            _ => false,
        };
        let max_keys = if is_in_a_map { 9 } else { 1 };
        let (limiter, _clock) = limiter(limit, |it| it.max_keys(max_keys));
        let admitted = admitted_of_all(&limiter, 200_000, |it, thread| {
            it.check(&("other", thread));
            it.peek("hot");
            if thread % 2 == 0 {
                it.reset(&("other", thread));
            }
            it.check("hot").allowed
        });
        assert_eq!(admitted, 5_000, "{name}");
        assert_eq!(limiter.overflowed(), 0, "{name}");
    }
}

/// A batch decides its checks in order, also for the same key.
#[test]
fn batches_get_exactly_the_limit() {
    for (name, limit) in every_variant(20_000, 86_400) {
        let (limiter, _clock) = limiter(limit, |it| it);
        let admitted = AtomicU64::new(0);
        admitted_of_all(&limiter, 80_000, |it, _| {
            it.check_many(&["hot"; 4], |_, decision| {
                admitted.fetch_add(u64::from(decision.allowed), Ordering::Relaxed);
            });
            true
        });
        assert_eq!(admitted.into_inner(), 20_000, "{name}");
    }
}
