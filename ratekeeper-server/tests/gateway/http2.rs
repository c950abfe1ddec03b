//! HTTP/2 to clients, to upstreams and on both sides.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::header::COOKIE;
use http::{Request, Response, StatusCode, Version};
use http_body_util::Full;
use hyper::server::conn::http2 as server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::peers::{File, Folder, Http2, Identity, ask_http2, read_answer, scripted, speak_http2};
use super::support::{Upstream, run, status};

fn post(scheme: &str, body: &'static str) -> Request<Full<Bytes>> {
    let uri = format!("{scheme}://api.test/a?b=c");
    Request::post(uri).header("x-one", "1").body(Full::from(body)).unwrap()
}

/// The upstream receives the same request, whichever protocol the client used.
fn check(upstream: &Upstream, version: Version, scheme: &str) {
    let seen = upstream.seen().pop().unwrap();
    assert_eq!((&seen.method, seen.version), (&http::Method::POST, version));
    assert_eq!(seen.uri.path_and_query().unwrap(), "/a?b=c");
    assert_eq!((seen.header("x-one"), seen.body.as_ref()), (Some("1"), &b"body"[..]));
    assert_eq!(seen.header("x-forwarded-proto"), Some(scheme));
    assert_eq!(seen.header("x-forwarded-host"), Some("api.test"));
    let host = match version {
        Version::HTTP_2 => seen.uri.authority().map(http::uri::Authority::as_str),
        _ => seen.header("host"),
    };
    assert_eq!(host, Some("api.test"));
}

#[tokio::test]
async fn both_client_protocols_reach_both_upstream_protocols() {
    for (protocol, version) in [("http1", Version::HTTP_11), ("http2", Version::HTTP_2)] {
        let upstream = Upstream::start().await;
        let setting = format!(", protocol: {protocol}");
        let gateway = run(&File { upstream: &setting, ..File::default() }.to(&[upstream.address])).await;

        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        let head = "POST /a?b=c HTTP/1.1\r\nHost: api.test\r\nX-One: 1\r\nContent-Length: 4\r\n\r\nbody";
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = read_answer(&mut stream).await;
        assert!(status(&answer) == 200 && answer.ends_with("hello"), "{answer}");
        check(&upstream, version, "http");

        let stream = TcpStream::connect(gateway.address).await.unwrap();
        let mut sender = speak_http2(stream).await;
        let answer = ask_http2(&mut sender, post("http", "body")).await;
        assert_eq!((answer.head.status, answer.body.as_ref()), (StatusCode::OK, &b"hello"[..]));
        assert_eq!(answer.head.version, Version::HTTP_2);
        check(&upstream, version, "http");
    }
}

#[tokio::test]
async fn tls_negotiates_the_protocol() {
    let (folder, identity) = (Folder::new(), Identity::new());
    let certificate = folder.write("cert.pem", &identity.certificate);
    let key = folder.write("key.pem", &identity.key);
    let tls = format!(", tls: {{ certificate: {{ file: {certificate} }}, key: {{ file: {key} }} }}");
    for (protocol, version) in [("http1", Version::HTTP_11), ("http2", Version::HTTP_2)] {
        let upstream = Upstream::start().await;
        let setting = format!(", protocol: {protocol}");
        let file = File { listener: &tls, upstream: &setting, ..File::default() };
        let gateway = run(&file.to(&[upstream.address])).await;
        let stream = identity.connect(gateway.address, "h2").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let answer = ask_http2(&mut speak_http2(stream).await, post("https", "body")).await;
        assert_eq!(answer.head.status, StatusCode::OK);
        check(&upstream, version, "https");

        let mut stream = identity.connect(gateway.address, "http/1.1").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        let head = "POST /a?b=c HTTP/1.1\r\nHost: api.test\r\nX-One: 1\r\nContent-Length: 4\r\n\r\nbody";
        stream.write_all(head.as_bytes()).await.unwrap();
        assert_eq!(status(&read_answer(&mut stream).await), 200);
        check(&upstream, version, "https");
    }
}

async fn client(upstream: &Upstream, protocol: &str) -> (super::support::Running, Http2) {
    let setting = format!(", protocol: {protocol}");
    let gateway = run(&File { upstream: &setting, ..File::default() }.to(&[upstream.address])).await;
    let sender = speak_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    (gateway, sender)
}

