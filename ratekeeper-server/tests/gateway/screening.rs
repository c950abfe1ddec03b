//! Requests that two servers could parse differently, sent byte by byte.

use super::support::{Upstream, get, header, in_front_of, send_raw, status};

/// Name, bytes to send and accepted statuses; 0 if the connection is closed without a response.
const PROBES: [(&str, &str, &[u16]); 27] = [
    ("two hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", &[400]),
    ("the same host twice", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", &[400]),
    ("no host", "GET / HTTP/1.1\r\n\r\n", &[400]),
    ("an empty host", "GET / HTTP/1.1\r\nHost:\r\n\r\n", &[400]),
    ("a host that is none", "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", &[400]),
    ("a host with a user", "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", &[400]),
    ("a host with a path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", &[400]),
    ("a target with another host", "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", &[400]),
    ("a target with a user", "GET http://u:p@a/ HTTP/1.1\r\nHost: a\r\n\r\n", &[400]),
    ("a target of another scheme", "GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", &[400]),
    ("a tunnel", "CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", &[501]),
    ("an echo", "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", &[405]),
    ("two lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", &[400]),
    ("a length that is none", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na", &[400]),
    (
        "a coding in HTTP/1.0",
        "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        &[400],
    ),
    ("a coding that is not chunked", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", &[400]),
    (
        "two codings",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        &[501],
    ),
    (
        "chunked twice",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        &[501],
    ),
    ("a space in front of a colon", "GET / HTTP/1.1\r\nHost : a\r\n\r\n", &[400]),
    ("a folded line", "GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", &[400]),
    ("a NUL", "GET / HTTP/1.1\r\nHost: a\r\nX: b\0c\r\n\r\n", &[400]),
    ("a bare CR", "GET / HTTP/1.1\r\nHost: a\r\nX: b\rc\r\n\r\n", &[400]),
    ("an encoded slash", "GET /a%2fb HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", &[400]),
    ("host as hop-by-hop", "GET / HTTP/1.1\r\nHost: a\r\nConnection: close, Host\r\n\r\n", &[400]),
    (
        "a forwarding header as hop-by-hop",
        "GET / HTTP/1.1\r\nHost: a\r\nConnection: close, x-forwarded-FOR\r\n\r\n",
        &[400],
    ),
    (
        "a limit's key as hop-by-hop",
        "GET / HTTP/1.1\r\nHost: a\r\nX-User-Id: a\r\nConnection: close, X-User-Id\r\n\r\n",
        &[400],
    ),
    (
        "a concurrency limit's key as hop-by-hop",
        "GET / HTTP/1.1\r\nHost: a\r\nX-Device: a\r\nConnection: close, X-Device\r\n\r\n",
        &[400],
    ),
];

const LIMITS: &str = "limits: { per-user: { key: { header: X-User-Id }, token_bucket: { capacity: 1000 } }, \
    at-once: { key: { header: X-Device }, concurrency: { limit: 100 } } }";

#[tokio::test]
async fn ambiguous_requests_are_rejected_and_not_forwarded() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, LIMITS, "").await;
    for (name, bytes, wanted) in PROBES {
        let response = send_raw(gateway.address, bytes).await;
        assert!(wanted.contains(&status(&response)), "{name}: {response}");
    }
    assert!(upstream.requests().is_empty(), "{:?}", upstream.requests());
    assert_eq!(status(&get(gateway.address, "/", "").await), 200, "valid requests are still served");
}

/// With both Content-Length and Transfer-Encoding, the coding decides, the length is removed and the connection is
/// closed. The bytes after the body are not a request.
#[tokio::test]
async fn transfer_encoding_overrides_content_length() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, LIMITS, "").await;
    for lines in [
        "Content-Length: 60\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 60",
    ] {
        let smuggled = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
        let request = format!("POST /outer HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n0\r\n\r\n{smuggled}");
        let response = send_raw(gateway.address, request).await;
        assert_eq!(response.matches("HTTP/1.1 ").count(), 1, "{response}");
    }
    for seen in upstream.requests() {
        assert_eq!((seen.uri.path(), seen.body.len()), ("/outer", 0));
        assert_eq!(seen.header("content-length"), None);
    }
}

