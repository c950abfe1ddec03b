//! Goal: a key that is known to be denied costs Redis nothing, and nobody is denied who would pass.

use std::time::Duration;

use testbed::RedisServer;
use tollgate::redis::Settings;
use tollgate::{Align, Count, Limit, RetryAfter};

use crate::{PATIENT, all_expire, limiter};

/// How many calls the server has had.
pub(crate) fn calls(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]).unwrap();
    let fcall = stats.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
    fcall.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test]
async fn a_denied_key_is_denied_without_asking() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::fixed_window(5, Duration::from_secs(3_600), Align::FirstRequest).unwrap();
    let limiter = limiter(&[limit], &Settings::new(&server.url()).deadline(PATIENT));
    for _ in 0..4 {
        assert!(limiter.check("key").await.allowed());
    }
    let denied = limiter.check_n("key", 2).await.decision();
    let before = calls(&server);
    let mut last = denied.retry_after;
    for cost in (2..2_000).map(|n| 2 + n % 3) {
        let decision = limiter.check_n("key", cost).await.decision();
        assert!(!decision.allowed && decision.remaining == 1);
        assert!(
            decision.retry_after <= last && decision.retry_after > RetryAfter::Now,
            "it only gets shorter"
        );
        last = decision.retry_after;
    }
    // A second or two may have gone by on a busy machine, and it asks again once a second.
    let asked = calls(&server) - before;
    assert!(asked <= 20, "{asked} calls for 1998 requests");
    assert!(limiter.check("key").await.allowed(), "one is left for a request that costs no more");
    limiter.reset("key").await.unwrap();
    assert!(limiter.check_n("key", 5).await.allowed(), "and a reset is seen at once by whoever asked for it");
    all_expire(&server);
}

/// A log that counts denied requests counts them: each must be asked.
#[tokio::test]
async fn a_log_of_all_requests_is_asked_each_time() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::sliding_window_log(1, Duration::from_secs(3_600), Count::All).unwrap();
    let limiter = limiter(&[limit], &Settings::new(&server.url()).deadline(PATIENT));
    for _ in 0..10 {
        limiter.check("key").await;
    }
    // Once more than there were requests: the functions had to be loaded first.
    assert_eq!(calls(&server), 11);
    all_expire(&server);
}
