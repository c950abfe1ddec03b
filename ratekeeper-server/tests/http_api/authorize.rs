//! `/v1/authorize`: requests as proxies describe them.

use ratekeeper::tower::RuleSet;
use ratekeeper::tower::client::{TrustedProxies, parse_cidr};

use super::support::{TestApi, TestContext, TestResponse, get, open, run};

const LIMITS: &str = "limits:
  per-client: { key: ip, fixed_window: { limit: 2, window: 1h, align: first_request } }
  login:
    key: ip
    when: { path: /login, method: POST, host: shop.test }
    fixed_window: { limit: 1, window: 1h, align: first_request }";

/// The headers of the documented nginx configuration.
fn original(method: &str, uri: &str, client: &str) -> String {
    format!(
        "X-Original-Method: {method}\r\nX-Original-URI: {uri}\r\nX-Original-Host: shop.test\r\nX-Forwarded-For: {client}\r\n"
    )
}

/// The headers of Traefik and Caddy.
fn forwarded(method: &str, uri: &str, client: &str) -> String {
    format!(
        "X-Forwarded-Method: {method}\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: shop.test\r\nX-Forwarded-Uri: {uri}\r\nX-Forwarded-For: {client}\r\n"
    )
}

async fn authorize(api: &TestApi, query: &str, headers: &str) -> TestResponse {
    get(api.address, "GET", &format!("/v1/authorize{query}"), headers).await
}

#[tokio::test]
async fn client_is_allowed_up_to_its_limits() {
    for describe in [original, forwarded] {
        let api = run(LIMITS);
        for remaining in [1, 0] {
            let response = authorize(&api, "", &describe("GET", "/a?b=c", "203.0.113.7")).await;
            assert_eq!((response.status, response.body.as_str()), (200, ""), "{response:?}");
            assert!(
                response.header("ratelimit").unwrap().contains(&format!("r={remaining}")),
                "{response:?}"
            );
            assert_eq!(response.header("cache-control"), Some("no-store"));
            assert_eq!(response.header("x-ratelimit-denied"), None);
        }
        let headers = describe("GET", "/a", "203.0.113.7");
        let response = authorize(&api, "", &headers).await;
        assert_eq!((response.status, response.header("x-ratelimit-denied")), (403, Some("429")));
        assert_eq!(response.header("retry-after"), Some("3600"));
        assert!(response.header("ratelimit").is_some() && response.header("ratelimit-policy").is_some());
        assert_eq!(response.header("cache-control"), Some("no-store"));
        let complete = authorize(&api, "?deny_status=429", &headers).await;
        assert_eq!(
            (complete.status, complete.header("content-type")),
            (429, Some("application/problem+json"))
        );
        assert_eq!(authorize(&api, "?deny_status=401", &headers).await.status, 401);
        assert_eq!(
            authorize(&api, "", &describe("GET", "/a", "203.0.113.8")).await.status,
            200,
            "another client"
        );
    }
}

/// Rules apply to the original request: its method, its normalized path, its host.
#[tokio::test]
async fn rules_see_the_original_request() {
    for describe in [original, forwarded] {
        let api = run(LIMITS);
        assert_eq!(authorize(&api, "", &describe("POST", "/login", "203.0.113.7")).await.status, 200);
        for target in ["/login", "//login", "/x/../login", "/%6cogin", "/login?a=b"] {
            let response = authorize(&api, "", &describe("POST", target, "203.0.113.7")).await;
            assert_eq!(response.status, 403, "{target}");
        }
        assert_eq!(authorize(&api, "", &describe("GET", "/login", "203.0.113.7")).await.status, 200);
        let ambiguous = authorize(&api, "", &describe("POST", "/a%2f..%2flogin", "203.0.113.9")).await;
        assert_eq!((ambiguous.status, ambiguous.header("x-ratelimit-denied")), (403, Some("400")));
        let complete = authorize(&api, "?deny_status=429", &describe("POST", "/a%2fb", "203.0.113.9")).await;
        assert_eq!(complete.status, 400, "the real status");
    }
}

/// A proxy appends the address of its peer to the right of what the client sent.
#[tokio::test]
async fn clients_cannot_choose_their_address() {
    let api = run(LIMITS);
    for number in 0..2 {
        let headers = original("GET", "/", &format!("198.51.100.{number}, 203.0.113.7"));
        assert_eq!(authorize(&api, "", &headers).await.status, 200);
    }
    assert_eq!(authorize(&api, "", &original("GET", "/", "198.51.100.9, 203.0.113.7")).await.status, 403);
}

#[tokio::test]
async fn untrusted_addresses_are_rejected() {
    let api = open(TestContext::new(LIMITS, |settings| {
        settings.trusted_proxies = TrustedProxies::proxies([parse_cidr("10.0.0.0/8").unwrap()]);
    }));
    let reason = authorize(&api, "", &original("GET", "/", "203.0.113.7")).await.problem(403);
    assert!(reason.contains("client: { trusted_proxies"), "{reason}");
}

