//! Goal: after a refund the key is as if the charge had never been made. Method: raw calls at an injected time,
//! compared with the same limit without the refunded charges.

use std::time::Duration;

use ratekeeper::{
    Charge, LeakyMode, Limit, Limiter, LogPolicy, ManualClock, Rate, RefillStyle, Time, WindowAlign,
};
use testbed::{RedisServer, ordinary_or_long};

use crate::limits::every_limit;
use crate::redis::all_expire;
use crate::redis::equivalence::{Dice, step};
use crate::redis::function_calls::{Operation, Raw};

/// Two requests arrive for each of three keys at the same time, and the first is refunded before or after the second
/// is decided: from then on the key matches one in memory that never had the first.
async fn undone_at_once(
    limit: &Limit,
    server: &RedisServer,
    name: u64,
    is_forward: bool,
    is_whole_micros: bool,
) {
    let mut raw = Raw::new(server, limit, name).await;
    let clock = ManualClock::new(Time::EPOCH);
    let memory = Limiter::builder(limit.clone()).clock(clock.clone()).max_keys(10_000).build().unwrap();
    let counts_all = matches!(limit, Limit::Log(log) if log.count() == LogPolicy::All);
    let mut dice = Dice(88_172_645_463_325_252 + name);
    let most = u64::from(limit.limit());
    let mut now = 1_700_000_000_000_000_000_u64;
    let mut undone = 0;
    let steps = ordinary_or_long(100, 300);
    for number in 0..steps {
        let far = step(&mut dice, limit.window().as_nanos() as u64);
        now = now.saturating_add_signed(if is_forward { far.max(0) } else { far });
        if is_whole_micros {
            now -= now % 1_000;
        }
        let at = Time::from_nanos(now);
        clock.set(at);
        let what = |key: u64| format!("{limit:?}: step {number} at {now}, key {key}");

        let costs = [(); 3].map(|()| (dice.below(most / 2 + 3) as u32, dice.below(most / 2 + 3) as u32));
        let first: Vec<_> =
            (0..3).zip(costs).map(|(key, (cost, _))| Operation::Charge { key, cost }).collect();
        let (_, firsts) = raw.call(Some(at), &first).await;
        let undo = [(); 3].map(|()| dice.below(2) == 0);
        let undo_first = [(); 3].map(|()| dice.below(2) == 0);
        let mut second = Vec::new();
        for key in 0..3 {
            let (cost, other) = costs[key as usize];
            let charge = Operation::Charge { key, cost: other };
            match (undo[key as usize] && firsts[key as usize].allowed, undo_first[key as usize]) {
                (false, _) => second.push(charge),
                (true, true) => second.extend([Operation::Refund { key, cost, at: Some(at) }, charge]),
                (true, false) => second.extend([charge, Operation::Refund { key, cost, at: Some(at) }]),
            }
        }
        let (_, seconds) = raw.call(Some(at), &second).await;
        for key in 0..3 {
            let (cost, other) = costs[key as usize];
            let (first_decision, second_decision) = (firsts[key as usize], seconds[key as usize]);
            let is_undone = undo[key as usize] && first_decision.allowed && !counts_all;
            if is_undone {
                undone += 1;
                // The key was accessed at this time but not charged.
                memory.check_n(&key, 0);
            } else {
                assert_eq!(first_decision, memory.check_n(&key, cost), "{}, the first", what(key));
            }
            if !is_undone || undo_first[key as usize] {
                assert_eq!(second_decision, memory.check_n(&key, other), "{}, the second", what(key));
            } else if second_decision.allowed {
                assert!(memory.check_n(&key, other).allowed, "{}, the second", what(key));
            }
            assert_eq!(raw.charge(at, key, 0).await, memory.check_n(&key, 0), "{}, after", what(key));
        }
    }
    assert!(undone > steps / 10 || counts_all, "{limit:?}: {undone} of the charges were undone");
}

#[tokio::test]
async fn immediate_refund_leaves_no_trace() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [1, 5, 300, 70_000] {
        for limit in every_limit(size, 10) {
            for is_whole_micros in [false, true] {
                name += 1;
                undone_at_once(&limit, &server, name, true, is_whole_micros).await;
            }
        }
    }
    all_expire(&server);
}

