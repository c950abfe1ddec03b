//! Timeouts of clients and upstreams, and graceful shutdown.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::support::{TEST_TIMEOUT, Upstream, get, in_front_of, read_all, run, status};

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
    super::support::wait_until(|| std::net::TcpStream::connect(address).is_err()).await;
    upstream.release(100);
    for sent in sending {
        let response = sent.await.unwrap();
        assert!(status(&response) == 200 && response.ends_with("hello"), "{response}");
    }
    assert_eq!(draining.await.unwrap(), 0);
}
