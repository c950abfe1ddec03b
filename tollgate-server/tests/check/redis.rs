//! The same door with its limits in Redis: shared by several, and without them when it is away.

use std::time::Duration;

use serde_json::json;
use testbed::RedisServer;
use tollgate::Clock as _;
use tollgate::redis::{Failure, Redis, Settings};
use tollgate::{ManualClock, SystemClock};

use super::support::{Made, PATIENCE, PER_USER, Running, builder, left, open, parse, post};

fn door(server: &RedisServer, deadline: Duration) -> Running<Redis> {
    let config = parse(PER_USER);
    let settings = Settings::new(&server.url()).deadline(deadline).failure(Failure::Open);
    let layer = builder(&config).unwrap().redis(&settings).unwrap();
    // Records expire by a clock of their own; charges have the server's time.
    let clock = ManualClock::new(SystemClock::new().now());
    open(Made::with_layer(config, clock, Some(layer), 100, |_| {}))
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
    let healthy = async {
        while post(door.address, "/v1/peek", &ask(0)).await.json()["degraded"] == true {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, healthy).await.expect("the store never came back");
    assert!(
        left(door.address, "per-user", "alice").await <= 9,
        "the refund that timed out may have been done once"
    );
    server.kill().unwrap();
}
