//! Goal: a limit that changes while it is in use keeps its state. Method: the plain algorithms, with each key's state
//! migrated by the core at every change, decide the same as the store; and threads that race with changes get what
//! the limits allow.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use proptest::prelude::*;
use ratekeeper::{BuildError, Charge, Limit, Limiter, ManualClock, Rate, RefillStyle, WhenFull, WindowAlign};
use ratekeeper_core::State;

use crate::limits::{decide, every_variant, fresh};
use crate::memory::{START, Tested, limiter};

fn renewed(before: &Tested, limits: &[Limit], from: &[Option<usize>]) -> Tested {
    let builder = Limiter::builder(limits[0].clone()).clock(ManualClock::default());
    let builder = limits[1..].iter().cloned().fold(builder, |it, limit| it.and(limit));
    builder.max_keys(5_000).reload_from(before, from).unwrap()
}

fn hourly(limit: u32) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(3_600), WindowAlign::FirstRequest).unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    /// The key, the milliseconds since the previous step, and the cost.
    Check(u8, u64, u32),
    Peek(u8),
    Reset(u8),
    /// The limit gets this size, of the same variant; its rate changes if it has one.
    Change(u32),
    /// The limit's window gets this many seconds, if it begins with the first request.
    ChangeWindow(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let gap_ms = prop_oneof![2 => Just(0), 3 => 1..2_000_u64, 1 => 2_000..40_000_u64];
    let size = prop_oneof![4 => 1..20_u32, 1 => Just(90_000_000)];
    let step = prop_oneof![
        12 => (0..30_u8, gap_ms, 0..4_u32).prop_map(|(key, gap, cost)| Step::Check(key, gap, cost)),
        1 => (0..30_u8).prop_map(Step::Peek),
        1 => (0..30_u8).prop_map(Step::Reset),
        2 => size.prop_map(Step::Change),
        2 => (1..60_u64).prop_map(Step::ChangeWindow),
    ];
    prop::collection::vec(step, 1..120)
}

/// The variant with this index and another size.
fn variant(number: usize, size: u32) -> Limit {
    every_variant(size, 10).swap_remove(number).1
}

/// The limit after a change.
fn changed(limit: &Limit, number: usize, change: &Step) -> Limit {
    match (limit, change) {
        (Limit::FixedWindow(it), Step::Change(size)) => {
            Limit::fixed_window(*size, it.window(), it.align()).unwrap()
        }
        (Limit::FixedWindow(it), Step::ChangeWindow(seconds)) if it.align() == WindowAlign::FirstRequest => {
            Limit::fixed_window(it.limit(), Duration::from_secs(*seconds), it.align()).unwrap()
        }
        (_, Step::Change(size)) => variant(number, *size),
        _ => limit.clone(),
    }
}

fn run(number: usize, max_keys: usize, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut limit = variant(number, 5);
    let (mut tested, clock) = limiter(limit.clone(), |it| it.max_keys(max_keys));
    let mut states: HashMap<u8, State> = HashMap::new();
    let mut now = START;
    for step in steps {
        match *step {
            Step::Check(key, gap_ms, cost) => {
                now = now.saturating_add(Duration::from_millis(gap_ms));
                clock.set(now);
                let state = states.entry(key).or_insert_with(|| fresh(&limit));
                let expected = decide(&limit, state, now, cost);
                prop_assert_eq!(tested.check_n(&key, cost), expected, "key {} at {:?}", key, now);
            }
            Step::Peek(key) => {
                let mut state = states.get(&key).cloned().unwrap_or_else(|| fresh(&limit));
                let expected = decide(&limit, &mut state, now, 0);
                prop_assert_eq!(tested.peek_n(&key, 0), expected, "key {} at {:?}", key, now);
            }
            Step::Reset(key) => {
                tested.reset(&key);
                states.remove(&key);
            }
            Step::Change(_) | Step::ChangeWindow(_) => {
                let to = changed(&limit, number, step).following(&limit);
                tested = renewed(&tested, std::slice::from_ref(&to), &[Some(0)]);
                for state in states.values_mut() {
                    *state = to.migrate_state(&limit, state.clone(), now).unwrap();
                }
                limit = to;
            }
        }
    }
    prop_assert_eq!(tested.overflowed(), 0);
    Ok(())
}

