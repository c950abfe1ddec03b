//! Goal: a deployment may change a limit while processes with the old one run, and another program may write to a
//! key; only the keys concerned are affected.

use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper::redis::{FailurePolicy, Redis, Settings};
use ratekeeper::{
    EdgePolicy, LeakyMode, Limit, Limiter, LogPolicy, Rate, RefillStyle, RetryAfter, Verdict, WindowAlign,
};
use testbed::RedisServer;

use crate::limits::{every_limit, resized};
use crate::redis::{PATIENT, all_expire, limiter};

const DAY: Duration = Duration::from_secs(86_400);

fn settings(server: &RedisServer, namespace: &str) -> Settings {
    // One connection, so that requests share calls.
    Settings::new(&server.url())
        .namespace(namespace)
        .deadline(PATIENT)
        .connections(1)
        .on_store_failure(FailurePolicy::Closed)
}

/// Whether a bucket refills while a test runs.
fn refills_soon(limit: &Limit) -> bool {
    matches!(limit, Limit::Bucket(it) if it.rate().count() == 999_983)
}

/// Keys that have used more than a lowered limit are denied with a retry time.
#[tokio::test]
async fn lowered_limit_denies_with_a_retry_time() {
    let server = RedisServer::start().unwrap();
    for (number, old) in every_limit(20, 3_600).into_iter().enumerate() {
        if refills_soon(&old) {
            continue;
        }
        let new = resized(&old, 5, None);
        let settings = settings(&server, &number.to_string());
        let (old, limiter) = (limiter(&[old], &settings), limiter(std::slice::from_ref(&new), &settings));
        assert!(old.check_n("key", 15).await.allowed());
        let verdict = limiter.check("key").await;
        let decision = verdict.decision();
        assert!(
            !verdict.is_degraded() && !decision.allowed && decision.remaining == 0,
            "{new:?}: {verdict:?}"
        );
        assert!(matches!(decision.retry_after, RetryAfter::After(_)), "{new:?}: {decision:?}");
        if !matches!(new, Limit::Log(_)) {
            assert!(limiter.check_n("key", 0).await.allowed(), "{new:?}: nothing is always to be had");
        }
        assert!(!limiter.check("other").await.is_degraded(), "{new:?}");
    }
    all_expire(&server);
}

/// Processes with a higher and a lower limit share the count: neither denies a request that its limit allows, and
/// neither drops what the other has counted.
#[tokio::test]
async fn different_sizes_of_a_limit_share_counts() {
    let server = RedisServer::start().unwrap();
    // With a limit of two million, a fixed window is stored in another format than with twenty.
    for (number, limit) in every_limit(20, 86_400).into_iter().enumerate() {
        if refills_soon(&limit) {
            continue;
        }
        for (low, high) in [(20, 40), (20, 200), (20, 2_000_000)] {
            let settings = settings(&server, &format!("{number} {high}"));
            let (one, other) = (
                limiter(&[resized(&limit, low, None)], &settings),
                limiter(&[resized(&limit, high, None)], &settings),
            );
            let remaining = async |limiter: &Limiter<Redis>, cost| {
                let verdict = limiter.check_n("key", cost).await;
                assert!(!verdict.is_degraded(), "{limit:?}");
                (verdict.allowed(), verdict.decision().remaining)
            };
            assert_eq!(remaining(&one, 10).await, (true, 10), "{limit:?}");
            assert_eq!(remaining(&other, 20).await, (true, high - 30), "{limit:?}");
            assert_eq!(remaining(&one, 0).await.1, 0, "{limit:?}");
            assert!(!one.check("key").await.allowed(), "{limit:?}");
            let counts_all = matches!(&limit, Limit::Log(log) if log.count() == LogPolicy::All);
            // All but one unit, and more than twice what a bucket of the smaller size can lack.
            let rest = (high - 31).min(250);
            if !counts_all {
                assert_eq!(remaining(&other, rest).await, (true, high - 30 - rest), "{limit:?}");
                for _ in 0..3 {
                    assert!(!one.check_n("key", 2).await.allowed(), "{limit:?}");
                }
                assert_eq!(remaining(&other, 1).await, (true, high - 31 - rest), "{limit:?}");
            }
            let lives = |name: &str| server.cli(&["PTTL", name]).unwrap().trim().parse::<u128>().unwrap();
            let counts = other.check_n("key", 0).await.decision().reset_after.as_millis();
            let names = server.cli(&["--scan"]).unwrap();
            let least = names.lines().map(lives).max().unwrap();
            assert!(least + 5_000 >= counts, "{limit:?}: counts for {counts} ms, lives for {least} ms");
            server.cli(&["FLUSHALL"]).unwrap();
        }
    }
}

