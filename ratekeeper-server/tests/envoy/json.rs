//! The Envoy API as JSON.

use http::StatusCode;
use ratekeeper_server::envoy::{EnvoyApiSettings, EnvoyListenerSettings, MESSAGE_BYTES_MAX};
use serde_json::{Value, json};

use super::support::{TestService, run, run_with};

const DOMAINS: &str = "  edge:
    - { key: user, fixed_window: { limit: 2, window: 1m }, name: per-user, metadata: { team: one } }
    - { key: path, unlimited: true }
";

async fn call(service: &TestService, body: &[u8]) -> (StatusCode, Value) {
    let (status, text) = ratekeeper_server::envoy::json(body, &service.current.load()).await;
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

#[tokio::test]
async fn json_request_gets_a_json_response() {
    let options =
        EnvoyApiSettings { headers: true, denied_body: "no\n".into(), ..EnvoyApiSettings::default() };
    let service = run_with(DOMAINS, options, EnvoyListenerSettings::default());
    let body = br#"{"domain":"edge","descriptors":[
        {"entries":[{"key":"user","value":"ann"}]},{"entries":[{"key":"path","value":"/"}]},{"entries":[{"key":"x"}]}]}"#;
    let limit = json!({ "requestsPerUnit": 2, "unit": "MINUTE", "name": "per-user" });
    let headers = |remaining: &str| {
        json!([
            { "key": "x-ratelimit-limit", "value": "2" },
            { "key": "x-ratelimit-remaining", "value": remaining },
            { "key": "x-ratelimit-reset", "value": "60" },
        ])
    };
    let metadata = json!({
        "domain": "edge",
        "descriptors": [{ "entries": ["user=ann"] }, { "entries": ["path=/"] }, { "entries": ["x="] }],
        "metadata": { "team": "one" },
    });
    let statuses = |code: &str| {
        json!([
            { "code": code, "currentLimit": limit, "durationUntilReset": "60s" },
            { "code": "OK", "limitRemaining": u32::MAX },
            { "code": "OK" },
        ])
    };
    let mut first = statuses("OK");
    first[0]["limitRemaining"] = 1.into();
    let expected = json!({
        "overallCode": "OK", "statuses": first, "responseHeadersToAdd": headers("1"), "dynamicMetadata": metadata,
    });
    assert_eq!(call(&service, body).await, (StatusCode::OK, expected));
    assert_eq!(call(&service, body).await.0, StatusCode::OK);
    let expected = json!({
        "overallCode": "OVER_LIMIT",
        "statuses": statuses("OVER_LIMIT"),
        "responseHeadersToAdd": headers("0"),
        "rawBody": "bm8K",
    });
    assert_eq!(call(&service, body).await, (StatusCode::TOO_MANY_REQUESTS, expected));
}

#[tokio::test]
async fn every_form_of_the_json_mapping_is_accepted() {
    let service = run("  edge: [{ key: user, fixed_window: { limit: 20, window: 1m } }]\n");
    let entries = r#""entries":[{"key":"user","value":"ann"}]"#;
    for (request, remaining) in [
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}],"hitsAddend":2}}"#), 18),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}],"hits_addend":"2"}}"#), 16),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries},"hitsAddend":"3"}}]}}"#), 13),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries},"hits_addend":3,"limit":null}}]}}"#), 10),
        (
            format!(
                r#"{{"domain":"edge","descriptors":[{{{entries},"hitsAddend":1.0}}],"hitsAddend":null}}"#
            ),
            9,
        ),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries},"hitsAddend":0.2e1}}]}}"#), 7),
        (
            format!(
                r#"{{"domain":"edge","descriptors":[{{{entries},"limit":{{"requestsPerUnit":"5","unit":"HOUR"}}}}]}}"#
            ),
            4,
        ),
        (
            format!(
                r#"{{"domain":"edge","descriptors":[{{{entries},"limit":{{"requests_per_unit":5,"unit":3}}}}]}}"#
            ),
            3,
        ),
    ] {
        let (status, response) = call(&service, request.as_bytes()).await;
        assert_eq!(
            (status, &response["statuses"][0]["limitRemaining"]),
            (StatusCode::OK, &remaining.into()),
            "{response}"
        );
    }
}

#[tokio::test]
async fn invalid_json_is_rejected_with_a_reason() {
    let service = run(DOMAINS);
    let entries = r#""entries":[{"key":"user","value":"ann"}]"#;
    for (body, reason) in [
        ("".to_owned(), "EOF"),
        ("[]".to_owned(), "not a RateLimitRequest"),
        ("{}".to_owned(), "`domain` is empty"),
        (r#"{"domain":"edge"}"#.to_owned(), "`descriptors` is empty"),
        (r#"{"domain":"edge","descriptors":[],"other":1}"#.to_owned(), "unknown field `other`"),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}],"hitsAddend":-1}}"#), "a whole number"),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}],"hitsAddend":1.5}}"#), "a whole number"),
        (
            format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}],"hitsAddend":1e300}}"#),
            "a whole number",
        ),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}],"hitsAddend":true}}"#), "a whole number"),
        (
            format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}],"hitsAddend":4294967296}}"#),
            "below 2^32",
        ),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries},"limit":{{"unit":"WEEK"}}}}]}}"#), "SECOND"),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries},"limit":{{"unit":99}}}}]}}"#), "unit is 99"),
        (format!(r#"{{"domain":"edge","descriptors":[{{{entries},"limit":{{}}}}]}}"#), "unit is 0"),
    ] {
        let (status, response) = call(&service, body.as_bytes()).await;
        assert_eq!((status, &response["code"]), (StatusCode::BAD_REQUEST, &3.into()), "{body}");
        assert!(response["message"].as_str().unwrap().contains(reason), "{body}: {response}");
    }
    for body in [&b"\xff\xfe"[..], b"{\"domain\":\"\xff\"}", &[b'['; 100_000]] {
        assert_eq!(call(&service, body).await.0, StatusCode::BAD_REQUEST);
    }
    let refund = format!(r#"{{"domain":"edge","descriptors":[{{{entries},"isNegativeHits":true}}]}}"#);
    assert_eq!(call(&service, refund.as_bytes()).await.0, StatusCode::FORBIDDEN);
    let huge = vec![b' '; MESSAGE_BYTES_MAX + 1];
    assert_eq!(call(&service, &huge).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    let (_, last) =
        call(&service, format!(r#"{{"domain":"edge","descriptors":[{{{entries}}}]}}"#).as_bytes()).await;
    assert_eq!(last["statuses"][0]["limitRemaining"], 1, "nothing was charged");
}