proptest! {
    #![proptest_config(testbed::property::cases(500))]

    #[test]
    fn changed_limit_decides_as_the_algorithm_with_migrated_state(steps in steps()) {
        for (number, (name, _)) in every_variant(5, 10).into_iter().enumerate() {
            // A counter with sixty buckets is in a map, which holds exactly `max_keys` keys.
            run(number, 40, &steps).map_err(|error| TestCaseError::fail(format!("{name}: {error}")))?;
        }
    }
}

#[test]
fn unchanged_limit_is_shared_at_any_index() {
    let (one, clock) = limiter(hourly(10), |it| it.and(hourly(20)).and(hourly(30)));
    assert!(one.check_n("a", 5).allowed);
    // The first limit is removed, the others are reordered, and one is new.
    let other = renewed(&one, &[hourly(30), hourly(40), hourly(20)], &[Some(2), None, Some(1)]);
    let charge = |it: &Tested, limit| it.charge(&[Charge { limit, key: it.key("a"), cost: 1 }]).unwrap();
    assert_eq!([0, 1, 2].map(|limit| charge(&other, limit).decision().remaining), [24, 39, 14]);
    // Charges by one limiter are visible to the other.
    assert_eq!(charge(&one, 1).decision().remaining, 13);
    assert_eq!(charge(&other, 2).decision().remaining, 12);
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(charge(&other, 2).decision().remaining, 19, "one clock");
}

#[test]
fn limit_with_another_window_or_algorithm_starts_with_full_budgets() {
    let (one, _clock) = limiter(hourly(10), |it| it);
    assert!(one.check_n("a", 9).allowed);
    let daily = Limit::fixed_window(10, Duration::from_secs(86_400), WindowAlign::Clock).unwrap();
    let rate = Rate::new(10, Duration::from_secs(3_600)).unwrap();
    for limit in [daily, Limit::token_bucket(10, rate, RefillStyle::Smooth).unwrap()] {
        assert_eq!(renewed(&one, &[limit], &[Some(0)]).check("a").remaining, 9);
    }
    assert_eq!(renewed(&one, &[hourly(11)], &[]).check("a").remaining, 10, "no predecessor is given");
}

/// Used units stay used, whatever the size and the rate become in between: narrow and wide states, up and down.
#[test]
fn used_up_key_stays_used_up_through_any_number_of_changes() {
    for (number, (name, limit)) in every_variant(5, 86_400).into_iter().enumerate() {
        let (mut last, clock) = limiter(limit, |it| it.max_keys(1_000));
        for key in 0..200_u32 {
            assert!(last.check_n(&key, 5).allowed, "{name}");
        }
        for change in 0..100_u32 {
            // The largest sizes need wider states.
            let size = [4, 3, 5, 90_000_000, 2, 7, 5][change as usize % 7];
            last = renewed(&last, &[every_variant(size, 86_400).swap_remove(number).1], &[Some(0)]);
            // New keys take up entries meanwhile.
            last.check(&("new", change));
            clock.advance(Duration::from_micros(1));
        }
        last = renewed(&last, &[every_variant(5, 86_400).swap_remove(number).1], &[Some(0)]);
        let admitted = (0..200_u32).filter(|key| last.check(key).allowed).count();
        assert_eq!(admitted, 0, "{name}: keys restored by reloads");
    }
}

fn first_request(limit: u32, minutes: u64) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(60 * minutes), WindowAlign::FirstRequest).unwrap()
}

/// A window that begins with the first request, as a ban does, ends its new length after its start.
#[test]
fn window_that_begins_with_the_first_request_keeps_its_start_when_its_length_changes() {
    let minutes = |minutes| Duration::from_secs(60 * minutes);
    for (from, to) in [(10, 60), (60, 10), (10, 11)] {
        let (one, clock) = limiter(first_request(1, from), |it| it);
        assert!(one.check("a").allowed);
        clock.advance(minutes(9));
        let other = renewed(&one, &[first_request(1, to)], &[Some(0)]);
        let denied = other.check("a");
        assert_eq!((denied.allowed, denied.reset_after), (false, minutes(to - 9)), "{from} -> {to}");
        clock.advance(minutes(to - 9));
        assert!(other.check("a").allowed, "{from} -> {to}");
    }
}

