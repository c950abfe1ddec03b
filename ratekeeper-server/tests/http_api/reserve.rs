//! Reservations, settlements and expiry.

use std::time::Duration;

use ratekeeper_server::http_api::refund_expired;
use serde_json::{Value, json};

use super::faulty_records::{PutFailure, TakeFailure};
use super::support::{
    PER_USER, TestApi, TestContext, lost_refunds, open, peek_remaining, post, run, send, wait_for_remaining,
};

async fn reserve(api: &TestApi, cost: u32) -> Value {
    let check = json!({ "limit": "per-user", "key": "alice", "cost": cost, "expires": "60s" });
    post(api.address, "/v1/reserve", &check).await.json()
}

async fn settle(api: &TestApi, reserved: &Value, cost: u32) -> Value {
    let check = json!({ "reservation": reserved["reservation"], "cost": cost });
    post(api.address, "/v1/settle", &check).await.json()
}

#[tokio::test]
async fn settlement_corrects_the_charge() {
    let api = run(PER_USER);
    for (reserved, used, refunded, uncovered, after) in
        [(7, 3, 4, 0, 7), (5, 0, 5, 0, 7), (2, 2, 0, 0, 5), (1, 4, 0, 0, 1), (1, 3, 0, 2, 0)]
    {
        let before = peek_remaining(api.address, "per-user", "alice").await;
        let reservation = reserve(&api, reserved).await;
        assert_eq!(
            (reservation["allowed"].as_bool(), reservation["expires_after"].as_f64()),
            (Some(true), Some(60.0)),
            "{reservation}"
        );
        assert_eq!(reservation["reservation"].as_str().map(str::len), Some(32), "{reservation}");
        assert_eq!(peek_remaining(api.address, "per-user", "alice").await, before - u64::from(reserved));
        let settled = settle(&api, &reservation, used).await;
        let expected = json!({ "limit": "per-user", "reserved": reserved, "cost": used, "refunded": refunded,
            "uncovered": uncovered, "degraded": false });
        assert_eq!(settled, expected);
        assert_eq!(peek_remaining(api.address, "per-user", "alice").await, after);
    }
    let denied = reserve(&api, 1).await;
    assert_eq!((denied["allowed"].as_bool(), denied["reservation"].is_null()), (Some(false), true));
}

#[tokio::test]
async fn reservation_is_settled_only_once() {
    let api = run(PER_USER);
    let reservation = reserve(&api, 5).await;
    settle(&api, &reservation, 2).await;
    let again = json!({ "reservation": reservation["reservation"], "cost": 0 });
    let response = post(api.address, "/v1/settle", &again).await;
    response.problem(409);
    assert_eq!(response.header("retry-after"), None, "a retry would not succeed");
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 8);
    let unknown = json!({ "reservation": "0123456789abcdef0123456789abcdef", "cost": 0 });
    post(api.address, "/v1/settle", &unknown).await.problem(404);
}

/// The client has disconnected and does not settle.
#[tokio::test]
async fn expired_reservation_is_refunded() {
    let api = run(PER_USER);
    let reservation = reserve(&api, 7).await;
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 3);
    api.context.clock.advance(Duration::from_secs(61));
    // The API sweeps expired reservations in the background.
    wait_for_remaining(api.address, "per-user", "alice", 10).await;
    let late = json!({ "reservation": reservation["reservation"], "cost": 7 });
    post(api.address, "/v1/settle", &late).await.problem(409);
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 10, "refunded exactly once");
}

/// A refund into a window that is over changes nothing.
#[tokio::test]
async fn refund_applies_to_the_time_of_the_charge() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 10, window: 1m, align: clock } }");
    let reservation = post(
        api.address,
        "/v1/reserve",
        &json!({ "limit": "per-user", "key": "alice", "cost": 6, "expires": "10m" }),
    )
    .await
    .json();
    api.context.clock.advance(Duration::from_secs(60));
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 6 })).await;
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 4);
    assert_eq!(settle(&api, &reservation, 0).await["refunded"], 6);
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 4, "the current window is unchanged");
}

