//! Rejections: each invalid request gets a specific status and reason.

use std::time::Duration;

use ratekeeper_server::http_api::{self, BODY_BYTES_MAX, CHECKS_MAX, KEY_BYTES_MAX, KEY_PARTS_MAX};
use serde_json::{Value, json};
use testbed::TEST_TIMEOUT;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::support::{PER_USER, TestContext, get, open, peek_remaining, post, run, send, send_raw};

#[tokio::test]
async fn invalid_bodies_are_rejected_with_a_reason() {
    let api = run(PER_USER);
    for (body, status, reason) in [
        ("", 400, "not JSON"),
        ("{", 400, "not JSON"),
        (r#"{"limit":"per-user","key":"a"} {}"#, 400, "not JSON"),
        ("[]", 422, "the body must be a JSON object"),
        ("7", 422, "the body must be a JSON object"),
        (r#"{"checks":[7]}"#, 422, "expected a JSON object"),
        (r#"{"checks":[{"key":"a"}]}"#, 422, "field `limit` is missing"),
        (r#"{"limit":"per-user","key":"a","cost":1e-400}"#, 422, "1e-400"),
        (r#"{"limit":"per-user","key":"a","cost":1.00000000000000000001}"#, 422, "1.00000000000000000001"),
        (r#"{"limit":"per-user","key":"a","cost":"1"}"#, 422, "a whole number"),
        ("{}", 422, "send `limit`"),
        (r#"{"checks":[]}"#, 422, "at least one"),
        (r#"{"limit":"per-user","checks":[]}"#, 422, "either `limit` or `checks`"),
        (r#"{"key":"a","checks":[{"limit":"per-user","key":"a"}]}"#, 422, "in each element of `checks`"),
        (r#"{"limit":"per-user","key":"a","csot":2}"#, 422, "unknown field `csot`"),
        (r#"{"limit":"per-user","limit":"per-user","key":"a"}"#, 422, "duplicate field"),
        (r#"{"limit":"per-user","key":"a","cost":-1}"#, 422, "-1"),
        (r#"{"limit":"per-user","key":"a","cost":1.5}"#, 422, "1.5"),
        (r#"{"limit":"per-user","key":"a","cost":4294967296}"#, 422, "4294967296"),
        (r#"{"limit":"per-user","key":7}"#, 422, "a string, or a list"),
        (r#"{"limit":"per-user","key":["a","b"]}"#, 422, "has 1 part"),
        (r#"{"limit":"per-user"}"#, 422, "has 1 part"),
        (r#"{"limit":"per-user","key":""}"#, 422, "is empty"),
        (r#"{"limit":"per-user","key":"a","deny_status":500}"#, 422, "one of 200, 403, 429"),
        (r#"{"limit":"per-usr","key":"a"}"#, 404, "did you mean `per-user`?"),
        (r#"{"limit":"something else","key":"a"}"#, 404, "a configured limit"),
        (r#"{"checks":[{"limit":"per-user","key":"a"},{"limit":"per-user","key":[]}]}"#, 422, "checks[1]"),
        (r#"{"limit":"per-user","key":"\ud800"}"#, 400, "not JSON"),
    ] {
        for path in ["/v1/check", "/v1/peek"] {
            let detail = send(api.address, path, "", body).await.problem(status);
            assert!(detail.contains(reason), "{path} {body}: {detail}");
            assert!(!detail.contains("struct"), "{path} {body}: {detail}");
        }
    }
    for (path, body, reason) in [
        ("/v1/settle", r#"{"cost":1}"#, "field `reservation` is missing"),
        ("/v1/settle", "[]", "the body must be a JSON object"),
        ("/v1/reserve", "{}", "field `limit` is missing"),
        ("/v1/refund", "\"a\"", "the body must be a JSON object"),
    ] {
        let detail = send(api.address, path, "", body).await.problem(422);
        assert!(detail.contains(reason), "{path} {body}: {detail}");
    }
    assert_eq!(peek_remaining(api.address, "per-user", "a").await, 10, "nothing was charged");
    let deny =
        send(api.address, "/v1/check?deny_status=teapot", "", r#"{"limit":"per-user","key":"a"}"#).await;
    assert!(deny.problem(400).contains("sent once"));
}

#[tokio::test]
async fn wrong_methods_types_and_paths_are_rejected() {
    let api = run(PER_USER);
    let response = get(api.address, "GET", "/v1/check", "").await;
    response.problem(405);
    assert_eq!(response.header("allow"), Some("POST"));
    get(api.address, "POST", "/openapi.json", "").await.problem(405);
    get(api.address, "GET", "/v1/chekc", "").await.problem(404);
    let body = r#"{"limit":"per-user","key":"a"}"#;
    let length = body.len();
    for kind in ["", "Content-Type: text/plain\r\n", "Content-Type: application/x-www-form-urlencoded\r\n"] {
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {length}\r\n"
        );
        let response = send_raw(api.address, format!("{head}{kind}\r\n{body}")).await;
        assert!(response.problem(415).contains("application/json"));
    }
    assert_eq!(
        get(api.address, "GET", "/openapi.json", "").await.header("content-type"),
        Some("application/json")
    );
}

#[tokio::test]
async fn sizes_are_bounded() {
    let api = run(PER_USER);
    let long = "x".repeat(BODY_BYTES_MAX);
    let response = post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": long })).await;
    assert!(response.problem(413).contains(&BODY_BYTES_MAX.to_string()));
    // A chunked body, without a declared length.
    let chunk = format!("{:x}\r\n{long}\r\n5\r\nabcde\r\n0\r\n\r\n", long.len());
    let head = "POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n";
    send_raw(api.address, format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}")).await.problem(413);

    let key = |bytes: usize| json!({ "limit": "per-user", "key": "x".repeat(bytes) });
    assert_eq!(post(api.address, "/v1/check", &key(KEY_BYTES_MAX)).await.status, 200);
    post(api.address, "/v1/check", &key(KEY_BYTES_MAX + 1)).await.problem(422);
    let parts = json!({ "limit": "per-user", "key": vec!["a"; KEY_PARTS_MAX + 1] });
    assert!(post(api.address, "/v1/check", &parts).await.problem(422).contains("16 parts"));
    let checks = |count: usize| {
        let one = |number: usize| json!({ "limit": "per-user", "key": number.to_string() });
        json!({ "checks": (0..count).map(one).collect::<Vec<Value>>() })
    };
    assert_eq!(post(api.address, "/v1/check", &checks(CHECKS_MAX)).await.status, 200);
    assert!(post(api.address, "/v1/check", &checks(CHECKS_MAX + 1)).await.problem(422).contains("65 checks"));
    let deep = format!("{}{}", r#"{"key":"#, "[".repeat(10_000));
    assert!(matches!(send(api.address, "/v1/check", "", &deep).await.status, 400 | 422));
    // The reason for a long input is short.
    let named = json!({ "limit": "y".repeat(60_000) });
    assert!(post(api.address, "/v1/check", &named).await.problem(404).len() < 500);
}

#[tokio::test]
async fn requests_require_the_token() {
    let token = "admin: { listen: 127.0.0.1:0, token: 0123456789abcdef }\n";
    let api = run(&format!("{token}{PER_USER}"));
    let body = r#"{"limit":"per-user","key":"a"}"#;
    for wrong in
        ["", "Authorization: Bearer 0123456789abcdeg\r\n", "Authorization: Basic 0123456789abcdef\r\n"]
    {
        let response = send(api.address, "/v1/check", wrong, body).await;
        assert!(response.problem(401).contains("apis.http"));
        assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    }
    let right = "Authorization: Bearer 0123456789abcdef\r\n";
    assert_eq!(send(api.address, "/v1/check", right, body).await.status, 200);
    let page = format!("{right}Origin: http://evil.test\r\n");
    send(api.address, "/v1/check", &page, body).await.problem(403);
    assert_eq!(get(api.address, "GET", "/openapi.json", "").await.status, 200, "it contains no secret");
}

#[tokio::test]
async fn cross_origin_and_rebound_requests_are_rejected() {
    let api = run(PER_USER);
    let body = r#"{"limit":"per-user","key":"a"}"#;
    send(api.address, "/v1/check", "Origin: http://evil.test\r\n", body).await.problem(403);
    let length = body.len();
    let evil = format!(
        "POST /v1/check HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    assert!(send_raw(api.address, evil).await.problem(421).contains("apis.http"));
    assert_eq!(peek_remaining(api.address, "per-user", "a").await, 10);
}

#[tokio::test]
async fn check_without_limits_is_rejected() {
    let api = open(TestContext::new(
        "gateway: { listen: 127.0.0.1:0, routes: [{ id: a, limits: all, upstream: http://127.0.0.1:1 }] }",
        |_| {},
    ));
    let response = post(api.address, "/v1/check", &json!({ "limit": "per-user", "key": "a" })).await;
    assert!(response.problem(404).contains("no limits"));
}

/// Rules that are not limits of the configuration follow those that are.
#[tokio::test]
async fn only_configured_limits_are_checked_by_name() {
    let yaml = "limits:
  mine: { key: global, fixed_window: { limit: 10, window: 1h } }
  other: { key: global, fixed_window: { limit: 10, window: 1h } }";
    let api = open(TestContext::new(yaml, |settings| settings.limits = 1));
    assert_eq!(post(api.address, "/v1/check", &json!({ "limit": "mine" })).await.status, 200);
    post(api.address, "/v1/check", &json!({ "limit": "other" })).await.problem(404);
}

#[tokio::test]
async fn requests_in_flight_are_answered_on_shutdown() {
    let api = run(PER_USER);
    let mut stream = TcpStream::connect(api.address).await.unwrap();
    let body = r#"{"limit":"per-user","key":"a"}"#;
    let head = format!(
        "POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // Once a later connection is answered, the head has been read.
    peek_remaining(api.address, "per-user", "a").await;
    api.drain.send(true).unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut response = String::new();
    timeout(TEST_TIMEOUT, stream.read_to_string(&mut response)).await.unwrap().unwrap();
    assert!(response.starts_with("HTTP/1.1 200") && response.contains(r#""remaining":9"#), "{response}");
    timeout(TEST_TIMEOUT, api.ended).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(api.address).await.is_err(), "the listener is closed");
}

/// A silent connection is closed, and does not keep the API open.
#[tokio::test]
async fn silent_connections_do_not_keep_the_api_open() {
    let api = run(PER_USER);
    let _silent = TcpStream::connect(api.address).await.unwrap();
    peek_remaining(api.address, "per-user", "a").await;
    api.drain.send(true).unwrap();
    timeout(Duration::from_secs(20), api.ended).await.unwrap().unwrap().unwrap();
}

/// Time is tokio's paused clock, which advances whenever all tasks wait.
#[tokio::test(start_paused = true)]
async fn slow_heads_and_bodies_are_cut_off() {
    let api = run(PER_USER);
    let read = async |sent: &str| {
        let mut stream = TcpStream::connect(api.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut response = String::new();
        // Slightly longer than a head or a body may take.
        let read = timeout(Duration::from_secs(11), stream.read_to_string(&mut response)).await;
        let _ = read.expect("the connection stayed open");
        response
    };
    let head = "POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n";
    let response = read(&format!("{head}{{\"limit\":")).await;
    assert!(
        response.starts_with("HTTP/1.1 408") && response.contains("did not arrive within 10 seconds"),
        "{response}"
    );
    let response = read("POST /v1/check HTTP/1.1\r\nHo").await;
    assert!(!response.contains(" 200 "), "{response}");
    let response = read("").await;
    assert!(!response.contains(" 200 "), "{response}");
}

/// A connection that has served a request may be idle for longer than proxies keep theirs; a head that has begun may
/// not be slow. The clock is paused: it advances whenever all tasks wait.
#[tokio::test(start_paused = true)]
async fn idle_connection_stays_open_but_slow_head_is_cut_off() {
    let api = run(PER_USER);
    let mut stream = TcpStream::connect(api.address).await.unwrap();
    for idle_secs in [9, 70, 70] {
        tokio::time::sleep(Duration::from_secs(idle_secs)).await;
        stream.write_all(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").await.unwrap();
        let mut response = vec![0; "HTTP/1.1 200".len() + http_api::OPENAPI.len()];
        timeout(TEST_TIMEOUT, stream.read_exact(&mut response)).await.unwrap().unwrap();
        assert!(response.starts_with(b"HTTP/1.1 200"));
        // The rest of the response: its head has more lines.
        let mut rest = vec![0; 4096];
        assert!(timeout(TEST_TIMEOUT, stream.read(&mut rest)).await.unwrap().unwrap() > 0);
    }
    tokio::time::sleep(Duration::from_secs(20)).await;
    let start = tokio::time::Instant::now();
    for byte in b"GET /openapi.json HTTP/1.1" {
        tokio::time::sleep(Duration::from_secs(1)).await;
        if stream.write_all(&[*byte]).await.is_err() {
            break;
        }
    }
    let mut rest = Vec::new();
    let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut rest)).await.expect("the connection stayed open");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}
