//! Goal: no call keeps Redis busy for long, whatever the state of a key. Method: the commands of one call and the time
//! that the server itself measures for it, and the decisions of the store in memory at the same instants.

use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper::redis::{Redis, Settings};
use ratekeeper::{EdgePolicy, Limit, Limiter, LogPolicy, ManualClock, Memory, Rate, RefillStyle, Time};
use testbed::{RedisServer, ordinary_or_long};

use crate::redis::equivalence::Dice;
use crate::redis::function_calls::{Operation, Raw};
use crate::redis::{PATIENT, all_expire, limiter};

const START: Time = Time::from_secs(1_700_000_000);
const WINDOW: Duration = Duration::from_secs(60);
const ENTRIES: u32 = 20_000;

fn at(micros: u64) -> Time {
    START.saturating_add(Duration::from_micros(micros))
}

/// Microseconds that the server spent in function calls since the statistics were reset.
fn call_micros(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).unwrap();
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:")).unwrap();
    let micros = line.split(',').find_map(|field| field.strip_prefix("usec=")).unwrap();
    micros.parse().unwrap()
}

/// The commands that functions executed on keys since the statistics were reset.
fn commands(server: &RedisServer) -> u64 {
    calls(server, &["get", "getrange", "set", "setrange", "pexpire", "unlink"])
}

/// The calls of these commands since the statistics were reset.
fn calls(server: &RedisServer, names: &[&str]) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).unwrap();
    let calls = |line: &str| {
        let (name, fields) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        names
            .contains(&name)
            .then(|| fields.split(',').find_map(|field| field.strip_prefix("calls="))?.parse::<u64>().ok())?
    };
    stats.lines().filter_map(calls).sum()
}

type MemoryLog = (Limiter<Memory<ManualClock>>, ManualClock);

/// One log in Redis and in memory.
fn both(server: &RedisServer, limit: &Limit) -> (Limiter<Redis>, MemoryLog) {
    let settings = Settings::new(&server.url()).deadline(PATIENT).connections(1);
    let clock = ManualClock::new(START);
    let memory = Limiter::builder(limit.clone()).clock(clock.clone()).build().unwrap();
    (limiter(std::slice::from_ref(limit), &settings), (memory, clock))
}

/// Adds entries to both logs, one every 100 microseconds.
async fn fill(
    redis: &Limiter<Redis>,
    (memory, clock): &MemoryLog,
    entries: std::ops::Range<u32>,
    costs: &[u32],
) {
    let charge = |entry: u32| (at(u64::from(entry) * 100), costs[entry as usize % costs.len()]);
    for batch in entries.collect::<Vec<_>>().chunks(64) {
        let checks = batch.iter().map(|entry| {
            let (at, cost) = charge(*entry);
            redis.check_at(at, "key", cost)
        });
        for (entry, verdict) in batch.iter().zip(join_all(checks).await) {
            let (at, cost) = charge(*entry);
            clock.set(at);
            assert_eq!(verdict.unwrap().decision(), memory.check_n("key", cost), "entry {entry}");
        }
    }
}

/// Checks in both stores, which must decide the same, and returns the time that Redis took.
async fn timed(
    server: &RedisServer,
    redis: &Limiter<Redis>,
    (memory, clock): &MemoryLog,
    at: Time,
    cost: u32,
) -> u64 {
    server.command(&["CONFIG", "RESETSTAT"]).unwrap();
    clock.set(at);
    let decision = redis.check_at(at, "key", cost).await.unwrap().decision();
    assert_eq!(decision, memory.check_n("key", cost), "cost {cost} at {at:?}");
    call_micros(server)
}

/// The server measures elapsed time, and the system may run something else meanwhile: the fastest of these tries counts.
const TRIES: usize = 10;

