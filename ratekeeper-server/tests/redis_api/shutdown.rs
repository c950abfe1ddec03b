//! Graceful shutdown of the API.

use testbed::{TEST_TIMEOUT, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::support::{TestApi, command};

#[tokio::test]
async fn idle_connections_are_closed_on_shutdown() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    assert_eq!(client.call("PING").await, "+PONG\r\n");
    let mut partial = api.connect().await;
    partial.send(b"*1\r\n$4\r\nPI").await;
    api.drain.send_replace(true);
    assert_eq!(client.rest().await, "");
    assert_eq!(partial.rest().await, "");
    timeout(TEST_TIMEOUT, api.server).await.unwrap().unwrap();
    assert!(TcpStream::connect(api.address).await.is_err(), "the listener is closed");
}

/// Commands that have arrived when the API begins to close are answered, so that every charged client gets its
/// reply.
#[tokio::test]
async fn commands_received_before_shutdown_are_answered() {
    let api = TestApi::start().await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = api.connect().await;
        assert_eq!(client.call("PING").await, "+PONG\r\n");
        client.send(&command("CL.THROTTLE user 999 1 3600").repeat(10)).await;
        clients.push(client);
    }
    api.drain.send_replace(true);
    let mut answered = 0;
    for client in &mut clients {
        let replies = client.rest().await;
        answered += replies.matches("*5\r\n").count();
    }
    assert_eq!(answered, 200);
    timeout(TEST_TIMEOUT, api.server).await.unwrap().unwrap();
    assert_eq!(api.metrics.open_connections(), 0);
}

/// A client that sends without pause is closed as well.
#[tokio::test]
async fn busy_client_cannot_delay_shutdown() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    let address = api.address;
    let sending = tokio::spawn(async move {
        let mut received = 0_usize;
        loop {
            let mut bytes = [0; 4096];
            if client.stream.write_all(&b"PING\r\n".repeat(100)).await.is_err() {
                return received;
            }
            match client.stream.read(&mut bytes).await {
                Ok(0) | Err(_) => return received,
                Ok(read) => received += read,
            }
        }
    });
    wait_until(|| api.metrics.open_connections() == 1).await;
    api.drain.send_replace(true);
    timeout(TEST_TIMEOUT, sending).await.unwrap().unwrap();
    timeout(TEST_TIMEOUT, api.server).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}
