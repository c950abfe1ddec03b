//! Goal: processes that share a server share the limit exactly.

use std::time::Duration;

use ratekeeper::redis::Settings;
use ratekeeper::{Charge, Limit, RetryAfter, Time, WindowAlign};
use testbed::RedisServer;

use crate::limits::{every_limit, resized};
use crate::redis::{PATIENT, all_expire, limiter, sum};

/// Many concurrent requests over many connections, in shared calls. The windows are too long to refill during the
/// test.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_limit(200, 300 * 86_400).into_iter().enumerate() {
        // The odd rate refills within seconds.
        if limit.window() < Duration::from_secs(86_400) {
            continue;
        }
        let tasks = (0..8).map(|_| {
            let settings =
                Settings::new(&server.url()).namespace(&number.to_string()).deadline(PATIENT).connections(2);
            let limiter = std::sync::Arc::new(limiter(std::slice::from_ref(&limit), &settings));
            let many = (0..8).map(move |_| {
                let limiter = limiter.clone();
                tokio::spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..20 {
                        let verdict = limiter.check("key").await;
                        assert!(!verdict.is_degraded());
                        admitted += u32::from(verdict.allowed());
                    }
                    admitted
                })
            });
            many.collect::<Vec<_>>()
        });
        assert_eq!(sum(tasks.flatten()).await, 200, "{limit:?}");
    }
    all_expire(&server);
}

#[tokio::test]
async fn denied_request_charges_no_limit() {
    let server = RedisServer::start().unwrap();
    let minute = Duration::from_secs(60);
    let limits = [
        Limit::fixed_window(5, minute, WindowAlign::FirstRequest).unwrap(),
        Limit::fixed_window(100, minute, WindowAlign::FirstRequest).unwrap(),
    ];
    let limiter = limiter(&limits, &Settings::new(&server.url()).deadline(PATIENT));
    let charge = |cost| {
        [
            Charge { limit: 1, key: limiter.key("192.0.2.7"), cost: 1 },
            Charge { limit: 0, key: limiter.key("alice"), cost },
        ]
    };
    let verdict = limiter.charge(&charge(6)).await.unwrap();
    assert!(!verdict.allowed());
    assert_eq!(verdict.decisions()[0].remaining, 100);
    assert_eq!(verdict.decisions()[1].retry_after, RetryAfter::Never);
    let verdict = limiter.charge(&charge(5)).await.unwrap();
    assert!(verdict.allowed());
    assert_eq!((verdict.decisions()[0].remaining, verdict.decisions()[1].remaining), (99, 0));
    let verdict = limiter.charge(&charge(1)).await.unwrap();
    assert_eq!((verdict.allowed(), verdict.decisions()[0].remaining), (false, 99));
    all_expire(&server);
}

/// A limit that is lowered while keys are in use holds from then on, with plausible decisions.
#[tokio::test]
async fn lowered_limit_holds_for_keys_in_use() {
    let server = RedisServer::start().unwrap();
    for (number, high) in every_limit(10, 60).iter().enumerate() {
        let low = resized(high, 3, None);
        let settings = Settings::new(&server.url()).namespace(&number.to_string()).deadline(PATIENT);
        let (before, after) =
            (limiter(std::slice::from_ref(high), &settings), limiter(std::slice::from_ref(&low), &settings));
        let now = Time::from_secs(1_700_000_000);
        assert!(before.check_at(now, "key", 8).await.unwrap().allowed());
        let decision = after.check_at(now, "key", 1).await.unwrap().decision();
        assert_eq!(
            (decision.allowed, decision.limit, decision.remaining),
            (false, 3, 0),
            "{low:?}: {decision:?}"
        );
        assert!(decision.reset_after <= high.window() + low.window(), "{low:?}: {decision:?}");
    }
}

/// A peek charges nothing, and a reset takes effect in all processes.
#[tokio::test]
async fn peek_charges_nothing_and_reset_is_shared() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_limit(3, 3_600).into_iter().enumerate() {
        let settings = Settings::new(&server.url()).namespace(&number.to_string()).deadline(PATIENT);
        let (one, other) = (
            limiter(std::slice::from_ref(&limit), &settings),
            limiter(std::slice::from_ref(&limit), &settings),
        );
        for _ in 0..3 {
            assert_eq!(one.peek_n("key", 3).await.decision().remaining, 3, "{limit:?}");
        }
        assert!(one.check_n("key", 3).await.allowed());
        assert!(!other.peek_n("key", 3).await.allowed(), "{limit:?}");
        other.reset("key").await.unwrap();
        assert!(one.peek_n("key", 3).await.allowed(), "{limit:?}");
    }
    all_expire(&server);
}

/// Keys in Redis are hashes with the documented names.
#[tokio::test]
async fn key_text_never_reaches_redis() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_limit(3, 3_600).into_iter().enumerate() {
        let settings = Settings::new(&server.url()).namespace(&number.to_string()).deadline(PATIENT);
        assert!(limiter(&[limit], &settings).check("alice@example.org").await.allowed());
    }
    let keys = server.cli(&["--scan"]).unwrap();
    for key in keys.lines() {
        let (prefix, hash) = key.split_once('{').unwrap();
        let algorithm = prefix.strip_prefix("rate_limit:").unwrap().strip_suffix(':').unwrap();
        assert!(
            ["token_bucket", "leaky_bucket", "fixed_window", "sliding_window_log", "sliding_window_counter"]
                .contains(&algorithm),
            "{key}"
        );
        let (hash, scale) = hash.split_once("}:").unwrap();
        assert!(hash.len() == 32 && scale.len() == 8 && !key.contains("alice"), "{key}");
    }
    all_expire(&server);
}
