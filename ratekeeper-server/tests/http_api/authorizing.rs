//! `/v1/authorize`: requests as proxies describe them.

use ratekeeper::tower::RuleSet;
use ratekeeper::tower::client::{TrustedProxies, parse_cidr};

use super::support::{Answer, Made, Running, get, open, run};

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

async fn ask(api: &Running, query: &str, headers: &str) -> Answer {
    get(api.address, "GET", &format!("/v1/authorize{query}"), headers).await
}

#[tokio::test]
async fn client_is_allowed_up_to_its_limits() {
    for describe in [original, forwarded] {
        let api = run(LIMITS);
        for left in [1, 0] {
            let answer = ask(&api, "", &describe("GET", "/a?b=c", "203.0.113.7")).await;
            assert_eq!((answer.status, answer.body.as_str()), (200, ""), "{answer:?}");
            assert!(answer.header("ratelimit").unwrap().contains(&format!("r={left}")), "{answer:?}");
            assert_eq!(answer.header("cache-control"), Some("no-store"));
            assert_eq!(answer.header("x-ratelimit-denied"), None);
        }
        let headers = describe("GET", "/a", "203.0.113.7");
        let answer = ask(&api, "", &headers).await;
        assert_eq!((answer.status, answer.header("x-ratelimit-denied")), (403, Some("429")));
        assert_eq!(answer.header("retry-after"), Some("3600"));
        assert!(answer.header("ratelimit").is_some() && answer.header("ratelimit-policy").is_some());
        assert_eq!(answer.header("cache-control"), Some("no-store"));
        let whole = ask(&api, "?deny_status=429", &headers).await;
        assert_eq!((whole.status, whole.header("content-type")), (429, Some("application/problem+json")));
        assert_eq!(ask(&api, "?deny_status=401", &headers).await.status, 401);
        assert_eq!(ask(&api, "", &describe("GET", "/a", "203.0.113.8")).await.status, 200, "another client");
    }
}

/// Rules apply to the original request: its method, its normalised path, its host.
#[tokio::test]
async fn rules_see_the_original_request() {
    for describe in [original, forwarded] {
        let api = run(LIMITS);
        assert_eq!(ask(&api, "", &describe("POST", "/login", "203.0.113.7")).await.status, 200);
        for spelling in ["/login", "//login", "/x/../login", "/%6cogin", "/login?a=b"] {
            let answer = ask(&api, "", &describe("POST", spelling, "203.0.113.7")).await;
            assert_eq!(answer.status, 403, "{spelling}");
        }
        assert_eq!(ask(&api, "", &describe("GET", "/login", "203.0.113.7")).await.status, 200);
        let ambiguous = ask(&api, "", &describe("POST", "/a%2f..%2flogin", "203.0.113.9")).await;
        assert_eq!((ambiguous.status, ambiguous.header("x-ratelimit-denied")), (403, Some("400")));
        let whole = ask(&api, "?deny_status=429", &describe("POST", "/a%2fb", "203.0.113.9")).await;
        assert_eq!(whole.status, 400, "as it is");
    }
}

/// A proxy appends the address of its peer to the right of what the client sent.
#[tokio::test]
async fn clients_cannot_choose_their_address() {
    let api = run(LIMITS);
    for number in 0..2 {
        let headers = original("GET", "/", &format!("198.51.100.{number}, 203.0.113.7"));
        assert_eq!(ask(&api, "", &headers).await.status, 200);
    }
    assert_eq!(ask(&api, "", &original("GET", "/", "198.51.100.9, 203.0.113.7")).await.status, 403);
}

#[tokio::test]
async fn untrusted_addresses_are_rejected() {
    let api = open(Made::new(LIMITS, |settings| {
        settings.trusted = TrustedProxies::proxies([parse_cidr("10.0.0.0/8").unwrap()]);
    }));
    let why = ask(&api, "", &original("GET", "/", "203.0.113.7")).await.problem(403);
    assert!(why.contains("client: { trusted"), "{why}");
}

