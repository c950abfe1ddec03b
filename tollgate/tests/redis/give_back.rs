//! Goal: a charge that is given back never was. Method: calls by hand, with a time of the test's choosing, beside the
//! same limit without the charges that are undone.

use std::time::Duration;

use testbed::{RedisServer, ordinary_or_long};
use tollgate::{Align, Charge, Count, Limit, Limiter, ManualClock, Mode, Rate, Style, Time};

use crate::redis::equivalence::{Dice, step};
use crate::redis::raw::{Ask, Raw};
use crate::redis::{all_expire, every_variant};

/// Two requests come to each of three keys at the same time, and the first is undone again, before or after the second
/// is asked: from then on the key says what one in memory says that has never seen it.
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
    let counts_all = matches!(limit, Limit::Log(log) if log.count() == Count::All);
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
        let first: Vec<_> = (0..3).zip(costs).map(|(key, (cost, _))| Ask::Charge { key, cost }).collect();
        let (_, firsts) = raw.call(Some(at), &first).await;
        let undo = [(); 3].map(|()| dice.below(2) == 0);
        let undo_first = [(); 3].map(|()| dice.below(2) == 0);
        let mut second = Vec::new();
        for key in 0..3 {
            let (cost, other) = costs[key as usize];
            let charge = Ask::Charge { key, cost: other };
            match (undo[key as usize] && firsts[key as usize].allowed, undo_first[key as usize]) {
                (false, _) => second.push(charge),
                (true, true) => second.extend([Ask::GiveBack { key, cost, at: Some(at) }, charge]),
                (true, false) => second.extend([charge, Ask::GiveBack { key, cost, at: Some(at) }]),
            }
        }
        let (_, seconds) = raw.call(Some(at), &second).await;
        for key in 0..3 {
            let (cost, other) = costs[key as usize];
            let (told_first, told_second) = (firsts[key as usize], seconds[key as usize]);
            let is_undone = undo[key as usize] && told_first.allowed && !counts_all;
            if is_undone {
                undone += 1;
                // The key was asked at this time; it has been given nothing.
                memory.check_n(&key, 0);
            } else {
                assert_eq!(told_first, memory.check_n(&key, cost), "{}, the first", what(key));
            }
            if !is_undone || undo_first[key as usize] {
                assert_eq!(told_second, memory.check_n(&key, other), "{}, the second", what(key));
            } else if told_second.allowed {
                assert!(memory.check_n(&key, other).allowed, "{}, the second", what(key));
            }
            assert_eq!(raw.charge(at, key, 0).await, memory.check_n(&key, 0), "{}, after", what(key));
        }
    }
    assert!(undone > steps / 10 || counts_all, "{limit:?}: {undone} of the charges were undone");
}

#[tokio::test]
async fn undone_at_once_it_never_was() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [1, 5, 300, 70_000] {
        for limit in every_variant(size, 10) {
            for is_whole_micros in [false, true] {
                name += 1;
                undone_at_once(&limit, &server, name, true, is_whole_micros).await;
            }
        }
    }
    all_expire(&server);
}

/// Logs do so even where the clock steps back.
#[tokio::test]
async fn undone_at_once_on_a_clock_that_steps_back() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [5, 300] {
        let limits = every_variant(size, 10);
        for limit in limits.iter().filter(|limit| matches!(limit, Limit::Log(_))) {
            for is_whole_micros in [false, true] {
                name += 1;
                undone_at_once(limit, &server, name, false, is_whole_micros).await;
            }
        }
    }
    all_expire(&server);
}

/// How long after the first charge of a key a comparison holds. Where windows or periods begin with a key's first
/// request, one that was charged, even if it is undone later, makes them begin at another time.
fn comparable(limit: &Limit) -> Option<Duration> {
    match limit {
        Limit::Steps(steps) => Some(steps.rate().period()),
        Limit::FixedWindow(window) if window.align() == Align::FirstRequest => Some(window.window()),
        _ => None,
    }
}

/// Requests, some of them undone a while later, on one key; on another the same without those that are undone. The
/// first never has more left than the second.
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
                raw.give_back(at, with, cost, charged_at).await;
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
        let both = [with, without].map(|key| Ask::Charge { key, cost: 0 });
        let (_, told) = raw.call(Some(at), &both).await;
        assert!(told[0].remaining <= told[1].remaining, "{what}: {told:?}");
        compared += usize::from(told[1].remaining < limit.limit());
    }
    assert!(compared > steps / 10, "{limit:?}: {compared} of {steps} steps say something");
    let counts_all = matches!(limit, Limit::Log(log) if log.count() == Count::All);
    assert_eq!(given > 0, !counts_all, "{limit:?}: {given} given back");
}

