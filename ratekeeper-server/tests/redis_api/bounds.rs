//! Hostile clients: whatever they send or withhold, other clients are served and memory stays bounded.

use std::time::Duration;

use ratekeeper_server::redis_api::Patience;
use ratekeeper_server::redis_api::protocol::{COMMAND_BYTES_MAX, LINE_BYTES_MAX, WORD_BYTES_MAX, WORDS_MAX};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use super::support::{PATIENCE, Running, Setup, command};

const SHORT: Duration = Duration::from_millis(100);

#[tokio::test]
async fn oversized_input_is_rejected_by_its_length() {
    let api = Running::start().await;
    let word = [&b"$8192\r\n"[..], &[b'a'; WORD_BYTES_MAX], b"\r\n"].concat();
    for (bytes, expected) in [
        (format!("*1\r\n${}\r\n", WORD_BYTES_MAX + 1).into_bytes(), "invalid bulk length"),
        (b"*1\r\n$536870912\r\n".to_vec(), "invalid bulk length"),
        (b"*2\r\n$4\r\nPING\r\n$-2147483648\r\n".to_vec(), "invalid bulk length"),
        (format!("*{}\r\n", WORDS_MAX + 1).into_bytes(), "invalid multibulk length"),
        (b"*2147483647\r\n".to_vec(), "invalid multibulk length"),
        (b"*1\r\n".repeat(1000), "expected '$', got '*'"),
        (vec![b'a'; LINE_BYTES_MAX + 1], "too big inline request"),
        (vec![b'*'; 1000], "invalid multibulk length"),
        ([&b"*100\r\n"[..], &word.repeat(COMMAND_BYTES_MAX / word.len() + 1)].concat(), "too big command"),
    ] {
        let mut client = api.connect().await;
        client.send(&bytes).await;
        let said = client.rest().await;
        assert!(said.starts_with(&format!("-ERR Protocol error: {expected}")), "{said}");
        assert_eq!(said.matches("\r\n").count(), 1, "{said}");
    }
    // Commands before the error are answered.
    let mut client = api.connect().await;
    client.send(b"PING\r\n*1\r\n$-5\r\nPING\r\n").await;
    let said = client.rest().await;
    assert!(said.starts_with("+PONG\r\n-ERR Protocol error") && !said.ends_with("+PONG\r\n"), "{said}");
    api.until(|api| api.counts.open() == 0).await;
}

#[tokio::test]
async fn connections_beyond_the_maximum_are_rejected() {
    let api = Running::start_with(Setup { max_connections: 50, ..Setup::default() }).await;
    let mut inside = Vec::new();
    for _ in 0..50 {
        let mut client = api.connect().await;
        assert_eq!(client.ask("PING").await, "+PONG\r\n");
        inside.push(client);
    }
    for _ in 0..1000 {
        assert_eq!(api.connect().await.rest().await, "-ERR max number of clients reached\r\n");
    }
    assert_eq!((api.counts.open(), api.counts.turned_away()), (50, 1000));
    // Open connections are not affected, and a closed one makes room for another.
    for client in &mut inside {
        assert_eq!(client.ask("PING").await, "+PONG\r\n");
    }
    inside.truncate(49);
    api.until(|api| api.counts.open() == 49).await;
    let mut next = api.connect().await;
    assert_eq!(next.ask("PING").await, "+PONG\r\n");
}

#[tokio::test]
async fn idle_connection_is_closed() {
    let patience = Patience { idle: SHORT, ..Patience::default() };
    let api = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut silent = api.connect().await;
    assert_eq!(silent.rest().await, "");
    let mut silent = api.connect().await;
    assert_eq!(silent.ask("PING").await, "+PONG\r\n");
    assert_eq!(silent.rest().await, "");
    api.until(|api| api.counts.open() == 0).await;
}

/// Each byte arrives within the idle time, but the command never completes.
#[tokio::test]
async fn slow_command_has_one_deadline() {
    let patience = Patience { command: SHORT, ..Patience::default() };
    let api = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut slow = api.connect().await;
    assert_eq!(slow.ask("PING").await, "+PONG\r\n");
    let mut sent = 0;
    let dripping = async {
        slow.stream.write_all(b"*1\r\n$1000\r\n").await.unwrap();
        // Until a write fails because the server has closed the connection.
        while slow.stream.write_all(b"a").await.is_ok() {
            sent += 1;
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    timeout(PATIENCE, dripping).await.unwrap();
    assert!(sent < 990, "it was closed before the end");
    api.until(|api| api.counts.open() == 0).await;
}

/// A client without the token has the time of one command to authenticate, whatever else it sends.
#[tokio::test]
async fn unauthenticated_connection_is_closed() {
    let patience = Patience { command: 10 * SHORT, ..Patience::default() };
    let token = Some("open-sesame-open-sesame");
    let api = Running::start_with(Setup { patience, token, ..Setup::default() }).await;
    let (mut friend, mut stranger) = (api.connect().await, api.connect().await);
    assert_eq!(friend.ask("AUTH open-sesame-open-sesame").await, "+OK\r\n");
    let talking = async {
        while stranger.stream.write_all(b"PING\r\n").await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    timeout(PATIENCE, talking).await.unwrap();
    api.until(|api| api.counts.open() == 1).await;
    assert_eq!(friend.ask("PING").await, "+PONG\r\n");
}

/// Many complete commands, each in time, are not a slow command.
#[tokio::test]
async fn overlapping_partial_commands_are_not_timed_out() {
    let patience = Patience { command: SHORT, ..Patience::default() };
    let api = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut client = api.connect().await;
    client.send(b"PI").await;
    for _ in 0..30 {
        tokio::time::sleep(SHORT / 10).await;
        client.send(b"NG\r\nPI").await;
        assert_eq!(client.reply().await, "+PONG\r\n");
    }
}

#[tokio::test]
async fn client_that_does_not_read_is_closed() {
    let patience = Patience { write: SHORT, ..Patience::default() };
    let api = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut deaf = api.connect().await;
    let echo = [&b"*2\r\n$4\r\nECHO\r\n$8192\r\n"[..], &[b'a'; 8192], b"\r\n"].concat();
    let mut sent = 0_usize;
    let shouting = async {
        while deaf.stream.write_all(&echo).await.is_ok() {
            sent += echo.len();
        }
    };
    timeout(PATIENCE, shouting).await.unwrap();
    // At most what the sockets of both sides buffer.
    assert!(sent < 64 << 20, "{sent} bytes were taken from one who reads nothing");
    api.until(|api| api.counts.open() == 0).await;
    assert_eq!(api.connect().await.ask("PING").await, "+PONG\r\n");
}

/// Replies that are much longer than their commands are sent before they accumulate.
#[tokio::test]
async fn many_long_replies_arrive_complete() {
    let api = Running::start().await;
    let mut client = api.connect().await;
    let count = 2_000;
    let (mut reader, mut writer) = (api.connect().await, client.stream.split().1);
    let one = reader.ask("COMMAND").await;
    writer.write_all(&command("COMMAND").repeat(count)).await.unwrap();
    for _ in 0..count {
        assert_eq!(client.reply().await, one);
    }
}

/// Empty lines are not commands.
#[tokio::test]
async fn empty_lines_are_not_answered() {
    let api = Running::start().await;
    let mut client = api.connect().await;
    client.send(&b"\r\n*0\r\n \n".repeat(20_000)).await;
    assert_eq!(client.ask("PING").await, "+PONG\r\n");
    assert_eq!(api.info().await["commands_other"], "1");
}
