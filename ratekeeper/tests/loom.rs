//! Every interleaving of the table's atomics, explored by the model checker loom.
//!
//! `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 cargo test -p ratekeeper --test loom`, or as a step of `cargo xtask
//! test`. A limiter with `max_keys` of 1 is one line of five entries and the side map, so all keys share one line.
#![cfg(loom)]

use std::time::Duration;

use loom::sync::Arc;
use loom::thread;
use ratekeeper::{
    Charge, EdgePolicy, Limit, Limiter, ManualClock, Memory, Rate, RefillStyle, Time, WhenFull, WindowAlign,
};

type Tested = Arc<Limiter<Memory<ManualClock>>>;

const START: Time = Time::from_secs(1_700_000_000);

fn limiter(limit: Limit) -> Tested {
    let clock = ManualClock::new(START);
    Arc::new(Limiter::builder(limit).clock(clock).max_keys(1).when_full(WhenFull::Deny).build().unwrap())
}

fn fixed(limit: u32) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(60), WindowAlign::Clock).unwrap()
}

/// Runs each job on its own thread, the last on this one, and returns the sum of allowed requests.
fn count_allowed(limiter: &Tested, jobs: &[fn(&Tested) -> u32]) -> u32 {
    let (last, others) = jobs.split_last().unwrap();
    let threads: Vec<_> = others
        .iter()
        .map(|&job| {
            let limiter = limiter.clone();
            thread::spawn(move || job(&limiter))
        })
        .collect();
    let mine = last(limiter);
    mine + threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u32>()
}

fn check(limiter: &Tested, key: u32) -> u32 {
    u32::from(limiter.check(&key).allowed)
}

#[test]
fn concurrent_checks_insert_a_new_key_once() {
    loom::model(|| {
        let limiter = limiter(fixed(1));
        assert_eq!(count_allowed(&limiter, &[|it| check(it, 1), |it| check(it, 1)]), 1);
    });
}

#[test]
fn concurrent_checks_charge_a_known_key_once_each() {
    loom::model(|| {
        let limiter = limiter(
            Limit::token_bucket(3, Rate::new(1, Duration::from_secs(1)).unwrap(), RefillStyle::Smooth)
                .unwrap(),
        );
        check(&limiter, 1);
        let twice = |it: &Tested| check(it, 1) + check(it, 1);
        assert_eq!(count_allowed(&limiter, &[twice, twice]), 2);
        assert_eq!(limiter.peek(&1).remaining, 0);
    });
}

/// The state of a window is two words, its start and its count. The start of the new window with the count of the old
/// one would leave five.
#[test]
fn state_of_two_words_is_never_torn() {
    loom::model(|| {
        let clock = ManualClock::new(START);
        let limit = Limit::fixed_window(10, Duration::from_secs(60), WindowAlign::FirstRequest).unwrap();
        let limiter = Arc::new(Limiter::builder(limit).clock(clock.clone()).max_keys(1).build().unwrap());
        limiter.check_n(&1, 5);
        clock.advance(Duration::from_secs(61));
        let peek = |it: &Tested| {
            let remaining = it.peek(&1).remaining;
            assert!(remaining == 10 || remaining == 9, "{remaining} left");
            0
        };
        let check_above_limit = |it: &Tested| {
            let remaining = it.check_n(&1, 11).remaining;
            assert!(remaining == 10 || remaining == 9, "{remaining} left");
            0
        };
        assert_eq!(count_allowed(&limiter, &[|it| check(it, 1), peek, check_above_limit]), 1);
    });
}

#[test]
fn state_of_five_words_is_never_torn() {
    loom::model(|| {
        let limit = Limit::sliding_window_counter(2, Duration::from_secs(60), 6, EdgePolicy::Keep).unwrap();
        let limiter = limiter(limit);
        check(&limiter, 1);
        assert_eq!(count_allowed(&limiter, &[|it| check(it, 1), |it| check(it, 1)]), 1);
    });
}