#[tokio::test]
async fn split_cookie_headers_are_joined() {
    for protocol in ["http1", "http2"] {
        let upstream = Upstream::start().await;
        let (_gateway, mut sender) = client(&upstream, protocol).await;
        let request =
            Request::get("http://a/").header(COOKIE, "a=1").header(COOKIE, "b=2").header(COOKIE, "c=3");
        ask_http2(&mut sender, request.body(Full::default()).unwrap()).await;
        assert_eq!(upstream.only().header("cookie"), Some("a=1; b=2; c=3"));
    }
}

#[tokio::test]
async fn response_trailers_reach_the_client() {
    let chunked = "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\n\r\n";
    let address = scripted(move |mut stream, _| async move {
        super::peers::read_head(&mut stream).await;
        stream.write_all(chunked.as_bytes()).await.unwrap();
    })
    .await;
    let gateway = run(&File::default().to(&[address])).await;
    let mut sender = speak_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let answer = ask_http2(&mut sender, Request::get("http://a/").body(Full::default()).unwrap()).await;
    assert_eq!(answer.body.as_ref(), b"hello");
    assert_eq!(answer.trailers.unwrap()["x-sum"], "42");
}

/// A gateway that has just started must not open one upstream connection for each of the first requests.
#[tokio::test]
async fn concurrent_requests_share_one_upstream_connection() {
    let upstream = Upstream::start().await;
    let (gateway, sender) = client(&upstream, "http2").await;
    let asking: Vec<_> = (0..50)
        .map(|_| {
            let mut sender = sender.clone();
            let request = Request::get("http://a/hold").body(Full::default()).unwrap();
            tokio::spawn(async move { ask_http2(&mut sender, request).await.head.status })
        })
        .collect();
    upstream.until_waiting(50).await;
    assert_eq!(*upstream.connections.lock().unwrap(), 1, "all came over one connection, so one worker asked");
    upstream.let_go(50);
    for asked in asking {
        assert_eq!(asked.await.unwrap(), StatusCode::OK);
    }
    drop(gateway);
}

/// On graceful shutdown, streams in flight finish and the connection closes with GOAWAY.
#[tokio::test]
async fn graceful_shutdown_finishes_streams_in_flight() {
    let upstream = Upstream::start().await;
    let (gateway, mut sender) = client(&upstream, "http1").await;
    let request = Request::get("http://a/hold").body(Full::default()).unwrap();
    let asking = tokio::spawn(async move { (ask_http2(&mut sender, request).await, sender) });
    upstream.until_waiting(1).await;
    let status_source = gateway.gateway.status();
    let draining = tokio::spawn(gateway.gateway.drain());
    super::support::until(|| !status_source.is_ready()).await;
    upstream.let_go(1);
    let (answer, sender) = asking.await.unwrap();
    assert_eq!(answer.body.as_ref(), b"hello");
    super::support::until(|| sender.is_closed()).await;
    assert_eq!(draining.await.unwrap(), 0);
}

/// A connection closed by the upstream fails no request, not even one that is not idempotent.
#[tokio::test]
async fn upstream_goaway_fails_no_request() {
    let ended = Arc::new(AtomicUsize::new(0));
    let count = ended.clone();
    let address = scripted(move |stream, _| {
        let count = count.clone();
        async move {
            let asked = Arc::new(Notify::new());
            let told = asked.clone();
            let answer = service_fn(move |_| {
                told.notify_one();
                async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("ok"))) }
            });
            let serving =
                server::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), answer);
            let mut serving = std::pin::pin!(serving);
            tokio::select! {
                _ = &mut serving => {}
                () = asked.notified() => {
                    serving.as_mut().graceful_shutdown();
                    let _ = serving.await;
                }
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
    })
    .await;
    let upstream = ", protocol: http2, retry_budget: 0%, outlier_ejection: { after: 1, for: 1h }";
    let gateway = run(&File { upstream, ..File::default() }.to(&[address])).await;
    let mut sender = speak_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    for number in 1..=20 {
        let answer = ask_http2(&mut sender, post("http", "body")).await;
        assert_eq!((answer.head.status, answer.body.as_ref()), (StatusCode::OK, &b"ok"[..]), "{number}");
        super::support::until(|| ended.load(Ordering::Relaxed) == number).await;
    }
}
