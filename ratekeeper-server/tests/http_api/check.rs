//! Checks, peeks, refunds and resets.

use std::time::Duration;

use ratekeeper_server::http_api::HttpApiSettings;
use serde_json::json;

use super::support::{PER_USER, TestContext, get, open, peek_remaining, post, remaining, run};

#[tokio::test]
async fn check_response_is_exact() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id }, token_bucket: { capacity: 2, refill: 1/3s } }");
    let check = json!({ "limit": "per-user", "key": "alice" });
    let response = post(api.address, "/v1/check", &check).await;
    assert_eq!(response.status, 200);
    assert_eq!(
        response.body,
        r#"{"allowed":true,"limits":[{"limit":"per-user","allowed":true,"size":2,"remaining":1,"retry_after":null,"reset_after":3.0,"delay":0,"shadow":false,"banned":false}],"degraded":false}"#
    );
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.header("ratelimit"), Some(r#""per-user";r=1;t=3"#));
    assert!(response.header("ratelimit-policy").unwrap().starts_with(r#""per-user";q=2"#), "{response:?}");
    assert_eq!(response.header("retry-after"), None);

    api.context.clock.advance(Duration::from_nanos(1));
    post(api.address, "/v1/check", &check).await;
    let response = post(api.address, "/v1/check", &check).await;
    assert_eq!(response.status, 200);
    assert_eq!(
        response.body,
        r#"{"allowed":false,"limits":[{"limit":"per-user","allowed":false,"size":2,"remaining":0,"retry_after":3.0,"reset_after":6.0,"delay":0,"shadow":false,"banned":false}],"degraded":false}"#
    );
    assert_eq!(response.header("retry-after"), Some("3"));
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.header("cache-control"), Some("no-store"));
    let bob = post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "bob" })).await;
    assert_eq!(bob.json()["allowed"], true);
}

#[tokio::test]
async fn denial_has_the_requested_status() {
    let api = run(PER_USER);
    let mut check = json!({ "limit": "per-user", "key": "a", "cost": 11 });
    let response = post(api.address, "/v1/check", &check).await;
    assert_eq!((response.status, response.json()["limits"][0]["retry_after"].as_str()), (200, Some("never")));
    for status in [403, 429] {
        assert_eq!(
            post(api.address, &format!("/v1/check?deny_status={status}"), &check).await.status,
            status
        );
    }
    check["deny_status"] = 429.into();
    let response = post(api.address, "/v1/check", &check).await;
    assert_eq!((response.status, response.json()["allowed"].as_bool()), (429, Some(false)));
    assert_eq!(
        post(api.address, "/v1/check?deny_status=200", &check).await.status,
        200,
        "the query has precedence"
    );
    check["cost"] = 1.into();
    assert_eq!(post(api.address, "/v1/check", &check).await.status, 200, "an allowed request");
}

#[tokio::test]
async fn several_limits_are_charged_atomically() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 5, window: 1h, align: first_request } }
  per-pair: { key: [{ header: X-User-Id }, { header: X-Endpoint }], fixed_window: { limit: 2, window: 1h, align: first_request } }
  total: { key: global, fixed_window: { limit: 100, window: 1h, align: first_request } }");
    let check = json!({ "checks": [
        { "limit": "per-user", "key": ["alice"] },
        { "limit": "per-pair", "key": ["alice", "/a"], "cost": 2 },
        { "limit": "total" },
    ]});
    let response = post(api.address, "/v1/check", &check).await;
    let json = response.json();
    let remaining: Vec<_> = (0..3).map(|at| json["limits"][at]["remaining"].as_u64().unwrap()).collect();
    assert_eq!((json["allowed"].as_bool(), remaining), (Some(true), vec![4, 0, 99]), "{response:?}");

    let response = post(api.address, "/v1/check", &check).await;
    let json = response.json();
    assert_eq!(json["allowed"], false);
    let allowed: Vec<_> = (0..3).map(|at| json["limits"][at]["allowed"].as_bool().unwrap()).collect();
    assert_eq!(allowed, [true, false, true]);
    let peek = json!({ "descriptors": check["checks"] });
    let json = post(api.address, "/v1/peek", &peek).await.json();
    let remaining: Vec<_> = (0..3).map(|at| json["limits"][at]["remaining"].as_u64().unwrap()).collect();
    assert_eq!(remaining, [4, 0, 99], "nothing was charged");

    let twice = json!({ "checks": [{ "limit": "per-user", "key": "b", "cost": 3 }, { "limit": "per-user", "key": "b", "cost": 3 }] });
    assert_eq!(post(api.address, "/v1/check", &twice).await.json()["allowed"], false, "costs add up");
}