#[tokio::test]
async fn undone_later_it_gives_no_more_than_had_it_never_been() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [5, 300, 70_000] {
        for limit in every_variant(size, 10) {
            for is_whole_micros in [false, true] {
                name += 1;
                undone_later(&limit, &server, name, 500, is_whole_micros).await;
            }
        }
    }
    all_expire(&server);
}

/// Where a window or a period begins with a request and that is undone, it stays where it began; and whatever else was
/// taken in it can be given back.
#[tokio::test]
async fn a_window_that_an_undone_request_began_stays() {
    let server = RedisServer::start().unwrap();
    let window = Duration::from_secs(10);
    let limits = [
        Limit::fixed_window(5, window, Align::FirstRequest).unwrap(),
        Limit::token_bucket(5, Rate::new(5, window).unwrap(), Style::Stepped).unwrap(),
    ];
    for limit in &limits {
        let mut raw = Raw::new(&server, limit, limit.name()).await;
        let start = Time::from_secs(1_700_000_000);
        let after = |secs: u64| start.saturating_add(Duration::from_secs(secs));
        assert!(raw.charge(start, 0, 1).await.allowed);
        assert!(raw.charge(start, 0, 1).await.allowed);
        assert!(raw.charge(after(1), 0, 3).await.allowed);
        raw.give_back(after(2), 0, 1, start).await;
        raw.give_back(after(2), 0, 1, start).await;
        raw.give_back(after(3), 0, 2, after(1)).await;
        assert_eq!(raw.charge(after(3), 0, 0).await.remaining, 4, "{limit:?}");
        assert_eq!(raw.charge(after(9), 0, 0).await.remaining, 4, "{limit:?}");
        assert_eq!(raw.charge(after(10), 0, 0).await.remaining, 5, "{limit:?}");
    }
    all_expire(&server);
}

/// A window later there is nothing to give back.
#[tokio::test]
async fn undone_too_late_gives_nothing() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_variant(5, 10).iter().enumerate() {
        let mut raw = Raw::new(&server, limit, number).await;
        let start = Time::from_secs(1_700_000_000);
        assert!(raw.charge(start, 0, 3).await.allowed);
        let later = start.saturating_add(3 * limit.window());
        assert!(raw.charge(later, 0, 3).await.allowed);
        raw.give_back(later, 0, 3, start).await;
        assert_eq!(raw.charge(later, 0, 0).await.remaining, 2, "{limit:?}");
    }
    all_expire(&server);
}

/// On the server's own clock: no state is made out of nothing, one that is as good as new goes, and what is left lives
/// as long as it counts.
#[tokio::test]
async fn what_is_left_lives_as_long_as_it_counts() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_variant(50, 3_600).iter().enumerate() {
        let mut raw = Raw::new(&server, limit, number).await;
        let (now, _) = raw.call(None, &[Ask::Charge { key: 9, cost: 0 }]).await;
        raw.call(None, &[Ask::GiveBack { key: 0, cost: 1, at: Some(now) }]).await;
        assert_eq!(raw.expires_after(0).await, None, "{limit:?}: out of nothing");

        let (at, told) = raw.call(None, &[Ask::Charge { key: 0, cost: 40 }]).await;
        assert!(told[0].allowed);
        raw.call(None, &[Ask::Charge { key: 0, cost: 2 }]).await;
        raw.call(None, &[Ask::GiveBack { key: 0, cost: 40, at: Some(at) }]).await;
        let left = raw.expires_after(0).await;
        let (_, told) = raw.call(None, &[Ask::Charge { key: 0, cost: 0 }]).await;
        assert!(left.is_some_and(|left| left >= told[0].reset_after), "{limit:?}: {left:?}, {told:?}");

        let counts_all = matches!(limit, Limit::Log(log) if log.count() == Count::All);
        let (at, told) = raw.call(None, &[Ask::Charge { key: 1, cost: 1 }]).await;
        assert!(told[0].allowed);
        raw.call(None, &[Ask::GiveBack { key: 1, cost: 1, at: Some(at) }]).await;
        assert_eq!(raw.expires_after(1).await.is_some(), counts_all, "{limit:?}");
    }
    all_expire(&server);
}