/// Logs match even if the clock steps back.
#[tokio::test]
async fn immediate_refund_to_a_log_survives_a_clock_step_back() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [5, 300] {
        let limits = every_limit(size, 10);
        for limit in limits.iter().filter(|limit| matches!(limit, Limit::Log(_))) {
            for is_whole_micros in [false, true] {
                name += 1;
                undone_at_once(limit, &server, name, false, is_whole_micros).await;
            }
        }
    }
    all_expire(&server);
}

/// How long after the first charge of a key it can be compared. Where windows or periods begin with a key's first
/// request, a charge moves their start even if it is refunded later.
fn comparable(limit: &Limit) -> Option<Duration> {
    match limit {
        Limit::SteppedBucket(steps) => Some(steps.rate().period()),
        Limit::FixedWindow(window) if window.align() == WindowAlign::FirstRequest => Some(window.window()),
        _ => None,
    }
}

/// Requests on one key, some of them refunded later; on another key the same without the refunded ones. The first key
/// never has more budget than the second.
async fn undone_later(limit: &Limit, server: &RedisServer, name: u64, steps: usize, is_whole_micros: bool) {
    let mut raw = Raw::new(server, limit, format!("later{name}")).await;
    let mut dice = Dice(7_046_029_254_386_353_131 + name);
    let (most, window_ns) = (u64::from(limit.limit()), limit.window().as_nanos() as u64);
    let mut now = 1_700_000_000_000_000_000_u64;
    let (mut begun, mut pair) = (now, 0);
    let mut pending: Vec<(Time, u32)> = Vec::new();
    let (mut compared, mut given) = (0, 0);
    for number in 0..steps {
        now += match comparable(limit) {
            Some(length) => dice.below(length.as_nanos() as u64 / 20),
            None => step(&mut dice, window_ns).max(0) as u64,
        };
        if is_whole_micros {
            now += 1_000 - now % 1_000;
        }
        if comparable(limit).is_some_and(|length| now - begun >= length.as_nanos() as u64) {
            // A new pair of keys.
            pending.clear();
            (begun, pair) = (now, pair + 1);
        }
        let (with, without) = (pair * 2, pair * 2 + 1);
        let at = Time::from_nanos(now);
        let what = format!("{limit:?}: step {number} at {now}");
        let cost = dice.below(most / 4 + 2) as u32 + 1;
        match dice.below(4) {
            0 if !pending.is_empty() => {
                let (charged_at, cost) = pending.swap_remove(dice.below(pending.len() as u64) as usize);
                let before = raw.charge(at, with, 0).await.remaining;
                raw.refund(at, with, cost, charged_at).await;
                let after = raw.charge(at, with, 0).await.remaining;
                assert!(before <= after && after - before <= cost, "{what}: {before} -> {after}, {cost}");
                given += after - before;
            }
            0 | 1 => {
                if raw.charge(at, with, cost).await.allowed {
                    pending.push((at, cost));
                }
            }
            _ => {
                if raw.charge(at, with, cost).await.allowed {
                    assert!(raw.charge(at, without, cost).await.allowed, "{what}");
                }
            }
        }
        let both = [with, without].map(|key| Operation::Charge { key, cost: 0 });
        let (_, decisions) = raw.call(Some(at), &both).await;
        assert!(decisions[0].remaining <= decisions[1].remaining, "{what}: {decisions:?}");
        compared += usize::from(decisions[1].remaining < limit.limit());
    }
    assert!(compared > steps / 10, "{limit:?}: {compared} of {steps} steps say something");
    let counts_all = matches!(limit, Limit::Log(log) if log.count() == LogPolicy::All);
    assert_eq!(given > 0, !counts_all, "{limit:?}: {given} refunded");
}

#[tokio::test]
async fn late_refund_never_exceeds_the_budget_without_the_charge() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [5, 300, 70_000] {
        for limit in every_limit(size, 10) {
            for is_whole_micros in [false, true] {
                name += 1;
                undone_later(&limit, &server, name, 500, is_whole_micros).await;
            }
        }
    }
    all_expire(&server);
}

