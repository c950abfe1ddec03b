//! What is reserved, settled, and given back by itself.

use std::time::Duration;

use serde_json::{Value, json};
use tollgate_server::check::give_back_expired;

use super::keeping::Failing;
use super::support::{Made, PATIENCE, PER_USER, Running, left, open, post, run, send};

async fn reserve(door: &Running, cost: u32) -> Value {
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": cost, "expires": "60s" });
    post(door.address, "/v1/reserve", &ask).await.json()
}

async fn settle(door: &Running, reserved: &Value, cost: u32) -> Value {
    let ask = json!({ "reservation": reserved["reservation"], "cost": cost });
    post(door.address, "/v1/settle", &ask).await.json()
}

#[tokio::test]
async fn a_reservation_is_charged_and_put_right() {
    let door = run(PER_USER);
    for (reserved, used, given_back, uncovered, after) in
        [(7, 3, 4, 0, 7), (5, 0, 5, 0, 7), (2, 2, 0, 0, 5), (1, 4, 0, 0, 1), (1, 3, 0, 2, 0)]
    {
        let before = left(door.address, "per-user", "alice").await;
        let held = reserve(&door, reserved).await;
        assert_eq!(
            (held["allowed"].as_bool(), held["expires_after"].as_f64()),
            (Some(true), Some(60.0)),
            "{held}"
        );
        assert_eq!(held["reservation"].as_str().map(str::len), Some(32), "{held}");
        assert_eq!(left(door.address, "per-user", "alice").await, before - u64::from(reserved));
        let settled = settle(&door, &held, used).await;
        let wanted = json!({ "limit": "per-user", "reserved": reserved, "cost": used, "given_back": given_back,
            "uncovered": uncovered, "degraded": false });
        assert_eq!(settled, wanted);
        assert_eq!(left(door.address, "per-user", "alice").await, after);
    }
    let denied = reserve(&door, 1).await;
    assert_eq!((denied["allowed"].as_bool(), denied["reservation"].is_null()), (Some(false), true));
}

#[tokio::test]
async fn a_reservation_is_settled_once() {
    let door = run(PER_USER);
    let held = reserve(&door, 5).await;
    settle(&door, &held, 2).await;
    let again = json!({ "reservation": held["reservation"], "cost": 0 });
    let answer = post(door.address, "/v1/settle", &again).await;
    answer.problem(409);
    assert_eq!(answer.header("retry-after"), None, "it will not be otherwise later");
    assert_eq!(left(door.address, "per-user", "alice").await, 8);
    let made_up = json!({ "reservation": "0123456789abcdef0123456789abcdef", "cost": 0 });
    post(door.address, "/v1/settle", &made_up).await.problem(404);
}

/// Its client is gone: nobody settles it.
#[tokio::test]
async fn what_nobody_settles_is_given_back_by_itself() {
    let door = run(PER_USER);
    let held = reserve(&door, 7).await;
    assert_eq!(left(door.address, "per-user", "alice").await, 3);
    door.made.clock.advance(Duration::from_secs(61));
    // The door looks for itself what has expired.
    let given_back = async {
        while left(door.address, "per-user", "alice").await != 10 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, given_back).await.expect("it was never given back");
    let late = json!({ "reservation": held["reservation"], "cost": 7 });
    post(door.address, "/v1/settle", &late).await.problem(409);
    assert_eq!(left(door.address, "per-user", "alice").await, 10, "once, and no more");
}

/// A window that is over has nothing to give back to.
#[tokio::test]
async fn what_is_given_back_is_of_the_time_when_it_was_taken() {
    let door = run("limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 10, window: 1m, align: clock } }");
    let held = post(
        door.address,
        "/v1/reserve",
        &json!({ "limit": "per-user", "key": "alice", "cost": 6, "expires": "10m" }),
    )
    .await
    .json();
    door.made.clock.advance(Duration::from_secs(60));
    post(door.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 6 })).await;
    assert_eq!(left(door.address, "per-user", "alice").await, 4);
    assert_eq!(settle(&door, &held, 0).await["given_back"], 6);
    assert_eq!(left(door.address, "per-user", "alice").await, 4, "this window has lent nothing");
}

