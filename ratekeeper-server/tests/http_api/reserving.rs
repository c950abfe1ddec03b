//! Reservations, settlements and expiry.

use std::time::Duration;

use ratekeeper_server::http_api::refund_expired;
use serde_json::{Value, json};

use super::keeping::Failing;
use super::support::{Made, PATIENCE, PER_USER, Running, left, open, post, run, send};

async fn reserve(api: &Running, cost: u32) -> Value {
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": cost, "expires": "60s" });
    post(api.address, "/v1/reserve", &ask).await.json()
}

async fn settle(api: &Running, reserved: &Value, cost: u32) -> Value {
    let ask = json!({ "reservation": reserved["reservation"], "cost": cost });
    post(api.address, "/v1/settle", &ask).await.json()
}

#[tokio::test]
async fn settlement_corrects_the_charge() {
    let api = run(PER_USER);
    for (reserved, used, refunded, uncovered, after) in
        [(7, 3, 4, 0, 7), (5, 0, 5, 0, 7), (2, 2, 0, 0, 5), (1, 4, 0, 0, 1), (1, 3, 0, 2, 0)]
    {
        let before = left(api.address, "per-user", "alice").await;
        let held = reserve(&api, reserved).await;
        assert_eq!(
            (held["allowed"].as_bool(), held["expires_after"].as_f64()),
            (Some(true), Some(60.0)),
            "{held}"
        );
        assert_eq!(held["reservation"].as_str().map(str::len), Some(32), "{held}");
        assert_eq!(left(api.address, "per-user", "alice").await, before - u64::from(reserved));
        let settled = settle(&api, &held, used).await;
        let wanted = json!({ "limit": "per-user", "reserved": reserved, "cost": used, "refunded": refunded,
            "uncovered": uncovered, "degraded": false });
        assert_eq!(settled, wanted);
        assert_eq!(left(api.address, "per-user", "alice").await, after);
    }
    let denied = reserve(&api, 1).await;
    assert_eq!((denied["allowed"].as_bool(), denied["reservation"].is_null()), (Some(false), true));
}

#[tokio::test]
async fn reservation_is_settled_only_once() {
    let api = run(PER_USER);
    let held = reserve(&api, 5).await;
    settle(&api, &held, 2).await;
    let again = json!({ "reservation": held["reservation"], "cost": 0 });
    let answer = post(api.address, "/v1/settle", &again).await;
    answer.problem(409);
    assert_eq!(answer.header("retry-after"), None, "it will not be otherwise later");
    assert_eq!(left(api.address, "per-user", "alice").await, 8);
    let made_up = json!({ "reservation": "0123456789abcdef0123456789abcdef", "cost": 0 });
    post(api.address, "/v1/settle", &made_up).await.problem(404);
}

/// The client has disconnected and does not settle.
#[tokio::test]
async fn expired_reservation_is_refunded() {
    let api = run(PER_USER);
    let held = reserve(&api, 7).await;
    assert_eq!(left(api.address, "per-user", "alice").await, 3);
    api.made.clock.advance(Duration::from_secs(61));
    // The API sweeps expired reservations in the background.
    let refunded = async {
        while left(api.address, "per-user", "alice").await != 10 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, refunded).await.expect("it was never given back");
    let late = json!({ "reservation": held["reservation"], "cost": 7 });
    post(api.address, "/v1/settle", &late).await.problem(409);
    assert_eq!(left(api.address, "per-user", "alice").await, 10, "once, and no more");
}

/// A refund into a window that is over changes nothing.
#[tokio::test]
async fn refund_applies_to_the_time_of_the_charge() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 10, window: 1m, align: clock } }");
    let held = post(
        api.address,
        "/v1/reserve",
        &json!({ "limit": "per-user", "key": "alice", "cost": 6, "expires": "10m" }),
    )
    .await
    .json();
    api.made.clock.advance(Duration::from_secs(60));
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 6 })).await;
    assert_eq!(left(api.address, "per-user", "alice").await, 4);
    assert_eq!(settle(&api, &held, 0).await["refunded"], 6);
    assert_eq!(left(api.address, "per-user", "alice").await, 4, "this window has lent nothing");
}

