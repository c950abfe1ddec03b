//! Forwarding of requests and responses, routing and edits.

use http::Version;
use testbed::http::{get, header, send_raw, status};
use testbed::http2::kind::{DATA, HEADERS};
use testbed::http2::{END_HEADERS, END_STREAM, block, frame, request_head};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::peers::{ConfigFile, RawHttp2};
use super::support::{Upstream, in_front_of, run};

#[tokio::test]
async fn request_body_reaches_upstream_complete() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let body = "0123456789".repeat(100_000);
    let head = "POST /a?b=c HTTP/1.1\r\nHost: test\r\nConnection: close\r\n";
    let sized = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    assert_eq!(status(&send_raw(gateway.address, sized).await), 200);
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    assert_eq!(status(&send_raw(gateway.address, chunked).await), 200);
    for seen in upstream.requests() {
        assert_eq!(seen.uri.to_string(), "/a?b=c");
        assert_eq!(seen.body, body);
        assert_eq!(seen.version, Version::HTTP_11);
    }
    assert_eq!(upstream.requests().len(), 2);
}

/// Few GET and HEAD requests have a body, and hyper's client sends none unless the framing is explicit.
#[tokio::test]
async fn get_and_head_bodies_without_content_length_reach_upstream() {
    for (protocol, version) in [("http1", Version::HTTP_11), ("http2", Version::HTTP_2)] {
        for method in ["GET", "HEAD"] {
            let upstream = Upstream::start().await;
            let setting = format!(", protocol: {protocol}");
            let file = ConfigFile { upstream: &setting, ..ConfigFile::default() };
            let gateway = run(&file.to(&[upstream.address])).await;
            let head = format!("{method} / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n");
            let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n");
            assert_eq!(status(&send_raw(gateway.address, chunked).await), 200);
            let mut client = RawHttp2::connect(gateway.address).await;
            let frames = [
                frame(HEADERS, END_HEADERS, 1, &block(request_head(method, "/"))),
                frame(DATA, 0, 1, b"hel"),
                frame(DATA, END_STREAM, 1, b"lo"),
            ];
            client.0.write_all(&frames.concat()).await.unwrap();
            client.next_of(HEADERS).await.expect("no response received");
            // A request without a body stays one.
            assert_eq!(status(&send_raw(gateway.address, format!("{head}\r\n")).await), 200);
            let seen = upstream.requests();
            let bodies: Vec<&[u8]> = seen.iter().map(|seen| seen.body.as_ref()).collect();
            assert_eq!(bodies, [&b"hello"[..], b"hello", b""], "{method} over {version:?}");
            assert!(seen.iter().all(|seen| (seen.method.as_str(), seen.version) == (method, version)));
            assert_eq!(seen[2].header("transfer-encoding"), None);
        }
    }
}

#[tokio::test]
async fn upstream_connections_are_reused() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    for _ in 0..50 {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
        let mut response = vec![0; 4096];
        let read = stream.read(&mut response).await.unwrap();
        assert!(response[..read].ends_with(b"hello"), "{}", String::from_utf8_lossy(&response[..read]));
    }
    assert_eq!(upstream.requests().len(), 50);
    assert_eq!(*upstream.connections.lock().unwrap(), 1);
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let one = |n: usize| format!("GET /status/{} HTTP/1.1\r\nHost: test\r\n\r\n", 200 + n);
    let last = "GET /status/210 HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
    let response = send_raw(gateway.address, (0..5).map(one).collect::<String>() + last).await;
    let statuses: Vec<&str> =
        response.match_indices("HTTP/1.1 ").map(|(at, found)| &response[at + found.len()..][..3]).collect();
    assert_eq!(statuses, ["200", "201", "202", "203", "204", "210"]);
}

