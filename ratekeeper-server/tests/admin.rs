//! The admin listener against clients that take connections and do not use them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratekeeper_server::{Current, StatusSource, admin};
use testbed::http::{read_all, send_raw, status};
use testbed::{TEST_TIMEOUT, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Metrics too large for the buffers of a socket.
struct LargeMetrics;

impl StatusSource for LargeMetrics {
    fn metrics(&self) -> String {
        "a".repeat(64 << 20)
    }

    fn is_ready(&self) -> bool {
        true
    }
}

fn listen() -> SocketAddr {
    listen_to(Arc::new(LargeMetrics))
}

fn listen_to(source: Arc<dyn StatusSource>) -> SocketAddr {
    let loopback = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, serving) = admin::listen(loopback, source, Arc::new(Current::new(None))).unwrap();
    tokio::spawn(serving);
    address
}

async fn healthz(address: SocketAddr) -> u16 {
    status(&send_raw(address, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await)
}

/// Time is tokio's paused clock, which advances whenever all tasks wait.
#[tokio::test(start_paused = true)]
async fn slow_admin_clients_are_disconnected() {
    let address = listen();
    for sent in ["", "GET /met", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut received = Vec::new();
        let read = timeout(Duration::from_secs(90), stream.read_to_end(&mut received)).await;
        let _ = read.unwrap_or_else(|_| panic!("the connection stayed open after {sent:?}"));
    }
    assert_eq!(healthz(address).await, 200);
}

/// On the paused clock, too.
#[tokio::test(start_paused = true)]
async fn admin_client_that_does_not_read_is_disconnected() {
    let address = listen();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    // Until the response has begun: it is written on a blocking thread, which the paused clock does not wait for.
    timeout(TEST_TIMEOUT, stream.readable()).await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(90)).await;
    let mut received = Vec::new();
    let read = timeout(TEST_TIMEOUT, stream.read_to_end(&mut received)).await;
    let _ = read.expect("the connection stayed open");
    assert!(received.len() < 64 << 20, "all {} bytes were sent", received.len());
}

#[tokio::test]
async fn incomplete_request_heads_do_not_take_the_admin_connections() {
    let address = listen();
    let mut silent = Vec::new();
    for _ in 0..2 * admin::CONNECTIONS_MAX {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /met").await.unwrap();
        silent.push(stream);
        assert_eq!(healthz(address).await, 200, "after {} incomplete request heads", silent.len());
    }
    // The oldest are closed, the latest are not.
    let mut received = Vec::new();
    let _ = timeout(TEST_TIMEOUT, silent[0].read_to_end(&mut received)).await.expect("it stayed open");
    let mut latest = silent.pop().unwrap();
    latest.write_all(b"rics HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    timeout(TEST_TIMEOUT, latest.read_exact(&mut [0; 12])).await.unwrap().unwrap();
}

#[tokio::test]
async fn admin_response_that_is_being_read_is_not_cut_off_for_new_connections() {
    let address = listen();
    let mut reader = TcpStream::connect(address).await.unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    reader.write_all(request).await.unwrap();
    timeout(TEST_TIMEOUT, reader.readable()).await.unwrap().unwrap();
    let mut silent = Vec::new();
    for _ in 0..2 * admin::CONNECTIONS_MAX {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /met").await.unwrap();
        silent.push(stream);
    }
    assert_eq!(healthz(address).await, 200);
    let mut received = Vec::new();
    timeout(TEST_TIMEOUT, reader.read_to_end(&mut received)).await.unwrap().unwrap();
    assert!(received.len() > 64 << 20, "only {} bytes were sent", received.len());
}

/// A server that is draining, and whose metrics cannot be written.
struct FailedStatus;

impl StatusSource for FailedStatus {
    fn metrics(&self) -> String {
        panic!("a bug")
    }

    fn is_ready(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn admin_errors_are_problem_responses() {
    let address = listen_to(Arc::new(FailedStatus));
    for (request, expected) in [
        ("GET /metric", 404),
        ("POST /metrics", 405),
        ("POST /readyz", 405),
        ("GET /metrics", 500),
        ("GET /readyz", 503),
    ] {
        let head = format!("{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let response = send_raw(address, head).await;
        assert_eq!(status(&response), expected, "{request}");
        assert!(response.contains("content-type: application/problem+json\r\n"), "{response}");
        assert!(response.contains(&format!("\"status\":{expected}")), "{response}");
        assert_eq!(response.contains("allow: GET,HEAD\r\n"), expected == 405, "{response}");
    }
}

/// Metrics that are not available until the sender is dropped.
struct BlockedMetrics(Mutex<Receiver<()>>, AtomicUsize);

impl StatusSource for BlockedMetrics {
    fn metrics(&self) -> String {
        self.1.fetch_add(1, Ordering::Relaxed);
        let _ = self.0.lock().unwrap().recv();
        String::new()
    }

    fn is_ready(&self) -> bool {
        true
    }
}

#[tokio::test]
async fn admin_connections_above_the_bound_are_closed_if_all_are_busy() {
    let (unblock, blocked) = channel();
    let source = Arc::new(BlockedMetrics(Mutex::new(blocked), AtomicUsize::new(0)));
    let address = listen_to(source.clone());
    let mut busy = Vec::new();
    for number in 1..=admin::CONNECTIONS_MAX {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        busy.push(stream);
        wait_until(|| source.1.load(Ordering::Relaxed) == number).await;
    }
    let mut above = TcpStream::connect(address).await.unwrap();
    assert_eq!(read_all(&mut above).await, "", "closed immediately");
    drop(unblock);
    for stream in &mut busy {
        let mut begin = [0; 12];
        timeout(TEST_TIMEOUT, stream.read_exact(&mut begin)).await.unwrap().unwrap();
        assert_eq!(begin, *b"HTTP/1.1 200");
    }
    assert_eq!(healthz(address).await, 200);
}
