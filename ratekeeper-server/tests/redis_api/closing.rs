//! Graceful shutdown of the API.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::support::{PATIENCE, Running, command};

#[tokio::test]
async fn idle_connections_are_closed_on_shutdown() {
    let api = Running::start().await;
    let mut client = api.connect().await;
    assert_eq!(client.ask("PING").await, "+PONG\r\n");
    let mut half = api.connect().await;
    half.send(b"*1\r\n$4\r\nPI").await;
    api.draining.send_replace(true);
    assert_eq!(client.rest().await, "");
    assert_eq!(half.rest().await, "");
    timeout(PATIENCE, api.served).await.unwrap().unwrap();
    assert!(TcpStream::connect(api.address).await.is_err(), "nobody listens");
}

/// Commands that have arrived when the API begins to close are answered, so that no charged client is left without a
/// reply.
#[tokio::test]
async fn commands_received_before_shutdown_are_answered() {
    let api = Running::start().await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = api.connect().await;
        assert_eq!(client.ask("PING").await, "+PONG\r\n");
        client.send(&command("CL.THROTTLE user 999 1 3600").repeat(10)).await;
        clients.push(client);
    }
    api.draining.send_replace(true);
    let mut answered = 0;
    for client in &mut clients {
        let said = client.rest().await;
        answered += said.matches("*5\r\n").count();
    }
    assert_eq!(answered, 200);
    timeout(PATIENCE, api.served).await.unwrap().unwrap();
    assert_eq!(api.counts.open(), 0);
}

/// A client that sends without pause is closed as well.
#[tokio::test]
async fn busy_client_cannot_delay_shutdown() {
    let api = Running::start().await;
    let mut client = api.connect().await;
    let address = api.address;
    let talking = tokio::spawn(async move {
        let mut said = 0_usize;
        loop {
            let mut bytes = [0; 4096];
            if client.stream.write_all(&b"PING\r\n".repeat(100)).await.is_err() {
                return said;
            }
            match client.stream.read(&mut bytes).await {
                Ok(0) | Err(_) => return said,
                Ok(read) => said += read,
            }
        }
    });
    api.until(|api| api.counts.open() == 1).await;
    api.draining.send_replace(true);
    timeout(PATIENCE, talking).await.unwrap().unwrap();
    timeout(PATIENCE, api.served).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}
