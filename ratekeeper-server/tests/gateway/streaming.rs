//! Bodies of all lengths, backpressure, and responses without a body.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Request;
use http_body_util::{BodyExt, Full};
use testbed::http::{get, header, read_head, read_response, send_raw, status};
use testbed::{TEST_TIMEOUT, wait_until_stable};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::peers::{ConfigFile, connect_http2, scripted};
use super::support::{Upstream, in_front_of, run};

const BODY_BYTES: usize = 200 << 20;
/// Upper bound for the buffers of four sockets and of the gateway together: far below the whole body.
const BUFFERED_MAX: usize = BODY_BYTES / 3;

/// A server that sends a large body, and the number of bytes sent so far.
async fn large_response_server() -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let address = scripted(move |mut stream, _| {
        let count = count.clone();
        async move {
            read_head(&mut stream).await;
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            let part = vec![b'x'; 64 << 10];
            while count.load(Ordering::Relaxed) < BODY_BYTES && stream.write_all(&part).await.is_ok() {
                count.fetch_add(part.len(), Ordering::Relaxed);
            }
            read_head(&mut stream).await;
        }
    })
    .await;
    (address, sent)
}

#[tokio::test]
async fn slow_client_applies_backpressure_to_the_upstream() {
    let (address, sent) = large_response_server().await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_head(&mut stream).await), 200);
    let buffered = wait_until_stable(|| sent.load(Ordering::Relaxed)).await;
    assert!(buffered < BUFFERED_MAX, "the gateway buffered {buffered} bytes");
    let (mut left, mut bytes) = (BODY_BYTES, vec![0; 256 << 10]);
    while left > 0 {
        left -= timeout(TEST_TIMEOUT, stream.read(&mut bytes)).await.unwrap().unwrap();
        let ahead = sent.load(Ordering::Relaxed).saturating_sub(BODY_BYTES - left);
        assert!(ahead < BUFFERED_MAX, "{ahead} bytes are buffered");
    }
}

#[tokio::test]
async fn slow_http2_client_applies_backpressure_to_the_upstream() {
    let (address, sent) = large_response_server().await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let mut sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let response =
        sender.send_request(Request::get("http://a/").body(Full::default()).unwrap()).await.unwrap();
    let buffered = wait_until_stable(|| sent.load(Ordering::Relaxed)).await;
    assert!(buffered < BUFFERED_MAX, "the gateway buffered {buffered} bytes");
    let (mut body, mut read) = (response.into_body(), 0);
    while let Some(frame) = timeout(TEST_TIMEOUT, body.frame()).await.unwrap() {
        read += frame.unwrap().data_ref().map_or(0, bytes::Bytes::len);
    }
    assert_eq!(read, BODY_BYTES);
}