/// In a long log the charge is found among those that came after it, across the end of the ring.
#[tokio::test]
async fn a_log_closes_the_gap() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::sliding_window_log(1_000, Duration::from_secs(10), Count::Admitted).unwrap();
    let mut raw = Raw::new(&server, &limit, "log").await;
    let clock = ManualClock::new(Time::EPOCH);
    let memory = Limiter::builder(limit.clone()).clock(clock.clone()).build().unwrap();
    let mut dice = Dice(4_101_842_887_655_102_017);
    let mut at = Time::from_secs(1_700_000_000);
    for round in 0..60 {
        // Undone after up to 70 others; the last few of that are more than are looked through at first.
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
        raw.give_back(at, 0, cost, charged_at).await;
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

/// A leaky bucket that is given back lets the next one out sooner.
#[tokio::test]
async fn a_queue_gets_shorter() {
    let server = RedisServer::start().unwrap();
    let rate = Rate::new(1, Duration::from_secs(1)).unwrap();
    let limit = Limit::leaky_bucket(5, rate, Mode::Shape).unwrap();
    let mut raw = Raw::new(&server, &limit, "queue").await;
    let at = Time::from_secs(1_700_000_000);
    raw.charge(at, 0, 1).await;
    raw.charge(at, 0, 2).await;
    raw.give_back(at, 0, 2, at).await;
    assert_eq!(raw.charge(at, 0, 1).await.delay, Duration::from_secs(1));
}

/// Part of a charge is given back, among others of the same time: as if only the rest had been charged.
#[tokio::test]
async fn a_part_is_given_back() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_variant(300, 10).iter().enumerate() {
        if matches!(limit, Limit::Log(log) if log.count() == Count::All) {
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
            let (_, told) = raw
                .call(Some(at), &[Ask::Charge { key: 0, cost }, Ask::Charge { key: 0, cost: other }])
                .await;
            if told[0].allowed {
                raw.give_back(at, 0, part, at).await;
                assert!(memory.check_n(&0, cost - part).allowed);
                parts += 1;
            }
            if told[1].allowed {
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

/// Charges on many keys, undone at their time or at one that is not known, whole or in part, on a clock that goes forward
/// or steps back: Redis and memory say the same all the time.
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
            let told = raw.charge(at, key, cost).await;
            assert_eq!(told, memory.check_n(&key, cost), "{what}");
            if told.allowed {
                made.push((key, at, cost));
            }
            continue;
        }
        // Those of long ago are not looked for in Redis.
        let recent = made.len().saturating_sub(20);
        let known = (dice.below(2) == 0 && !made.is_empty())
            .then(|| made.remove(recent + dice.below((made.len() - recent) as u64) as usize));
        let (key, charged_at, cost) =
            known.map_or((key, None, cost), |(key, at, cost)| (key, Some(at), cost));
        let before = memory.peek_n(&key, 0).remaining;
        raw.give_back(at, key, cost, charged_at).await;
        memory.give_back(&[Charge { limit: 0, key: memory.key(&key), cost }], charged_at);
        let told = memory.check_n(&key, 0);
        assert_eq!(raw.charge(at, key, 0).await, told, "{what}, given back {cost} of {charged_at:?}");
        assert!(told.remaining - before <= cost, "{what}: {before} -> {}", told.remaining);
        given += told.remaining - before;
    }
    let counts_all = matches!(limit, Limit::Log(log) if log.count() == Count::All);
    assert_eq!(given > 0, !counts_all, "{limit:?}: {given} given back");
}

#[tokio::test]
async fn memory_and_redis_give_back_the_same() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for size in [5, 300, 70_000] {
        for limit in every_variant(size, 10) {
            for is_forward in [true, false] {
                name += 1;
                undone_in_both(&limit, &server, name, is_forward).await;
            }
        }
    }
    all_expire(&server);
}

/// A charge of a while ago is found among many others.
#[tokio::test]
async fn a_charge_in_a_long_log_is_found() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::sliding_window_log(10_000, Duration::from_secs(10_000), Count::Admitted).unwrap();
    let mut raw = Raw::new(&server, &limit, 1_u64).await;
    let at = |second: u64| Time::from_secs(1_700_000_000 + second);
    raw.charge(at(0), 0, 5).await;
    for second in 1..=1_000 {
        raw.charge(at(second), 0, 1 + (second % 2) as u32).await;
    }
    let before = raw.charge(at(1_001), 0, 0).await.remaining;
    raw.give_back(at(1_001), 0, 4, at(0)).await;
    assert_eq!(raw.charge(at(1_001), 0, 0).await.remaining, before + 4);
    raw.give_back(at(1_001), 0, 1, at(0)).await;
    assert_eq!(raw.charge(at(1_001), 0, 0).await.remaining, before + 5);
    raw.give_back(at(1_001), 0, 1, at(0)).await;
    assert_eq!(raw.charge(at(1_001), 0, 0).await.remaining, before + 5, "there is nothing more of it");
    // What is left goes as it came.
    assert_eq!(raw.charge(at(10_500), 0, 0).await.remaining, 10_000 - 750, "the younger half");
    all_expire(&server);
}