/// If the request that began a window or period is refunded, the window keeps its start, and other charges in it can
/// still be refunded.
#[tokio::test]
async fn refund_keeps_the_start_of_the_window() {
    let server = RedisServer::start().unwrap();
    let window = Duration::from_secs(10);
    let limits = [
        Limit::fixed_window(5, window, WindowAlign::FirstRequest).unwrap(),
        Limit::token_bucket(5, Rate::new(5, window).unwrap(), RefillStyle::Stepped).unwrap(),
    ];
    for limit in &limits {
        let mut raw = Raw::new(&server, limit, limit.name()).await;
        let start = Time::from_secs(1_700_000_000);
        let after = |secs: u64| start.saturating_add(Duration::from_secs(secs));
        assert!(raw.charge(start, 0, 1).await.allowed);
        assert!(raw.charge(start, 0, 1).await.allowed);
        assert!(raw.charge(after(1), 0, 3).await.allowed);
        raw.refund(after(2), 0, 1, start).await;
        raw.refund(after(2), 0, 1, start).await;
        raw.refund(after(3), 0, 2, after(1)).await;
        assert_eq!(raw.charge(after(3), 0, 0).await.remaining, 4, "{limit:?}");
        assert_eq!(raw.charge(after(9), 0, 0).await.remaining, 4, "{limit:?}");
        assert_eq!(raw.charge(after(10), 0, 0).await.remaining, 5, "{limit:?}");
    }
    all_expire(&server);
}

/// After the window nothing is left to refund.
#[tokio::test]
async fn refund_after_the_window_returns_nothing() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_limit(5, 10).iter().enumerate() {
        let mut raw = Raw::new(&server, limit, number).await;
        let start = Time::from_secs(1_700_000_000);
        assert!(raw.charge(start, 0, 3).await.allowed);
        let later = start.saturating_add(3 * limit.window());
        assert!(raw.charge(later, 0, 3).await.allowed);
        raw.refund(later, 0, 3, start).await;
        assert_eq!(raw.charge(later, 0, 0).await.remaining, 2, "{limit:?}");
    }
    all_expire(&server);
}

/// On the server's clock: a refund never creates a state, removes a state without charges, and keeps the expiry late
/// enough.
#[tokio::test]
async fn refund_keeps_a_sufficient_expiry() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_limit(50, 3_600).iter().enumerate() {
        let mut raw = Raw::new(&server, limit, number).await;
        let (now, _) = raw.call(None, &[Operation::Charge { key: 9, cost: 0 }]).await;
        raw.call(None, &[Operation::Refund { key: 0, cost: 1, at: Some(now) }]).await;
        assert_eq!(raw.expires_after(0).await, None, "{limit:?}: out of nothing");

        let (at, decisions) = raw.call(None, &[Operation::Charge { key: 0, cost: 40 }]).await;
        assert!(decisions[0].allowed);
        raw.call(None, &[Operation::Charge { key: 0, cost: 2 }]).await;
        raw.call(None, &[Operation::Refund { key: 0, cost: 40, at: Some(at) }]).await;
        let left = raw.expires_after(0).await;
        let (_, decisions) = raw.call(None, &[Operation::Charge { key: 0, cost: 0 }]).await;
        assert!(
            left.is_some_and(|left| left >= decisions[0].reset_after),
            "{limit:?}: {left:?}, {decisions:?}"
        );

        let counts_all = matches!(limit, Limit::Log(log) if log.count() == LogPolicy::All);
        let (at, decisions) = raw.call(None, &[Operation::Charge { key: 1, cost: 1 }]).await;
        assert!(decisions[0].allowed);
        raw.call(None, &[Operation::Refund { key: 1, cost: 1, at: Some(at) }]).await;
        assert_eq!(raw.expires_after(1).await.is_some(), counts_all, "{limit:?}");
    }
    all_expire(&server);
}

