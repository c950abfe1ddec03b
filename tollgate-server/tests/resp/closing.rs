//! How the door closes.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::support::{PATIENCE, Running, command};

#[tokio::test]
async fn who_has_nothing_to_say_is_closed() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    assert_eq!(client.ask("PING").await, "+PONG\r\n");
    let mut half = door.connect().await;
    half.send(b"*1\r\n$4\r\nPI").await;
    door.draining.send_replace(true);
    assert_eq!(client.rest().await, "");
    assert_eq!(half.rest().await, "");
    timeout(PATIENCE, door.served).await.unwrap().unwrap();
    assert!(TcpStream::connect(door.address).await.is_err(), "nobody listens");
}

/// What had come when the door was told to close is answered: nobody who was charged is left without an answer.
#[tokio::test]
async fn what_has_come_is_answered() {
    let door = Running::start().await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = door.connect().await;
        assert_eq!(client.ask("PING").await, "+PONG\r\n");
        client.send(&command("CL.THROTTLE user 999 1 3600").repeat(10)).await;
        clients.push(client);
    }
    door.draining.send_replace(true);
    let mut answered = 0;
    for client in &mut clients {
        let said = client.rest().await;
        answered += said.matches("*5\r\n").count();
    }
    assert_eq!(answered, 200);
    timeout(PATIENCE, door.served).await.unwrap().unwrap();
    assert_eq!(door.counts.open(), 0);
}

/// One who always has something to say is closed, too.
#[tokio::test]
async fn nobody_keeps_the_door_open_by_talking() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    let address = door.address;
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
    door.until(|door| door.counts.open() == 1).await;
    door.draining.send_replace(true);
    timeout(PATIENCE, talking).await.unwrap().unwrap();
    timeout(PATIENCE, door.served).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}