#[test]
fn changed_window_keeps_keys_denied_through_any_number_of_reloads() {
    let (mut last, _clock) = limiter(first_request(1, 60), |it| it.max_keys(1_000));
    let keys: Vec<u32> = (0..1_500).filter(|key| last.check(key).allowed).collect();
    for minutes in [61, 10, 1_440, 60, 1, 60, 5] {
        last = renewed(&last, &[first_request(1, minutes)], &[Some(0)]);
        assert_eq!(keys.iter().filter(|key| last.check(key).allowed).count(), 0, "{minutes} minutes");
    }
}

#[test]
fn longer_window_does_not_revive_a_count_that_has_ended() {
    for back in [false, true] {
        let (mut last, clock) = limiter(first_request(1, if back { 60 } else { 1 }), |it| it);
        if back {
            last = renewed(&last, &[first_request(1, 1)], &[Some(0)]);
        }
        assert!(last.check("a").allowed);
        clock.advance(Duration::from_secs(60));
        let longer = renewed(&last, &[first_request(1, 60)], &[Some(0)]);
        assert!(longer.check("a").allowed);
    }
}

/// A higher `max_keys` applies to limits in use, and keys keep their usage, also through several raises in a row.
#[test]
fn raised_max_keys_applies_to_limits_in_use() {
    for (name, limit) in every_variant(5, 86_400) {
        let settings = |it: ratekeeper::LimiterBuilder<ManualClock>| it.when_full(WhenFull::Deny);
        let (mut last, _clock) = limiter(limit.clone(), |it| settings(it).max_keys(100));
        let used: Vec<u32> = (0..).take_while(|key| last.check_n(key, 5).allowed).collect();
        let mut keys = u32::MAX / 2..;
        let mut others = Vec::new();
        for max_keys in [1_000, 2_000, 10_000] {
            last = settings(Limiter::builder(limit.clone()).clock(ManualClock::default()))
                .max_keys(max_keys)
                .reload_from(&last, &[Some(0)])
                .unwrap();
            assert_eq!(used.iter().chain(&others).filter(|key| last.check(key).allowed).count(), 0, "{name}");
            let (before, overflowed) = (others.len() + used.len(), last.overflowed());
            others.extend(keys.by_ref().take(max_keys - before).filter(|key| last.check_n(key, 5).allowed));
            assert_eq!(others.len() + used.len(), max_keys, "{name}");
            assert_eq!(last.overflowed(), overflowed, "{name}");
        }
        // A reset reaches all predecessors.
        last.reset(&used[0]);
        assert!(last.check_n(&used[0], 5).allowed, "{name}");
    }
}

/// More bytes allow more keys, and the bytes of all tables together stay within the bound.
#[test]
fn raised_max_bytes_applies_to_limits_in_use() {
    for (name, limit) in every_variant(5, 86_400) {
        let (mut last, _clock) =
            limiter(limit.clone(), |it| it.max_bytes(64 << 10).when_full(WhenFull::Deny));
        let mut used: Vec<u32> = Vec::new();
        let mut keys = 0..u32::MAX;
        for max_bytes in [64_usize << 10, 256 << 10, 1 << 20] {
            let builder = Limiter::builder(limit.clone()).clock(ManualClock::default()).max_bytes(max_bytes);
            last = builder.when_full(WhenFull::Deny).reload_from(&last, &[Some(0)]).unwrap();
            assert_eq!(used.iter().filter(|key| last.check(key).allowed).count(), 0, "{name}");
            let more: Vec<u32> = keys.by_ref().take_while(|key| last.check_n(key, 5).allowed).collect();
            assert!(more.len() > used.len(), "{name}: {} beside {}", more.len(), used.len());
            used.extend(more);
            assert!(last.bytes() <= max_bytes, "{name}: {} bytes", last.bytes());
        }
    }
}

/// A lower bound does not take entries from keys in use.
#[test]
fn lowered_max_keys_restores_no_key() {
    for (name, limit) in every_variant(5, 86_400) {
        let (one, _clock) = limiter(limit.clone(), |it| it.max_keys(1_000));
        assert_eq!((0..1_000).filter(|key| one.check_n(key, 5).allowed).count(), 1_000, "{name}");
        let builder = Limiter::builder(limit).clock(ManualClock::default()).max_keys(10);
        let other = builder.reload_from(&one, &[Some(0)]).unwrap();
        assert_eq!((0..1_000).filter(|key| other.check(key).allowed).count(), 0, "{name}");
    }
}