/// A log of 20,000 entries of which almost all expire at once, and one whose limit was lowered far below its entries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_log_that_expires_at_once_does_not_block_redis() {
    let server = RedisServer::start().unwrap();
    for (costs, bound_micros) in [(&[1][..], 1_000), (&[1, 2], 1_000), (&[1, 1, 5, 1], 10_000)] {
        let mut tried = Vec::new();
        for _ in 0..TRIES {
            let micros = expire_long_log(&server, costs).await;
            println!("costs {costs:?}: {micros:?} us");
            tried.push(micros);
            if tried.last().is_some_and(|micros| micros.iter().all(|it| *it < bound_micros)) {
                break;
            }
        }
        let fastest = |step: usize| tried.iter().map(|micros| micros[step]).min();
        let fastest: Vec<_> = (0..tried[0].len()).filter_map(fastest).collect();
        assert!(fastest.iter().all(|it| *it < bound_micros), "costs {costs:?}: {tried:?} us");
    }
}

/// Fills a log and lets it expire in steps. Returns the time of each call in the server.
async fn expire_long_log(server: &RedisServer, costs: &[u32]) -> Vec<u64> {
    server.command(&["FLUSHALL"]).unwrap();
    let log = Limit::sliding_window_log(5 * ENTRIES, WINDOW, LogPolicy::Admitted).unwrap();
    let (redis, memory) = both(server, &log);
    fill(&redis, &memory, 0..ENTRIES, costs).await;
    let end = u64::from(ENTRIES) * 100;
    let mut micros = Vec::new();
    // Half of the entries have expired, then all but 100, then one more at a time.
    for after in [end / 2, end - 10_000, end - 9_900, end - 9_850] {
        let now = at(after).saturating_add(WINDOW);
        micros.push(timed(server, &redis, &memory, now, 1).await);
    }
    all_expire(server);
    micros
}

/// A denial states when the request will be allowed: far into the log, if the limit was lowered.
#[tokio::test]
async fn denial_by_a_lowered_limit_does_not_block_redis() {
    let server = RedisServer::start().unwrap();
    let log = |limit| Limit::sliding_window_log(limit, WINDOW, LogPolicy::Admitted).unwrap();
    let settings = Settings::new(&server.url()).deadline(PATIENT).connections(1);
    let named = |limit| limiter(&[log(limit)], &settings);
    let now = at(u64::from(ENTRIES) * 100);
    let (mut decision, mut micros) = (None, u64::MAX);
    for _ in 0..TRIES {
        server.command(&["FLUSHALL"]).unwrap();
        let (redis, lowered) = (named(ENTRIES), named(10));
        for batch in (0..ENTRIES).collect::<Vec<_>>().chunks(64) {
            join_all(batch.iter().map(|entry| redis.check_at(at(u64::from(*entry) * 100), "key", 1))).await;
        }
        server.command(&["CONFIG", "RESETSTAT"]).unwrap();
        decision = Some(lowered.check_at(now, "key", 1).await.unwrap().decision());
        micros = micros.min(call_micros(&server));
        println!("{micros} us");
        if micros < 1_000 {
            break;
        }
    }
    let decision = decision.unwrap();
    // The oldest entry that must leave is the tenth from the end.
    let leaves = at(u64::from(ENTRIES - 10) * 100).saturating_add(WINDOW);
    let wait = Duration::from_nanos(leaves.as_nanos() - now.as_nanos());
    assert_eq!(decision.retry_after, ratekeeper::RetryAfter::After(wait));
    assert!(micros < 1_000, "{micros} us");
}

/// A log of all requests drops as many old units as a request costs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn charge_of_a_whole_limit_does_not_block_redis() {
    const LIMIT: u32 = 10_000;
    let server = RedisServer::start().unwrap();
    for (costs, commands_max) in [(&[1][..], 100), (&[1, 2], 100), (&[1, 1, 5, 1], 200)] {
        server.command(&["FLUSHALL"]).unwrap();
        let log = Limit::sliding_window_log(LIMIT, WINDOW, LogPolicy::All).unwrap();
        let (redis, memory) = both(&server, &log);
        fill(&redis, &memory, 0..LIMIT, costs).await;
        for (step, cost) in (1..).zip([LIMIT / 2 + 1, LIMIT / 3, 1, LIMIT - 1, LIMIT, 2, LIMIT]) {
            let now = at(u64::from(LIMIT) * 100 + step);
            timed(&server, &redis, &memory, now, cost).await;
            let commands = commands(&server);
            assert!(commands <= commands_max, "costs {costs:?}, cost {cost}: {commands} commands");
        }
        // One unit at a time expires.
        for step in 1..20 {
            let now = at(u64::from(LIMIT) * 100 + step / 3).saturating_add(WINDOW);
            timed(&server, &redis, &memory, now, 1).await;
        }
    }
    all_expire(&server);
}