#[tokio::test]
async fn peek_charges_nothing_and_reset_restores_the_budget() {
    let api = run(PER_USER);
    let check = json!({ "limit": "per-user", "key": "alice", "cost": 4 });
    for _ in 0..3 {
        assert_eq!(remaining(&post(api.address, "/v1/peek", &check).await), 10);
    }
    post(api.address, "/v1/check", &check).await;
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 6);
    post(api.address, "/v1/reset", &check).await;
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 10);
}

#[tokio::test]
async fn refund_never_exceeds_the_charge() {
    let api = run(PER_USER);
    let check = json!({ "limit": "per-user", "key": "alice", "cost": 4 });
    post(api.address, "/v1/check", &check).await;
    for expected in [9, 10, 10] {
        let refund = json!({ "limit": "per-user", "key": "alice", "cost": 3 });
        assert_eq!(post(api.address, "/v1/refund", &refund).await.status, 200);
        assert_eq!(peek_remaining(api.address, "per-user", "alice").await, expected);
    }
}

/// The response is about the key after the refund, not about a request of the refunded cost.
#[tokio::test]
async fn refund_above_the_limit_reports_the_state_of_the_key() {
    let api = run(PER_USER);
    post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "alice", "cost": 4 })).await;
    for path in ["/v1/refund", "/v1/reset"] {
        let request = json!({ "limit": "per-user", "key": "alice", "cost": 1_000 });
        let response = post(api.address, path, &request).await.json();
        assert_eq!(response["allowed"], true, "{path}: {response}");
        assert!(response["limits"][0]["retry_after"].is_null(), "{path}: {response}");
        assert_eq!(response["limits"][0]["remaining"], 10, "{path}: {response}");
    }
}

#[tokio::test]
async fn refunds_and_resets_are_disabled_by_default() {
    let api = open(TestContext::new(PER_USER, |settings| {
        let HttpApiSettings { refunds, resets, .. } = HttpApiSettings::default();
        (settings.refunds, settings.resets) = (refunds, resets);
    }));
    let check = json!({ "limit": "per-user", "key": "alice", "cost": 4 });
    post(api.address, "/v1/check", &check).await;
    for (path, setting) in [("/v1/refund", "apis.http.refunds"), ("/v1/reset", "apis.http.resets")] {
        let reason = post(api.address, path, &check).await.problem(403);
        assert!(reason.contains(setting), "{reason}");
    }
    assert_eq!(peek_remaining(api.address, "per-user", "alice").await, 6);
}

