//! Goal: a cached denial costs no call to Redis, and no request is denied that Redis would allow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratekeeper::redis::Settings;
use ratekeeper::{Limit, LogPolicy, RetryAfter, WindowAlign};
use testbed::RedisServer;

use crate::redis::{PATIENT, all_expire, limiter};

/// Number of FCALL commands that the server has executed.
pub(crate) fn calls(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]).unwrap();
    let fcall = stats.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
    fcall.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test]
async fn repeated_denials_are_answered_from_the_cache() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::fixed_window(5, Duration::from_secs(3_600), WindowAlign::FirstRequest).unwrap();
    let limiter = limiter(&[limit], &Settings::new(&server.url()).deadline(PATIENT));
    for _ in 0..4 {
        assert!(limiter.check("key").await.allowed());
    }
    let denied = limiter.check_n("key", 2).await.decision();
    let before = calls(&server);
    let mut last = denied.retry_after;
    for _ in 2..2_000 {
        let decision = limiter.check_n("key", 2).await.decision();
        assert!(!decision.allowed && decision.remaining == 1);
        assert!(
            decision.retry_after <= last && decision.retry_after > RetryAfter::Now,
            "it only gets shorter"
        );
        last = decision.retry_after;
    }
    // On a busy machine this takes a few seconds, and the denial is rechecked once a second.
    let sent = calls(&server) - before;
    assert!(sent <= 20, "{sent} calls for 1998 requests");
    assert_eq!(
        limiter.check_n("key", 6).await.decision().retry_after,
        RetryAfter::Never,
        "it has its own wait"
    );
    assert!(limiter.check("key").await.allowed(), "one is left for a request that costs no more");
    limiter.reset("key").await.unwrap();
    assert!(limiter.check_n("key", 5).await.allowed(), "the process that resets a key sees it immediately");
    all_expire(&server);
}

/// The log must count every denied request, so its denials are not cached.
#[tokio::test]
async fn log_of_all_requests_is_checked_each_time() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::sliding_window_log(1, Duration::from_secs(3_600), LogPolicy::All).unwrap();
    let limiter = limiter(&[limit], &Settings::new(&server.url()).deadline(PATIENT));
    for _ in 0..10 {
        limiter.check("key").await;
    }
    // One more than the requests: the first call failed because the functions were not loaded.
    assert_eq!(calls(&server), 11);
    all_expire(&server);
}

/// Also while other tasks check the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_takes_effect_immediately_in_its_process() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::fixed_window(1, Duration::from_secs(86_400), WindowAlign::FirstRequest).unwrap();
    let limiter = Arc::new(limiter(&[limit], &Settings::new(&server.url()).deadline(PATIENT)));
    let is_over = Arc::new(AtomicBool::new(false));
    let asking = (0..8).map(|_| {
        let (limiter, is_over) = (limiter.clone(), is_over.clone());
        tokio::spawn(async move {
            while !is_over.load(Ordering::Relaxed) {
                limiter.check("key").await;
                tokio::task::yield_now().await;
            }
        })
    });
    let asking: Vec<_> = asking.collect();
    for _ in 0..100 {
        limiter.reset("key").await.unwrap();
        // One of the tasks gets the unit. A peek always calls Redis.
        let getting = async {
            while limiter.peek("key").await.allowed() {
                tokio::task::yield_now().await;
            }
        };
        let got = tokio::time::timeout(Duration::from_millis(700), getting).await;
        assert!(got.is_ok(), "a denial was known for longer than the reset took");
    }
    is_over.store(true, Ordering::Relaxed);
    for task in asking {
        task.await.unwrap();
    }
    all_expire(&server);
}
