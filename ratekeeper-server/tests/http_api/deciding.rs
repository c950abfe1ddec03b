//! Checks, peeks, refunds and resets.

use std::time::Duration;

use ratekeeper_server::http_api::Settings;
use serde_json::json;

use super::support::{Made, PER_USER, left, open, post, remaining, run};

#[tokio::test]
async fn check_response_is_exact() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id }, token_bucket: { capacity: 2, refill: 1/3s } }");
    let ask = json!({ "limit": "per-user", "key": "alice" });
    let answer = post(api.address, "/v1/check", &ask).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.body,
        r#"{"allowed":true,"limits":[{"limit":"per-user","allowed":true,"size":2,"remaining":1,"retry_after":null,"reset_after":3.0,"delay":0,"shadow":false,"banned":false}],"degraded":false}"#
    );
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("ratelimit"), Some(r#""per-user";r=1;t=3"#));
    assert!(answer.header("ratelimit-policy").unwrap().starts_with(r#""per-user";q=2"#), "{answer:?}");
    assert_eq!(answer.header("retry-after"), None);

    api.made.clock.advance(Duration::from_nanos(1));
    post(api.address, "/v1/check", &ask).await;
    let answer = post(api.address, "/v1/check", &ask).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.body,
        r#"{"allowed":false,"limits":[{"limit":"per-user","allowed":false,"size":2,"remaining":0,"retry_after":3.0,"reset_after":6.0,"delay":0,"shadow":false,"banned":false}],"degraded":false}"#
    );
    assert_eq!(answer.header("retry-after"), Some("3"));
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    let bob = post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "bob" })).await;
    assert_eq!(bob.json()["allowed"], true);
}

#[tokio::test]
async fn denial_has_the_requested_status() {
    let api = run(PER_USER);
    let mut ask = json!({ "limit": "per-user", "key": "a", "cost": 11 });
    let answer = post(api.address, "/v1/check", &ask).await;
    assert_eq!((answer.status, answer.json()["limits"][0]["retry_after"].as_str()), (200, Some("never")));
    for status in [403, 429] {
        assert_eq!(post(api.address, &format!("/v1/check?deny_status={status}"), &ask).await.status, status);
    }
    ask["deny_status"] = 429.into();
    let answer = post(api.address, "/v1/check", &ask).await;
    assert_eq!((answer.status, answer.json()["allowed"].as_bool()), (429, Some(false)));
    assert_eq!(post(api.address, "/v1/check?deny_status=200", &ask).await.status, 200, "the query is nearer");
    ask["cost"] = 1.into();
    assert_eq!(post(api.address, "/v1/check", &ask).await.status, 200, "who is allowed is not denied");
}

#[tokio::test]
async fn several_limits_are_charged_atomically() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 5, window: 1h, align: first_request } }
  per-pair: { key: [{ header: X-User-Id }, { header: X-Endpoint }], fixed_window: { limit: 2, window: 1h, align: first_request } }
  all: { key: global, fixed_window: { limit: 100, window: 1h, align: first_request } }");
    let ask = json!({ "checks": [
        { "limit": "per-user", "key": ["alice"] },
        { "limit": "per-pair", "key": ["alice", "/a"], "cost": 2 },
        { "limit": "all" },
    ]});
    let answer = post(api.address, "/v1/check", &ask).await;
    let json = answer.json();
    let left: Vec<_> = (0..3).map(|at| json["limits"][at]["remaining"].as_u64().unwrap()).collect();
    assert_eq!((json["allowed"].as_bool(), left), (Some(true), vec![4, 0, 99]), "{answer:?}");

    let answer = post(api.address, "/v1/check", &ask).await;
    let json = answer.json();
    assert_eq!(json["allowed"], false);
    let allowed: Vec<_> = (0..3).map(|at| json["limits"][at]["allowed"].as_bool().unwrap()).collect();
    assert_eq!(allowed, [true, false, true]);
    let look = json!({ "descriptors": ask["checks"] });
    let json = post(api.address, "/v1/peek", &look).await.json();
    let left: Vec<_> = (0..3).map(|at| json["limits"][at]["remaining"].as_u64().unwrap()).collect();
    assert_eq!(left, [4, 0, 99], "nothing was taken");

    let twice = json!({ "checks": [{ "limit": "per-user", "key": "b", "cost": 3 }, { "limit": "per-user", "key": "b", "cost": 3 }] });
    assert_eq!(post(api.address, "/v1/check", &twice).await.json()["allowed"], false, "costs add up");
}