async fn together(limiter: &Limiter<Redis>, keys: std::ops::Range<u32>) -> Vec<Verdict> {
    join_all(keys.map(|key| async move { limiter.check(&key).await })).await
}

/// The limit with new parameters has its own states: all keys start with a full budget under it.
async fn is_reshaped(server: &RedisServer, namespace: &str, from: Limit, to: Limit) {
    let settings = settings(server, namespace);
    let (old, new) = (limiter(&[from], &settings), limiter(&[to], &settings));
    for verdict in together(&old, 0..10).await {
        assert!(verdict.allowed());
    }
    for (key, verdict) in together(&new, 0..30).await.iter().enumerate() {
        let decision = (verdict.is_degraded(), verdict.allowed(), verdict.decision().remaining);
        assert_eq!(decision, (false, true, 9), "{namespace}: key {key}");
    }
}

#[tokio::test]
async fn changed_parameters_start_new_states() {
    let server = RedisServer::start().unwrap();
    let rate = Rate::new(10, DAY).unwrap();
    let bucket = |style| Limit::token_bucket(10, rate, style).unwrap();
    let counter = |buckets| Limit::sliding_window_counter(10, DAY, buckets, EdgePolicy::Weigh).unwrap();
    is_reshaped(&server, "to stepped", bucket(RefillStyle::Smooth), bucket(RefillStyle::Stepped)).await;
    is_reshaped(&server, "to smooth", bucket(RefillStyle::Stepped), bucket(RefillStyle::Smooth)).await;
    is_reshaped(&server, "to 12", counter(6), counter(12)).await;
    is_reshaped(&server, "to 6", counter(12), counter(6)).await;
    is_reshaped(&server, "to 1", counter(6), counter(1)).await;
    let faster = Limit::token_bucket(10, Rate::new(20, DAY).unwrap(), RefillStyle::Smooth).unwrap();
    is_reshaped(&server, "to faster", bucket(RefillStyle::Smooth), faster.clone()).await;
    is_reshaped(&server, "to slower", faster, bucket(RefillStyle::Smooth)).await;
    let faster = Limit::token_bucket(10, Rate::new(20, DAY).unwrap(), RefillStyle::Stepped).unwrap();
    is_reshaped(&server, "to more at a time", bucket(RefillStyle::Stepped), faster).await;
    let leaky = |mode| Limit::leaky_bucket(10, rate, mode).unwrap();
    is_reshaped(&server, "to shape", leaky(LeakyMode::Police), leaky(LeakyMode::Shape)).await;
    let window = |window, align| Limit::fixed_window(10, window, align).unwrap();
    let log = |window, count| Limit::sliding_window_log(10, window, count).unwrap();
    let counter = |window| Limit::sliding_window_counter(10, window, 1, EdgePolicy::Weigh).unwrap();
    for (from, to) in [(DAY, 2 * DAY), (2 * DAY, DAY)] {
        let days = to.as_secs() / 86_400;
        is_reshaped(
            &server,
            &format!("window of {days}"),
            window(from, WindowAlign::Clock),
            window(to, WindowAlign::Clock),
        )
        .await;
        let first = |length| window(length, WindowAlign::FirstRequest);
        is_reshaped(&server, &format!("first of {days}"), first(from), first(to)).await;
        is_reshaped(&server, &format!("log of {days}"), log(from, LogPolicy::All), log(to, LogPolicy::All))
            .await;
        is_reshaped(&server, &format!("counter of {days}"), counter(from), counter(to)).await;
    }
    is_reshaped(&server, "to clock", window(DAY, WindowAlign::FirstRequest), window(DAY, WindowAlign::Clock))
        .await;
    is_reshaped(&server, "to admitted", log(DAY, LogPolicy::All), log(DAY, LogPolicy::Admitted)).await;
    all_expire(&server);
}