#[tokio::test]
async fn deny_lists_bans_and_shadow_limits_are_reported() {
    let api = run("limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 1, window: 1h, align: first_request }
    allow: [{ key: root }]
    deny: [{ key: mallory }]
    ban: { after: 2, within: 1h, for: 10m }
  planned: { key: { header: X-User-Id }, fixed_window: { limit: 1, window: 1h, align: first_request }, shadow: true }");
    let check = |limit: &str, key: &str| json!({ "limit": limit, "key": key });
    let root = post(api.address, "/v1/check", &check("per-user", "root")).await.json();
    assert_eq!((root["allowed"].as_bool(), root["limits"][0]["size"].is_null()), (Some(true), true));
    let mallory = post(api.address, "/v1/check?deny_status=429", &check("per-user", "mallory")).await;
    assert_eq!(mallory.status, 429);
    let limit = &mallory.json()["limits"][0];
    assert_eq!((limit["allowed"].as_bool(), limit["retry_after"].as_str()), (Some(false), Some("never")));

    // The deny list decides, and the other limits are not charged.
    let both = json!({ "checks": [check("planned", "mallory"), check("per-user", "mallory")] });
    let json = post(api.address, "/v1/check", &both).await.json();
    assert_eq!((json["allowed"].as_bool(), json["limits"][0]["remaining"].as_u64()), (Some(false), Some(1)));
    assert_eq!(peek_remaining(api.address, "planned", "mallory").await, 1);

    for _ in 0..2 {
        let planned = post(api.address, "/v1/check", &check("planned", "a")).await.json();
        assert_eq!(
            (planned["allowed"].as_bool(), planned["limits"][0]["shadow"].as_bool()),
            (Some(true), Some(true))
        );
    }
    for _ in 0..4 {
        post(api.address, "/v1/check", &check("per-user", "b")).await;
    }
    let banned = post(api.address, "/v1/check", &check("per-user", "b")).await.json();
    assert_eq!(
        (banned["allowed"].as_bool(), banned["limits"][0]["banned"].as_bool()),
        (Some(false), Some(true))
    );
    post(api.address, "/v1/reset", &check("per-user", "b")).await;
    assert_eq!(post(api.address, "/v1/check", &check("per-user", "b")).await.json()["allowed"], true);
}

#[tokio::test]
async fn delay_is_reported_and_not_applied() {
    let api =
        run("limits: { drip: { key: global, leaky_bucket: { capacity: 5, leak: 1/10m, mode: shape } } }");
    let check = json!({ "limit": "drip" });
    post(api.address, "/v1/check", &check).await;
    let response = post(api.address, "/v1/check", &check).await;
    assert!(response.body.contains(r#""delay":600.0"#), "{response:?}");
}

/// Which tier applies depends on the request, which the caller does not send: the base limit alone would be untrue.
#[tokio::test]
async fn peek_reports_every_tier_and_reset_restores_all() {
    let limits = "limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 5, window: 1h, align: first_request }
    overrides:
      - { key: vip, unlimited: true }
      - { when: { header: { X-Plan: gold } }, fixed_window: { limit: 50, window: 1h, align: first_request } }
      - { key: ann, fixed_window: { limit: 7, window: 1h, align: first_request } }
      - { when: { header: { X-Plan: free } }, unlimited: true }
";
    let api = run(limits);
    let gold = "X-Original-Method: GET\r\nX-Original-URI: /\r\nX-Original-Host: a\r\nX-Forwarded-For: 192.0.2.1\r\n\
        X-User-Id: bob\r\nX-Plan: gold\r\n";
    for _ in 0..50 {
        assert_eq!(get(api.address, "GET", "/v1/authorize", gold).await.status, 200);
    }
    assert_eq!(get(api.address, "GET", "/v1/authorize", gold).await.status, 403);

    let bob = json!({ "limit": "per-user", "key": "bob" });
    let peek = post(api.address, "/v1/peek", &bob).await.json();
    let [base, tiers] = [&peek["limits"][0], &peek["limits"][0]["tiers"]];
    assert_eq!((base["size"].as_u64(), base["remaining"].as_u64()), (Some(5), Some(5)), "{peek}");
    assert_eq!(
        (tiers[0]["override"].as_u64(), tiers[0]["size"].as_u64(), tiers[0]["remaining"].as_u64()),
        (Some(1), Some(50), Some(0)),
        "{peek}"
    );
    assert_eq!(
        (tiers[0]["allowed"].as_bool(), tiers[0]["retry_after"].as_f64()),
        (Some(false), Some(3600.0))
    );
    assert_eq!((tiers[1]["override"].as_u64(), tiers[1]["size"].is_null()), (Some(3), true), "{peek}");

    // An override by key comes before the tiers behind it.
    let ann = post(api.address, "/v1/peek", &json!({ "limit": "per-user", "key": "ann" })).await.json();
    assert_eq!((ann["limits"][0]["size"].as_u64(), ann["limits"][0]["tiers"][1].is_null()), (Some(7), true));
    let vip = post(api.address, "/v1/peek", &json!({ "limit": "per-user", "key": "vip" })).await.json();
    assert!(vip["limits"][0].get("tiers").is_none(), "{vip}");

    let reset = post(api.address, "/v1/reset", &bob).await.json();
    assert_eq!(reset["limits"][0]["tiers"][0]["remaining"].as_u64(), Some(50), "{reset}");
    assert_eq!(get(api.address, "GET", "/v1/authorize", gold).await.status, 200);
}

/// A ban denies the key in every tier that has a limit.
#[tokio::test]
async fn peek_reports_a_ban_in_all_tiers() {
    let api = run(
        "limits: { per-user: { key: { header: X-User-Id }, fixed_window: { limit: 1, window: 1h, align: first_request }, \
        ban: { after: 1, within: 1h, for: 2h }, overrides: [ \
        { when: { method: POST }, fixed_window: { limit: 50, window: 1h, align: first_request } }, \
        { when: { method: PUT }, unlimited: true } ] } }",
    );
    let bob = json!({ "limit": "per-user", "key": "bob" });
    assert_eq!(post(api.address, "/v1/check", &bob).await.status, 200);
    let free = post(api.address, "/v1/peek", &bob).await.json();
    assert_eq!(free["limits"][0]["tiers"][0]["allowed"].as_bool(), Some(true), "{free}");
    // The denial bans the key.
    post(api.address, "/v1/check", &bob).await;
    let peek = post(api.address, "/v1/peek", &bob).await.json();
    let [base, tiers] = [&peek["limits"][0], &peek["limits"][0]["tiers"]];
    assert_eq!(base["banned"].as_bool(), Some(true), "{peek}");
    for of in [base, &tiers[0]] {
        assert_eq!(of["allowed"].as_bool(), Some(false), "{peek}");
        assert!((7_100.0..=7_200.0).contains(&of["retry_after"].as_f64().unwrap()), "{peek}");
    }
    assert_eq!(tiers[1]["allowed"].as_bool(), Some(true), "an unlimited tier denies no key: {peek}");
}

/// To JSON Schema, and so to the description of this API, a number without a fraction is an integer.
#[tokio::test]
async fn whole_numbers_may_be_written_with_a_point() {
    let api =
        run("limits: { big: { key: { header: X-User-Id }, fixed_window: { limit: 10000, window: 1h } } }");
    let send = async |path: &str, body: &str| super::support::send(api.address, path, "", body).await;
    let cost = |cost: &str| format!(r#"{{"limit":"big","key":"a","cost":{cost}}}"#);
    for (body, remaining) in [(cost("9035.0"), 965), (cost("9e1"), 875), (cost("0.0"), 875)] {
        let response = send("/v1/check", &body).await;
        assert_eq!(
            response.json()["limits"][0]["remaining"].as_u64(),
            Some(remaining),
            "{body}: {response:?}"
        );
    }
    let status = r#"{"limit":"big","key":"a","cost":9999,"deny_status":429.0}"#;
    assert_eq!(send("/v1/check", status).await.status, 429);
    let reserved = send("/v1/reserve", r#"{"limit":"big","key":"b","cost":7.0}"#).await.json();
    let settle = format!(r#"{{"reservation":{},"cost":5.0}}"#, reserved["reservation"]);
    assert_eq!(send("/v1/settle", &settle).await.json()["refunded"].as_u64(), Some(2));
    for wrong in ["0.5", "-1", "-1.0", "4294967296.0", "1e300", "\"1\"", "true"] {
        assert_eq!(send("/v1/check", &cost(wrong)).await.status, 422, "{wrong}");
    }
}
