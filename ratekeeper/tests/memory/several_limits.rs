//! Goal: a request that any limit denies is charged to no limit.

use std::time::Duration;

use ratekeeper::{Charge, ChargeError, Limit, LogPolicy, RetryAfter, Store, WindowAlign};

use crate::limits::every_variant;
use crate::memory::limiter;

fn fixed(limit: u32) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(60), WindowAlign::FirstRequest).unwrap()
}

#[test]
fn denied_request_charges_no_limit() {
    for (name, second) in every_variant(10, 60) {
        let counts_all = name == "log, all";
        let (limiter, _clock) = limiter(fixed(3), |it| it.and(second));
        let allowed = (0..20).filter(|_| limiter.check("key").allowed).count();
        assert_eq!(allowed, 3, "{name}");
        let zero = |limit| [Charge { limit, key: limiter.key("key"), cost: 0 }];
        assert_eq!(limiter.charge(&zero(0)).unwrap().decisions()[0].remaining, 0);
        let left = limiter.charge(&zero(1)).unwrap().decisions()[0].remaining;
        assert_eq!(left, if counts_all { 0 } else { 7 }, "{name}");
    }
}

#[test]
fn decision_is_that_of_the_most_restrictive_limit() {
    let (limiter, _clock) = limiter(fixed(2), |it| {
        it.and(Limit::sliding_window_log(5, Duration::from_secs(3600), LogPolicy::Admitted).unwrap())
    });
    let first = limiter.check("key");
    assert_eq!((first.allowed, first.limit, first.remaining), (true, 2, 1));
    assert_eq!(first.reset_after, Duration::from_secs(3600), "until both have their full budget");
    limiter.check("key");
    let denied = limiter.check("key");
    assert_eq!((denied.allowed, denied.limit, denied.remaining), (false, 2, 0));
    assert_eq!(denied.retry_after, RetryAfter::After(Duration::from_secs(60)));
    let never = limiter.check_n("key", 6);
    assert_eq!(never.retry_after, RetryAfter::Never);
    assert_eq!(limiter.peek("key"), denied, "a peek considers all limits");
}

#[test]
fn decisions_come_in_the_order_of_the_charges() {
    let (limiter, _clock) = limiter(fixed(7), |it| it.and(fixed(8)).and(fixed(9)));
    let charge = |limit, cost| Charge { limit, key: limiter.key(&limit), cost };
    let verdict = limiter.charge(&[charge(2, 1), charge(0, 2), charge(1, 3)]).unwrap();
    let remaining: Vec<u32> = verdict.decisions().iter().map(|decision| decision.remaining).collect();
    assert_eq!(remaining, [8, 5, 5]);
}

#[test]
fn invalid_charges_are_an_error_and_charge_nothing() {
    let (limiter, _clock) = limiter(fixed(7), |it| it.and(fixed(8)));
    let charge = |limit| Charge { limit, key: limiter.key("key"), cost: 1 };
    assert_eq!(
        limiter.charge(&[charge(0), charge(2)]),
        Err(ChargeError::UnknownLimit { limit: 2, limits: 2 })
    );
    assert_eq!(limiter.charge(&[charge(1), charge(0), charge(1)]), Err(ChargeError::SameKeyTwice(1)));
    assert_eq!(limiter.check("key").remaining, 6);
    assert!(limiter.charge(&[]).unwrap().allowed(), "no limit denies");
}

/// Eight threads, three limits, keys that overlap in every way: the smallest limit is used up exactly, and the others
/// are charged the same number of times.
#[test]
fn contended_limits_are_charged_atomically() {
    for (name, scarce) in every_variant(1_000, 86_400) {
        let wide =
            Limit::sliding_window_log(1_000_000, Duration::from_secs(86_400), LogPolicy::Admitted).unwrap();
        let (limiter, _clock) = limiter(fixed(1_000_000), |it| it.and(wide).and(scarce).max_keys(100));
        let admitted: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8u32)
                .map(|thread| {
                    let limiter = &limiter;
                    scope.spawn(move || {
                        let charge =
                            |limit: usize, key: u32| Charge { limit, key: limiter.key(&key), cost: 1 };
                        let admit = |turn: u32| {
                            let mut charges = [charge(0, turn % 3), charge(1, 7), charge(2, 0)];
                            charges.rotate_left(thread as usize % 3);
                            limiter.charge(&charges).unwrap().allowed()
                        };
                        (0..2_000).filter(|&turn| admit(turn)).count()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, 1_000, "{name}");
        let used = |limit: usize, key: u32, of: u32| {
            let peek = [Charge { limit, key: limiter.key(&key), cost: 0 }];
            of - limiter.charge(&peek).unwrap().decisions()[0].remaining
        };
        assert_eq!((0..3).map(|key| used(0, key, 1_000_000)).sum::<u32>(), 1_000, "{name}");
        assert_eq!(used(1, 7, 1_000_000), 1_000, "{name}");
    }
}

/// The `Store` trait decides as the limiter does.
#[test]
fn store_trait_decides_as_the_limiter() {
    fn ready<T>(future: impl Future<Output = T>) -> T {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::pin!(future).poll(&mut context) {
            std::task::Poll::Ready(value) => value,
            std::task::Poll::Pending => panic!("memory never waits"),
        }
    }
    fn charge_once<S: Store<Error = ChargeError>>(store: &S) -> bool {
        let charges = [Charge { limit: 0, key: store.key("key"), cost: 1 }];
        ready(store.charge(&charges)).unwrap().allowed()
    }
    let (limiter, _clock) = limiter(fixed(1), |it| it);
    assert!(charge_once(limiter.store()));
    assert!(!charge_once(limiter.store()));
    assert!(!limiter.check("key").allowed, "the same key, the same state");
}