/// Units beyond the budget are not charged, and finished work causes no ban.
#[tokio::test]
async fn uncovered_cost_causes_no_ban() {
    let api = run("limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 10, window: 1h, align: first_request }
    ban: { after: 1, within: 1h, for: 10m }");
    let reservation = reserve(&api, 5).await;
    assert_eq!(settle(&api, &reservation, 50).await["uncovered"], 40);
    let peek = post(api.address, "/v1/peek", &json!({ "limit": "per-user", "key": "alice", "cost": 0 }))
        .await
        .json();
    assert_eq!(
        (peek["limits"][0]["banned"].as_bool(), peek["limits"][0]["remaining"].as_u64()),
        (Some(false), Some(0))
    );
}

#[tokio::test]
async fn uncharged_reservation_refunds_nothing() {
    let api = run("limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 10, window: 1h, align: first_request }
    allow: [{ key: root }]
  planned: { key: { header: X-User-Id }, fixed_window: { limit: 10, window: 1h, align: first_request }, shadow: true }");
    let check = json!({ "limit": "per-user", "key": "root", "cost": 99 });
    let reservation = post(api.address, "/v1/reserve", &check).await.json();
    let settled = settle(&api, &reservation, 200).await;
    assert_eq!((settled["refunded"].as_u64(), settled["uncovered"].as_u64()), (Some(0), Some(0)));

    let check = |cost: u32| json!({ "limit": "planned", "key": "a", "cost": cost });
    post(api.address, "/v1/check", &check(8)).await;
    // The limit would deny it, so nothing was charged, and the refund must not return other charges.
    let reservation = post(api.address, "/v1/reserve", &check(5)).await.json();
    assert_eq!(reservation["allowed"], true);
    assert_eq!(settle(&api, &reservation, 0).await["refunded"], 0);
    assert_eq!(peek_remaining(api.address, "planned", "a").await, 2);
}

#[tokio::test]
async fn reservation_without_capacity_charges_nothing() {
    let api = open(TestContext::with_capacity(PER_USER, 2, |_| {}));
    for _ in 0..2 {
        assert_eq!(reserve(&api, 1).await["allowed"], true);
    }
    let check = json!({ "limit": "per-user", "key": "alice", "cost": 3 });
    let response = post(api.address, "/v1/reserve", &check).await;
    assert!(response.problem(503).contains("no capacity"));
    assert_eq!(response.header("retry-after"), Some("1"));
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 8);
}

/// A record that was not sent is refunded immediately. One that may be stored is refunded only once, when it expires.
#[tokio::test]
async fn reservation_with_unconfirmed_record_is_refunded_once() {
    let api = run(PER_USER);
    let check = json!({ "limit": "per-user", "key": "alice", "cost": 3, "expires": "60s" });
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 5 })).await;
    api.context.records.fail_puts(Some(PutFailure::NotSent));
    let response = post(api.address, "/v1/reserve", &check).await;
    response.problem(503);
    assert_eq!(response.header("retry-after"), Some("1"));
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 5);

    api.context.records.fail_puts(Some(PutFailure::ResponseLost));
    let key = "Idempotency-Key: 1\r\n";
    let response = send(api.address, "/v1/reserve", key, &check.to_string()).await;
    response.problem(503);
    assert_eq!(response.header("retry-after"), None);
    assert_eq!(
        peek_remaining(api.address, "per-user", "alice").await,
        2,
        "the record may be stored and expire"
    );
    api.context.records.fail_puts(None);
    let again = send(api.address, "/v1/reserve", key, &check.to_string()).await;
    again.problem(503);
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 2, "the retry charges nothing");
    api.context.clock.advance(Duration::from_secs(61));
    refund_expired(&*api.context).await;
    // The background sweep may have been first; its refund may still be in progress.
    wait_for_remaining(api.address, "per-user", "alice", 5).await;
}

/// As long as the record is not taken, nothing has changed, and the caller can retry.
#[tokio::test]
async fn settlement_that_did_not_take_its_record_can_be_retried() {
    let api = run(PER_USER);
    for failure in [TakeFailure::ReadUnanswered, TakeFailure::NotSent] {
        let reservation = reserve(&api, 5).await;
        let before = peek_remaining(api.address, "per-user", "alice").await;
        let request = json!({ "reservation": reservation["reservation"], "cost": 2 });
        let key = format!("Idempotency-Key: {failure:?}\r\n");
        api.context.records.fail_takes(Some(failure));
        let response = send(api.address, "/v1/settle", &key, &request.to_string()).await;
        assert!(response.problem(503).contains("retry"), "{failure:?}: {response:?}");
        assert_eq!(response.header("retry-after"), Some("1"), "{failure:?}");
        assert_eq!(peek_remaining(api.address, "per-user", "alice").await, before);
        api.context.records.fail_takes(None);
        let again = send(api.address, "/v1/settle", &key, &request.to_string()).await;
        assert_eq!(again.json()["refunded"], 3, "{failure:?}");
        assert_eq!(peek_remaining(api.address, "per-user", "alice").await, before + 3);
        post(api.address, "/v1/reset", &json!({ "limit": "per-user", "key": "alice" })).await;
    }
    assert_eq!(lost_refunds(&api), 0);
}

/// The record may be taken. If it is, a retry must not refund it, because the first request may still do so.
#[tokio::test]
async fn settlement_with_unknown_outcome_is_counted_and_refunds_at_most_once() {
    let api = run(PER_USER);
    let reservation = reserve(&api, 5).await;
    api.context.records.fail_takes(Some(TakeFailure::ResponseLost));
    let request = json!({ "reservation": reservation["reservation"], "cost": 2 });
    let response = post(api.address, "/v1/settle", &request).await;
    assert!(response.problem(503).contains("409"), "{response:?}");
    assert_eq!(response.header("retry-after"), Some("1"));
    assert_eq!(lost_refunds(&api), 1);
    api.context.records.fail_takes(None);
    assert!(post(api.address, "/v1/settle", &request).await.problem(409).contains("refund"));
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 5, "the charge stands");
}

#[tokio::test]
async fn settlement_with_unknown_outcome_and_no_refund_loses_none() {
    for cost in [5, 7] {
        let api = run(PER_USER);
        let reservation = reserve(&api, 5).await;
        api.context.records.fail_takes(Some(TakeFailure::ResponseLost));
        let request = json!({ "reservation": reservation["reservation"], "cost": cost });
        let response = post(api.address, "/v1/settle", &request).await;
        let reason = response.problem(503);
        assert!(reason.contains("409") && !reason.contains("refund"), "{response:?}");
        assert_eq!(response.header("retry-after"), Some("1"));
        api.context.records.fail_takes(None);
        post(api.address, "/v1/settle", &request).await.problem(409);
        assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 5);
        assert_eq!(lost_refunds(&api), 0);
    }
}

#[tokio::test]
async fn reservation_lifetime_is_bounded() {
    let api = run(PER_USER);
    for (expires, reason) in
        [("500ms", "from 1s to 1d"), ("2d", "from 1s to 1d"), ("soon", "`expires`"), ("60", "`expires`")]
    {
        let check = json!({ "limit": "per-user", "key": "a", "expires": expires });
        let detail = post(api.address, "/v1/reserve", &check).await.problem(422);
        assert!(detail.contains(reason), "{expires}: {detail}");
    }
}