/// Rings of 16,384 words, whose oldest word is at the beginning, near it, or near the end, grow in place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_log_that_grows_is_not_copied() {
    const RING: u32 = 1 << 14;
    /// Entries that would fill a window.
    const WINDOW_ENTRIES: u32 = 600_000;
    let server = RedisServer::start().unwrap();
    let (one, mixed) = (&[1][..], &[1, 2, 3][..]);
    for (expired, costs) in [(0, one), (3_000, one), (14_000, one), (1_500, mixed), (7_500, mixed)] {
        server.command(&["FLUSHALL"]).unwrap();
        let log = Limit::sliding_window_log(10 * RING, WINDOW, LogPolicy::Admitted).unwrap();
        let (redis, memory) = both(&server, &log);
        // Entries of cost 1, 2 and 3 have 1, 2 and 2 words.
        let full = if costs.len() == 1 { RING } else { RING * 3 / 5 };
        let [second, third] = [WINDOW_ENTRIES / 2, WINDOW_ENTRIES + expired];
        fill(&redis, &memory, 0..expired, costs).await;
        fill(&redis, &memory, second..second + full - expired - 100, costs).await;
        // The first entries have left the window, so the ring wraps around.
        fill(&redis, &memory, third..third + expired, costs).await;
        let length =
            || server.command(&["RANDOMKEY"]).and_then(|key| server.command(&["STRLEN", &key])).unwrap();
        let (mut before, mut grown) = (length(), 0);
        for entry in third + expired..third + expired + 200 {
            server.command(&["CONFIG", "RESETSTAT"]).unwrap();
            fill(&redis, &memory, entry..entry + 1, costs).await;
            let (commands, now) = (commands(&server), length());
            assert!(commands <= 20, "{expired} expired: {commands} commands");
            grown += u32::from(now != before);
            before = now;
        }
        assert_eq!(grown, 1, "{expired} expired: the ring grows once");
        // The moved entries leave the window at their instants.
        for entry in [second, second + (full - expired) / 2, third, third + expired, third + expired + 150] {
            let now = at(u64::from(entry) * 100).saturating_add(WINDOW);
            timed(&server, &redis, &memory, now, 1).await;
            timed(&server, &redis, &memory, now, 10 * RING - 20).await;
        }
    }
    all_expire(&server);
}

/// A log in Redis, charged by raw calls, and in memory.
struct RawLog<'a> {
    raw: Raw<'a>,
    memory: MemoryLog,
    limit: u32,
}

