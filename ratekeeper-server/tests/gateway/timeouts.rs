//! Timeouts of clients and upstreams, and graceful shutdown.

use testbed::TEST_TIMEOUT;
use testbed::http::{get, read_all, status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::peers::ConfigFile;
use super::support::{Upstream, in_front_of, run};

/// Timeouts short enough for a test.
const SHORT: &str = "timeouts: { header: 200ms, body: 200ms, idle: 400ms, drain: 5s }";

async fn short(upstream: &Upstream) -> super::support::TestGateway {
    let at = upstream.address;
    run(&format!(
        "gateway:\n  listen: 127.0.0.1:0\n  {SHORT}\n  routes:\n    - {{ id: a, limits: all, upstream: http://{at}, timeout: 300ms }}\n"
    ))
    .await
}

#[tokio::test]
async fn incomplete_heads_time_out() {
    let upstream = Upstream::start().await;
    let gateway = short(&upstream).await;
    for begin in ["", "GET / HT", "GET / HTTP/1.1\r\nHost: a\r\nX: "] {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        stream.write_all(begin.as_bytes()).await.unwrap();
        assert_eq!(read_all(&mut stream).await, "", "{begin:?}");
    }
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn slowly_sent_head_times_out() {
    let upstream = Upstream::start().await;
    let gateway = short(&upstream).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let dripping = async {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nX: ").await.unwrap();
        // Each byte arrives in time, but the head never completes.
        while stream.write_all(b"a").await.is_ok() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    timeout(TEST_TIMEOUT, dripping).await.unwrap();
}

#[tokio::test]
async fn missing_request_body_gives_408() {
    let upstream = Upstream::start().await;
    let gateway = short(&upstream).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc").await.unwrap();
    assert_eq!(status(&read_all(&mut stream).await), 408);
}

/// Sends a body in parts, one every 20 ms, and returns the response.
async fn send_slowly(gateway: &super::support::TestGateway, part: &str, parts: usize) -> String {
    let (mut reading, mut writing) = TcpStream::connect(gateway.address).await.unwrap().into_split();
    let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", part.len() * parts);
    writing.write_all(head.as_bytes()).await.unwrap();
    let part = part.to_owned();
    let sending = tokio::spawn(async move {
        for _ in 0..parts {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            if writing.write_all(part.as_bytes()).await.is_err() {
                break;
            }
        }
        writing
    });
    let mut response = [0; 12];
    timeout(TEST_TIMEOUT, reading.read_exact(&mut response)).await.expect("no response").unwrap();
    sending.abort();
    String::from_utf8(response.to_vec()).unwrap()
}

#[tokio::test]
async fn slowly_sent_request_body_gives_408() {
    let upstream = Upstream::start().await;
    let gateway = short(&upstream).await;
    // Each byte arrives in time, but at 50 bytes per second.
    assert_eq!(status(&send_slowly(&gateway, "a", 1_000_000).await), 408);
    // Longer than the timeout, but above the minimum rate.
    assert_eq!(status(&send_slowly(&gateway, &"a".repeat(100), 25).await), 200);
}

/// A client that answers what it reads, slowly: a conversation over one request.
#[tokio::test]
async fn minimum_rate_does_not_hold_once_the_response_has_begun() {
    let address = super::peers::scripted(|mut stream, _| async move {
        testbed::http::read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na").await.unwrap();
        stream.read_exact(&mut [0; 25]).await.unwrap();
        stream.write_all(b"z").await.unwrap();
    })
    .await;
    let file = ConfigFile { gateway: "timeouts: { body: 200ms }", ..ConfigFile::default() };
    let gateway = run(&file.to(&[address])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 25\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.readable().await.unwrap();
    // In total, longer than the timeout of a body.
    for _ in 0..25 {
        stream.write_all(b"b").await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let response = read_all(&mut stream).await;
    assert!(response.ends_with("az"), "{response}");
}

#[tokio::test]
async fn minimum_rate_can_be_switched_off() {
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "timeouts: { body: 200ms, min_rate: 0 }", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    assert_eq!(status(&send_slowly(&gateway, "a", 25).await), 200);
}

#[tokio::test]
async fn idle_connection_is_closed_after_its_response() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    drop(gateway);
    let gateway = short(&upstream).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let response = read_all(&mut stream).await;
    assert!(response.ends_with("hello"), "{response}");
}

#[tokio::test]
async fn slow_upstream_gives_504() {
    let upstream = Upstream::start().await;
    let gateway = short(&upstream).await;
    assert_eq!(status(&get(gateway.address, "/hold", "").await), 504);
}

#[tokio::test]
async fn graceful_shutdown_answers_requests_in_flight() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let address = gateway.address;
    let mut idle = TcpStream::connect(address).await.unwrap();
    idle.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut bytes = [0; 1024];
    assert!(idle.read(&mut bytes).await.unwrap() > 0);
    let sending: Vec<_> = (0..100)
        .map(|_| {
            tokio::spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
                read_all(&mut stream).await
            })
        })
        .collect();
    upstream.wait_for_held(100).await;
    let draining = tokio::spawn(gateway.gateway.drain());
    // A request on an open connection is still answered, as the last one on it.
    idle.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let last = read_all(&mut idle).await;
    assert!(status(&last) == 200, "{last}");
    testbed::wait_until(|| std::net::TcpStream::connect(address).is_err()).await;
    upstream.release(100);
    for sent in sending {
        let response = sent.await.unwrap();
        assert!(status(&response) == 200 && response.ends_with("hello"), "{response}");
    }
    assert_eq!(draining.await.unwrap(), 0);
}