/// Units beyond the budget are not charged, and finished work causes no ban.
#[tokio::test]
async fn uncovered_cost_causes_no_ban() {
    let api = run("limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 10, window: 1h, align: first_request }
    ban: { after: 1, within: 1h, for: 10m }");
    let held = reserve(&api, 5).await;
    assert_eq!(settle(&api, &held, 50).await["uncovered"], 40);
    let look = post(api.address, "/v1/peek", &json!({ "limit": "per-user", "key": "alice", "cost": 0 }))
        .await
        .json();
    assert_eq!(
        (look["limits"][0]["banned"].as_bool(), look["limits"][0]["remaining"].as_u64()),
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
    let ask = json!({ "limit": "per-user", "key": "root", "cost": 99 });
    let held = post(api.address, "/v1/reserve", &ask).await.json();
    let settled = settle(&api, &held, 200).await;
    assert_eq!((settled["refunded"].as_u64(), settled["uncovered"].as_u64()), (Some(0), Some(0)));

    let ask = |cost: u32| json!({ "limit": "planned", "key": "a", "cost": cost });
    post(api.address, "/v1/check", &ask(8)).await;
    // The limit would deny it, so nothing was charged, and the refund must not return other charges.
    let held = post(api.address, "/v1/reserve", &ask(5)).await.json();
    assert_eq!(held["allowed"], true);
    assert_eq!(settle(&api, &held, 0).await["refunded"], 0);
    assert_eq!(left(api.address, "planned", "a").await, 2);
}

#[tokio::test]
async fn reservation_without_capacity_charges_nothing() {
    let api = open(Made::with_room(PER_USER, 2, |_| {}));
    for _ in 0..2 {
        assert_eq!(reserve(&api, 1).await["allowed"], true);
    }
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 3 });
    let answer = post(api.address, "/v1/reserve", &ask).await;
    assert!(answer.problem(503).contains("no room"));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(left(api.address, "per-user", "alice").await, 8);
}

/// A record that was not sent is refunded immediately. One that may be stored is refunded only once, when it expires.
#[tokio::test]
async fn reservation_with_unknown_record_is_refunded_once() {
    let api = run(PER_USER);
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 3, "expires": "60s" });
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 5 })).await;
    api.made.records.puts(Some(Failing::Before));
    let answer = post(api.address, "/v1/reserve", &ask).await;
    answer.problem(503);
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(left(api.address, "per-user", "alice").await, 5);

    api.made.records.puts(Some(Failing::After));
    let key = "Idempotency-Key: 1\r\n";
    let answer = send(api.address, "/v1/reserve", key, &ask.to_string()).await;
    answer.problem(503);
    assert_eq!(answer.header("retry-after"), None);
    assert_eq!(left(api.address, "per-user", "alice").await, 2, "it may be kept, and then it expires");
    api.made.records.puts(None);
    let again = send(api.address, "/v1/reserve", key, &ask.to_string()).await;
    again.problem(503);
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(left(api.address, "per-user", "alice").await, 2, "the same key takes nothing again");
    api.made.clock.advance(Duration::from_secs(61));
    refund_expired(&*api.made).await;
    // The background sweep may have been first; its refund may still be in progress.
    let refunded = async {
        while left(api.address, "per-user", "alice").await != 5 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, refunded).await.expect("it did not come back once");
}

#[tokio::test]
async fn reservation_lifetime_is_bounded() {
    let api = run(PER_USER);
    for (expires, why) in
        [("500ms", "from 1s to 1d"), ("2d", "from 1s to 1d"), ("soon", "`expires`"), ("60", "`expires`")]
    {
        let ask = json!({ "limit": "per-user", "key": "a", "expires": expires });
        let said = post(api.address, "/v1/reserve", &ask).await.problem(422);
        assert!(said.contains(why), "{expires}: {said}");
    }
}