/// More than is there is not charged, and nobody is banned for work that is done.
#[tokio::test]
async fn what_is_not_covered_bans_nobody() {
    let door = run("limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 10, window: 1h, align: first_request }
    ban: { after: 1, within: 1h, for: 10m }");
    let held = reserve(&door, 5).await;
    assert_eq!(settle(&door, &held, 50).await["uncovered"], 40);
    let look = post(door.address, "/v1/peek", &json!({ "limit": "per-user", "key": "alice", "cost": 0 }))
        .await
        .json();
    assert_eq!(
        (look["limits"][0]["banned"].as_bool(), look["limits"][0]["remaining"].as_u64()),
        (Some(false), Some(0))
    );
}

#[tokio::test]
async fn shadows_and_free_keys_have_nothing_to_give_back() {
    let door = run("limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 10, window: 1h, align: first_request }
    allow: [{ key: root }]
  planned: { key: { header: X-User-Id }, fixed_window: { limit: 10, window: 1h, align: first_request }, shadow: true }");
    let ask = json!({ "limit": "per-user", "key": "root", "cost": 99 });
    let held = post(door.address, "/v1/reserve", &ask).await.json();
    let settled = settle(&door, &held, 200).await;
    assert_eq!((settled["given_back"].as_u64(), settled["uncovered"].as_u64()), (Some(0), Some(0)));

    let ask = |cost: u32| json!({ "limit": "planned", "key": "a", "cost": cost });
    post(door.address, "/v1/check", &ask(8)).await;
    // It would be denied, so it has taken nothing, and nothing comes back of what others took.
    let held = post(door.address, "/v1/reserve", &ask(5)).await.json();
    assert_eq!(held["allowed"], true);
    assert_eq!(settle(&door, &held, 0).await["given_back"], 0);
    assert_eq!(left(door.address, "planned", "a").await, 2);
}

#[tokio::test]
async fn where_there_is_no_room_nothing_is_taken() {
    let door = open(Made::with_room(PER_USER, 2, |_| {}));
    for _ in 0..2 {
        assert_eq!(reserve(&door, 1).await["allowed"], true);
    }
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 3 });
    let answer = post(door.address, "/v1/reserve", &ask).await;
    assert!(answer.problem(503).contains("no room"));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(left(door.address, "per-user", "alice").await, 8);
}

/// What was never sent comes back at once. What may be kept is left to whoever finds it: it comes back once, when it
/// expires, and not twice.
#[tokio::test]
async fn what_may_be_kept_is_given_back_once() {
    let door = run(PER_USER);
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 3, "expires": "60s" });
    post(door.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 5 })).await;
    door.made.records.puts(Some(Failing::Before));
    let answer = post(door.address, "/v1/reserve", &ask).await;
    answer.problem(503);
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(left(door.address, "per-user", "alice").await, 5);

    door.made.records.puts(Some(Failing::Behind));
    let key = "Idempotency-Key: 1\r\n";
    let answer = send(door.address, "/v1/reserve", key, &ask.to_string()).await;
    answer.problem(503);
    assert_eq!(answer.header("retry-after"), None);
    assert_eq!(left(door.address, "per-user", "alice").await, 2, "it may be kept, and then it expires");
    door.made.records.puts(None);
    let again = send(door.address, "/v1/reserve", key, &ask.to_string()).await;
    again.problem(503);
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(left(door.address, "per-user", "alice").await, 2, "the same key takes nothing again");
    door.made.clock.advance(Duration::from_secs(61));
    give_back_expired(&*door.made).await;
    // The door may have been quicker, and is done with it then before it is asked anything else.
    let given_back = async {
        while left(door.address, "per-user", "alice").await != 5 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, given_back).await.expect("it did not come back once");
}

#[tokio::test]
async fn how_long_it_is_reserved_for_has_bounds() {
    let door = run(PER_USER);
    for (expires, why) in
        [("500ms", "from 1s to 1d"), ("2d", "from 1s to 1d"), ("soon", "`expires`"), ("60", "`expires`")]
    {
        let ask = json!({ "limit": "per-user", "key": "a", "expires": expires });
        let said = post(door.address, "/v1/reserve", &ask).await.problem(422);
        assert!(said.contains(why), "{expires}: {said}");
    }
}
