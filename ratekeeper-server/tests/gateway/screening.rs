//! Requests that two servers could parse differently, sent byte by byte.

use http::Request;
use http_body_util::Full;
use testbed::http::{get, header, read_all, send_raw, status};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::peers::{connect_http2, request_http2};
use super::support::{Upstream, in_front_of};

/// Name, bytes to send and accepted statuses; 0 if the connection is closed without a response.
const PROBES: [(&str, &str, &[u16]); 33] = [
    ("two hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", &[400]),
    ("the same host twice", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", &[400]),
    ("no host", "GET / HTTP/1.1\r\n\r\n", &[400]),
    ("an empty host", "GET / HTTP/1.1\r\nHost:\r\n\r\n", &[400]),
    ("a host that is none", "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", &[400]),
    ("a host with a user", "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", &[400]),
    ("a host with a path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", &[400]),
    ("a host with two dots at its end", "GET / HTTP/1.1\r\nHost: a..\r\n\r\n", &[400]),
    ("a host with an empty label", "GET / HTTP/1.1\r\nHost: a..b\r\n\r\n", &[400]),
    ("a host of a dot", "GET / HTTP/1.1\r\nHost: .\r\n\r\n", &[400]),
    ("a host with a comma", "GET / HTTP/1.1\r\nHost: a,\r\n\r\n", &[400]),
    ("a target with a malformed host", "GET http://a../ HTTP/1.1\r\nHost: a..\r\n\r\n", &[400]),
    ("an empty host in HTTP/1.0", "GET / HTTP/1.0\r\nHost:\r\n\r\n", &[400]),
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

/// A request that states the length of its body more than once is rejected, wherever it is on its connection and
/// however its bytes arrive. The bytes after its head are not a request.
#[tokio::test]
async fn request_with_two_lengths_is_rejected() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, LIMITS, "").await;
    let body = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
    // Requests whose bodies contain what looks like a framing header.
    let fake = "\r\n\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n";
    let sized = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{fake}", fake.len());
    let chunked = format!(
        "POST / HTTP/1.1\r\nHost: a\r\nTrailer: X-A\r\nTransfer-Encoding: chunked\r\n\r\n\
         {:X}; a=b\r\n{fake}\r\n0\r\nX-A: b\r\nContent-Length: 1\r\n\r\n",
        fake.len()
    );
    let before = ["", "GET / HTTP/1.1\r\nHost: a\r\n\r\n", &sized, &chunked];
    for lines in [
        "Content-Length: 48\r\nTransfer-Encoding: chunked",
        "transfer-encoding: chunked\r\nX: y\r\ncontent-length: 48",
        "Content-Length: 48\r\nContent-Length: 48",
    ] {
        for valid in before {
            let request = format!("{valid}POST /outer HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n{body}");
            let response = send_raw(gateway.address, &request).await;
            let statuses: Vec<u16> =
                response.split("HTTP/1.1 ").skip(1).map(|it| it[..3].parse().unwrap()).collect();
            let expected = if valid.is_empty() { &[400][..] } else { &[200, 400] };
            assert_eq!(statuses, expected, "{request}{response}");
        }
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let request = format!("POST /outer HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n");
        for bytes in request.as_bytes().chunks(7) {
            stream.write_all(bytes).await.unwrap();
            tokio::task::yield_now().await;
        }
        assert_eq!(status(&read_all(&mut stream).await), 400);
    }
    assert!(upstream.requests().iter().all(|seen| seen.uri.path() == "/"), "{:?}", upstream.requests());
    assert_eq!(upstream.requests().len(), 9);
}

#[tokio::test]
async fn http2_request_with_two_lengths_is_rejected() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, LIMITS, "").await;
    let mut client = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let request = |second: &str| {
        let request = Request::post("http://a/").header("content-length", "4");
        request.header("content-length", second).body(Full::from("body")).unwrap()
    };
    assert_eq!(request_http2(&mut client, request("4")).await.head.status, 400);
    // h2 resets the stream if the lengths differ.
    assert!(client.send_request(request("5")).await.is_err());
    assert!(upstream.requests().is_empty(), "{:?}", upstream.requests());
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

/// Servers that turn names into variables read `Content_Length` as `Content-Length`.
#[tokio::test]
async fn aliases_of_framing_and_hop_by_hop_headers_are_removed() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let aliases = [
        "Content_Length",
        "content.length",
        "Transfer_Encoding",
        "TRANSFER.ENCODING",
        "Content_Encoding",
        "Content_Type",
        "Keep_Alive",
        "Proxy_Authorization",
        "Proxy.Connection",
    ];
    let lines: String = aliases.iter().map(|name| format!("{name}: 7\r\n")).collect();
    assert_eq!(status(&get(gateway.address, "/", &format!("{lines}X_Own.Name: 1\r\n")).await), 200);
    let mut client = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let mut request = Request::get("http://a/").header("x_own.name", "1");
    for name in aliases {
        request = request.header(name.to_lowercase(), "7");
    }
    assert_eq!(request_http2(&mut client, request.body(Full::default()).unwrap()).await.head.status, 200);
    for seen in upstream.requests() {
        for name in aliases {
            assert_eq!(seen.header(name), None, "{name}");
        }
        assert_eq!(seen.header("x_own.name"), Some("1"), "not an alias of a header that matters here");
    }
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
