//! Every interleaving of the table's atomics, as loom's model checker sees them.
//!
//! `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 cargo test -p tollgate --test loom`, or as a step of
//! `cargo xtask test`. A limiter with room for one key is one line of five slots and the map beside it, so every
//! key meets every other.
#![cfg(loom)]

use std::time::Duration;

use loom::sync::Arc;
use loom::thread;
use tollgate::{Align, Charge, Edge, Limit, Limiter, ManualClock, Memory, Rate, Style, Time, WhenFull};

type Tested = Arc<Limiter<Memory<ManualClock>>>;

const START: Time = Time::from_secs(1_700_000_000);

fn limiter(limit: Limit) -> Tested {
    let clock = ManualClock::new(START);
    Arc::new(Limiter::builder(limit).clock(clock).max_keys(1).when_full(WhenFull::Deny).build().unwrap())
}

fn fixed(limit: u32) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(60), Align::Clock).unwrap()
}

/// Runs the jobs on a thread each, the last on this one, and adds up what they admitted.
fn admitted(limiter: &Tested, jobs: &[fn(&Tested) -> u32]) -> u32 {
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
fn a_new_key_is_made_once() {
    loom::model(|| {
        let limiter = limiter(fixed(1));
        assert_eq!(admitted(&limiter, &[|it| check(it, 1), |it| check(it, 1)]), 1);
    });
}

#[test]
fn a_known_key_is_charged_once_for_each() {
    loom::model(|| {
        let limiter = limiter(
            Limit::token_bucket(3, Rate::new(1, Duration::from_secs(1)).unwrap(), Style::Smooth).unwrap(),
        );
        check(&limiter, 1);
        let twice = |it: &Tested| check(it, 1) + check(it, 1);
        assert_eq!(admitted(&limiter, &[twice, twice]), 2);
        assert_eq!(limiter.peek(&1).remaining, 0);
    });
}

/// A new window is two words, its start and its count. The start of the new with the count of the old would be a
/// key that has five left.
#[test]
fn a_state_of_two_words_is_never_torn() {
    loom::model(|| {
        let clock = ManualClock::new(START);
        let limit = Limit::fixed_window(10, Duration::from_secs(60), Align::FirstRequest).unwrap();
        let limiter = Arc::new(Limiter::builder(limit).clock(clock.clone()).max_keys(1).build().unwrap());
        limiter.check_n(&1, 5);
        clock.advance(Duration::from_secs(61));
        let peek = |it: &Tested| {
            let remaining = it.peek(&1).remaining;
            assert!(remaining == 10 || remaining == 9, "{remaining} left");
            0
        };
        let ask_too_much = |it: &Tested| {
            let remaining = it.check_n(&1, 11).remaining;
            assert!(remaining == 10 || remaining == 9, "{remaining} left");
            0
        };
        assert_eq!(admitted(&limiter, &[|it| check(it, 1), peek, ask_too_much]), 1);
    });
}

#[test]
fn a_state_of_five_words_is_never_torn() {
    loom::model(|| {
        let limit = Limit::sliding_window_counter(2, Duration::from_secs(60), 6, Edge::Keep).unwrap();
        let limiter = limiter(limit);
        check(&limiter, 1);
        assert_eq!(admitted(&limiter, &[|it| check(it, 1), |it| check(it, 1)]), 1);
    });
}

#[test]
fn keys_of_one_line_do_not_disturb_each_other() {
    loom::model(|| {
        let limiter = limiter(fixed(1));
        assert_eq!(admitted(&limiter, &[|it| check(it, 1), |it| check(it, 2) + check(it, 1)]), 2);
        assert_eq!(limiter.peek(&2).remaining, 0);
    });
}

/// Five keys fill the line; the sixth goes beside it, and comes back as soon as a slot is free.
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
        assert_eq!(admitted(&limiter, &[|it| check(it, 5) + check(it, 6), reset_and_check]), 2);
        assert_eq!(check(&limiter, 5) + check(&limiter, 6), 0);
    });
}

#[test]
fn two_limits_are_charged_both_or_neither() {
    loom::model(|| {
        let clock = ManualClock::new(START);
        let limiter =
            Arc::new(Limiter::builder(fixed(1)).and(fixed(1)).clock(clock).max_keys(1).build().unwrap());
        // The first wants key 1 of both limits, the second wants key 2 of the first and key 1 of the second.
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