/// An incomplete or ambiguous description is never allowed.
#[tokio::test]
async fn incomplete_description_is_rejected() {
    let api = run(LIMITS);
    let complete = original("GET", "/", "203.0.113.7");
    let other = forwarded("GET", "/", "203.0.113.7");
    let without = |all: &str, name: &str| -> String {
        all.split_inclusive("\r\n").filter(|line| !line.starts_with(name)).collect()
    };
    let with = |line: &str| format!("{complete}{line}\r\n");
    for (headers, reason) in [
        (String::new(), "the request is not described"),
        (without(&complete, "X-Original-Method"), "x-original-method"),
        (without(&complete, "X-Original-URI"), "`X-Original-URI` is missing"),
        (without(&complete, "X-Original-Host"), "`X-Original-Host` is missing"),
        (without(&complete, "X-Forwarded-For"), "x-forwarded-for"),
        (without(&other, "X-Forwarded-Method"), "x-forwarded-method"),
        (without(&other, "X-Forwarded-Uri"), "x-forwarded-uri"),
        (without(&other, "X-Forwarded-Host"), "x-forwarded-host"),
        (without(&other, "X-Forwarded-For"), "x-forwarded-for"),
        (format!("{complete}{}", without(&other, "X-Forwarded-For")), "described by both"),
        (with("X-Forwarded-Uri: /cheap"), "described by both"),
        (with("X-Original-URI: /cheap"), "sent twice"),
        (with("X-Original-Method: OPTIONS"), "sent twice"),
        (with("X-Original-Host: other.test"), "sent twice"),
        (with("X-Original-URL: http://shop.test/cheap"), "different targets"),
        (with("X-Original-URL: http://other.test/"), "different hosts"),
        (with("X-Original-URL: shop.test/"), "not a URL"),
        (with("X-Original-URL: ftp://shop.test/"), "not a URL"),
        (original("GET", "cheap", "203.0.113.7"), "begin with `/`"),
        (original("GET", "http://shop.test/", "203.0.113.7"), "begin with `/`"),
        (original("GET", "/a#b", "203.0.113.7"), "contain no `#`"),
        (original("GET", "/a b", "203.0.113.7"), "invalid characters"),
        (original("GET", "*", "203.0.113.7"), "only for OPTIONS"),
        (original("G(T", "/", "203.0.113.7"), "method"),
        (original("CONNECT", "/", "203.0.113.7"), "method"),
        (original("GET", "", "203.0.113.7"), "invalid characters"),
        (complete.replace("shop.test", "user@shop.test"), "host"),
    ] {
        let detail = authorize(&api, "", &headers).await.problem(400);
        assert!(detail.contains(reason), "{headers}: {detail}");
    }
    assert_eq!(authorize(&api, "?deny_status=200", &complete).await.status, 400);
    assert_eq!(authorize(&api, "?deny_status=403&deny_status=429", &complete).await.status, 400);
    // A bare CR does not separate headers.
    let split =
        get(api.address, "GET", "/v1/authorize", "X-Original-Method: GET\rX-Original-URI: /\r\n").await;
    assert_eq!(split.status, 400);
    let url = complete.replace("X-Original-URI: /", "X-Original-URL: https://shop.test/");
    assert_eq!(authorize(&api, "", &url).await.status, 200);
}

/// Two servers could read it as different hosts, for which different limits apply.
#[tokio::test]
async fn malformed_host_is_denied() {
    let api = run(LIMITS);
    for host in ["shop.test..", "shop..test", "shop.test,a", "shop%2etest", "[::1"] {
        for describe in [original, forwarded] {
            let headers = describe("GET", "/", "203.0.113.7").replace("shop.test", host);
            let response = authorize(&api, "", &headers).await;
            let is_denied = response.status == 403 && response.header("x-ratelimit-denied") == Some("400");
            // What no URI can have as its host is rejected before the middleware.
            assert!(is_denied || response.status == 400, "{host}: {response:?}");
        }
    }
}

/// A gRPC denial has status 200 and its code in `grpc-status`: a proxy would take it for an allowed request.
#[tokio::test]
async fn denied_grpc_call_has_an_error_status() {
    let api = run(LIMITS);
    let headers = format!("{}Content-Type: application/grpc\r\n", original("POST", "/a.B/C", "203.0.113.7"));
    for expected in [200, 200, 403] {
        assert_eq!(authorize(&api, "", &headers).await.status, expected);
    }
    let complete = authorize(&api, "?deny_status=429", &headers).await;
    assert_eq!((complete.status, complete.header("grpc-status")), (429, Some("8")));
}

/// Caddy sends its client's host, and a page's `Origin` passes through all proxies.
#[tokio::test]
async fn every_method_and_every_host_is_answered() {
    let api = run("limits: { total: { key: global, fixed_window: { limit: 100, window: 1h } } }");
    for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        let headers = format!("{}Origin: http://shop.test\r\n", forwarded("GET", "/", "203.0.113.7"));
        let text = format!(
            "{method} /v1/authorize HTTP/1.1\r\nHost: shop.test\r\nConnection: close\r\n{headers}\r\n"
        );
        assert_eq!(super::support::send_raw(api.address, text).await.status, 200, "{method}");
    }
}

#[tokio::test]
async fn only_selected_limits_apply() {
    let yaml = "limits:
  strict: { key: global, fixed_window: { limit: 1, window: 1h, align: first_request } }
  loose: { key: global, fixed_window: { limit: 3, window: 1h, align: first_request } }";
    let api = open(TestContext::new(yaml, |settings| settings.authorize_limits = Some(RuleSet([1].into()))));
    for expected in [200, 200, 200, 403] {
        assert_eq!(authorize(&api, "", &original("GET", "/", "203.0.113.7")).await.status, expected);
    }
}

/// The proxy forwards both spellings, and the application may read the other one.
#[tokio::test]
async fn other_spellings_of_a_key_header_are_rejected() {
    let api =
        run("limits: { per-user: { key: { header: X-User-Id }, fixed_window: { limit: 2, window: 1h } } }");
    let headers = original("GET", "/", "203.0.113.7");
    for (more, wanted) in [
        ("X-User-Id: ann\r\n", 200),
        ("X-User-Id: r1\r\nX_User_Id: ann\r\n", 400),
        ("X.User.Id: ann\r\n", 400),
    ] {
        let response = authorize(&api, "?deny_status=429", &format!("{headers}{more}")).await;
        assert_eq!(response.status, wanted, "{more}: {response:?}");
    }
}
