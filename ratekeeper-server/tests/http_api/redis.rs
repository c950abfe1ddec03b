//! The HTTP API with limits in Redis: shared between APIs, and degraded while Redis is unavailable.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ratekeeper::Clock as _;
use ratekeeper::redis::{FailurePolicy, Redis, Settings};
use ratekeeper::{ManualClock, SystemClock};
use serde_json::json;
use testbed::{RedisServer, TEST_TIMEOUT, wait_for, wait_until};

use super::support::{
    PER_USER, TestApi, TestContext, lost_refunds, open, peek_remaining, post, send, wait_for_remaining,
};
use crate::support::{layer_builder, parse};

fn api(server: &RedisServer, deadline: Duration) -> TestApi<Redis> {
    let config = parse(PER_USER);
    let settings = Settings::new(&server.url()).deadline(deadline).on_store_failure(FailurePolicy::Open);
    let layer = layer_builder(&config).redis(&settings).unwrap();
    // Records expire by a separate clock; charges have the server's time.
    let clock = ManualClock::new(SystemClock::new().now());
    open(TestContext::with_layer(config, clock, Some(layer), 100, |_| {}))
}

/// Waits until the store answers.
async fn wait_until_healthy(api: &TestApi<Redis>) {
    let peek = json!({ "limit": "per-user", "key": "anyone", "cost": 0 });
    let is_degraded = async || post(api.address, "/v1/peek", &peek).await.json()["degraded"] == true;
    wait_for(async || (!is_degraded().await).then_some(())).await;
}

#[tokio::test]
async fn reservations_are_shared_between_apis() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (api(&server, TEST_TIMEOUT), api(&server, TEST_TIMEOUT));
    let check = json!({ "limit": "per-user", "key": "alice", "cost": 7, "expires": "60s" });
    let reservation = post(one.address, "/v1/reserve", &check).await.json();
    assert_eq!(reservation["allowed"], true, "{reservation}");
    assert_eq!(peek_remaining(other.address, "per-user", "alice").await, 3);
    let settle = json!({ "reservation": reservation["reservation"], "cost": 2 });
    assert_eq!(post(one.address, "/v1/settle", &settle).await.json()["refunded"], 5);
    assert_eq!(peek_remaining(other.address, "per-user", "alice").await, 8);
    post(one.address, "/v1/reserve", &check).await;
    one.context.clock.advance(Duration::from_secs(61));
    wait_for_remaining(other.address, "per-user", "alice", 8).await;
    assert!(server.keys_without_expiry().unwrap().is_empty());
}

/// A reservation made while the store is unavailable charges nothing, so settling it refunds nothing.
#[tokio::test]
async fn uncharged_units_are_not_refunded() {
    let mut server = RedisServer::start().unwrap();
    let api = api(&server, Duration::from_secs(1));
    let check = |cost: u32| json!({ "limit": "per-user", "key": "alice", "cost": cost });
    post(api.address, "/v1/check", &check(6)).await;
    server.pause().unwrap();
    let reservation = post(api.address, "/v1/reserve", &check(5)).await.json();
    assert_eq!(
        (reservation["allowed"].as_bool(), reservation["degraded"].as_bool()),
        (Some(true), Some(true)),
        "{reservation}"
    );
    post(api.address, "/v1/refund", &check(5)).await.problem(503);
    server.resume().unwrap();
    let settle = json!({ "reservation": reservation["reservation"], "cost": 0 });
    let settled = post(api.address, "/v1/settle", &settle).await.json();
    assert_eq!(settled["refunded"], 0, "{settled}");
    wait_until_healthy(&api).await;
    assert!(
        peek_remaining(api.address, "per-user", "alice").await <= 9,
        "the refund that timed out may have been executed once"
    );
    server.kill().unwrap();
}

/// While the store of the limit is unavailable, nothing is settled, so that the refund is not lost.
#[tokio::test]
async fn settlement_waits_for_the_store_of_the_limit() {
    let server = RedisServer::start().unwrap();
    let api = api(&server, Duration::from_secs(1));
    let reservation =
        post(api.address, "/v1/reserve", &json!({ "limit": "per-user", "key": "alice", "cost": 7 }))
            .await
            .json();
    let request = json!({ "reservation": reservation["reservation"], "cost": 2 });
    server.pause().unwrap();
    let response = post(api.address, "/v1/settle", &request).await;
    assert!(response.problem(503).contains("retry"), "{response:?}");
    assert_eq!(response.header("retry-after"), Some("1"));
    server.resume().unwrap();
    wait_until_healthy(&api).await;
    assert_eq!(post(api.address, "/v1/settle", &request).await.json()["refunded"], 5);
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 8);
    post(api.address, "/v1/settle", &request).await.problem(409);
    assert_eq!(lost_refunds(&api), 0);
}