/// In a long log the charge is found among later ones, across the end of the ring.
#[tokio::test]
async fn refund_in_a_log_matches_memory_across_the_ring_end() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::sliding_window_log(1_000, Duration::from_secs(10), LogPolicy::Admitted).unwrap();
    let mut raw = Raw::new(&server, &limit, "log").await;
    let clock = ManualClock::new(Time::EPOCH);
    let memory = Limiter::builder(limit.clone()).clock(clock.clone()).build().unwrap();
    let mut dice = Dice(4_101_842_887_655_102_017);
    let mut at = Time::from_secs(1_700_000_000);
    for round in 0..60 {
        // Refunded after up to 69 other charges; more than 64 exceed the first search.
        let others = dice.below(70);
        let cost = 1 + dice.below(3) as u32;
        let charged_at = at;
        assert!(raw.charge(at, 0, cost).await.allowed);
        let mut kept = Vec::new();
        for _ in 0..others {
            at = at.saturating_add(Duration::from_micros(1 + dice.below(20_000)));
            let cost = 1 + dice.below(3) as u32;
            assert!(raw.charge(at, 0, cost).await.allowed, "round {round}");
            kept.push((at, cost));
        }
        raw.refund(at, 0, cost, charged_at).await;
        for (at, cost) in kept {
            clock.set(at);
            assert!(memory.check_n(&0, cost).allowed);
        }
        clock.set(at);
        assert_eq!(raw.charge(at, 0, 0).await, memory.check_n(&0, 0), "round {round}, {others} after it");
        at = at.saturating_add(Duration::from_millis(dice.below(2_000)));
    }
    all_expire(&server);
}

/// A refund to a leaky bucket shortens the delay of the next request.
#[tokio::test]
async fn refund_shortens_the_delay_of_a_leaky_bucket() {
    let server = RedisServer::start().unwrap();
    let rate = Rate::new(1, Duration::from_secs(1)).unwrap();
    let limit = Limit::leaky_bucket(5, rate, LeakyMode::Shape).unwrap();
    let mut raw = Raw::new(&server, &limit, "queue").await;
    let at = Time::from_secs(1_700_000_000);
    raw.charge(at, 0, 1).await;
    raw.charge(at, 0, 2).await;
    raw.refund(at, 0, 2, at).await;
    assert_eq!(raw.charge(at, 0, 1).await.delay, Duration::from_secs(1));
}

/// A partial refund among charges of the same time: as if only the rest had been charged.
#[tokio::test]
async fn partial_refund_matches_a_smaller_charge() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_limit(300, 10).iter().enumerate() {
        if matches!(limit, Limit::Log(log) if log.count() == LogPolicy::All) {
            continue;
        }
        let mut raw = Raw::new(&server, limit, format!("part{number}")).await;
        let clock = ManualClock::new(Time::EPOCH);
        let memory = Limiter::builder(limit.clone()).clock(clock.clone()).build().unwrap();
        let mut dice = Dice(2_862_933_555_777_941_757 + number as u64);
        let mut now = 1_700_000_000_000_000_000_u64;
        let mut parts = 0;
        for number in 0..300 {
            now += step(&mut dice, 10_000_000_000).max(0) as u64;
            let at = Time::from_nanos(now);
            clock.set(at);
            let (cost, other) = (dice.below(40) as u32 + 2, dice.below(3) as u32);
            let part = 1 + dice.below(u64::from(cost) - 1) as u32;
            let (_, decisions) = raw
                .call(
                    Some(at),
                    &[Operation::Charge { key: 0, cost }, Operation::Charge { key: 0, cost: other }],
                )
                .await;
            if decisions[0].allowed {
                raw.refund(at, 0, part, at).await;
                assert!(memory.check_n(&0, cost - part).allowed);
                parts += 1;
            }
            if decisions[1].allowed {
                assert!(memory.check_n(&0, other).allowed);
            }
            assert_eq!(
                raw.charge(at, 0, 0).await,
                memory.check_n(&0, 0),
                "{limit:?}: step {number} at {now}"
            );
        }
        assert!(parts > 30, "{limit:?}: {parts}");
    }
    all_expire(&server);
}

