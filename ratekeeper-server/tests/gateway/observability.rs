//! Observability: access log, metrics and the admin listener.

use std::collections::HashSet;
use std::net::SocketAddr;

use serde_json::{Value, json};
use testbed::http::{get, send_raw, status};
use testbed::wait_until;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::support::{TestGateway, Upstream, in_front_of, run};

const LIMITS: &str = "limits:
  per-user: { key: { header: X-Api-Key }, fixed_window: { limit: 2, window: 1h, align: first_request } }";

fn parsed(lines: &[String]) -> Vec<Value> {
    lines
        .iter()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

#[tokio::test]
async fn access_log_has_one_line_per_request_without_secrets() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, LIMITS, "").await;
    let secrets =
        "X-Api-Key: canary-key\r\nAuthorization: Bearer canary-token\r\nCookie: s=canary-cookie\r\n";
    for _ in 0..3 {
        get(gateway.address, "/a%22b?token=canary-query", secrets).await;
    }
    get(gateway.address, "/a%2fb", "").await;
    send_raw(gateway.address, "GET http://canary-user:p@a/ HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let lines = gateway.log.lines(5).await;
    assert_eq!(lines.len(), 5);
    assert!(!lines.iter().any(|line| line.contains("canary")), "{lines:?}");
    // Each worker writes its lines separately, so the order across workers is undefined.
    let mut lines = parsed(&lines);
    lines.sort_by_key(|line| line["status"].as_u64());
    let wanted = [(200, "allowed"), (200, "allowed"), (400, "rejected"), (400, "rejected"), (429, "denied")];
    for (line, (wanted, decision)) in lines.iter().zip(wanted) {
        assert_eq!(
            (line["status"].as_u64(), line["decision"].as_str()),
            (Some(wanted), Some(decision)),
            "{line}"
        );
        assert_eq!(
            (line["client"].as_str(), line["method"].as_str()),
            (Some("127.0.0.1"), Some("GET")),
            "{line}"
        );
        assert_eq!((&line["level"], &line["message"]), (&json!("INFO"), &json!("request")), "{line}");
        let is_decided = decision != "rejected";
        assert_eq!(line["limit"].as_str(), is_decided.then_some("per-user"), "{line}");
        assert_eq!(line["key"].as_str().map(str::len), is_decided.then_some(16), "{line}");
        assert_eq!(line["key"].is_null(), !is_decided, "{line}");
        assert_eq!(line["retry_after"].as_f64().is_some(), decision == "denied", "{line}");
        assert!(line["duration_us"].is_u64() && line["delay_us"] == 0, "{line}");
        assert_eq!(line["time"].as_str().map(str::len), Some("2026-01-01T00:00:00.000Z".len()), "{line}");
    }
    // The key is a hash, the same in each line.
    assert_eq!(HashSet::from([&lines[0]["key"], &lines[1]["key"], &lines[4]["key"]]).len(), 1, "{lines:?}");
    let mut remaining: Vec<_> = [0, 1, 4].map(|at: usize| lines[at]["remaining"].as_u64()).into();
    remaining.sort_unstable();
    assert_eq!(remaining, [Some(0), Some(0), Some(1)]);
    assert_eq!((lines[0]["route"].as_str(), lines[0]["bytes"].as_u64()), (Some("all"), Some(5)));
    let ids: HashSet<&str> = lines.iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 5);
    // The upstream receives the same request ids.
    assert!(upstream.requests().iter().all(|seen| ids.contains(seen.header("x-request-id").unwrap())));
}

#[tokio::test]
async fn delay_is_logged_with_its_limit() {
    let upstream = Upstream::start().await;
    let limits = "limits: { drip: { leaky_bucket: { capacity: 5, leak: 1/s, mode: shape } } }";
    let gateway = in_front_of(&upstream, limits, "").await;
    let address = gateway.address;
    // Concurrent, so that one of them waits on any machine.
    let sent: Vec<_> = (0..3).map(|_| tokio::spawn(async move { get(address, "/", "").await })).collect();
    for sent in sent {
        assert_eq!(status(&sent.await.unwrap()), 200);
    }
    let lines = parsed(&gateway.log.lines(3).await);
    let delayed: Vec<&Value> = lines.iter().filter(|line| line["delay_us"].as_u64() > Some(0)).collect();
    assert!(!delayed.is_empty(), "{lines:?}");
    for line in delayed {
        assert_eq!(
            (line["limit"].as_str(), line["decision"].as_str()),
            (Some("drip"), Some("allowed")),
            "{line}"
        );
        assert!(line["duration_us"].as_u64() >= line["delay_us"].as_u64(), "{line}");
    }
}