/// A denial by the failure policy `closed` is not a decision about the key.
#[tokio::test]
async fn reservation_denied_by_the_policy_closed_is_reported_as_unavailable() {
    let config = parse(PER_USER);
    let settings = Settings::new("redis://127.0.0.1:1").on_store_failure(FailurePolicy::Closed);
    let layer = layer_builder(&config).redis(&settings).unwrap();
    let api = open(TestContext::with_layer(config, ManualClock::default(), Some(layer), 100, |_| {}));
    let response = post(api.address, "/v1/reserve", &json!({ "limit": "per-user", "key": "ann" })).await;
    let detail = response.problem(503);
    assert!(detail.contains("the store is unavailable"), "{detail}");
    assert_eq!(response.header("retry-after"), Some("1"));
}

/// The outcome of the first request is unknown, so the second is not executed.
#[tokio::test]
async fn refund_with_unknown_outcome_is_not_repeated() {
    let server = RedisServer::start().unwrap();
    let api = api(&server, Duration::from_secs(1));
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 9 })).await;
    let (key, refund) = ("Idempotency-Key: 1\r\n", r#"{"limit":"per-user","key":"alice","cost":2}"#);
    server.pause().unwrap();
    let response = send(api.address, "/v1/refund", key, refund).await;
    assert!(response.problem(503).contains("/v1/peek"));
    assert_eq!(response.header("retry-after"), None, "a retry could refund twice");
    server.resume().unwrap();
    wait_until_healthy(&api).await;
    let before = peek_remaining(api.address, "per-user", "alice").await;
    for _ in 0..2 {
        let again = send(api.address, "/v1/refund", key, refund).await;
        again.problem(503);
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
    }
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, before);
}

/// Reserves units for each user.
async fn reserve_for(api: &TestApi<Redis>, users: &[&str]) {
    for user in users {
        let check = json!({ "limit": "per-user", "key": user, "cost": 7, "expires": "60s" });
        assert_eq!(post(api.address, "/v1/reserve", &check).await.json()["allowed"], true);
        // They expire one after the other.
        api.context.clock.advance(Duration::from_secs(1));
    }
}

/// Waits until the API has fetched this many expired reservations.
async fn wait_for_taken(api: &TestApi<Redis>, number: usize) {
    wait_until(|| api.context.records.taken_due.load(Ordering::SeqCst) >= number).await;
}

/// Refunds after one that the store did not answer were not sent: they wait until the store is available.
#[tokio::test]
async fn unsent_refunds_are_made_later() {
    let server = RedisServer::start().unwrap();
    let api = api(&server, Duration::from_secs(1));
    let users = ["a", "b", "c", "d"];
    reserve_for(&api, &users).await;
    server.pause().unwrap();
    api.context.clock.advance(Duration::from_secs(61));
    wait_until(|| lost_refunds(&api) > 0).await;
    server.resume().unwrap();
    wait_until_healthy(&api).await;
    for user in &users[1..] {
        wait_for_remaining(api.address, "per-user", user, 10).await;
    }
    assert_eq!(lost_refunds(&api), 1, "only the refund that was sent is lost");
}

/// An API that closes completes the refunds in progress.
#[tokio::test]
async fn refunds_in_progress_complete_before_shutdown() {
    let server = RedisServer::start().unwrap();
    let (mut one, other) = (api(&server, TEST_TIMEOUT), api(&server, TEST_TIMEOUT));
    reserve_for(&one, &["a", "b", "c"]).await;
    server.pause().unwrap();
    one.context.clock.advance(Duration::from_secs(61));
    wait_for_taken(&one, 3).await;
    one.drain.send(true).unwrap();
    let ended = tokio::time::timeout(Duration::from_millis(200), &mut one.ended).await;
    ended.expect_err("it ended before the store had answered");
    server.resume().unwrap();
    tokio::time::timeout(TEST_TIMEOUT, one.ended).await.unwrap().unwrap().unwrap();
    for user in ["a", "b", "c"] {
        assert_eq!(peek_remaining(other.address, "per-user", user).await, 10, "{user}");
    }
}

/// The failure policy `open` allows without asking anybody: the full quota would be a guess.
#[tokio::test]
async fn remaining_quota_is_unknown_if_the_store_is_unavailable_and_the_policy_is_open() {
    let config = parse(PER_USER);
    let settings = Settings::new("redis://127.0.0.1:1").on_store_failure(FailurePolicy::Open);
    let layer = layer_builder(&config).redis(&settings).unwrap();
    let api = open(TestContext::with_layer(config, ManualClock::default(), Some(layer), 100, |_| {}));
    let response = post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "ann" })).await;
    let limit = &response.json()["limits"][0];
    assert_eq!((response.json()["degraded"].as_bool(), limit["allowed"].as_bool()), (Some(true), Some(true)));
    assert_eq!(limit["size"].as_u64(), Some(10));
    assert!(limit["remaining"].is_null() && limit["reset_after"].is_null(), "{response:?}");
    assert_eq!(response.header("ratelimit"), None, "{response:?}");
    assert_eq!(response.header("ratelimit-policy"), Some(r#""per-user";q=10;w=3600"#));
}