#[tokio::test]
async fn peek_charges_nothing_and_reset_restores_the_budget() {
    let api = run(PER_USER);
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 4 });
    for _ in 0..3 {
        assert_eq!(remaining(&post(api.address, "/v1/peek", &ask).await), 10);
    }
    post(api.address, "/v1/check", &ask).await;
    assert_eq!(left(api.address, "per-user", "alice").await, 6);
    post(api.address, "/v1/reset", &ask).await;
    assert_eq!(left(api.address, "per-user", "alice").await, 10);
}

#[tokio::test]
async fn refund_never_exceeds_the_charge() {
    let api = run(PER_USER);
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 4 });
    post(api.address, "/v1/check", &ask).await;
    for wanted in [9, 10, 10] {
        let back = json!({ "limit": "per-user", "key": "alice", "cost": 3 });
        assert_eq!(post(api.address, "/v1/refund", &back).await.status, 200);
        assert_eq!(left(api.address, "per-user", "alice").await, wanted);
    }
}

#[tokio::test]
async fn refunds_and_resets_are_off_by_default() {
    let api = open(Made::new(PER_USER, |settings| {
        let Settings { refunds, resets, .. } = Settings::default();
        (settings.refunds, settings.resets) = (refunds, resets);
    }));
    let ask = json!({ "limit": "per-user", "key": "alice", "cost": 4 });
    post(api.address, "/v1/check", &ask).await;
    for (path, setting) in [("/v1/refund", "apis.http.refunds"), ("/v1/reset", "apis.http.resets")] {
        let why = post(api.address, path, &ask).await.problem(403);
        assert!(why.contains(setting), "{why}");
    }
    assert_eq!(left(api.address, "per-user", "alice").await, 6);
}

#[tokio::test]
async fn lists_bans_and_shadows_are_reported() {
    let api = run("limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 1, window: 1h, align: first_request }
    allow: [{ key: root }]
    deny: [{ key: mallory }]
    ban: { after: 2, within: 1h, for: 10m }
  planned: { key: { header: X-User-Id }, fixed_window: { limit: 1, window: 1h, align: first_request }, shadow: true }");
    let ask = |limit: &str, key: &str| json!({ "limit": limit, "key": key });
    let root = post(api.address, "/v1/check", &ask("per-user", "root")).await.json();
    assert_eq!((root["allowed"].as_bool(), root["limits"][0]["size"].is_null()), (Some(true), true));
    let mallory = post(api.address, "/v1/check?deny_status=429", &ask("per-user", "mallory")).await;
    assert_eq!(mallory.status, 429);
    let limit = &mallory.json()["limits"][0];
    assert_eq!((limit["allowed"].as_bool(), limit["retry_after"].as_str()), (Some(false), Some("never")));

    // The deny list decides, and the other limits are not charged.
    let both = json!({ "checks": [ask("planned", "mallory"), ask("per-user", "mallory")] });
    let json = post(api.address, "/v1/check", &both).await.json();
    assert_eq!((json["allowed"].as_bool(), json["limits"][0]["remaining"].as_u64()), (Some(false), Some(1)));
    assert_eq!(left(api.address, "planned", "mallory").await, 1);

    for _ in 0..2 {
        let planned = post(api.address, "/v1/check", &ask("planned", "a")).await.json();
        assert_eq!(
            (planned["allowed"].as_bool(), planned["limits"][0]["shadow"].as_bool()),
            (Some(true), Some(true))
        );
    }
    for _ in 0..4 {
        post(api.address, "/v1/check", &ask("per-user", "b")).await;
    }
    let banned = post(api.address, "/v1/check", &ask("per-user", "b")).await.json();
    assert_eq!(
        (banned["allowed"].as_bool(), banned["limits"][0]["banned"].as_bool()),
        (Some(false), Some(true))
    );
    post(api.address, "/v1/reset", &ask("per-user", "b")).await;
    assert_eq!(post(api.address, "/v1/check", &ask("per-user", "b")).await.json()["allowed"], true);
}

#[tokio::test]
async fn delay_is_reported_and_not_applied() {
    let api =
        run("limits: { drip: { key: global, leaky_bucket: { capacity: 5, leak: 1/10m, mode: shape } } }");
    let ask = json!({ "limit": "drip" });
    post(api.address, "/v1/check", &ask).await;
    let answer = post(api.address, "/v1/check", &ask).await;
    assert!(answer.body.contains(r#""delay":600.0"#), "{answer:?}");
}