#[test]
fn keys_of_one_line_do_not_disturb_each_other() {
    loom::model(|| {
        let limiter = limiter(fixed(1));
        assert_eq!(count_allowed(&limiter, &[|it| check(it, 1), |it| check(it, 2) + check(it, 1)]), 2);
        assert_eq!(limiter.peek(&2).remaining, 0);
    });
}

/// Five keys fill the line; the sixth is spilled, and moves back as soon as an entry is free.
#[test]
fn spilled_keys_are_found_again() {
    loom::model(|| {
        let limiter = limiter(fixed(1));
        for key in 0..5 {
            check(&limiter, key);
        }
        let reset_and_check = |it: &Tested| {
            it.reset(&0);
            check(it, 5)
        };
        assert_eq!(count_allowed(&limiter, &[|it| check(it, 5) + check(it, 6), reset_and_check]), 2);
        assert_eq!(check(&limiter, 5) + check(&limiter, 6), 0);
    });
}

#[test]
fn two_limits_are_charged_both_or_neither() {
    loom::model(|| {
        let clock = ManualClock::new(START);
        let limiter =
            Arc::new(Limiter::builder(fixed(1)).and(fixed(1)).clock(clock).max_keys(1).build().unwrap());
        // One thread charges key 1 of both limits, the other key 2 of the first limit and key 1 of the second.
        let both = |it: &Tested, first: u32| {
            let charges = [
                Charge { limit: 1, key: it.key(&1), cost: 1 },
                Charge { limit: 0, key: it.key(&first), cost: 1 },
            ];
            u32::from(it.charge(&charges).unwrap().allowed())
        };
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || both(&limiter, 1))
        };
        let mine = both(&limiter, 2);
        let theirs = other.join().unwrap();
        assert_eq!(mine + theirs, 1, "the second limit has one to give");
        for (key, won) in [(1, theirs), (2, mine)] {
            let charge = [Charge { limit: 0, key: limiter.key(&key), cost: 0 }];
            assert_eq!(limiter.charge(&charge).unwrap().decisions()[0].remaining, 1 - won);
        }
    });
}

fn bucket(capacity: u32, seconds: u64) -> Limit {
    let rate = Rate::new(1, Duration::from_secs(seconds)).unwrap();
    Limit::token_bucket(capacity, rate, RefillStyle::Smooth).unwrap()
}

fn reloaded(before: &Tested, limit: Limit) -> Tested {
    let builder = Limiter::builder(limit).clock(ManualClock::default()).max_keys(1).when_full(WhenFull::Deny);
    Arc::new(builder.reload_from(before, &[Some(0)]).unwrap())
}

/// A line is converted to another rate while a request of the earlier limiter is being decided.
#[test]
fn two_generations_charge_a_converted_key_once_each() {
    loom::model(|| {
        let earlier = limiter(bucket(3, 1));
        check(&earlier, 1);
        let later = reloaded(&earlier, bucket(3, 2));
        let thread = {
            let earlier = earlier.clone();
            thread::spawn(move || check(&earlier, 1) + check(&earlier, 1))
        };
        let mine = check(&later, 1) + check(&later, 1);
        assert_eq!(mine + thread.join().unwrap(), 2);
    });
}

/// A request of the first of three limiters adds a key to an empty line while the third one is created and used.
#[test]
fn new_key_of_an_earlier_generation_is_not_misread() {
    loom::model(|| {
        let first = limiter(bucket(1, 1));
        let second = reloaded(&first, bucket(1, 2));
        let thread = thread::spawn(move || check(&first, 1));
        let third = reloaded(&second, bucket(1, 1_000));
        let mine = check(&third, 1);
        assert_eq!(mine + thread.join().unwrap(), 1);
        // A state of another scale would be one of a wrong clock.
        assert!(!third.peek(&1).allowed);
    });
}