/// An operator must be able to tell a blocked client from one that lacks a key.
#[tokio::test]
async fn forbidden_requests_say_which_of_the_two_reasons() {
    let upstream = Upstream::start().await;
    let limits = "limits:
  per-user:
    key: { header: X-User-Id, fallback: deny }
    deny: [{ key: eve }]
    fixed_window: { limit: 100, window: 1h }
";
    let gateway = in_front_of(&upstream, limits, "").await;
    let cases = [
        ("X-User-Id: eve\r\n", 403, "this client is on a deny list", "deny_list"),
        ("", 403, "the request lacks a key that a limit requires", "missing_key"),
        (
            "X-User-Id: a\r\nX-User-Id: b\r\n",
            400,
            "the header x-user-id is there twice; send it once",
            "malformed",
        ),
    ];
    for (number, (headers, wanted, detail, reason)) in cases.into_iter().enumerate() {
        let response = get(gateway.address, "/", headers).await;
        assert!(status(&response) == wanted && response.contains(detail), "{response}");
        let lines = parsed(&gateway.log.lines(number + 1).await);
        let line = lines.iter().find(|line| line["reason"] == reason);
        assert!(line.is_some_and(|line| line["decision"] == "rejected"), "{lines:?}");
    }
    get(gateway.address, "/", "X-User-Id: ann\r\n").await;
    let lines = gateway.log.lines(4).await;
    assert_eq!(lines.iter().filter(|line| !line.contains("\"reason\":null")).count(), 3, "{lines:?}");
}

/// These requests used to be visible only to the client.
#[tokio::test]
async fn malformed_requests_are_counted_and_logged() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let (many, large) = ("X-A: canary\r\n".repeat(200), "a".repeat(100_000));
    let wrong: [(u16, String); 4] = [
        (400, "canary\r\n\r\n".to_owned()),
        (400, "GET / HTTP/1.1\r\nHost: a\r\nX A: canary\r\n\r\n".to_owned()),
        (431, format!("GET / HTTP/1.1\r\nHost: a\r\n{many}\r\n")),
        (431, format!("GET / HTTP/1.1\r\nHost: a\r\nX-A: {large}\r\n\r\n")),
    ];
    for (wanted, request) in &wrong {
        let response = send_raw(gateway.address, request).await;
        assert_eq!(status(&response), *wanted, "{response}");
    }
    // A client that disconnects in the middle of a head is not counted.
    drop(TcpStream::connect(gateway.address).await.unwrap().write_all(b"GET / HT").await);
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    let lines = gateway.log.lines(wrong.len() + 1).await;
    assert!(!lines.iter().any(|line| line.contains("canary")), "{lines:?}");
    let mut lines = parsed(&lines);
    assert_eq!(lines.len(), wrong.len() + 1, "{lines:?}");
    lines.sort_by_key(|line| line["status"].as_u64());
    for (line, (wanted, _)) in lines[1..].iter().zip(&wrong) {
        assert_eq!(
            (line["status"].as_u64(), line["decision"].as_str()),
            (Some(u64::from(*wanted)), Some("rejected")),
            "{line}"
        );
        let about = ["route", "method", "path", "client"].map(|name| line[name].as_str());
        assert_eq!(about, [None, Some(""), Some(""), Some("127.0.0.1")], "{line}");
    }
    let metrics = gateway.gateway.status().metrics();
    let rejected = r#"ratekeeper_requests_total{route="",decision="rejected",code="4xx"}"#;
    assert_eq!(sample(&metrics, rejected).as_deref(), Some("4"), "{metrics}");
    assert_eq!(sample(&metrics, "ratekeeper_requests_in_flight").as_deref(), Some("0"));
}