#[tokio::test]
async fn first_matching_route_is_used() {
    let (one, other) = (Upstream::start().await, Upstream::start().await);
    let gateway = run(&format!(
        "gateway:
  listen: 127.0.0.1:0
  routes:
    - {{ id: post, limits: all, method: POST, upstream: http://{} }}
    - {{ id: host, limits: all, host: special.test, upstream: http://{} }}
    - {{ id: header, limits: all, header: {{ X-Kind: b }}, upstream: http://{} }}
    - {{ id: path, limits: all, path: /api/**, upstream: http://{} }}
",
        other.address, other.address, other.address, one.address
    ))
    .await;
    assert_eq!(status(&get(gateway.address, "/api/x", "").await), 200);
    assert_eq!((one.requests().len(), other.requests().len()), (1, 0));
    assert_eq!(status(&get(gateway.address, "/api/x", "X-Kind: b\r\n").await), 200);
    let special = "GET /api HTTP/1.1\r\nHost: SPECIAL.test:8080\r\nConnection: close\r\n\r\n";
    assert_eq!(status(&send_raw(gateway.address, special).await), 200);
    let post = "POST /api HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    assert_eq!(status(&send_raw(gateway.address, post).await), 200);
    assert_eq!((one.requests().len(), other.requests().len()), (1, 3));
    let nowhere = get(gateway.address, "/elsewhere", "").await;
    assert_eq!(status(&nowhere), 404);
    assert_eq!(header(&nowhere, "content-type"), Some("application/problem+json"));
}

#[tokio::test]
async fn paths_and_headers_are_edited() {
    let upstream = Upstream::start().await;
    let at = upstream.address;
    let gateway = run(&format!(
        "gateway:
  listen: 127.0.0.1:0
  routes:
    - id: strip
      limits: all
      path: /api/**
      upstream: http://{at}/base
      strip_prefix: /api
      request_headers: {{ set: {{ X-Set: new }}, add: {{ X-Added: more }}, remove: [X-Secret] }}
      response_headers: {{ set: {{ X-Out: out }}, remove: [content-length-x] }}
    - id: rewrite
      limits: all
      path: /users/{{id}}/**
      upstream: http://{at}
      rewrite: /v2/{{id}}/{{rest}}
"
    ))
    .await;
    let headers = "X-Set: old\r\nX-Added: one\r\nX-Secret: s\r\n";
    let response = get(gateway.address, "/api/x?q=1", headers).await;
    assert_eq!((status(&response), header(&response, "x-out")), (200, Some("out")));
    let seen = upstream.only_request();
    assert_eq!(seen.uri.to_string(), "/base/x?q=1");
    assert_eq!((seen.header("x-set"), seen.header("x-secret")), (Some("new"), None));
    assert_eq!(seen.headers.get_all("x-added").iter().count(), 2);
    get(gateway.address, "/api", "").await;
    get(gateway.address, "/users/7/a/b", "").await;
    let paths: Vec<String> = upstream.requests().iter().map(|seen| seen.uri.to_string()).collect();
    assert_eq!(paths, ["/base/x?q=1", "/base/", "/v2/7/a/b"]);
}

#[tokio::test]
async fn unreachable_upstream_gives_502() {
    let gone = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let gateway = run(&format!(
        "gateway:\n  listen: 127.0.0.1:0\n  routes:\n    - {{ id: a, limits: all, upstream: http://{gone} }}\n"
    ))
    .await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 502);
}

/// With `case: ignore`, routes match without regard to case, but captures keep the case of the request.
#[tokio::test]
async fn captured_path_segments_keep_their_case() {
    let upstream = Upstream::start().await;
    let paths = "paths: { case: ignore }";
    let route = ", path: '/users/{id}/**', rewrite: '/people/{id}/{rest}'";
    let gateway = in_front_of(&upstream, paths, route).await;
    assert_eq!(status(&get(gateway.address, "/Users/AbC/Files/X", "").await), 200);
    assert_eq!(upstream.only_request().uri.path(), "/people/AbC/Files/X");
}

/// A path edit applies to every form of a path that matches the route.
#[tokio::test]
async fn escaped_and_differently_cased_prefixes_are_edited() {
    let upstream = Upstream::start().await;
    let at = upstream.address;
    let gateway = run(&format!(
        "paths: {{ case: ignore }}
gateway:
  listen: 127.0.0.1:0
  routes:
    - {{ id: strip, limits: all, path: '/@s/É/**', strip_prefix: '/@s/É', upstream: 'http://{at}' }}
    - {{ id: rewrite, limits: all, path: '/@u/{{id}}/**', rewrite: '/v2/{{id}}/{{rest}}', upstream: 'http://{at}' }}
"
    ))
    .await;
    for (sent, forwarded) in [
        ("/@s/%C3%A9/X%40Y", "/X%40Y"),
        ("/%40S/%C3%89/x/", "/x/"),
        ("/%40s/%c3%a9", "/"),
        ("/@S/%C3%89/", "/"),
        ("/%40s//./%C3%89/x", "/x"),
        ("/%40u/%40Me/A/B%40", "/v2/%40Me/A/B%40"),
        ("/@U/a", "/v2/a"),
        ("/@U/a/", "/v2/a"),
    ] {
        assert_eq!(status(&get(gateway.address, sent, "").await), 200, "{sent}");
        assert_eq!(upstream.requests().pop().unwrap().uri.path(), forwarded, "{sent}");
    }
    assert_eq!(status(&get(gateway.address, "/%40sx/%C3%89", "").await), 404);
}

/// The path that the upstream receives.
async fn forwarded_path(limits: &str, route: &str, path: &str) -> String {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, limits, route).await;
    assert_eq!(status(&get(gateway.address, path, "").await), 200, "{path}");
    upstream.only_request().uri.to_string()
}

#[tokio::test]
async fn parameters_and_empty_segments_that_no_rule_reads_reach_upstream() {
    let limits =
        "limits: { per-client: { key: ip, when: { method: GET }, fixed_window: { limit: 9, window: 1h } } }";
    for route in ["", ", path: '/files/**'"] {
        for (sent, forwarded) in [
            ("/files/a;v=1//b?c=%2F;d", "/files/a;v=1//b?c=%2F;d"),
            ("/files/%61;V=%31;w//", "/files/a;V=1;w//"),
            ("/files//;x/A/", "/files//;x/A/"),
        ] {
            assert_eq!(forwarded_path(limits, route, sent).await, forwarded);
        }
    }
}

/// What was matched is served: a path that an upstream could read as another one is normalized.
#[tokio::test]
async fn parameters_and_empty_segments_that_change_a_decision_are_removed() {
    let window = "fixed_window: { limit: 9, window: 1h }";
    let login = format!("limits: {{ login: {{ when: {{ path: '/files/*/login' }}, {window} }} }}");
    let tier = format!(
        "limits: {{ total: {{ {window}, overrides: [{{ when: {{ path: /files/login }}, unlimited: true }}] }} }}"
    );
    let key = format!("limits: {{ by-file: {{ key: {{ path: '/files/{{name}}' }}, {window} }} }}");
    let at_once =
        "limits: { at-once: { when: { path: '/files/*/login' }, concurrency: { limit: 9 } } }".to_owned();
    for (limits, route, sent, forwarded) in [
        (&login, "", "/files//login", "/files/login"),
        (&login, "", "/files/a/login;b", "/files/a/login"),
        (&tier, "", "/files/login;a", "/files/login"),
        (&key, "", "/files/a;b", "/files/a"),
        (&at_once, "", "/files//login", "/files/login"),
        (&String::new(), "", "//host/files", "/host/files"),
        (&String::new(), "", "/files/..;/b", "/b"),
        (&String::new(), "", "/files//../b", "/b"),
        (&String::new(), ", path: '/files/**'", "/files;a/b", "/files/b"),
        (&String::new(), ", path: '/files/**', strip_prefix: /files", "/files/a;b//c", "/a/c"),
    ] {
        assert_eq!(forwarded_path(limits, route, sent).await, forwarded, "{sent} {limits}");
    }
    let long = format!("/{}", "a;".repeat(4000));
    assert_eq!(forwarded_path("", "", &long).await, "/a");
}