/// Also if all entries of the store are in use, by keys that a flood brings before and between the changes.
#[test]
fn tightened_limit_takes_effect_in_a_full_store() {
    for (number, (name, limit)) in every_variant(5, 86_400).into_iter().enumerate() {
        let settings =
            |it: ratekeeper::LimiterBuilder<ManualClock>| it.max_keys(300).when_full(WhenFull::Deny);
        let (mut last, _clock) = limiter(limit, settings);
        let known: Vec<u32> = (0..100).filter(|key| last.check_n(key, 5).allowed).collect();
        let mut flood = 0..u32::MAX;
        for change in 0..20 {
            let before = last.overflowed();
            while last.overflowed() < before + 100 {
                last.check(&("flood", flood.next()));
            }
            let to = every_variant(4 - change % 3, 86_400).swap_remove(number).1;
            last = settings(Limiter::builder(to).clock(ManualClock::default()))
                .reload_from(&last, &[Some(0)])
                .unwrap();
            assert_eq!(
                known.iter().filter(|key| last.check(key).allowed).count(),
                0,
                "{name}, change {change}"
            );
        }
    }
}

#[test]
fn all_generations_together_stay_within_max_bytes() {
    const MAX: usize = 4 << 20;
    for (number, (name, limit)) in every_variant(1_000, 3_600).into_iter().enumerate() {
        let (first, _clock) = limiter(limit, |it| it.max_bytes(MAX).when_full(WhenFull::Deny));
        let mut all = vec![first];
        for size in 1..30 {
            let last = all.last().unwrap();
            for key in 0..40_000_u32 {
                last.check(&key);
            }
            assert!(last.bytes() <= MAX, "{name}: {} bytes after {size} reloads", last.bytes());
            let to = every_variant(1_000 + 100_000 * size, 3_600).swap_remove(number).1;
            let builder = Limiter::builder(to).clock(ManualClock::default()).max_bytes(MAX);
            all.push(builder.when_full(WhenFull::Deny).reload_from(last, &[Some(0)]).unwrap());
        }
    }
    // Limits that share nothing, while limiters with the earlier ones are still in use.
    let (first, _clock) = limiter(hourly(10), |it| it.max_bytes(MAX));
    let mut all = vec![first];
    for size in 1..8 {
        let builder = Limiter::builder(hourly(10 + size)).clock(ManualClock::default()).max_bytes(MAX);
        all.push(builder.reload_from(all.last().unwrap(), &[]).unwrap());
        let bytes: usize = all.iter().map(Tested::bytes).sum();
        assert!(bytes <= MAX, "{bytes} bytes in {} limiters", all.len());
    }
    // If nothing is left, the reload fails and says why. The memory is free once the earlier limiters are dropped.
    let reload = |before: &Tested| {
        let builder = Limiter::builder(hourly(10)).clock(ManualClock::default()).max_bytes(MAX);
        builder.reload_from(before, &[])
    };
    let failed = loop {
        match reload(all.last().unwrap()) {
            Ok(next) => all.push(next),
            Err(error) => break error,
        }
        assert!(all.len() < 100, "there must be a bound");
    };
    assert!(matches!(failed, BuildError::BytesInUse { .. }), "{failed}");
    all.drain(..all.len() - 1);
    assert!(reload(&all[0]).unwrap().bytes() > MAX / 4);
}

/// The states of narrower entries are dropped once they have expired.
#[test]
fn predecessor_is_dropped_when_expired() {
    let sliding = |limit| {
        let hour = Duration::from_secs(3_600);
        Limit::sliding_window_counter(limit, hour, 1, ratekeeper::EdgePolicy::Weigh).unwrap()
    };
    let (one, clock) = limiter(sliding(10), |it| it);
    one.check_n("a", 9);
    let wide = renewed(&one, &[sliding(90_000_000)], &[Some(0)]);
    let both = wide.bytes();
    assert!(both > one.bytes());
    assert_eq!(wide.peek_n("a", 0).remaining, 90_000_000 - 9);
    clock.advance(Duration::from_secs(3 * 3_600));
    wide.check("b");
    assert!(wide.bytes() < both, "nothing in it counts any more");
}