/// An incomplete or ambiguous description is never allowed.
#[tokio::test]
async fn incomplete_description_is_rejected() {
    let api = run(LIMITS);
    let whole = original("GET", "/", "203.0.113.7");
    let other = forwarded("GET", "/", "203.0.113.7");
    let without = |all: &str, name: &str| -> String {
        all.split_inclusive("\r\n").filter(|line| !line.starts_with(name)).collect()
    };
    let with = |line: &str| format!("{whole}{line}\r\n");
    for (headers, why) in [
        (String::new(), "no request is described"),
        (without(&whole, "X-Original-Method"), "x-original-method"),
        (without(&whole, "X-Original-URI"), "`X-Original-URI` is missing"),
        (without(&whole, "X-Original-Host"), "`X-Original-Host` is missing"),
        (without(&whole, "X-Forwarded-For"), "x-forwarded-for"),
        (without(&other, "X-Forwarded-Method"), "x-forwarded-method"),
        (without(&other, "X-Forwarded-Uri"), "x-forwarded-uri"),
        (without(&other, "X-Forwarded-Host"), "x-forwarded-host"),
        (without(&other, "X-Forwarded-For"), "x-forwarded-for"),
        (format!("{whole}{}", without(&other, "X-Forwarded-For")), "described twice"),
        (with("X-Forwarded-Uri: /cheap"), "described twice"),
        (with("X-Original-URI: /cheap"), "there twice"),
        (with("X-Original-Method: OPTIONS"), "there twice"),
        (with("X-Original-Host: other.test"), "there twice"),
        (with("X-Original-URL: http://shop.test/cheap"), "two targets"),
        (with("X-Original-URL: http://other.test/"), "two hosts"),
        (with("X-Original-URL: shop.test/"), "no URL"),
        (with("X-Original-URL: ftp://shop.test/"), "no URL"),
        (original("GET", "cheap", "203.0.113.7"), "begins with `/`"),
        (original("GET", "http://shop.test/", "203.0.113.7"), "begins with `/`"),
        (original("GET", "/a#b", "203.0.113.7"), "no `#`"),
        (original("GET", "/a b", "203.0.113.7"), "does not belong there"),
        (original("GET", "*", "203.0.113.7"), "OPTIONS alone"),
        (original("G(T", "/", "203.0.113.7"), "method"),
        (original("CONNECT", "/", "203.0.113.7"), "method"),
        (original("GET", "", "203.0.113.7"), "does not belong there"),
        (whole.replace("shop.test", "user@shop.test"), "host"),
    ] {
        let said = ask(&api, "", &headers).await.problem(400);
        assert!(said.contains(why), "{headers}: {said}");
    }
    assert_eq!(ask(&api, "?deny_status=200", &whole).await.status, 400);
    assert_eq!(ask(&api, "?deny_status=403&deny_status=429", &whole).await.status, 400);
    // A bare CR does not separate headers.
    let split =
        get(api.address, "GET", "/v1/authorize", "X-Original-Method: GET\rX-Original-URI: /\r\n").await;
    assert_eq!(split.status, 400);
    let url = whole.replace("X-Original-URI: /", "X-Original-URL: https://shop.test/");
    assert_eq!(ask(&api, "", &url).await.status, 200);
}

/// A gRPC denial has status 200 and its code in `grpc-status`: a proxy would take it for an allowed request.
#[tokio::test]
async fn denied_grpc_call_has_a_denial_status() {
    let api = run(LIMITS);
    let headers = format!("{}Content-Type: application/grpc\r\n", original("POST", "/a.B/C", "203.0.113.7"));
    for wanted in [200, 200, 403] {
        assert_eq!(ask(&api, "", &headers).await.status, wanted);
    }
    let whole = ask(&api, "?deny_status=429", &headers).await;
    assert_eq!((whole.status, whole.header("grpc-status")), (429, Some("8")));
}

/// Caddy sends its client's host, and a page's `Origin` passes through all proxies.
#[tokio::test]
async fn every_method_and_every_host_is_answered() {
    let api = run("limits: { all: { key: global, fixed_window: { limit: 100, window: 1h } } }");
    for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        let headers = format!("{}Origin: http://shop.test\r\n", forwarded("GET", "/", "203.0.113.7"));
        let text = format!(
            "{method} /v1/authorize HTTP/1.1\r\nHost: shop.test\r\nConnection: close\r\n{headers}\r\n"
        );
        assert_eq!(super::support::say(api.address, text).await.status, 200, "{method}");
    }
}

#[tokio::test]
async fn only_selected_limits_apply() {
    let yaml = "limits:
  strict: { key: global, fixed_window: { limit: 1, window: 1h, align: first_request } }
  loose: { key: global, fixed_window: { limit: 3, window: 1h, align: first_request } }";
    let api = open(Made::new(yaml, |settings| settings.authorize_limits = Some(RuleSet([1].into()))));
    for wanted in [200, 200, 200, 403] {
        assert_eq!(ask(&api, "", &original("GET", "/", "203.0.113.7")).await.status, wanted);
    }
}
