//! Goal: a decision in time whatever the server does, and the exact limit again as soon as it is back.

use std::time::Duration;

use testbed::RedisServer;
use tollgate::redis::{Failure, Settings};
use tollgate::{Align, Limit, RetryAfter, Verdict};

use crate::{PATIENT, limiter};

fn ten_an_hour() -> Limit {
    Limit::fixed_window(10, Duration::from_secs(3_600), Align::FirstRequest).unwrap()
}

/// Asks until an answer fits: the breaker lets one ask every tenth of a second.
pub(crate) async fn until(
    limiter: &tollgate::Limiter<tollgate::redis::Redis>,
    fits: impl Fn(&Verdict) -> bool,
) -> Verdict {
    let asking = async {
        loop {
            let verdict = limiter.check("until").await;
            if fits(&verdict) {
                return verdict;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENT, asking).await.unwrap()
}

/// Nobody listens: each policy gives its own answer, and says so.
#[tokio::test]
async fn without_a_server_the_policy_decides() {
    let nobody = Settings::new("redis://127.0.0.1:1").deadline(Duration::from_millis(20));

    let open = limiter(&[ten_an_hour()], &nobody.clone().failure(Failure::Open));
    for _ in 0..50 {
        let verdict = open.check_n("key", 11).await;
        assert!(verdict.allowed() && verdict.is_degraded());
    }
    assert!(open.is_degraded());

    let closed = limiter(&[ten_an_hour()], &nobody.clone().failure(Failure::Closed));
    for _ in 0..50 {
        let verdict = closed.check("key").await;
        assert!(!verdict.allowed() && verdict.is_degraded());
        assert!(matches!(verdict.decision().retry_after, RetryAfter::After(wait) if wait > Duration::ZERO));
    }

    // Ten among three processes are three for each.
    let local = limiter(&[ten_an_hour()], &nobody.clone().failure(Failure::Local { nodes: 3 }));
    let mut admitted = 0;
    for _ in 0..50 {
        let verdict = local.check("key").await;
        assert!(verdict.is_degraded());
        admitted += u32::from(verdict.allowed());
    }
    assert_eq!(admitted, 3);

    let too_many = limiter(&[ten_an_hour()], &nobody.failure(Failure::Local { nodes: 11 }));
    assert!(!too_many.check("key").await.allowed(), "a share of less than one is none");
}

/// The server is killed and started again, empty and without our functions: decisions go on, and are exact again.
#[tokio::test]
async fn a_killed_server_is_used_again_when_it_is_back() {
    let mut server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).deadline(Duration::from_millis(500)).failure(Failure::Closed);
    let limiter = limiter(&[ten_an_hour()], &settings);
    for round in 0..5 {
        let verdict = until(&limiter, |verdict| !verdict.is_degraded()).await;
        assert!(verdict.allowed(), "round {round}: an empty server knows of nobody");
        assert_eq!(verdict.decision().remaining, 9, "round {round}");
        server.kill().unwrap();
        until(&limiter, Verdict::is_degraded).await;
        server.restart().unwrap();
    }
}

/// The server stands still: nobody waits much longer than the deadline, and soon nobody waits at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still_holds_nobody_up() {
    let server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).failure(Failure::Local { nodes: 1 });
    let limiter = std::sync::Arc::new(limiter(&[ten_an_hour()], &settings));
    until(&limiter, |verdict| !verdict.is_degraded()).await;
    server.pause().unwrap();
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                for _ in 0..200 {
                    let asked = tokio::time::timeout(Duration::from_millis(500), limiter.check("key"));
                    assert!(asked.await.unwrap().is_degraded());
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(limiter.is_degraded());
    server.resume().unwrap();
    until(&limiter, |verdict| !verdict.is_degraded()).await;
}

/// Functions that somebody has flushed are loaded again, and the request is decided all the same.
#[tokio::test]
async fn flushed_functions_are_loaded_again() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(&[ten_an_hour()], &Settings::new(&server.url()).deadline(PATIENT));
    for remaining in (0..10).rev() {
        let verdict = limiter.check("key").await;
        assert_eq!((verdict.is_degraded(), verdict.decision().remaining), (false, remaining));
        assert_eq!(server.cli(&["FUNCTION", "FLUSH"]).unwrap(), "OK");
    }
}

/// A server that becomes a replica refuses to write: the connection is made anew, and works once it is a master again.
#[tokio::test]
async fn a_demoted_server_is_left_and_found_again() {
    let server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).deadline(Duration::from_millis(500)).failure(Failure::Closed);
    let limiter = limiter(&[ten_an_hour()], &settings);
    until(&limiter, |verdict| !verdict.is_degraded()).await;
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
    until(&limiter, Verdict::is_degraded).await;
    server.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    until(&limiter, |verdict| !verdict.is_degraded()).await;
}

/// A key that another program has written to is an error, not a decision.
#[tokio::test]
async fn a_foreign_value_is_not_decided_about() {
    let server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).deadline(PATIENT).failure(Failure::Closed);
    let limiter = limiter(&[ten_an_hour()], &settings);
    assert!(limiter.check("key").await.allowed());
    let key = server.cli(&["--scan"]).unwrap();
    for value in ["", "x", "a much longer text than any state would be"] {
        server.cli(&["SET", &key, value, "PX", "100000"]).unwrap();
        let verdict = limiter.check("key").await;
        assert!(verdict.is_degraded() || verdict.allowed(), "{value:?}");
    }
    assert_eq!(server.cli(&["PING"]).unwrap(), "PONG");
}
