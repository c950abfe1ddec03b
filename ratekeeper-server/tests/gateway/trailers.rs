//! Trailers of requests.

use http::{HeaderMap, Version};
use testbed::http::{read_response, status};
use testbed::http2::kind::{DATA, HEADERS};
use testbed::http2::{END_HEADERS, END_STREAM, block, frame, request_head};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::peers::{ConfigFile, RawHttp2};
use super::support::{ReceivedRequest, TestGateway, Upstream, run};

/// Sends `hello` in two chunks and a trailer; `announcing` is the `Trailer` header, or empty.
async fn send_http1(gateway: &TestGateway, announcing: &str) {
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{announcing}Transfer-Encoding: chunked\r\n\r\n");
    let body = "3\r\nhel\r\n2\r\nlo\r\n0\r\nX-Sum: 42\r\n\r\n";
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 200);
    // The trailer was not parsed as another request.
    stream.write_all(b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 200);
}

/// Like `send_http1`, with HTTP/2.
async fn send_http2(gateway: &TestGateway, announcing: &[(&str, &str)]) {
    let mut client = RawHttp2::connect(gateway.address).await;
    let head = request_head("POST", "/").into_iter().chain(announcing.iter().copied());
    let frames = [
        frame(HEADERS, END_HEADERS, 1, &block(head)),
        frame(DATA, 0, 1, b"hel"),
        frame(DATA, 0, 1, b"lo"),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &block([("x-sum", "42")])),
        frame(HEADERS, END_HEADERS | END_STREAM, 3, &block(request_head("GET", "/next"))),
    ];
    client.0.write_all(&frames.concat()).await.unwrap();
    for _ in 0..2 {
        client.next_of(HEADERS).await.expect("no response received");
    }
}

/// The request that the upstream received; also checks that it received the next one.
async fn forwarded_request(protocol: &str, send: impl AsyncFnOnce(&TestGateway)) -> ReceivedRequest {
    let upstream = Upstream::start().await;
    let setting = format!(", protocol: {protocol}");
    let gateway =
        run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])).await;
    send(&gateway).await;
    testbed::wait_until(|| upstream.requests().len() == 2).await;
    let (first, next): (Vec<ReceivedRequest>, Vec<ReceivedRequest>) =
        upstream.requests().into_iter().partition(|seen| seen.uri.path() == "/");
    assert_eq!((first.len(), next.len()), (1, 1));
    assert_eq!((next[0].uri.path(), next[0].body.len()), ("/next", 0));
    first[0].clone()
}

fn sum(trailers: Option<&HeaderMap>) -> Option<&str> {
    let trailers = trailers?;
    assert_eq!(trailers.len(), 1, "{trailers:?}");
    trailers.get("x-sum").map(|value| value.to_str().unwrap())
}

#[tokio::test]
async fn announced_trailers_are_forwarded() {
    for (protocol, version) in [("http1", Version::HTTP_11), ("http2", Version::HTTP_2)] {
        let by_http1 =
            forwarded_request(protocol, async |gateway| send_http1(gateway, "Trailer: X-Sum\r\n").await)
                .await;
        let by_http2 =
            forwarded_request(protocol, async |gateway| send_http2(gateway, &[("trailer", "x-sum")]).await)
                .await;
        for seen in [by_http1, by_http2] {
            assert_eq!((seen.version, seen.body.as_ref()), (version, &b"hello"[..]));
            assert!(seen.header("trailer").unwrap().eq_ignore_ascii_case("x-sum"), "{seen:?}");
            assert_eq!(sum(seen.trailers.as_ref()), Some("42"), "to {protocol}: {seen:?}");
            assert_eq!(seen.header("x-sum"), None, "a trailer must not become a header");
        }
    }
}

/// HTTP/2 needs no announcement. To an HTTP/1 upstream, unannounced trailers are dropped, as the standard allows; the
/// rest of the request is complete.
#[tokio::test]
async fn unannounced_trailers_are_forwarded_only_to_http2() {
    for (protocol, wanted) in [("http1", None), ("http2", Some("42"))] {
        let by_http1 = forwarded_request(protocol, async |gateway| send_http1(gateway, "").await).await;
        let by_http2 = forwarded_request(protocol, async |gateway| send_http2(gateway, &[]).await).await;
        for seen in [by_http1, by_http2] {
            assert_eq!(seen.body.as_ref(), b"hello");
            assert_eq!(sum(seen.trailers.as_ref()), wanted, "to {protocol}: {seen:?}");
        }
    }
}