/// Requests of the earlier limiter count for the later one, and the other way round.
#[test]
fn earlier_and_later_limiter_share_the_usage_of_a_changed_limit() {
    for (number, (name, limit)) in every_variant(100, 86_400).into_iter().enumerate() {
        // A log that counts all requests keeps only the denied ones that matter for the limit that denied them.
        if name == "log, all" {
            continue;
        }
        let (one, _clock) = limiter(limit, |it| it);
        let other = renewed(&one, &[every_variant(200, 86_400).swap_remove(number).1], &[Some(0)]);
        let mut admitted = 0;
        for _ in 0..300 {
            admitted += u32::from(one.check("a").allowed) + u32::from(other.check("a").allowed);
        }
        assert_eq!(admitted, 200, "{name}");
    }
}

/// Four threads check one key while its limit is raised a hundred times. After the key was migrated, each predecessor
/// allows at most the requests that were in flight then.
#[test]
fn threads_that_race_with_raises_are_not_denied() {
    const CHANGES: u32 = 100;
    const STEP: u32 = 1_000;
    for (name, first) in every_variant(STEP, 86_400) {
        // A log that counts all requests keeps denying a client that retries, also under a higher limit.
        if name == "log, all" {
            continue;
        }
        let (first, _clock) = limiter(first, |it| it.max_keys(1_000));
        let current = Arc::new(RwLock::new(Arc::new(first)));
        let (is_over, admitted) = (AtomicBool::new(false), AtomicU32::new(0));
        // Collected, because a thread that panics would leave the others waiting.
        let wrong = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let (current, is_over, admitted, wrong) = (&current, &is_over, &admitted, &wrong);
                scope.spawn(move || {
                    while !is_over.load(Ordering::Acquire) {
                        let limiter = current.read().unwrap().clone();
                        let decision = limiter.check("hot");
                        if decision.allowed {
                            admitted.fetch_add(1, Ordering::AcqRel);
                        } else {
                            // Each of the other threads may have one allowed request that it has not counted yet.
                            let all = admitted.load(Ordering::Acquire) + 4;
                            if all < decision.limit {
                                wrong.lock().unwrap().push((all, decision));
                            }
                        }
                    }
                });
            }
            for change in 2..=CHANGES {
                let (_, to) =
                    every_variant(STEP * change, 86_400).into_iter().find(|(its, _)| *its == name).unwrap();
                let before = current.read().unwrap().clone();
                let next = Arc::new(renewed(&before, &[to], &[Some(0)]));
                *current.write().unwrap() = next;
                // Waits until the threads use the new limiter, so that every limit is in use.
                let seen = admitted.load(Ordering::Acquire);
                while admitted.load(Ordering::Acquire) == seen && seen < STEP * (change - 1) {
                    std::thread::yield_now();
                }
            }
            while current.read().unwrap().check("hot").allowed {
                admitted.fetch_add(1, Ordering::AcqRel);
            }
            is_over.store(true, Ordering::Release);
        });
        assert_eq!(wrong.into_inner().unwrap(), [], "{name}: denied too early");
        let admitted = admitted.into_inner();
        let all = STEP * CHANGES;
        assert!((all..=all + 4 * CHANGES).contains(&admitted), "{name}: {admitted} of {all}");
    }
}

/// Two limiters share some limits in different orders, and one migrates state from the other: they do not deadlock.
#[test]
fn limiters_that_share_limits_in_different_orders_do_not_deadlock() {
    let (one, _clock) = limiter(hourly(1_000_000), |it| it.and(hourly(2_000_000)).and(hourly(3_000_000)));
    let other = renewed(
        &one,
        &[hourly(3_000_000), hourly(1_000_001), hourly(2_000_000)],
        &[Some(2), Some(0), Some(1)],
    );
    std::thread::scope(|scope| {
        for limiter in [&one, &other, &one, &other] {
            scope.spawn(move || {
                for number in 0..50_000_u32 {
                    assert!(limiter.check("hot").allowed);
                    limiter.check(&(number % 100));
                }
            });
        }
    });
    assert_eq!(one.peek_n("hot", 0).remaining, 800_000, "the changed limit is shared, too");
}