/// Charges on several keys, and refunds with the time and cost of a charge or of any cost with an unknown time, on a
/// clock that goes forward or steps back: Redis and memory always agree.
async fn undone_in_both(limit: &Limit, server: &RedisServer, name: u64, is_forward: bool) {
    let mut raw = Raw::new(server, limit, format!("both{name}")).await;
    let clock = ManualClock::new(Time::EPOCH);
    let memory = Limiter::builder(limit.clone()).clock(clock.clone()).max_keys(10_000).build().unwrap();
    let mut dice = Dice(4_101_842_887_655_102_017 + name);
    let (most, window_ns) = (u64::from(limit.limit()), limit.window().as_nanos() as u64);
    let mut now = 1_700_000_000_000_000_000_u64;
    let mut made: Vec<(u64, Time, u32)> = Vec::new();
    let mut given = 0;
    for number in 0..400 {
        let far = step(&mut dice, window_ns) / 4;
        now = now.saturating_add_signed(if is_forward { far.max(0) } else { far });
        let at = Time::from_nanos(now);
        clock.set(at);
        let (key, cost) = (dice.below(3), dice.below(most / 3 + 2) as u32 + 1);
        let what = format!("{limit:?}: step {number} at {now}, key {key}, cost {cost}");
        if dice.below(3) > 0 {
            let decision = raw.charge(at, key, cost).await;
            assert_eq!(decision, memory.check_n(&key, cost), "{what}");
            if decision.allowed {
                made.push((key, at, cost));
            }
            continue;
        }
        // Redis does not search for old charges.
        let recent = made.len().saturating_sub(20);
        let known = (dice.below(2) == 0 && !made.is_empty())
            .then(|| made.remove(recent + dice.below((made.len() - recent) as u64) as usize));
        let (key, charged_at, cost) =
            known.map_or((key, None, cost), |(key, at, cost)| (key, Some(at), cost));
        let before = memory.peek_n(&key, 0).remaining;
        raw.refund(at, key, cost, charged_at).await;
        memory.refund(&[Charge { limit: 0, key: memory.key(&key), cost }], charged_at);
        let decision = memory.check_n(&key, 0);
        assert_eq!(raw.charge(at, key, 0).await, decision, "{what}, refunded {cost} of {charged_at:?}");
        assert!(decision.remaining - before <= cost, "{what}: {before} -> {}", decision.remaining);
        given += decision.remaining - before;
    }
    let counts_all = matches!(limit, Limit::Log(log) if log.count() == LogPolicy::All);
    assert_eq!(given > 0, !counts_all, "{limit:?}: {given} refunded");
}

#[tokio::test]
async fn memory_and_redis_agree_on_refunds() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [5, 300, 70_000] {
        for limit in every_limit(size, 10) {
            for is_forward in [true, false] {
                name += 1;
                undone_in_both(&limit, &server, name, is_forward).await;
            }
        }
    }
    all_expire(&server);
}

/// An older charge is found among many others.
#[tokio::test]
async fn refund_finds_an_old_charge_in_a_long_log() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::sliding_window_log(10_000, Duration::from_secs(10_000), LogPolicy::Admitted).unwrap();
    let mut raw = Raw::new(&server, &limit, 1_u64).await;
    let at = |second: u64| Time::from_secs(1_700_000_000 + second);
    raw.charge(at(0), 0, 5).await;
    for second in 1..=1_000 {
        raw.charge(at(second), 0, 1 + (second % 2) as u32).await;
    }
    let before = raw.charge(at(1_001), 0, 0).await.remaining;
    raw.refund(at(1_001), 0, 4, at(0)).await;
    assert_eq!(raw.charge(at(1_001), 0, 0).await.remaining, before + 4);
    raw.refund(at(1_001), 0, 1, at(0)).await;
    assert_eq!(raw.charge(at(1_001), 0, 0).await.remaining, before + 5);
    raw.refund(at(1_001), 0, 1, at(0)).await;
    assert_eq!(raw.charge(at(1_001), 0, 0).await.remaining, before + 5, "there is nothing more of it");
    // The remaining entries still leave the window in time.
    assert_eq!(raw.charge(at(10_500), 0, 0).await.remaining, 10_000 - 750, "the younger half");
    all_expire(&server);
}
