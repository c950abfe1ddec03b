//! The admin listener against clients that take connections and do not use them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper_server::{Current, StatusSource, admin};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::gateway::support::{TEST_TIMEOUT, read_all, send_raw, status};

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
    let loopback = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, serving) =
        admin::listen(loopback, Arc::new(LargeMetrics), Arc::new(Current::new(None))).unwrap();
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
async fn admin_connections_above_the_bound_are_closed() {
    let address = listen();
    let mut silent = Vec::new();
    for _ in 0..admin::CONNECTIONS_MAX {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /met").await.unwrap();
        silent.push(stream);
    }
    let mut above = TcpStream::connect(address).await.unwrap();
    assert_eq!(read_all(&mut above).await, "", "closed immediately");
    drop(silent);
    let answered = async {
        while healthz(address).await != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TEST_TIMEOUT, answered).await.expect("the listener did not recover");
}
