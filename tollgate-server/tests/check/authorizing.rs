//! Forward auth: requests as proxies describe them.

use tollgate::tower::Chosen;
use tollgate::tower::client::{Trust, parse_cidr};

use super::support::{Answer, Made, Running, get, open, run};

const LIMITS: &str = "limits:
  per-client: { key: ip, fixed_window: { limit: 2, window: 1h, align: first_request } }
  login:
    key: ip
    when: { path: /login, method: POST, host: shop.test }
    fixed_window: { limit: 1, window: 1h, align: first_request }";

/// As the snippet for nginx has it.
fn original(method: &str, uri: &str, client: &str) -> String {
    format!(
        "X-Original-Method: {method}\r\nX-Original-URI: {uri}\r\nX-Original-Host: shop.test\r\nX-Forwarded-For: {client}\r\n"
    )
}

/// As Traefik and Caddy have it.
fn forwarded(method: &str, uri: &str, client: &str) -> String {
    format!(
        "X-Forwarded-Method: {method}\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: shop.test\r\nX-Forwarded-Uri: {uri}\r\nX-Forwarded-For: {client}\r\n"
    )
}

async fn ask(door: &Running, query: &str, headers: &str) -> Answer {
    get(door.address, "GET", &format!("/v1/authorize{query}"), headers).await
}

#[tokio::test]
async fn a_client_is_let_in_as_often_as_its_limits_say() {
    for describe in [original, forwarded] {
        let door = run(LIMITS);
        for left in [1, 0] {
            let answer = ask(&door, "", &describe("GET", "/a?b=c", "203.0.113.7")).await;
            assert_eq!((answer.status, answer.body.as_str()), (200, ""), "{answer:?}");
            assert!(answer.header("ratelimit").unwrap().contains(&format!("r={left}")), "{answer:?}");
            assert_eq!(answer.header("cache-control"), Some("no-store"));
            assert_eq!(answer.header("x-ratelimit-denied"), None);
        }
        let headers = describe("GET", "/a", "203.0.113.7");
        let answer = ask(&door, "", &headers).await;
        assert_eq!((answer.status, answer.header("x-ratelimit-denied")), (403, Some("429")));
        assert_eq!(answer.header("retry-after"), Some("3600"));
        assert!(answer.header("ratelimit").is_some() && answer.header("ratelimit-policy").is_some());
        assert_eq!(answer.header("cache-control"), Some("no-store"));
        let whole = ask(&door, "?deny_status=429", &headers).await;
        assert_eq!((whole.status, whole.header("content-type")), (429, Some("application/problem+json")));
        assert_eq!(ask(&door, "?deny_status=401", &headers).await.status, 401);
        assert_eq!(ask(&door, "", &describe("GET", "/a", "203.0.113.8")).await.status, 200, "another client");
    }
}

/// Rules see the request that is asked about: its method, its path in any spelling, its host.
#[tokio::test]
async fn rules_see_the_original_request() {
    for describe in [original, forwarded] {
        let door = run(LIMITS);
        assert_eq!(ask(&door, "", &describe("POST", "/login", "203.0.113.7")).await.status, 200);
        for spelling in ["/login", "//login", "/x/../login", "/%6cogin", "/login?a=b"] {
            let answer = ask(&door, "", &describe("POST", spelling, "203.0.113.7")).await;
            assert_eq!(answer.status, 403, "{spelling}");
        }
        assert_eq!(ask(&door, "", &describe("GET", "/login", "203.0.113.7")).await.status, 200);
        let ambiguous = ask(&door, "", &describe("POST", "/a%2f..%2flogin", "203.0.113.9")).await;
        assert_eq!((ambiguous.status, ambiguous.header("x-ratelimit-denied")), (403, Some("400")));
        let whole = ask(&door, "?deny_status=429", &describe("POST", "/a%2fb", "203.0.113.9")).await;
        assert_eq!(whole.status, 400, "as it is");
    }
}

/// A proxy adds the address that it saw to the right of what a client sent.
#[tokio::test]
async fn clients_cannot_choose_their_address() {
    let door = run(LIMITS);
    for number in 0..2 {
        let headers = original("GET", "/", &format!("198.51.100.{number}, 203.0.113.7"));
        assert_eq!(ask(&door, "", &headers).await.status, 200);
    }
    assert_eq!(ask(&door, "", &original("GET", "/", "198.51.100.9, 203.0.113.7")).await.status, 403);
}

#[tokio::test]
async fn strangers_are_told_nothing() {
    let door = open(Made::new(LIMITS, |settings| {
        settings.trusted = Trust::proxies([parse_cidr("10.0.0.0/8").unwrap()]);
    }));
    let why = ask(&door, "", &original("GET", "/", "203.0.113.7")).await.problem(403);
    assert!(why.contains("client: { trusted"), "{why}");
}

/// Whoever describes a request badly gets no yes.
#[tokio::test]
async fn half_a_description_is_none() {
    let door = run(LIMITS);
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
        let said = ask(&door, "", &headers).await.problem(400);
        assert!(said.contains(why), "{headers}: {said}");
    }
    assert_eq!(ask(&door, "?deny_status=200", &whole).await.status, 400);
    assert_eq!(ask(&door, "?deny_status=403&deny_status=429", &whole).await.status, 400);
    // Nobody's header ends in the middle of another's.
    let split =
        get(door.address, "GET", "/v1/authorize", "X-Original-Method: GET\rX-Original-URI: /\r\n").await;
    assert_eq!(split.status, 400);
    let url = whole.replace("X-Original-URI: /", "X-Original-URL: https://shop.test/");
    assert_eq!(ask(&door, "", &url).await.status, 200);
}

/// The denial of a gRPC call has status 200 and the rest in a trailer: a proxy would let it pass.
#[tokio::test]
async fn a_denied_grpc_call_is_denied() {
    let door = run(LIMITS);
    let headers = format!("{}Content-Type: application/grpc\r\n", original("POST", "/a.B/C", "203.0.113.7"));
    for wanted in [200, 200, 403] {
        assert_eq!(ask(&door, "", &headers).await.status, wanted);
    }
    let whole = ask(&door, "?deny_status=429", &headers).await;
    assert_eq!((whole.status, whole.header("grpc-status")), (429, Some("8")));
}

/// Caddy asks for the host of its client, and a page's `Origin` comes through all proxies.
#[tokio::test]
async fn every_method_and_every_host_is_answered() {
    let door = run("limits: { all: { key: global, fixed_window: { limit: 100, window: 1h } } }");
    for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        let headers = format!("{}Origin: http://shop.test\r\n", forwarded("GET", "/", "203.0.113.7"));
        let text = format!(
            "{method} /v1/authorize HTTP/1.1\r\nHost: shop.test\r\nConnection: close\r\n{headers}\r\n"
        );
        assert_eq!(super::support::say(door.address, text).await.status, 200, "{method}");
    }
}

#[tokio::test]
async fn only_the_chosen_limits_count() {
    let yaml = "limits:
  strict: { key: global, fixed_window: { limit: 1, window: 1h, align: first_request } }
  loose: { key: global, fixed_window: { limit: 3, window: 1h, align: first_request } }";
    let door = open(Made::new(yaml, |settings| settings.authorize_limits = Some(Chosen([1].into()))));
    for wanted in [200, 200, 200, 403] {
        assert_eq!(ask(&door, "", &original("GET", "/", "203.0.113.7")).await.status, wanted);
    }
}