#[tokio::test]
async fn slow_upstream_applies_backpressure_to_the_client() {
    let (sent, got, may_read) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let (count, may) = (got.clone(), may_read.clone());
    let address = scripted(move |mut stream, _| {
        let (count, may) = (count.clone(), may.clone());
        async move {
            read_head(&mut stream).await;
            may.acquire().await.unwrap().forget();
            let mut bytes = vec![0; 256 << 10];
            while count.load(Ordering::Relaxed) < BODY_BYTES {
                count.fetch_add(stream.read(&mut bytes).await.unwrap(), Ordering::Relaxed);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
            read_head(&mut stream).await;
        }
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let stream = TcpStream::connect(gateway.address).await.unwrap();
    let (mut reading, mut writing) = stream.into_split();
    let count = sent.clone();
    let sending = tokio::spawn(async move {
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
        writing.write_all(head.as_bytes()).await.unwrap();
        let part = vec![b'x'; 64 << 10];
        while count.load(Ordering::Relaxed) < BODY_BYTES {
            writing.write_all(&part).await.unwrap();
            count.fetch_add(part.len(), Ordering::Relaxed);
        }
        writing
    });
    let buffered = wait_until_stable(|| sent.load(Ordering::Relaxed)).await;
    assert!(buffered < BUFFERED_MAX, "the gateway buffered {buffered} bytes");
    may_read.add_permits(1);
    assert_eq!(status(&read_response(&mut reading).await), 200);
    assert_eq!(got.load(Ordering::Relaxed), BODY_BYTES);
    drop(sending.await.unwrap());
}

#[tokio::test]
async fn trailers_are_sent_only_to_clients_that_accept_them() {
    let chunked = "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\n\r\n";
    let address = scripted(move |mut stream, _| async move {
        read_head(&mut stream).await;
        stream.write_all(chunked.as_bytes()).await.unwrap();
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let response = get(gateway.address, "/", "TE: trailers\r\n").await;
    assert!(response.ends_with("\r\n5\r\nhello\r\n0\r\nx-sum: 42\r\n\r\n"), "{response}");
    let response = get(gateway.address, "/", "").await;
    assert!(response.ends_with("\r\n5\r\nhello\r\n0\r\n\r\n"), "{response}");
}

#[tokio::test]
async fn responses_without_a_body_keep_the_connection_in_sync() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    for _ in 0..3 {
        stream.write_all(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let head = read_head(&mut stream).await;
        assert_eq!((status(&head), header(&head, "content-length")), (200, Some("5")), "{head}");
        for code in [204, 304] {
            stream
                .write_all(format!("GET /status/{code} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes())
                .await
                .unwrap();
            let head = read_head(&mut stream).await;
            assert_eq!((status(&head), header(&head, "transfer-encoding")), (code, None), "{head}");
        }
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let response = read_response(&mut stream).await;
        assert!(status(&response) == 200 && response.ends_with("hello"), "{response}");
    }
    assert_eq!(*upstream.connections.lock().unwrap(), 1);
}

#[tokio::test]
async fn expect_continue_gets_100_before_the_body() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(status(&read_head(&mut stream).await), 100);
    stream.write_all(b"body").await.unwrap();
    let response = read_response(&mut stream).await;
    assert!(status(&response) == 200 && response.ends_with("hello"), "{response}");
    assert_eq!(upstream.only_request().body, "body");
}

#[tokio::test]
async fn http_1_0_clients_are_served() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let response = send_raw(gateway.address, "GET / HTTP/1.0\r\n\r\n").await;
    assert!(status(&response) == 200 && response.ends_with("\r\n\r\nhello"), "{response}");
    assert_eq!(upstream.only_request().header("host"), Some(&*upstream.address.to_string()));

    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    for _ in 0..2 {
        stream.write_all(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").await.unwrap();
        let response = read_response(&mut stream).await;
        assert!(
            header(&response, "connection").is_some_and(|it| it.eq_ignore_ascii_case("keep-alive")),
            "{response}"
        );
        assert!(response.ends_with("hello"), "{response}");
    }

    // HTTP/1.0 clients do not support chunked encoding.
    let address = scripted(|mut stream, _| async move {
        read_head(&mut stream).await;
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
        stream.write_all(chunked).await.unwrap();
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let response = send_raw(gateway.address, "GET / HTTP/1.0\r\n\r\n").await;
    assert_eq!(header(&response, "transfer-encoding"), None, "{response}");
    assert!(response.ends_with("\r\n\r\nhello"), "{response}");
}

/// A truncated response must not look complete.
#[tokio::test]
async fn truncated_upstream_response_is_truncated_for_the_client() {
    let address = scripted(|mut stream, number| async move {
        read_head(&mut stream).await;
        let part: &[u8] = match number {
            0 => b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
            _ => b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        };
        stream.write_all(part).await.unwrap();
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let sized = get(gateway.address, "/", "").await;
    assert_eq!(header(&sized, "content-length"), Some("10"), "{sized}");
    assert!(!sized.ends_with("hellohello"));
    let chunked = get(gateway.address, "/", "").await;
    assert!(!chunked.ends_with("0\r\n\r\n"), "{chunked}");
    let line = gateway.log.lines(2).await.remove(1);
    assert!(line.contains(r#""status":200"#), "{line}");
}