impl<'a> RawLog<'a> {
    async fn new(server: &RedisServer, limit: &'a Limit, constants: &[(&str, &str)]) -> RawLog<'a> {
        let clock = ManualClock::new(START);
        let memory = Limiter::builder(limit.clone()).clock(clock.clone()).build().unwrap();
        let raw = Raw::with_constants(server, limit, "log", constants).await;
        RawLog { raw, memory: (memory, clock), limit: limit.limit() }
    }

    /// Charges the costs at an instant in one call.
    async fn charge(&mut self, now: Time, costs: &[u32]) {
        let charges: Vec<_> = costs.iter().map(|cost| Operation::Charge { key: 0, cost: *cost }).collect();
        let (_, decisions) = self.raw.call(Some(now), &charges).await;
        let (memory, clock) = &self.memory;
        clock.set(now);
        for (cost, decision) in costs.iter().zip(decisions) {
            assert_eq!(decision, memory.check_n(&0, *cost), "cost {cost} at {now:?}");
        }
    }

    /// The denials of these costs state instants from all over the log.
    async fn probe(&mut self, now: Time) {
        let (memory, clock) = &self.memory;
        clock.set(now);
        let free = memory.check_n(&0, 0).remaining;
        let used = self.limit - free;
        let costs: Vec<_> = (0..=16).map(|part| free + 1 + (used - 1) / 16 * part).collect();
        self.charge(now, &costs).await;
    }
}

/// Rings of 81,920 words grow at every position of the oldest word, and again before that has left the window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ring_of_any_size_grows_in_few_commands() {
    const GROWTH: u32 = 1 << 14;
    const RING: u32 = 5 * GROWTH;
    const CALL: u32 = 64;
    let limit = Limit::sliding_window_log(20 * GROWTH, WINDOW, LogPolicy::Admitted).unwrap();
    let middle = RING / 2;
    let firsts = [GROWTH + 64, middle, RING - GROWTH - 64, GROWTH, 64, 20_032, RING - GROWTH, RING - 64];
    for first in firsts.into_iter().take(ordinary_or_long(4, 8)) {
        let server = RedisServer::start().unwrap();
        let mut log = RawLog::new(&server, &limit, &[]).await;
        let ones = [1; CALL as usize];
        // Each call is at its own millisecond: the first words, the others half a window later, and then, after the
        // first have left the window, as many new ones.
        let begin = |group: u64, call: u32| at(group * 30_500_000 + u64::from(call) * 1_000);
        for call in 0..first / CALL {
            log.charge(begin(0, call), &ones).await;
        }
        for call in 0..(RING - first) / CALL {
            log.charge(begin(1, call), &ones).await;
        }
        for call in 0..first / CALL {
            log.charge(begin(2, call), &ones).await;
        }
        let length = log.raw.log_layout(0).await.1;
        assert_eq!(length, 98 + RING as usize * 8, "first {first}: the ring is full");
        for call in first / CALL..(first + 3 * GROWTH) / CALL {
            let now = begin(2, call);
            // The ring is full after a whole call, so the first charge of the next is the one that grows it.
            server.command(&["CONFIG", "RESETSTAT"]).unwrap();
            log.charge(now, &[1]).await;
            let commands = commands(&server);
            assert!(commands <= 20, "first {first}: {commands} commands");
            log.charge(now, &ones[1..]).await;
            if call % 97 == 0 {
                log.probe(now).await;
            }
        }
        // All words leave the window, while new ones are charged.
        let end = begin(2, (first + 3 * GROWTH) / CALL);
        for step in 0..140 {
            let now = end.saturating_add(WINDOW / 100 * step);
            log.charge(now, &ones).await;
            log.probe(now).await;
        }
        all_expire(&server);
    }
}

/// The same with short rings, at random: the library's constants are replaced, so that a ring of 16 words grows in
/// place.
#[tokio::test]
async fn short_rings_grow_in_place_with_the_decisions_of_memory() {
    let server = RedisServer::start().unwrap();
    let constants = [("COPIED_MAX = 2 ^ 14", "COPIED_MAX = 16"), ("MOVED = 4096", "MOVED = 5")];
    let mut folded = 0;
    for seed in 1..=ordinary_or_long(24, 240) as u64 {
        server.command(&["FLUSHALL"]).unwrap();
        let policy = if seed % 3 == 0 { LogPolicy::All } else { LogPolicy::Admitted };
        let limit = Limit::sliding_window_log(if seed % 2 == 0 { 400 } else { 90 }, WINDOW, policy).unwrap();
        let mut log = RawLog::new(&server, &limit, &constants).await;
        let mut dice = Dice(88_172_645_463_325_252 + seed);
        let cost_max = 1 + seed % 4;
        let (mut now, mut pace) = (0, 1);
        for number in 0..1_500 {
            if number % 100 == 0 {
                // From 5 to 5,000 words in a window.
                pace = [100, 1_000, 3_000, 10_000, 100_000][dice.below(5) as usize];
            }
            now += dice.below(120_000_000 / pace);
            let mut costs = vec![1 + dice.below(cost_max) as u32];
            match dice.below(12) {
                0 => costs.push(dice.below(u64::from(limit.limit()) + 2) as u32),
                1 => {
                    // A refund leaves no trace of a charge.
                    let (cost, at) = (costs.remove(0), at(now));
                    let decision = log.raw.charge(at, 0, cost).await;
                    if decision.allowed && policy == LogPolicy::Admitted {
                        log.raw.refund(at, 0, cost, at).await;
                    } else {
                        log.memory.1.set(at);
                        assert_eq!(decision, log.memory.0.check_n(&0, cost), "seed {seed}, step {number}");
                    }
                }
                _ => {}
            }
            if !costs.is_empty() {
                log.charge(at(now), &costs).await;
            }
            if policy == LogPolicy::Admitted
                && number % 10 == 0
                && log.memory.0.check_n(&0, 0).remaining < limit.limit()
            {
                log.probe(at(now)).await;
            }
            let (is_folded, length) = log.raw.log_layout(0).await;
            folded += usize::from(is_folded);
            assert!(length <= 98 + (2 * limit.limit() as usize + 17) * 8, "seed {seed}: {length} bytes");
        }
    }
    println!("folded after {folded} steps");
    assert!(folded > 500, "folded after {folded} steps");
    all_expire(&server);
}

