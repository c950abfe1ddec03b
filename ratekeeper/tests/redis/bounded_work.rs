//! Goal: no call keeps Redis busy for long, whatever the state of a key. Method: the time that the server itself
//! measures for one call, and the decisions of the store in memory at the same instants.

use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper::redis::{Redis, Settings};
use ratekeeper::{Limit, Limiter, LogPolicy, ManualClock, Memory, Time};
use testbed::RedisServer;

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

/// Checks in both stores, which must decide the same, and returns the time that Redis took.
async fn timed(
    server: &RedisServer,
    redis: &Limiter<Redis>,
    (memory, clock): &(Limiter<Memory<ManualClock>>, ManualClock),
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
const TRIES: usize = 3;

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
    let log = |limit| Limit::sliding_window_log(limit, WINDOW, LogPolicy::Admitted).unwrap();
    let settings = Settings::new(&server.url()).deadline(PATIENT).connections(1);
    let redis = limiter(&[log(5 * ENTRIES)], &settings);
    let clock = ManualClock::new(START);
    let memory = (Limiter::builder(log(5 * ENTRIES)).clock(clock.clone()).build().unwrap(), clock.clone());
    let charge = |entry: u32| (at(u64::from(entry) * 100), costs[entry as usize % costs.len()]);
    for batch in (0..ENTRIES).collect::<Vec<_>>().chunks(64) {
        // One instant and one cost each, in order: calls of one connection are executed in order.
        let checks = batch.iter().map(|entry| {
            let (at, cost) = charge(*entry);
            redis.check_at(at, "key", cost)
        });
        for (entry, verdict) in batch.iter().zip(join_all(checks).await) {
            let (at, cost) = charge(*entry);
            clock.set(at);
            assert_eq!(verdict.unwrap().decision(), memory.0.check_n("key", cost), "entry {entry}");
        }
    }
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
