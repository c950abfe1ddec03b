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
use testbed::http::{read_response, status};
use testbed::http2::kind::{DATA, HEADERS, RST_STREAM, SETTINGS};
use testbed::http2::{END_HEADERS, PREFACE, block, frame, get};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::http2_abuse::REFUSED_STREAM;
use super::peers::{ConfigFile, Http2, Identity, RawHttp2, TempDir, connect_http2, request_http2, scripted};
use super::retries::INTERNAL_ERROR;
use super::support::{Upstream, run};

fn post(scheme: &str, body: &'static str) -> Request<Full<Bytes>> {
    let uri = format!("{scheme}://api.test/a?b=c");
    Request::post(uri).header("x-one", "1").body(Full::from(body)).unwrap()
}

/// The upstream receives the same request, whichever protocol the client used.
fn check(upstream: &Upstream, version: Version, scheme: &str) {
    let seen = upstream.requests().pop().unwrap();
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
        let gateway =
            run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])).await;

        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        let head = "POST /a?b=c HTTP/1.1\r\nHost: api.test\r\nX-One: 1\r\nContent-Length: 4\r\n\r\nbody";
        stream.write_all(head.as_bytes()).await.unwrap();
        let response = read_response(&mut stream).await;
        assert!(status(&response) == 200 && response.ends_with("hello"), "{response}");
        check(&upstream, version, "http");

        let stream = TcpStream::connect(gateway.address).await.unwrap();
        let mut sender = connect_http2(stream).await;
        let response = request_http2(&mut sender, post("http", "body")).await;
        assert_eq!((response.head.status, response.body.as_ref()), (StatusCode::OK, &b"hello"[..]));
        assert_eq!(response.head.version, Version::HTTP_2);
        check(&upstream, version, "http");
    }
}

#[tokio::test]
async fn tls_negotiates_the_protocol() {
    let (directory, identity) = (TempDir::new(), Identity::new());
    let certificate = directory.write("cert.pem", &identity.certificate);
    let key = directory.write("key.pem", &identity.key);
    let tls = format!(", tls: {{ certificate: {{ file: {certificate} }}, key: {{ file: {key} }} }}");
    for (protocol, version) in [("http1", Version::HTTP_11), ("http2", Version::HTTP_2)] {
        let upstream = Upstream::start().await;
        let setting = format!(", protocol: {protocol}");
        let file = ConfigFile { listener: &tls, upstream: &setting, ..ConfigFile::default() };
        let gateway = run(&file.to(&[upstream.address])).await;
        let stream = identity.connect(gateway.address, "h2").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let response = request_http2(&mut connect_http2(stream).await, post("https", "body")).await;
        assert_eq!(response.head.status, StatusCode::OK);
        check(&upstream, version, "https");

        let mut stream = identity.connect(gateway.address, "http/1.1").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        let head = "POST /a?b=c HTTP/1.1\r\nHost: api.test\r\nX-One: 1\r\nContent-Length: 4\r\n\r\nbody";
        stream.write_all(head.as_bytes()).await.unwrap();
        assert_eq!(status(&read_response(&mut stream).await), 200);
        check(&upstream, version, "https");
    }
}

async fn client(upstream: &Upstream, protocol: &str) -> (super::support::TestGateway, Http2) {
    let setting = format!(", protocol: {protocol}");
    let gateway =
        run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])).await;
    let sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    (gateway, sender)
}

#[tokio::test]
async fn split_cookie_headers_are_joined() {
    for protocol in ["http1", "http2"] {
        let upstream = Upstream::start().await;
        let (_gateway, mut sender) = client(&upstream, protocol).await;
        let request =
            Request::get("http://a/").header(COOKIE, "a=1").header(COOKIE, "b=2").header(COOKIE, "c=3");
        request_http2(&mut sender, request.body(Full::default()).unwrap()).await;
        assert_eq!(upstream.only_request().header("cookie"), Some("a=1; b=2; c=3"));
    }
}