/// In a call of several requests, each is tried by its fast path once, also if that leaves it to the slow path.
#[tokio::test]
async fn fast_path_runs_once_for_each_request_of_a_call() {
    let server = RedisServer::start().unwrap();
    let limit =
        Limit::token_bucket(10, Rate::new(10, Duration::from_secs(1)).unwrap(), RefillStyle::Smooth).unwrap();
    let mut raw = Raw::new(&server, &limit, "bucket").await;
    // A state of nanoseconds, which INCRBY cannot change.
    let nanos = START.saturating_add(Duration::from_nanos(1));
    assert!(raw.charge(nanos, 0, 1).await.allowed);
    server.command(&["CONFIG", "RESETSTAT"]).unwrap();
    let (_, decisions) = raw.call(Some(at(1)), &[Operation::Charge { key: 0, cost: 1 }; 2]).await;
    assert_eq!(decisions.iter().map(|it| it.remaining).collect::<Vec<_>>(), [8, 7]);
    assert_eq!(calls(&server, &["incrby"]), 2);
}

/// A counter of as many buckets as possible, at every step a different number of them new.
#[tokio::test]
async fn counter_of_1024_buckets_does_not_block_redis() {
    const BUCKETS: u32 = 1024;
    const BUCKET_MICROS: u64 = 60_000_000 / BUCKETS as u64;
    let server = RedisServer::start().unwrap();
    for edge in [EdgePolicy::Weigh, EdgePolicy::Drop, EdgePolicy::Keep] {
        let limit = Limit::sliding_window_counter(1_000_000, WINDOW, BUCKETS, edge).unwrap();
        let mut raw = Raw::new(&server, &limit, format!("{edge:?}")).await;
        let clock = ManualClock::new(START);
        let memory = Limiter::builder(limit.clone()).clock(clock.clone()).build().unwrap();
        for bucket in 0..2 * u64::from(BUCKETS) {
            let now = at(bucket * BUCKET_MICROS + bucket % 7);
            clock.set(now);
            let cost = (bucket % 5) as u32;
            assert_eq!(raw.charge(now, 0, cost).await, memory.check_n(&0, cost), "{edge:?}, bucket {bucket}");
        }
        let mut fastest = u64::MAX;
        for _ in 0..TRIES {
            server.command(&["CONFIG", "RESETSTAT"]).unwrap();
            let now = at(2 * u64::from(BUCKETS) * BUCKET_MICROS);
            let refund = Operation::Refund { key: 0, cost: 500, at: None };
            raw.call(Some(now), &[refund, Operation::Charge { key: 0, cost: 1 }]).await;
            fastest = fastest.min(call_micros(&server));
            if fastest < 1_000 {
                break;
            }
        }
        println!("{edge:?}: {fastest} us");
        assert!(fastest < 1_000, "{edge:?}: {fastest} us");
    }
    all_expire(&server);
}
