//! The OpenAPI document is accurate: responses have the documented schema, and documented requests are accepted.

use ratekeeper_server::http_api::OPENAPI;
use serde_json::{Value, json};

use super::support::{PER_USER, TestApi, TestContext, TestResponse, get, open, post, run, send};

fn document() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

/// Whether a value conforms to a schema of the document.
fn is_valid(document: &Value, schema: &Value, value: &Value) -> bool {
    let mut schema = schema.clone();
    schema["components"] = document["components"].clone();
    jsonschema::validator_for(&schema).unwrap().is_valid(value)
}

fn resolved<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str() {
        Some(reference) => document.pointer(reference.trim_start_matches('#')).unwrap(),
        None => value,
    }
}

/// Asserts that the document has this response for the path.
#[track_caller]
fn assert_documented(document: &Value, path: &str, method: &str, response: &TestResponse) {
    let responses = &document["paths"][path][method]["responses"];
    let status = response.status.to_string();
    let documented = &responses[&status];
    assert!(!documented.is_null(), "{path}: {status} is not documented: {response:?}");
    let documented = resolved(document, documented);
    let Some(kinds) = documented["content"].as_object() else {
        assert!(response.body.is_empty(), "{path}: {response:?}");
        return;
    };
    let kind = response.header("content-type").unwrap();
    let schema = &kinds.get(kind).unwrap_or_else(|| panic!("{path} {status}: {kind}"))["schema"];
    assert!(is_valid(document, schema, &response.json()), "{path}: {response:?}");
    for header in
        ["ratelimit", "ratelimit-policy", "retry-after", "idempotent-replayed", "x-ratelimit-denied"]
    {
        let is_documented = documented["headers"]
            .as_object()
            .is_some_and(|headers| headers.keys().any(|it| it.eq_ignore_ascii_case(header)));
        assert!(is_documented || response.header(header).is_none(), "{path} {status}: {header}");
    }
}

/// Asserts that the document and the API agree on whether a body is valid.
async fn assert_agreement(api: &TestApi, path: &str, body: &Value, is_valid_body: bool) {
    let document = document();
    let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
    assert_eq!(is_valid(&document, schema, body), is_valid_body, "the document: {path} {body}");
    let response = post(api.address, path, body).await;
    assert_documented(&document, path, "post", &response);
    assert_eq!(!matches!(response.status, 400 | 422), is_valid_body, "the API: {path} {body} {response:?}");
}

#[tokio::test]
async fn request_bodies_are_accepted_as_documented() {
    let api = run(&format!(
        "{PER_USER}
  total: {{ key: global, fixed_window: {{ limit: 100, window: 1h }} }}"
    ));
    let check = json!({ "limit": "per-user", "key": "a", "cost": 2 });
    let checks = [
        (check.clone(), true),
        (json!({ "limit": "total" }), true),
        (json!({ "limit": "nobody" }), true),
        (json!({ "limit": "total", "key": [] }), true),
        (json!({ "limit": "per-user", "key": ["a"], "cost": 99, "deny_status": 429 }), true),
        (json!({ "limit": "per-user", "key": ["a"], "cost": 99, "deny_status": 403 }), true),
        (json!({ "checks": [check, { "limit": "total" }], "deny_status": 200 }), true),
        (json!({ "descriptors": [{ "limit": "total", "cost": 0 }] }), true),
        (json!({}), false),
        (json!([]), false),
        (json!({ "checks": [] }), false),
        (json!({ "checks": vec![json!({ "limit": "total" }); 65] }), false),
        (json!({ "limit": "total", "checks": [{ "limit": "total" }] }), false),
        (json!({ "checks": [{ "limit": "total" }], "cost": 1 }), false),
        (json!({ "limit": "total", "cost": -1 }), false),
        (json!({ "limit": "total", "cost": 4_294_967_296_u64 }), false),
        (json!({ "limit": "total", "cost": 1.5 }), false),
        (json!({ "limit": "total", "other": 1 }), false),
        (json!({ "limit": 7 }), false),
        (json!({ "limit": "per-user", "key": "x".repeat(1025) }), false),
        (json!({ "limit": "per-user", "key": vec!["a"; 17] }), false),
        (json!({ "limit": "total", "deny_status": 500 }), false),
    ];
    for path in ["/v1/check", "/v1/peek"] {
        for (body, is_valid_body) in &checks {
            assert_agreement(&api, path, body, *is_valid_body).await;
        }
    }
    for path in ["/v1/refund", "/v1/reset"] {
        assert_agreement(&api, path, &json!({ "limit": "per-user", "key": "a", "cost": 2 }), true).await;
        assert_agreement(&api, path, &json!({ "limit": "per-user", "key": "a", "expires": "1s" }), false)
            .await;
        assert_agreement(&api, path, &json!({ "checks": [{ "limit": "total" }] }), false).await;
    }
    let reserve = json!({ "limit": "per-user", "key": "a", "cost": 4, "expires": "60s" });
    assert_agreement(&api, "/v1/reserve", &reserve, true).await;
    assert_agreement(&api, "/v1/reserve", &json!({ "limit": "per-user", "key": "a", "cost": 99 }), true)
        .await;
    assert_agreement(&api, "/v1/reserve", &json!({ "limit": "total", "expires": "soon" }), false).await;
    assert_agreement(&api, "/v1/reserve", &json!({ "limit": "total", "expires": 60 }), false).await;
    let reservation = post(api.address, "/v1/reserve", &reserve).await.json();
    let settle = json!({ "reservation": reservation["reservation"], "cost": 1 });
    for _ in 0..2 {
        assert_agreement(&api, "/v1/settle", &settle, true).await;
    }
    assert_agreement(&api, "/v1/settle", &json!({ "reservation": "unknown", "cost": 1 }), true).await;
    assert_agreement(&api, "/v1/settle", &json!({ "reservation": "unknown" }), false).await;
}

