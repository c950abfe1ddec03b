//! The HTTP API with limits in Redis: shared between APIs, and degraded while Redis is unavailable.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ratekeeper::Clock as _;
use ratekeeper::redis::{FailurePolicy, Redis, Settings};
use ratekeeper::{ManualClock, SystemClock};
use ratekeeper_server::Exposition;
use ratekeeper_server::http_api::Source;
use serde_json::json;
use testbed::RedisServer;

use super::support::{Made, PATIENCE, PER_USER, Running, builder, left, open, parse, post, send};

fn api(server: &RedisServer, deadline: Duration) -> Running<Redis> {
    let config = parse(PER_USER);
    let settings = Settings::new(&server.url()).deadline(deadline).on_store_failure(FailurePolicy::Open);
    let layer = builder(&config).unwrap().redis(&settings).unwrap();
    // Records expire by a separate clock; charges have the server's time.
    let clock = ManualClock::new(SystemClock::new().now());
    open(Made::with_layer(config, clock, Some(layer), 100, |_| {}))
}

/// Waits until the store answers.
async fn healthy(api: &Running<Redis>) {
    let look = json!({ "limit": "per-user", "key": "somebody", "cost": 0 });
    let answers = async {
        while post(api.address, "/v1/peek", &look).await.json()["degraded"] == true {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, answers).await.expect("the store never came back");
}

#[tokio::test]
async fn reservations_are_shared_between_apis() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (api(&server, PATIENCE), api(&server, PATIENCE));
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 7, "expires": "60s" });
    let held = post(one.address, "/v1/reserve", &ask).await.json();
    assert_eq!(held["allowed"], true, "{held}");
    assert_eq!(left(other.address, "per-user", "alice").await, 3);
    let settle = json!({ "reservation": held["reservation"], "cost": 2 });
    assert_eq!(post(one.address, "/v1/settle", &settle).await.json()["refunded"], 5);
    assert_eq!(left(other.address, "per-user", "alice").await, 8);
    post(one.address, "/v1/reserve", &ask).await;
    one.made.clock.advance(Duration::from_secs(61));
    let refunded = async {
        while left(other.address, "per-user", "alice").await != 8 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, refunded).await.expect("it was never given back");
    assert!(server.keys_without_expiry().unwrap().is_empty());
}

/// A reservation made while the store is unavailable charges nothing, so settling it refunds nothing.
#[tokio::test]
async fn uncharged_units_are_not_refunded() {
    let mut server = RedisServer::start().unwrap();
    let api = api(&server, Duration::from_secs(1));
    let ask = |cost: u32| json!({ "limit": "per-user", "key": "alice", "cost": cost });
    post(api.address, "/v1/check", &ask(6)).await;
    server.pause().unwrap();
    let held = post(api.address, "/v1/reserve", &ask(5)).await.json();
    assert_eq!((held["allowed"].as_bool(), held["degraded"].as_bool()), (Some(true), Some(true)), "{held}");
    post(api.address, "/v1/refund", &ask(5)).await.problem(503);
    server.resume().unwrap();
    let settle = json!({ "reservation": held["reservation"], "cost": 0 });
    let settled = post(api.address, "/v1/settle", &settle).await.json();
    assert_eq!(settled["refunded"], 0, "{settled}");
    healthy(&api).await;
    assert!(
        left(api.address, "per-user", "alice").await <= 9,
        "the refund that timed out may have been done once"
    );
    server.kill().unwrap();
}

/// The outcome of the first request is unknown, so the second is not executed.
#[tokio::test]
async fn refund_with_unknown_outcome_is_not_repeated() {
    let server = RedisServer::start().unwrap();
    let api = api(&server, Duration::from_secs(1));
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 9 })).await;
    let (key, refund) = ("Idempotency-Key: 1\r\n", r#"{"limit":"per-user","key":"alice","cost":2}"#);
    server.pause().unwrap();
    let answer = send(api.address, "/v1/refund", key, refund).await;
    assert!(answer.problem(503).contains("/v1/peek"));
    assert_eq!(answer.header("retry-after"), None, "nobody is asked to do it again");
    server.resume().unwrap();
    healthy(&api).await;
    let before = left(api.address, "per-user", "alice").await;
    for _ in 0..2 {
        let again = send(api.address, "/v1/refund", key, refund).await;
        again.problem(503);
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
    }
    assert_eq!(left(api.address, "per-user", "alice").await, before);
}

/// Reserves units for each user, and lets the reservations expire.
async fn expired(api: &Running<Redis>, users: &[&str]) {
    for user in users {
        let ask = json!({ "limit": "per-user", "key": user, "cost": 7, "expires": "60s" });
        assert_eq!(post(api.address, "/v1/reserve", &ask).await.json()["allowed"], true);
        // They expire one after the other.
        api.made.clock.advance(Duration::from_secs(1));
    }
}

/// Waits until the API has fetched this many expired reservations.
async fn handed_out(api: &Running<Redis>, number: usize) {
    let begun = async {
        while api.made.records.handed_out.load(Ordering::SeqCst) < number {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, begun).await.expect("nothing was looked for");
}

/// Refunds after one that the store did not answer were not sent: they wait until the store is available.
#[tokio::test]
async fn unsent_refunds_are_made_later() {
    let server = RedisServer::start().unwrap();
    let api = api(&server, Duration::from_secs(1));
    let users = ["a", "b", "c", "d"];
    expired(&api, &users).await;
    server.pause().unwrap();
    api.made.clock.advance(Duration::from_secs(61));
    let first = async {
        while lost(&api) == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, first).await.expect("nobody tried");
    server.resume().unwrap();
    healthy(&api).await;
    let others = async {
        for user in &users[1..] {
            while left(api.address, "per-user", user).await != 10 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    tokio::time::timeout(PATIENCE, others).await.expect("what has waited never came back");
    assert_eq!(lost(&api), 1, "only the one that was sent is not known");
}

/// The number of lost refunds.
fn lost(api: &Running<Redis>) -> u64 {
    let mut out = Exposition::default();
    api.made.counts().write(&mut out);
    let text = out.into_text();
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("ratekeeper_http_api_refunds_lost_total "));
    count.unwrap().parse().unwrap()
}

/// An API that closes completes the refunds in progress.
#[tokio::test]
async fn refunds_in_progress_complete_before_shutdown() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (api(&server, PATIENCE), api(&server, PATIENCE));
    expired(&one, &["a", "b", "c"]).await;
    server.pause().unwrap();
    one.made.clock.advance(Duration::from_secs(61));
    handed_out(&one, 3).await;
    one.drain.send(true).unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.resume().unwrap();
    tokio::time::timeout(PATIENCE, one.ended).await.unwrap().unwrap().unwrap();
    for user in ["a", "b", "c"] {
        assert_eq!(left(other.address, "per-user", user).await, 10, "{user}");
    }
}