/// A trusted proxy may forward an id that a client has chosen.
#[tokio::test]
async fn received_request_id_that_is_not_an_id_is_replaced() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "client: { trusted_proxies: [127.0.0.0/8] }", "").await;
    let long = "a".repeat(129);
    let hostile = ["a\",\"status\":599,\"b\":\"", "a\\", "a\tb", "a b", "", "\u{e9}", "<a>", &long];
    for id in hostile {
        assert_eq!(status(&get(gateway.address, "/", &format!("X-Request-Id: {id}\r\n")).await), 200);
    }
    let accepted = ["7b0e5c1a-2f7d-4c3e-9b1a-0d5e6f7a8b9c", "Root=1-67891233-abc", "a/b+c=="];
    for id in accepted {
        assert_eq!(status(&get(gateway.address, "/", &format!("X-Request-Id: {id}\r\n")).await), 200);
    }
    let lines = gateway.log.lines(hostile.len() + accepted.len()).await;
    let ids: HashSet<String> = parsed(&lines)
        .iter()
        .map(|line| {
            assert_eq!(line["status"], 200, "{line}");
            line["id"].as_str().unwrap().to_owned()
        })
        .collect();
    let is_generated = |id: &String| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert_eq!(ids.iter().filter(|id| is_generated(id)).count(), hostile.len(), "{ids:?}");
    assert!(accepted.iter().all(|id| ids.contains(*id)), "{ids:?}");
    assert!(upstream.requests().iter().all(|seen| ids.contains(seen.header("x-request-id").unwrap())));
}

#[tokio::test]
async fn disabled_access_log_writes_nothing() {
    let upstream = Upstream::start().await;
    let file = super::peers::ConfigFile { gateway: "access_log: false", ..Default::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    assert_eq!(status(&get(gateway.address, "/silent", "").await), 200);
    // Only the line of the later request is written.
    let wanted = super::peers::ConfigFile::default().to(&[upstream.address]);
    gateway.gateway.reload(&crate::support::parse(&wanted)).unwrap();
    assert_eq!(status(&get(gateway.address, "/loud", "").await), 200);
    let lines = gateway.log.lines(1).await;
    assert!(lines.len() == 1 && lines[0].contains("/loud"), "{lines:?}");
}

/// The admin listener of a gateway.
fn admin(gateway: &TestGateway) -> SocketAddr {
    gateway.gateway.addresses().iter().find(|it| it.service == "admin").unwrap().address
}

/// Sends a request to the admin listener, with `Host: localhost`.
async fn get_admin(admin: SocketAddr, path: &str, headers: &str) -> String {
    send_raw(admin, format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"))
        .await
}

/// The value of a sample.
fn sample(metrics: &str, name: &str) -> Option<String> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::to_owned)
}