/// A named limit whose windows begin with the first request, as those of bans do, may change their length: a window
/// ends its new length after its start, as in memory.
#[tokio::test]
async fn named_window_keeps_its_start_when_its_length_changes() {
    let server = RedisServer::start().unwrap();
    let start = 1_700_000_000;
    for (from, to) in [(600, 3_600), (3_600, 600), (600, 601)] {
        let settings = settings(&server, &format!("{from} {to}")).named(0, "ban");
        let of = |secs| Limit::fixed_window(1, Duration::from_secs(secs), WindowAlign::FirstRequest).unwrap();
        let (old, new) = (limiter(&[of(from)], &settings), limiter(&[of(to)], &settings));
        let check = async |limiter: &Limiter<Redis>, key: &str, cost, after: u64| {
            let at = ratekeeper::Time::from_secs(start + after);
            limiter.check_at(at, key, cost).await.unwrap().decision()
        };
        assert!(check(&old, "a", 1, 0).await.allowed);
        for cost in [0, 1] {
            let found = check(&new, "a", cost, 540).await;
            let (remaining, rest) = (found.remaining, found.reset_after.as_secs());
            assert_eq!((remaining, rest), (0, to - 540), "{from} -> {to}");
        }
        assert!(!check(&new, "a", 1, to - 1).await.allowed, "{from} -> {to}");
        assert!(check(&new, "a", 1, to).await.allowed, "{from} -> {to}");
        // A longer window does not revive a count that has ended.
        assert!(check(&old, "b", 1, 0).await.allowed);
        assert!(check(&new, "b", 1, from).await.allowed, "{from} -> {to}");
        // Processes with both lengths share the count.
        let more =
            |secs| Limit::fixed_window(9, Duration::from_secs(secs), WindowAlign::FirstRequest).unwrap();
        let (old, new) = (limiter(&[more(from)], &settings), limiter(&[more(to)], &settings));
        assert_eq!(check(&old, "c", 3, 0).await.remaining, 6);
        assert_eq!(check(&new, "c", 3, 1).await.remaining, 3);
        assert_eq!(check(&old, "c", 1, 2).await.remaining, 2);
        assert_eq!(check(&new, "c", 0, 3).await.reset_after.as_secs(), to - 3);
        // The process with the shorter length does not end the window for the other.
        let (short, long) = if from < to { (&old, &new) } else { (&new, &old) };
        assert_eq!(check(long, "d", 9, 0).await.remaining, 0);
        assert_eq!(check(short, "d", 0, from.min(to)).await.remaining, 9);
        assert_eq!(check(long, "d", 0, from.min(to)).await.remaining, 0);
    }
    all_expire(&server);
}

/// A foreign value in one key fails only that key: other requests in the same call are decided, and the server does
/// not count as unavailable.
#[tokio::test]
async fn foreign_value_fails_only_its_own_key() {
    let server = RedisServer::start().unwrap();
    let a_day = Limit::fixed_window(10, DAY, WindowAlign::FirstRequest).unwrap();
    let limiter = limiter(&[a_day], &settings(&server, ""));
    assert!(!limiter.check("bad").await.is_degraded());
    let name = server.cli(&["--scan"]).unwrap();
    server.cli(&["DEL", &name]).unwrap();
    server.cli(&["HSET", &name, "field", "value"]).unwrap();
    server.cli(&["EXPIRE", &name, "1000"]).unwrap();
    for _ in 0..10 {
        let (bad, others) = tokio::join!(limiter.check("bad"), together(&limiter, 0..10));
        assert!(bad.is_degraded());
        assert!(others.iter().all(|verdict| !verdict.is_degraded()));
    }
    assert!(!limiter.is_degraded());
    all_expire(&server);
}

/// A number that no state can have is a foreign value as well: an error that is counted, not a denial.
#[tokio::test]
async fn number_that_is_no_state_is_a_foreign_value() {
    let server = RedisServer::start().unwrap();
    let bucket =
        Limit::token_bucket(5, Rate::new(1, Duration::from_secs(3_600)).unwrap(), RefillStyle::Smooth)
            .unwrap();
    for (namespace, limit) in
        [("bucket", bucket), ("window", Limit::fixed_window(5, DAY, WindowAlign::Clock).unwrap())]
    {
        let limiter = limiter(&[limit], &settings(&server, namespace));
        assert!(!limiter.check("bad").await.is_degraded());
        let name = server.cli(&["--scan"]).unwrap();
        server.cli(&["SET", &name, "99999999999999999999999999999", "EX", "1000"]).unwrap();
        assert!(limiter.check("bad").await.is_degraded(), "{namespace}");
        let wrong_types: u64 = limiter
            .failures()
            .filter(|(cause, _)| cause.name() == "wrong_type")
            .map(|(_, count)| count)
            .sum();
        assert_eq!(wrong_types, 1, "{namespace}");
        server.cli(&["DEL", &name]).unwrap();
    }
}
