//! The same door with its limits in Redis: shared by several, and without them when it is away.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use testbed::RedisServer;
use tollgate::Clock as _;
use tollgate::redis::{Failure, Redis, Settings};
use tollgate::{ManualClock, SystemClock};
use tollgate_server::Exposition;
use tollgate_server::check::Source;

use super::support::{Made, PATIENCE, PER_USER, Running, builder, left, open, parse, post, send};

fn door(server: &RedisServer, deadline: Duration) -> Running<Redis> {
    let config = parse(PER_USER);
    let settings = Settings::new(&server.url()).deadline(deadline).failure(Failure::Open);
    let layer = builder(&config).unwrap().redis(&settings).unwrap();
    // Records expire by a clock of their own; charges have the server's time.
    let clock = ManualClock::new(SystemClock::new().now());
    open(Made::with_layer(config, clock, Some(layer), 100, |_| {}))
}

/// Waits until the store answers.
async fn healthy(door: &Running<Redis>) {
    let look = json!({ "limit": "per-user", "key": "somebody", "cost": 0 });
    let answers = async {
        while post(door.address, "/v1/peek", &look).await.json()["degraded"] == true {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, answers).await.expect("the store never came back");
}

#[tokio::test]
async fn what_one_reserves_the_others_see() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (door(&server, PATIENCE), door(&server, PATIENCE));
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 7, "expires": "60s" });
    let held = post(one.address, "/v1/reserve", &ask).await.json();
    assert_eq!(held["allowed"], true, "{held}");
    assert_eq!(left(other.address, "per-user", "alice").await, 3);
    let settle = json!({ "reservation": held["reservation"], "cost": 2 });
    assert_eq!(post(one.address, "/v1/settle", &settle).await.json()["given_back"], 5);
    assert_eq!(left(other.address, "per-user", "alice").await, 8);
    post(one.address, "/v1/reserve", &ask).await;
    one.made.clock.advance(Duration::from_secs(61));
    let given_back = async {
        while left(other.address, "per-user", "alice").await != 8 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, given_back).await.expect("it was never given back");
    assert!(server.keys_without_expiry().unwrap().is_empty());
}

/// What was not taken does not come back, however often somebody says that it was not used.
#[tokio::test]
async fn what_the_store_did_not_see_is_not_given_back() {
    let mut server = RedisServer::start().unwrap();
    let door = door(&server, Duration::from_secs(1));
    let ask = |cost: u32| json!({ "limit": "per-user", "key": "alice", "cost": cost });
    post(door.address, "/v1/check", &ask(6)).await;
    server.pause().unwrap();
    let held = post(door.address, "/v1/reserve", &ask(5)).await.json();
    assert_eq!((held["allowed"].as_bool(), held["degraded"].as_bool()), (Some(true), Some(true)), "{held}");
    post(door.address, "/v1/refund", &ask(5)).await.problem(503);
    server.resume().unwrap();
    let settle = json!({ "reservation": held["reservation"], "cost": 0 });
    let settled = post(door.address, "/v1/settle", &settle).await.json();
    assert_eq!(settled["given_back"], 0, "{settled}");
    healthy(&door).await;
    assert!(
        left(door.address, "per-user", "alice").await <= 9,
        "the refund that timed out may have been done once"
    );
    server.kill().unwrap();
}

/// It is not known whether the first one was done, so the second one is not.
#[tokio::test]
async fn a_refund_that_nobody_knows_of_is_not_done_again() {
    let server = RedisServer::start().unwrap();
    let door = door(&server, Duration::from_secs(1));
    post(door.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 9 })).await;
    let (key, refund) = ("Idempotency-Key: 1\r\n", r#"{"limit":"per-user","key":"alice","cost":2}"#);
    server.pause().unwrap();
    let answer = send(door.address, "/v1/refund", key, refund).await;
    assert!(answer.problem(503).contains("/v1/peek"));
    assert_eq!(answer.header("retry-after"), None, "nobody is asked to do it again");
    server.resume().unwrap();
    healthy(&door).await;
    let before = left(door.address, "per-user", "alice").await;
    for _ in 0..2 {
        let again = send(door.address, "/v1/refund", key, refund).await;
        again.problem(503);
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
    }
    assert_eq!(left(door.address, "per-user", "alice").await, before);
}

/// Reserves one of each of some users, and lets it expire.
async fn expired(door: &Running<Redis>, users: &[&str]) {
    for user in users {
        let ask = json!({ "limit": "per-user", "key": user, "cost": 7, "expires": "60s" });
        assert_eq!(post(door.address, "/v1/reserve", &ask).await.json()["allowed"], true);
        // They expire one after the other.
        door.made.clock.advance(Duration::from_secs(1));
    }
}

/// Waits until the door has begun to give back.
async fn handed_out(door: &Running<Redis>, number: usize) {
    let begun = async {
        while door.made.records.handed_out.load(Ordering::SeqCst) < number {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, begun).await.expect("nothing was looked for");
}

/// What comes after one that the store did not answer was never sent: it waits, however long that takes.
#[tokio::test]
async fn what_was_not_sent_is_given_back_later() {
    let server = RedisServer::start().unwrap();
    let door = door(&server, Duration::from_secs(1));
    let users = ["a", "b", "c", "d"];
    expired(&door, &users).await;
    server.pause().unwrap();
    door.made.clock.advance(Duration::from_secs(61));
    let first = async {
        while lost(&door) == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, first).await.expect("nobody tried");
    server.resume().unwrap();
    healthy(&door).await;
    let others = async {
        for user in &users[1..] {
            while left(door.address, "per-user", user).await != 10 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    tokio::time::timeout(PATIENCE, others).await.expect("what has waited never came back");
    assert_eq!(lost(&door), 1, "only the one that was sent is not known");
}

/// How many charges should have been given back, and were not.
fn lost(door: &Running<Redis>) -> u64 {
    let mut out = Exposition::default();
    door.made.counts().write(&mut out);
    let text = out.into_text();
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("tollgate_check_give_backs_lost_total "));
    count.unwrap().parse().unwrap()
}

/// A door that closes in the middle of it finishes what it has begun.
#[tokio::test]
async fn what_is_being_given_back_is_given_back_before_the_door_ends() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (door(&server, PATIENCE), door(&server, PATIENCE));
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
