//! Goal: a deploy may change a limit while processes with the old one run, and another program may write to a key: each
//! concerns the keys that it is about, and nobody else.

use std::time::Duration;

use futures_util::future::join_all;
use testbed::RedisServer;
use tollgate::redis::{Failure, Redis, Settings};
use tollgate::{Align, Edge, Limit, Limiter, Rate, RetryAfter, Style, Verdict};

use crate::{PATIENT, all_expire, every_variant, limiter};

const DAY: Duration = Duration::from_secs(86_400);

fn settings(server: &RedisServer, namespace: &str) -> Settings {
    // One connection, so that requests share calls.
    Settings::new(&server.url())
        .namespace(namespace)
        .deadline(PATIENT)
        .connections(1)
        .failure(Failure::Closed)
}

/// Keys that have taken more than a lowered limit are denied, and told when they pass again.
#[tokio::test]
async fn a_limit_is_lowered() {
    let server = RedisServer::start().unwrap();
    for (number, (old, new)) in every_variant(20, 3_600).into_iter().zip(every_variant(5, 3_600)).enumerate()
    {
        // These count in time, and the rate is lower, too.
        if matches!(new, Limit::Bucket(_)) {
            continue;
        }
        let settings = settings(&server, &number.to_string());
        let (old, limiter) = (limiter(&[old], &settings), limiter(std::slice::from_ref(&new), &settings));
        assert!(old.check_n("key", 15).await.allowed());
        let verdict = limiter.check("key").await;
        let told = verdict.decision();
        assert!(!verdict.is_degraded() && !told.allowed && told.remaining == 0, "{new:?}: {verdict:?}");
        assert!(matches!(told.retry_after, RetryAfter::After(_)), "{new:?}: {told:?}");
        if !matches!(new, Limit::Log(_)) {
            assert!(limiter.check_n("key", 0).await.allowed(), "{new:?}: nothing is always to be had");
        }
        assert!(!limiter.check("other").await.is_degraded(), "{new:?}");
    }
    all_expire(&server);
}

async fn together(limiter: &Limiter<Redis>, keys: std::ops::Range<u32>) -> Vec<Verdict> {
    join_all(keys.map(|key| async move { limiter.check(&key).await })).await
}

/// The new shape of a limit has its own states: keys that only it has seen are decided as ever, and the others begin
/// anew.
async fn is_reshaped(server: &RedisServer, namespace: &str, from: Limit, to: Limit) {
    let settings = settings(server, namespace);
    let (old, new) = (limiter(&[from], &settings), limiter(&[to], &settings));
    for verdict in together(&old, 0..10).await {
        assert!(verdict.allowed());
    }
    for (key, verdict) in together(&new, 0..30).await.iter().enumerate() {
        let told = (verdict.is_degraded(), verdict.allowed(), verdict.decision().remaining);
        assert_eq!(told, (false, true, 9), "{namespace}: key {key}");
    }
}

#[tokio::test]
async fn the_shape_of_a_limit_is_changed() {
    let server = RedisServer::start().unwrap();
    let rate = Rate::new(10, DAY).unwrap();
    let bucket = |style| Limit::token_bucket(10, rate, style).unwrap();
    let counter = |buckets| Limit::sliding_window_counter(10, DAY, buckets, Edge::Weigh).unwrap();
    is_reshaped(&server, "to stepped", bucket(Style::Smooth), bucket(Style::Stepped)).await;
    is_reshaped(&server, "to smooth", bucket(Style::Stepped), bucket(Style::Smooth)).await;
    is_reshaped(&server, "to 12", counter(6), counter(12)).await;
    is_reshaped(&server, "to 6", counter(12), counter(6)).await;
    is_reshaped(&server, "to 1", counter(6), counter(1)).await;
    all_expire(&server);
}

/// A key that another program has written to is an error for itself: those in the same call are decided, and the server
/// is not taken to be away.
#[tokio::test]
async fn a_foreign_key_concerns_itself_only() {
    let server = RedisServer::start().unwrap();
    let a_day = Limit::fixed_window(10, DAY, Align::FirstRequest).unwrap();
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
