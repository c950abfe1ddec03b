//! Idempotent retries.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ratekeeper_server::Exposition;
use serde_json::json;

use super::support::{PER_USER, TestContext, open, peek_remaining, post, run, send};

const KEY: &str = "Idempotency-Key: 7f1c\r\n";

#[tokio::test]
async fn retry_is_charged_once_and_gets_the_first_response() {
    let api = run(PER_USER);
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    let first = send(api.address, "/v1/check", KEY, body).await;
    // A concurrent check charges the same key.
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice" })).await;
    let retry = send(api.address, "/v1/check", KEY, body).await;
    assert_eq!((retry.status, &retry.body), (first.status, &first.body));
    assert_eq!(retry.header("ratelimit"), first.header("ratelimit"));
    assert_eq!(
        (first.header("idempotent-replayed"), retry.header("idempotent-replayed")),
        (None, Some("true"))
    );
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 5);

    let other = send(api.address, "/v1/check", KEY, r#"{"limit":"per-user","key":"alice","cost":5}"#).await;
    assert!(other.problem(422).contains("use a new one"));
    let elsewhere = send(api.address, "/v1/refund", KEY, body).await;
    assert_eq!(elsewhere.status, 200, "each endpoint has its own idempotency keys");
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 9);
    send(api.address, "/v1/refund", KEY, body).await;
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 9);

    api.context.clock.advance(Duration::from_secs(601));
    send(api.address, "/v1/check", KEY, body).await;
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 5, "the stored response has expired");
}

#[tokio::test]
async fn reservations_are_made_and_settled_once() {
    let api = run(PER_USER);
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    let first = send(api.address, "/v1/reserve", KEY, body).await;
    let retry = send(api.address, "/v1/reserve", KEY, body).await;
    assert_eq!(first.body, retry.body);
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 6);
    let settle = json!({ "reservation": first.json()["reservation"], "cost": 1 }).to_string();
    let first = send(api.address, "/v1/settle", KEY, &settle).await;
    let retry = send(api.address, "/v1/settle", KEY, &settle).await;
    assert_eq!((first.status, retry.status, &first.body), (200, 200, &retry.body));
    send(api.address, "/v1/settle", "", &settle).await.problem(409);
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 9);
}

/// A denial charges nothing, so a retry is decided again.
#[tokio::test]
async fn denials_and_errors_are_not_replayed() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 2, window: 1m, align: clock } }");
    let body = r#"{"limit":"per-user","key":"alice","cost":2}"#;
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice" })).await;
    assert_eq!(send(api.address, "/v1/check", KEY, body).await.json()["allowed"], false);
    api.context.clock.advance(Duration::from_secs(60));
    assert_eq!(send(api.address, "/v1/check", KEY, body).await.json()["allowed"], true);
    let wrong = "Idempotency-Key: other\r\n";
    send(api.address, "/v1/check", wrong, r#"{"limit":"nobody"}"#).await.problem(404);
    let right = send(api.address, "/v1/check", wrong, r#"{"limit":"per-user","key":"b"}"#).await;
    assert_eq!(right.status, 200, "an error does not use up the key");
}

/// Of concurrent requests with one key, one is charged; the others get its response or a 409.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_retries_are_charged_once() {
    let api = run(PER_USER);
    let address = api.address;
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    let requests: Vec<_> = (0..16).map(|_| tokio::spawn(send(address, "/v1/check", KEY, body))).collect();
    for request in requests {
        let response = request.await.unwrap();
        match response.status {
            200 => assert_eq!(response.json()["limits"][0]["remaining"], 6),
            _ => {
                response.problem(409);
                assert_eq!(response.header("retry-after"), Some("1"));
            }
        }
    }
    assert_eq!(peek_remaining(address, "per-user", "alice").await, 6);
}

/// One failure to store a response is retried; repeated failures are counted, and the key stays claimed.
#[tokio::test]
async fn unstored_response_is_retried_and_counted() {
    let api = run(PER_USER);
    let dropped = || {
        let mut out = Exposition::default();
        api.context.metrics.write(&mut out);
        let text = out.into_text();
        let line =
            text.lines().find_map(|line| line.strip_prefix("ratekeeper_http_api_idempotency_dropped_total "));
        line.unwrap().to_owned()
    };
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    api.context.records.responses_lost.store(1, Ordering::SeqCst);
    let first = send(api.address, "/v1/check", KEY, body).await;
    let retry = send(api.address, "/v1/check", KEY, body).await;
    assert_eq!((retry.status, &retry.body), (200, &first.body));
    assert_eq!(dropped(), "0");

    api.context.records.responses_lost.store(2, Ordering::SeqCst);
    let other = "Idempotency-Key: other\r\n";
    assert_eq!(send(api.address, "/v1/check", other, body).await.status, 200);
    assert_eq!(dropped(), "1");
    send(api.address, "/v1/check", other, body).await.problem(409);
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 2);
}

/// Using up one capacity does not affect the other.
#[tokio::test]
async fn idempotency_keys_and_reservations_have_separate_capacities() {
    let api = open(TestContext::with_capacity(PER_USER, 1, |_| {}));
    let body = r#"{"limit":"per-user","key":"alice"}"#;
    assert_eq!(send(api.address, "/v1/check", KEY, body).await.status, 200);
    assert_eq!(send(api.address, "/v1/reserve", "", body).await.status, 200);
    send(api.address, "/v1/reserve", "", body).await.problem(503);
}

#[tokio::test]
async fn idempotency_keys_and_records_are_bounded() {
    let api = open(TestContext::with_capacity(PER_USER, 1, |_| {}));
    let body = r#"{"limit":"per-user","key":"alice"}"#;
    let long = format!("Idempotency-Key: {}\r\n", "x".repeat(256));
    for wrong in [
        &*long,
        "Idempotency-Key:\r\n",
        "Idempotency-Key: a\r\nIdempotency-Key: b\r\n",
        "Idempotency-Key: \u{e9}\r\n",
    ] {
        send(api.address, "/v1/check", wrong, body).await.problem(400);
    }
    assert_eq!(send(api.address, "/v1/check", KEY, body).await.status, 200);
    let response = send(api.address, "/v1/check", "Idempotency-Key: second\r\n", body).await;
    assert!(response.problem(503).contains("no capacity"));
    assert_eq!(
        peek_remaining(api.address, "per-user", "alice").await,
        9,
        "a request whose key cannot be stored is not executed"
    );
    api.context.clock.advance(Duration::from_secs(601));
    let response = send(api.address, "/v1/check", "Idempotency-Key: second\r\n", body).await;
    assert_eq!(response.status, 200, "the expired key was evicted");
}
