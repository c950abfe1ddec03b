//! Rate limit headers, bodies of denials, and merging with the upstream's headers.

use std::convert::Infallible;
use std::error::Error;

use http::{Request, Response};
use ratekeeper::tower::response::{DenialResponse, HeaderSet, NameError};
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::{LayerError, RatekeeperLayer};
use tower::{Layer, ServiceExt, service_fn};

use super::{TestResponse, get, hourly, ip, per_client, plain, send, statuses, with};

#[tokio::test]
async fn allowed_response_has_rate_limit_headers() {
    let layer = per_client(3).build().unwrap();
    let got = send(&layer, plain("/a?b=c")).await;
    assert_eq!((got.status, got.body.as_str()), (200, "/a?b=c"));
    assert_eq!(got.header("ratelimit-policy"), Some(r#""per-client";q=3;w=3600"#));
    assert_eq!(got.header("ratelimit"), Some(r#""per-client";r=2;t=3600"#));
    assert_eq!(got.header("retry-after"), None);
    let got = send(&layer, plain("/")).await;
    assert!(got.header("ratelimit").unwrap().starts_with(r#""per-client";r=1;t="#));
}

#[tokio::test]
async fn denied_request_gets_429_with_retry_after() {
    let layer = per_client(1).build().unwrap();
    assert_eq!(send(&layer, plain("/")).await.status, 200);
    let got = send(&layer, plain("/")).await;
    assert_eq!(got.status, 429);
    let wait: u64 = got.header("retry-after").unwrap().parse().unwrap();
    assert!((3590..=3600).contains(&wait), "{wait}");
    assert_eq!(got.header("ratelimit"), Some(format!(r#""per-client";r=0;t={wait}"#).as_str()));
    assert_eq!(got.header("ratelimit-policy"), Some(r#""per-client";q=1;w=3600"#));
    assert_eq!(got.header("cache-control"), Some("no-store"));
    assert_eq!(got.header("content-type"), Some("application/problem+json"));
    assert!(
        got.body.contains(r##""type":"https://iana.org/assignments/http-problem-types#quota-exceeded""##)
    );
    assert!(
        got.body.contains(r#""status":429"#) && got.body.contains(r#""violated-policies":["per-client"]"#)
    );
}

#[tokio::test]
async fn every_header_set_is_sent() {
    let names = |set: &str| -> &[&str] {
        match set {
            "ietf" => &["ratelimit", "ratelimit-policy"],
            "draft6" => &["ratelimit-limit", "ratelimit-remaining", "ratelimit-reset", "ratelimit-policy"],
            "legacy" | "legacy_epoch" => &["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"],
            "github" => &["x-ratelimit-limit", "x-ratelimit-used", "x-ratelimit-resource"],
            "spring" => &["x-ratelimit-remaining", "x-ratelimit-burst-capacity"],
            "none" => &[],
            _ => panic!("an unknown header set: {set}"),
        }
    };
    for set in HeaderSet::all() {
        let layer = per_client(1).headers(set).build().unwrap();
        for status in [200, 429] {
            let got = send(&layer, plain("/")).await;
            assert_eq!(got.status, status);
            for name in names(set.name()) {
                assert!(got.header(name).is_some(), "{name} of {set:?}: {got:?}");
            }
            let header_count = got.headers.keys().filter(|name| name.as_str().contains("ratelimit")).count();
            assert_eq!(header_count == 0, set.name() == "none", "{set:?}");
            assert_eq!(got.header("retry-after").is_some(), status == 429, "{set:?}");
        }
    }
}

/// The response through the layer if the service sends these headers.
async fn beside(set: &str, theirs: &'static [(&'static str, &'static str)]) -> TestResponse {
    let upstream = move |_: Request<String>| async move {
        let mut response = Response::builder();
        for (name, value) in theirs {
            response = response.header(*name, *value);
        }
        Ok::<_, Infallible>(response.body(String::new()).unwrap())
    };
    let layer = per_client(5).headers(HeaderSet::named(set).unwrap()).build().unwrap();
    let response = layer.layer(service_fn(upstream)).oneshot(plain("/")).await.unwrap();
    TestResponse {
        status: response.status().as_u16(),
        headers: response.headers().clone(),
        body: String::new(),
    }
}

#[tokio::test]
async fn upstream_list_headers_are_merged() {
    let got = beside("ietf", &[("ratelimit", r#""theirs";r=1"#), ("ratelimit", r#""other";r=2"#)]).await;
    let both = r#""theirs";r=1, "other";r=2, "per-client";r=4;t=3600"#;
    assert_eq!(got.header("ratelimit"), Some(both));
    assert_eq!(got.header("ratelimit-policy"), Some(r#""per-client";q=5;w=3600"#));

    // An older draft is not a list, so our header is added as a separate line.
    let got = beside("ietf", &[("ratelimit", "limit=100, remaining=50, reset=1")]).await;
    let lines: Vec<&str> = got.headers.get_all("ratelimit").iter().map(|it| it.to_str().unwrap()).collect();
    assert_eq!(lines, ["limit=100, remaining=50, reset=1", r#""per-client";r=4;t=3600"#]);
}

#[tokio::test]
async fn upstream_single_value_headers_are_kept() {
    let got = beside("legacy", &[("x-ratelimit-limit", "77")]).await;
    assert_eq!(got.header("x-ratelimit-limit"), Some("77"));
    assert_eq!(got.header("x-ratelimit-remaining"), None);
    let got = beside("draft6", &[("ratelimit-remaining", "7"), ("ratelimit-policy", "100;w=60")]).await;
    assert_eq!(got.header("ratelimit-limit"), None);
    assert_eq!(got.header("ratelimit-remaining"), Some("7"));
    assert_eq!(got.header("ratelimit-policy"), Some("100;w=60, 5;w=3600"));
    let got = beside("legacy", &[("x-other", "77")]).await;
    assert_eq!(got.header("x-ratelimit-remaining"), Some("4"));
}

#[tokio::test]
async fn custom_denial_response_is_sent_except_to_grpc() {
    let custom = DenialResponse::default().with_status(420).unwrap().with_body("<p>calm</p>");
    let custom = custom.with_content_type("text/html").unwrap();
    let layer = per_client(1).deny_response("per-client", custom).build().unwrap();
    send(&layer, plain("/")).await;
    let got = send(&layer, plain("/")).await;
    assert_eq!((got.status, got.body.as_str()), (420, "<p>calm</p>"));
    assert_eq!(got.header("content-type"), Some("text/html"));
    assert!(got.header("retry-after").is_some() && got.header("ratelimit").is_some());

    // gRPC clients get status 8; any other status has a different meaning.
    let call = || get("/").header("content-type", "application/grpc").body(String::new()).unwrap();
    let got = send(&layer, call()).await;
    assert_eq!((got.status, got.header("grpc-status"), got.body.as_str()), (200, Some("8"), ""));
}

#[tokio::test]
async fn denied_grpc_call_gets_a_grpc_status() {
    let call = |kind: &str| get("/").header("content-type", kind).body(String::new()).unwrap();
    let layer = per_client(1).build().unwrap();
    let got = send(&layer, call("application/grpc")).await;
    assert_eq!((got.status, got.header("grpc-status"), got.body.as_str()), (200, None, "/"));
    let got = send(&layer, call("application/grpc+proto")).await;
    assert_eq!((got.status, got.header("grpc-status")), (200, Some("8")));
    assert_eq!(got.header("content-type"), Some("application/grpc"));
    let wait = got.header("retry-after").unwrap();
    let message = format!("too many requests; retry in {wait} s");
    assert_eq!(got.header("grpc-message"), Some(message.as_str()));
    assert_eq!(got.body, "", "trailers only");
    let got = send(&layer, call("application/grpc-web-text")).await;
    assert_eq!(got.header("content-type"), Some("application/grpc-web-text"));
    assert_eq!(got.header("grpc-status"), Some("8"));

    let twice = get("/a%2fb").header("content-type", "application/grpc").body(String::new()).unwrap();
    let got = send(&layer, twice).await;
    assert_eq!((got.status, got.header("grpc-status")), (200, Some("3")));
    assert!(got.header("grpc-message").unwrap().contains("an encoded slash"), "{got:?}");
}

#[tokio::test]
async fn jitter_lengthens_retry_after_up_to_its_maximum() {
    let layer = per_client(1).jitter_secs(1000).build().unwrap();
    send(&layer, plain("/")).await;
    let mut waits = Vec::new();
    for _ in 0..50 {
        let got = send(&layer, plain("/")).await;
        waits.push(got.header("retry-after").unwrap().parse::<u64>().unwrap());
    }
    assert!(waits.iter().all(|wait| (3590..=4600).contains(wait)), "{waits:?}");
    waits.sort_unstable();
    waits.dedup();
    assert!(waits.len() > 10, "fifty of a thousand are hardly ever the same: {waits:?}");
}

#[tokio::test]
async fn response_without_applicable_rule_has_no_headers() {
    let rule = Rule::new("posts", hourly(1)).key(ip()).when(super::conditions::methods(&["POST"]));
    let layer = RatekeeperLayer::builder().rule(rule).build().unwrap();
    for _ in 0..3 {
        let got = send(&layer, plain("/")).await;
        assert_eq!((got.status, got.headers.len()), (200, 0));
    }
}

#[tokio::test]
async fn headers_report_all_limits() {
    let layer = per_client(5).rule(Rule::new("all", hourly(2))).build().unwrap();
    let got = send(&layer, plain("/")).await;
    assert_eq!(got.header("ratelimit"), Some(r#""per-client";r=4;t=3600, "all";r=1;t=3600"#));
    assert_eq!(statuses(&layer, [plain("/"), plain("/")]).await, [200, 429]);
    let got = send(&layer, with("x", "y")).await;
    assert!(got.header("ratelimit").unwrap().starts_with(r#""per-client";r=3;"#), "{got:?}");
    assert!(got.body.contains(r#""violated-policies":["all"]"#));
}

#[test]
fn invalid_layer_is_an_error_with_a_reason() {
    let error = |builder: ratekeeper::tower::LayerBuilder| builder.build().unwrap_err();
    assert_eq!(error(RatekeeperLayer::builder()), LayerError::NoRules);
    let twice = error(per_client(1).per_client("per-client", hourly(2)));
    assert_eq!(twice.to_string(), "two limits are called per-client; give one another name");
    let unknown = error(per_client(1).deny_response("pre-client", DenialResponse::default()));
    assert_eq!(unknown.to_string(), "there is an answer for the rule pre-client, but no such rule");
    assert!(matches!(error(per_client(1).max_keys(0)), LayerError::Memory(_)));
    let unspeakable = error(RatekeeperLayer::builder().per_client("tägl", hourly(1)));
    assert!(matches!(unspeakable, LayerError::Name(..)), "{unspeakable}");
}

#[test]
fn layer_error_has_its_cause_as_source() {
    let error = RatekeeperLayer::builder().per_client("", hourly(1)).build().unwrap_err();
    let source = error.source().and_then(|source| source.downcast_ref());
    assert_eq!(source, Some(&NameError::Empty));
    // An error with the message of its cause is not repeated in the chain.
    assert!(per_client(1).max_keys(0).build().unwrap_err().source().is_none());
}