#[tokio::test]
async fn rejections_are_documented() {
    let document = document();
    let token = "admin: { listen: 127.0.0.1:0, token: 0123456789abcdef }\n";
    let (api, with_token) = (run(PER_USER), run(&format!("{token}{PER_USER}")));
    let disabled = open(TestContext::with_capacity(PER_USER, 0, |settings| {
        (settings.refunds, settings.resets) = (false, false);
    }));
    let body = r#"{"limit":"per-user","key":"a","cost":1}"#;
    for path in ["/v1/check", "/v1/peek", "/v1/reserve", "/v1/refund", "/v1/reset", "/v1/settle"] {
        assert_documented(&document, path, "post", &send(with_token.address, path, "", body).await);
        assert_documented(
            &document,
            path,
            "post",
            &send(api.address, path, "Origin: http://a\r\n", body).await,
        );
        assert_documented(&document, path, "post", &send(api.address, path, "", "{").await);
        assert_documented(&document, path, "post", &send(api.address, path, "", &" ".repeat(70_000)).await);
        assert_documented(&document, path, "post", &send(disabled.address, path, "", body).await);
        let key = "Idempotency-Key: 7\r\n";
        assert_documented(&document, path, "post", &send(disabled.address, path, key, body).await);
        for _ in 0..2 {
            assert_documented(&document, path, "post", &send(api.address, path, key, body).await);
        }
    }
    let described = "X-Original-Method: GET\r\nX-Original-URI: /\r\nX-Original-Host: a\r\nX-Forwarded-For: 203.0.113.7\r\nX-User-Id: z\r\n";
    for query in ["", "?deny_status=401", "?deny_status=403", "?deny_status=429", "?deny_status=7"] {
        for headers in [described, "", "X-Original-Method: GET\r\n"] {
            for _ in 0..4 {
                let response = get(api.address, "GET", &format!("/v1/authorize{query}"), headers).await;
                assert_documented(&document, "/v1/authorize", "get", &response);
            }
        }
    }
    assert_documented(&document, "/openapi.json", "get", &get(api.address, "GET", "/openapi.json", "").await);
}

#[test]
fn every_reference_resolves() {
    fn walk(document: &Value, value: &Value) {
        if let Some(reference) = value.get("$ref").and_then(Value::as_str) {
            assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
        }
        match value {
            Value::Object(map) => map.values().for_each(|it| walk(document, it)),
            Value::Array(list) => list.iter().for_each(|it| walk(document, it)),
            _ => {}
        }
    }
    let document = document();
    walk(&document, &document);
}