#[tokio::test]
async fn response_trailers_reach_the_client() {
    let chunked = "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\n\r\n";
    let address = scripted(move |mut stream, _| async move {
        testbed::http::read_head(&mut stream).await;
        stream.write_all(chunked.as_bytes()).await.unwrap();
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let mut sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let response = request_http2(&mut sender, Request::get("http://a/").body(Full::default()).unwrap()).await;
    assert_eq!(response.body.as_ref(), b"hello");
    assert_eq!(response.trailers.unwrap()["x-sum"], "42");
}

/// A gateway that has just started must not open one upstream connection for each of the first requests.
#[tokio::test]
async fn concurrent_requests_share_one_upstream_connection() {
    let upstream = Upstream::start().await;
    let (gateway, sender) = client(&upstream, "http2").await;
    let sending: Vec<_> = (0..50)
        .map(|_| {
            let mut sender = sender.clone();
            let request = Request::get("http://a/hold").body(Full::default()).unwrap();
            tokio::spawn(async move { request_http2(&mut sender, request).await.head.status })
        })
        .collect();
    upstream.wait_for_held(50).await;
    assert_eq!(*upstream.connections.lock().unwrap(), 1, "the requests of one worker share a connection");
    upstream.release(50);
    for request in sending {
        assert_eq!(request.await.unwrap(), StatusCode::OK);
    }
    drop(gateway);
}

/// On graceful shutdown, streams in flight finish and the connection closes with GOAWAY.
#[tokio::test]
async fn graceful_shutdown_finishes_streams_in_flight() {
    let upstream = Upstream::start().await;
    let (gateway, mut sender) = client(&upstream, "http1").await;
    let request = Request::get("http://a/hold").body(Full::default()).unwrap();
    let sending = tokio::spawn(async move { (request_http2(&mut sender, request).await, sender) });
    upstream.wait_for_held(1).await;
    let status_source = gateway.gateway.status();
    let draining = tokio::spawn(gateway.gateway.drain());
    testbed::wait_until(|| !status_source.is_ready()).await;
    upstream.release(1);
    let (response, sender) = sending.await.unwrap();
    assert_eq!(response.body.as_ref(), b"hello");
    testbed::wait_until(|| sender.is_closed()).await;
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
            let request = Arc::new(Notify::new());
            let received = request.clone();
            let response = service_fn(move |_| {
                received.notify_one();
                async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("ok"))) }
            });
            let serving =
                server::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), response);
            let mut serving = std::pin::pin!(serving);
            tokio::select! {
                _ = &mut serving => {}
                () = request.notified() => {
                    serving.as_mut().graceful_shutdown();
                    let _ = serving.await;
                }
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
    })
    .await;
    let upstream = ", protocol: http2, retry_budget: 0%, outlier_ejection: { after: 1, for: 1h }";
    let gateway = run(&ConfigFile { upstream, ..ConfigFile::default() }.to(&[address])).await;
    let mut sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    for number in 1..=20 {
        let response = request_http2(&mut sender, post("http", "body")).await;
        assert_eq!((response.head.status, response.body.as_ref()), (StatusCode::OK, &b"ok"[..]), "{number}");
        testbed::wait_until(|| ended.load(Ordering::Relaxed) == number).await;
    }
}

/// REFUSED_STREAM would make the client send again a request that the server has processed.
#[tokio::test]
async fn reset_of_a_response_does_not_have_the_reason_of_the_upstream() {
    let has_begun = Arc::new(Notify::new());
    let reset_allowed = has_begun.clone();
    let address = scripted(move |mut stream, _| {
        let reset_allowed = reset_allowed.clone();
        async move {
            stream.read_exact(&mut [0; PREFACE.len()]).await.unwrap();
            stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            let mut connection = RawHttp2(stream);
            let request = connection.next_of(HEADERS).await.unwrap().stream;
            let head = frame(HEADERS, END_HEADERS, request, &block([(":status", "200")]));
            let begin = frame(DATA, 0, request, b"hello");
            connection.0.write_all(&[head, begin].concat()).await.unwrap();
            reset_allowed.notified().await;
            let reset = frame(RST_STREAM, 0, request, &REFUSED_STREAM.to_be_bytes());
            connection.0.write_all(&reset).await.unwrap();
            while connection.next().await.is_some() {}
        }
    })
    .await;
    let file = ConfigFile { upstream: ", protocol: http2", ..ConfigFile::default() };
    let gateway = run(&file.to(&[address])).await;
    let mut client = RawHttp2::connect(gateway.address).await;
    client.0.write_all(&get(1, "/")).await.unwrap();
    assert_eq!(client.next_of(DATA).await.expect("the connection ended").payload, b"hello");
    has_begun.notify_one();
    let reset = client.next_of(RST_STREAM).await.expect("the connection ended");
    assert_eq!((reset.stream, reset.payload), (1, INTERNAL_ERROR.to_be_bytes().to_vec()));
}