#[tokio::test]
async fn metrics_count_requests_and_decisions() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, LIMITS, ", path: /api/**").await;
    let admin = admin(&gateway);
    for _ in 0..3 {
        get(gateway.address, "/api/a?canary", "X-Api-Key: canary\r\n").await;
    }
    get(gateway.address, "/api/status/404", "X-Api-Key: other\r\n").await;
    get(gateway.address, "/status/500", "").await;
    send_raw(
        gateway.address,
        "CANARY /api/x HTTP/1.1\r\nHost: canary\r\nConnection: close\r\nX-Api-Key: third\r\n\r\n",
    )
    .await;
    let metrics = || async { get_admin(admin, "/metrics", "").await };
    // A request is counted after its response is sent, which may be slightly after the client has read it.
    let count = "ratekeeper_request_duration_seconds_count";
    let status_source = gateway.gateway.status();
    wait_until(|| {
        sample(&status_source.metrics(), &format!("{count}{{route=\"all\"}}")).as_deref() == Some("5")
    })
    .await;
    wait_until(|| {
        sample(&status_source.metrics(), &format!("{count}{{route=\"\"}}")).as_deref() == Some("1")
    })
    .await;
    let text = metrics().await;
    assert_eq!(
        testbed::http::header(&text, "content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    for (name, wanted) in [
        (r#"ratekeeper_requests_total{route="all",decision="allowed",code="2xx"}"#, "4"),
        (r#"ratekeeper_requests_total{route="all",decision="denied",code="4xx"}"#, "1"),
        (r#"ratekeeper_requests_total{route="",decision="rejected",code="4xx"}"#, "1"),
        (r#"ratekeeper_limit_decisions_total{limit="per-user",decision="allowed"}"#, "4"),
        (r#"ratekeeper_limit_decisions_total{limit="per-user",decision="denied"}"#, "1"),
        (r#"ratekeeper_request_duration_seconds_bucket{route="all",le="+Inf"}"#, "5"),
        ("ratekeeper_requests_in_flight", "0"),
        ("ratekeeper_keys", "3"),
        ("ratekeeper_access_log_dropped_total", "0"),
        (r#"ratekeeper_reloads_total{result="success"}"#, "0"),
    ] {
        assert_eq!(sample(&text, name).as_deref(), Some(wanted), "{name}\n{text}");
    }
    let sum = sample(&text, r#"ratekeeper_request_duration_seconds_sum{route="all"}"#).unwrap();
    assert!(sum.parse::<f64>().unwrap() > 0.0, "{sum}");
    let buckets: Vec<u64> = text
        .lines()
        .filter(|line| line.starts_with(r#"ratekeeper_request_duration_seconds_bucket{route="all""#))
        .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(buckets.is_sorted() && buckets.last() == Some(&5), "{buckets:?}");
    // Client input never becomes a label, and each series appears once.
    assert!(!text.to_lowercase().contains("canary"), "{text}");
    let names: Vec<&str> = text
        .split("\r\n\r\n")
        .nth(1)
        .unwrap()
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.rsplit_once(' ').unwrap().0)
        .collect();
    let different: HashSet<&str> = names.iter().copied().collect();
    assert_eq!(names.len(), different.len());
}

#[tokio::test]
async fn draining_gateway_is_healthy_but_not_ready() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let admin = admin(&gateway);
    let address = gateway.address;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(status(&get_admin(admin, path, "").await), 200, "{path}");
    }
    let sending = tokio::spawn(async move { get(address, "/hold", "").await });
    upstream.wait_for_held(1).await;
    let status_source = gateway.gateway.status();
    let draining = tokio::spawn(gateway.gateway.drain());
    wait_until(|| !status_source.is_ready()).await;
    assert_eq!(status(&get_admin(admin, "/readyz", "").await), 503);
    assert_eq!(status(&get_admin(admin, "/healthz", "").await), 200);
    assert_eq!(status(&get_admin(admin, "/metrics", "").await), 200);
    upstream.release(1);
    assert_eq!(status(&sending.await.unwrap()), 200);
    assert_eq!(draining.await.unwrap(), 0);
}

/// A cross-origin page in a browser must not read the metrics.
#[tokio::test]
async fn cross_origin_requests_to_the_admin_listener_are_rejected() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let admin = admin(&gateway);
    assert_eq!(status(&get_admin(admin, "/metrics", "Origin: http://evil.test\r\n").await), 403);
    assert_eq!(
        status(&get(gateway.address, "/metrics", "").await),
        200,
        "on the gateway it is a path like others"
    );
    assert_eq!(upstream.only_request().uri.path(), "/metrics");
}

/// Logs of gateway and upstream can be correlated only by a common request id.
#[tokio::test]
async fn logged_request_id_is_sent_to_the_upstream() {
    let upstream = Upstream::start().await;
    let trust = "client: { trusted_proxies: [127.0.0.0/8] }";
    let gateway = in_front_of(&upstream, trust, "").await;
    get(gateway.address, "/", "X-Request-Id: theirs-7\r\n").await;
    get(gateway.address, "/", &format!("X-Request-Id: {}\r\n", "x".repeat(200))).await;
    let lines = gateway.log.lines(2).await;
    for (seen, line) in upstream.requests().iter().zip(&lines) {
        let name = seen.header("x-request-id").unwrap();
        assert!(line.contains(&format!(r#""id":"{name}""#)), "{line}");
    }
    assert_eq!(upstream.requests()[0].header("x-request-id"), Some("theirs-7"));
    assert_eq!(upstream.requests()[1].header("x-request-id").map(str::len), Some(16));
}

/// DNS rebinding: a page can resolve its domain to this machine, and its requests are then not cross-origin.
#[tokio::test]
async fn foreign_host_names_are_rejected_by_the_admin_listener() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let admin = admin(&gateway);
    let port = admin.port();
    let by = |target: String, host: String| async move {
        send_raw(admin, format!("GET {target} HTTP/1.1\r\n{host}Connection: close\r\n\r\n")).await
    };
    for path in ["/metrics", "/healthz", "/readyz"] {
        for host in ["localhost", "LOCALHOST", "127.0.0.1", "[::1]", "192.0.2.7"] {
            for host in [host.to_owned(), format!("{host}:{port}")] {
                let response = by(path.to_owned(), format!("Host: {host}\r\n")).await;
                assert_eq!(status(&response), 200, "{path} {host}");
            }
        }
        for host in [
            "evil.test",
            "localhost.evil.test",
            "127.0.0.1.evil.test",
            "evil-localhost",
            "127.0.0.1@evil.test",
        ] {
            let response = by(path.to_owned(), format!("Host: {host}:{port}\r\n")).await;
            assert_eq!(status(&response), 421, "{path} {host}");
            assert!(response.contains("use localhost or an IP address"), "{response}");
            assert!(!response.contains("ratekeeper_"), "{response}");
        }
        let response = by(format!("http://evil.test{path}"), "Host: localhost\r\n".to_owned()).await;
        assert_eq!(status(&response), 421, "{response}");
        let response = by(path.to_owned(), "Host: localhost\r\nHost: evil.test\r\n".to_owned()).await;
        assert!(matches!(status(&response), 400 | 421), "{response}");
    }
}

#[tokio::test]
async fn metrics_require_the_configured_token() {
    let upstream = Upstream::start().await;
    let file = |token: &str| {
        super::support::one_route(&upstream, &format!("admin: {{ listen: 127.0.0.1:0, token: {token} }}"), "")
    };
    let gateway = run(&file("0123456789abcdef")).await;
    let admin = admin(&gateway);
    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    for wrong in [
        String::new(),
        bearer(""),
        bearer("0123456789abcdeg"),
        bearer("0123456789abcde"),
        bearer("0123456789abcdef0"),
        "Authorization: 0123456789abcdef\r\n".to_owned(),
        "Authorization: Basic 0123456789abcdef\r\n".to_owned(),
        format!("{}{}", bearer("0"), bearer("0123456789abcdef")),
    ] {
        let response = get_admin(admin, "/metrics", &wrong).await;
        assert_eq!(
            (status(&response), testbed::http::header(&response, "www-authenticate")),
            (401, Some("Bearer"))
        );
        assert!(!response.contains("ratekeeper_") && !response.contains("0123456789"), "{response}");
    }
    assert_eq!(status(&get_admin(admin, "/metrics", &bearer("0123456789abcdef")).await), 200);
    assert_eq!(
        status(&get_admin(admin, "/metrics", "authorization: bearer 0123456789abcdef\r\n").await),
        200
    );
    // With a token, any host name is allowed for metrics; health and readiness need no token.
    for (path, headers) in [("/healthz", ""), ("/readyz", ""), ("/metrics", &*bearer("0123456789abcdef"))] {
        assert_eq!(status(&get(admin, path, headers).await), 200, "{path}");
    }
    let page = format!("Origin: http://evil.test\r\n{}", bearer("0123456789abcdef"));
    assert_eq!(status(&get_admin(admin, "/metrics", &page).await), 403);
    // A reload replaces the token.
    gateway.gateway.reload(&crate::support::parse(&file("fedcba9876543210"))).unwrap();
    assert_eq!(status(&get_admin(admin, "/metrics", &bearer("0123456789abcdef")).await), 401);
    assert_eq!(status(&get_admin(admin, "/metrics", &bearer("fedcba9876543210")).await), 200);
}
