//! Requests that are sent again.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use tollgate_server::Exposition;
use tollgate_server::check::Source;

use super::support::{Made, PER_USER, left, open, post, run, send};

const KEY: &str = "Idempotency-Key: 7f1c\r\n";

#[tokio::test]
async fn a_retried_request_is_charged_once_and_gets_the_first_answer() {
    let door = run(PER_USER);
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    let first = send(door.address, "/v1/check", KEY, body).await;
    // Somebody else takes something meanwhile.
    post(door.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice" })).await;
    let again = send(door.address, "/v1/check", KEY, body).await;
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert_eq!(again.header("ratelimit"), first.header("ratelimit"));
    assert_eq!(
        (first.header("idempotent-replayed"), again.header("idempotent-replayed")),
        (None, Some("true"))
    );
    assert_eq!(left(door.address, "per-user", "alice").await, 5);

    let other = send(door.address, "/v1/check", KEY, r#"{"limit":"per-user","key":"alice","cost":5}"#).await;
    assert!(other.problem(422).contains("use a new one"));
    let elsewhere = send(door.address, "/v1/refund", KEY, body).await;
    assert_eq!(elsewhere.status, 200, "a key is one of its path");
    assert_eq!(left(door.address, "per-user", "alice").await, 9);
    send(door.address, "/v1/refund", KEY, body).await;
    assert_eq!(left(door.address, "per-user", "alice").await, 9);

    door.made.clock.advance(Duration::from_secs(601));
    send(door.address, "/v1/check", KEY, body).await;
    assert_eq!(left(door.address, "per-user", "alice").await, 5, "what is long ago is a new request");
}

#[tokio::test]
async fn reservations_are_made_and_settled_once() {
    let door = run(PER_USER);
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    let first = send(door.address, "/v1/reserve", KEY, body).await;
    let again = send(door.address, "/v1/reserve", KEY, body).await;
    assert_eq!(first.body, again.body);
    assert_eq!(left(door.address, "per-user", "alice").await, 6);
    let settle = json!({ "reservation": first.json()["reservation"], "cost": 1 }).to_string();
    let first = send(door.address, "/v1/settle", KEY, &settle).await;
    let again = send(door.address, "/v1/settle", KEY, &settle).await;
    assert_eq!((first.status, again.status, &first.body), (200, 200, &again.body));
    send(door.address, "/v1/settle", "", &settle).await.problem(409);
    assert_eq!(left(door.address, "per-user", "alice").await, 9);
}

/// A denial took nothing, so whoever waits and comes again is asked anew.
#[tokio::test]
async fn denials_and_mistakes_are_not_remembered() {
    let door = run("limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 2, window: 1m, align: clock } }");
    let body = r#"{"limit":"per-user","key":"alice","cost":2}"#;
    post(door.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice" })).await;
    assert_eq!(send(door.address, "/v1/check", KEY, body).await.json()["allowed"], false);
    door.made.clock.advance(Duration::from_secs(60));
    assert_eq!(send(door.address, "/v1/check", KEY, body).await.json()["allowed"], true);
    let wrong = "Idempotency-Key: other\r\n";
    send(door.address, "/v1/check", wrong, r#"{"limit":"nobody"}"#).await.problem(404);
    let right = send(door.address, "/v1/check", wrong, r#"{"limit":"per-user","key":"b"}"#).await;
    assert_eq!(right.status, 200, "the key was not used up by a mistake");
}

/// However many come at once, one is charged; the others get its answer or are told to wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_at_once_one_is_charged() {
    let door = run(PER_USER);
    let address = door.address;
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    let asked: Vec<_> = (0..16).map(|_| tokio::spawn(send(address, "/v1/check", KEY, body))).collect();
    for asked in asked {
        let answer = asked.await.unwrap();
        match answer.status {
            200 => assert_eq!(answer.json()["limits"][0]["remaining"], 6),
            _ => {
                answer.problem(409);
                assert_eq!(answer.header("retry-after"), Some("1"));
            }
        }
    }
    assert_eq!(left(address, "per-user", "alice").await, 6);
}

/// A store that stumbles once costs nobody the promise; one that stays away is counted, and the key stays taken.
#[tokio::test]
async fn an_answer_that_cannot_be_kept_is_tried_again_and_counted() {
    let door = run(PER_USER);
    let lost = || {
        let mut out = Exposition::default();
        door.made.counts().write(&mut out);
        let text = out.into_text();
        let line = text.lines().find_map(|line| line.strip_prefix("tollgate_check_unremembered_total "));
        line.unwrap().to_owned()
    };
    let body = r#"{"limit":"per-user","key":"alice","cost":4}"#;
    door.made.records.answers_lost.store(1, Ordering::SeqCst);
    let first = send(door.address, "/v1/check", KEY, body).await;
    let again = send(door.address, "/v1/check", KEY, body).await;
    assert_eq!((again.status, &again.body), (200, &first.body));
    assert_eq!(lost(), "0");

    door.made.records.answers_lost.store(2, Ordering::SeqCst);
    let other = "Idempotency-Key: other\r\n";
    assert_eq!(send(door.address, "/v1/check", other, body).await.status, 200);
    assert_eq!(lost(), "1");
    send(door.address, "/v1/check", other, body).await.problem(409);
    assert_eq!(left(door.address, "per-user", "alice").await, 2);
}

/// Whoever uses up one of them leaves the other as it was.
#[tokio::test]
async fn keys_and_reservations_do_not_take_each_others_room() {
    let door = open(Made::with_room(PER_USER, 1, |_| {}));
    let body = r#"{"limit":"per-user","key":"alice"}"#;
    assert_eq!(send(door.address, "/v1/check", KEY, body).await.status, 200);
    assert_eq!(send(door.address, "/v1/reserve", "", body).await.status, 200);
    send(door.address, "/v1/reserve", "", body).await.problem(503);
}

#[tokio::test]
async fn keys_have_bounds_and_so_has_what_is_remembered() {
    let door = open(Made::with_room(PER_USER, 1, |_| {}));
    let body = r#"{"limit":"per-user","key":"alice"}"#;
    let long = format!("Idempotency-Key: {}\r\n", "x".repeat(256));
    for wrong in [
        &*long,
        "Idempotency-Key:\r\n",
        "Idempotency-Key: a\r\nIdempotency-Key: b\r\n",
        "Idempotency-Key: \u{e9}\r\n",
    ] {
        send(door.address, "/v1/check", wrong, body).await.problem(400);
    }
    assert_eq!(send(door.address, "/v1/check", KEY, body).await.status, 200);
    let answer = send(door.address, "/v1/check", "Idempotency-Key: second\r\n", body).await;
    assert!(answer.problem(503).contains("no room"));
    assert_eq!(left(door.address, "per-user", "alice").await, 9, "what cannot be promised is not done");
    door.made.clock.advance(Duration::from_secs(601));
    let answer = send(door.address, "/v1/check", "Idempotency-Key: second\r\n", body).await;
    assert_eq!(answer.status, 200, "what has expired makes room");
}