#[tokio::test]
async fn hop_by_hop_headers_are_not_forwarded() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let headers = "Keep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nProxy-Authorization: x\r\nTE: trailers\r\n\
        Upgrade: h2c\r\nHTTP2-Settings: a\r\nX-Mine: 1\r\nX-Kept: 2\r\n";
    let request = format!("GET / HTTP/1.1\r\nHost: test\r\nConnection: close, X-Mine\r\n{headers}\r\n");
    assert_eq!(status(&send_raw(gateway.address, request).await), 200);
    let seen = upstream.only_request();
    for name in [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
        "te",
        "upgrade",
        "http2-settings",
        "x-mine",
    ] {
        assert_eq!(seen.header(name), None, "{name}");
    }
    assert_eq!(seen.header("x-kept"), Some("2"));
    let response = get(gateway.address, "/header/Proxy-Authenticate/Basic", "").await;
    assert_eq!(header(&response, "proxy-authenticate"), None, "in the response: {response}");
}

#[tokio::test]
async fn forwarding_headers_of_untrusted_clients_are_replaced() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let headers = "X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: bank\r\nX-Real-IP: 6.6.6.6\r\n\
        Forwarded: for=6.6.6.6\r\nX_Forwarded_For: 6.6.6.6\r\nX.Real.IP: 6.6.6.6\r\nX-Request-Id: mine\r\n";
    get(gateway.address, "/", headers).await;
    let seen = upstream.only_request();
    assert_eq!(seen.header("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(seen.header("x-real-ip"), Some("127.0.0.1"));
    assert_eq!(seen.header("x-forwarded-proto"), Some("http"));
    assert_eq!(seen.header("x-forwarded-host"), Some("test"));
    for name in ["forwarded", "x_forwarded_for", "x.real.ip"] {
        assert_eq!(seen.header(name), None, "{name}");
    }
    assert_eq!(seen.header("x-request-id").map(str::len), Some(16));
}

#[tokio::test]
async fn forwarding_headers_of_a_trusted_proxy_are_kept() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "client: { trusted_proxies: [127.0.0.0/8] }", "").await;
    let headers =
        "X-Forwarded-For: 6.6.6.6, 203.0.113.7\r\nX-Forwarded-Proto: https\r\nX-Request-Id: theirs\r\n";
    get(gateway.address, "/", headers).await;
    let seen = upstream.only_request();
    assert_eq!(seen.header("x-forwarded-for"), Some("6.6.6.6, 203.0.113.7, 127.0.0.1"));
    assert_eq!(seen.header("x-real-ip"), Some("203.0.113.7"));
    assert_eq!(seen.header("x-forwarded-proto"), Some("https"));
    assert_eq!(seen.header("x-request-id"), Some("theirs"));
}

#[tokio::test]
async fn oversized_heads_are_rejected() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let many = "X-A: b\r\n".repeat(150);
    assert_eq!(status(&get(gateway.address, "/", &many).await), 431);
    let large = format!("X-A: {}\r\n", "b".repeat(70_000));
    assert_eq!(status(&get(gateway.address, "/", &large).await), 431);
    let long = format!("/{}", "a".repeat(70_000));
    assert!([414, 431].contains(&status(&get(gateway.address, &long, "").await)));
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn normalized_path_is_forwarded_as_it_was_matched() {
    let upstream = Upstream::start().await;
    let at = upstream.address;
    let gateway = super::support::run(&format!(
        "gateway:\n  listen: 127.0.0.1:0\n  routes:\n    - {{ id: a, limits: all, path: /admin/**, upstream: http://{at} }}\n"
    ))
    .await;
    for path in ["//admin/x", "/a/../admin/x", "/%61dmin/x", "/admin;p=1/x", "/./admin//x"] {
        assert_eq!(status(&get(gateway.address, path, "").await), 200, "{path}");
    }
    assert!(
        upstream.requests().iter().all(|seen| seen.uri.path() == "/admin/x"),
        "{:?}",
        upstream.requests()
    );
    assert_eq!(status(&get(gateway.address, "/other", "").await), 404);
}
