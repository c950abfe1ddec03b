//! Hostile clients: other clients are served and memory stays bounded, independent of what a client sends.

use std::time::Duration;

use ratekeeper_server::redis_api::ClientTimeouts;
use ratekeeper_server::redis_api::protocol::{COMMAND_BYTES_MAX, LINE_BYTES_MAX, WORD_BYTES_MAX, WORDS_MAX};
use testbed::{TEST_TIMEOUT, wait_until};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use super::support::{TestApi, TestSettings, command};

const SHORT: Duration = Duration::from_millis(100);

#[tokio::test]
async fn oversized_input_is_rejected_by_its_length() {
    let api = TestApi::start().await;
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
        let reply = client.rest().await;
        assert!(reply.starts_with(&format!("-ERR Protocol error: {expected}")), "{reply}");
        assert_eq!(reply.matches("\r\n").count(), 1, "{reply}");
    }
    // Commands before the error are answered.
    let mut client = api.connect().await;
    client.send(b"PING\r\n*1\r\n$-5\r\nPING\r\n").await;
    let reply = client.rest().await;
    assert!(reply.starts_with("+PONG\r\n-ERR Protocol error") && !reply.ends_with("+PONG\r\n"), "{reply}");
    wait_until(|| api.metrics.open_connections() == 0).await;
}

#[tokio::test]
async fn connections_beyond_the_maximum_are_rejected() {
    let api = TestApi::start_with(TestSettings { max_connections: 50, ..TestSettings::default() }).await;
    let mut connected = Vec::new();
    for _ in 0..50 {
        let mut client = api.connect().await;
        assert_eq!(client.call("PING").await, "+PONG\r\n");
        connected.push(client);
    }
    for _ in 0..1000 {
        assert_eq!(api.connect().await.rest().await, "-ERR max number of clients reached\r\n");
    }
    assert_eq!((api.metrics.open_connections(), api.metrics.rejected_connections()), (50, 1000));
    // Open connections are not affected, and a closed one makes room for another.
    for client in &mut connected {
        assert_eq!(client.call("PING").await, "+PONG\r\n");
    }
    connected.truncate(49);
    wait_until(|| api.metrics.open_connections() == 49).await;
    let mut next = api.connect().await;
    assert_eq!(next.call("PING").await, "+PONG\r\n");
}

#[tokio::test]
async fn idle_connection_is_closed() {
    let timeouts = ClientTimeouts { idle: SHORT, ..ClientTimeouts::default() };
    let api = TestApi::start_with(TestSettings { timeouts, ..TestSettings::default() }).await;
    let mut silent = api.connect().await;
    assert_eq!(silent.rest().await, "");
    let mut silent = api.connect().await;
    assert_eq!(silent.call("PING").await, "+PONG\r\n");
    assert_eq!(silent.rest().await, "");
    wait_until(|| api.metrics.open_connections() == 0).await;
}

/// Each byte arrives within the idle time, but the command never completes.
#[tokio::test]
async fn slow_command_has_one_deadline() {
    let timeouts = ClientTimeouts { command: SHORT, ..ClientTimeouts::default() };
    let api = TestApi::start_with(TestSettings { timeouts, ..TestSettings::default() }).await;
    let mut slow = api.connect().await;
    assert_eq!(slow.call("PING").await, "+PONG\r\n");
    let mut sent = 0;
    let sending = async {
        slow.stream.write_all(b"*1\r\n$1000\r\n").await.unwrap();
        // Until a write fails because the server has closed the connection.
        while slow.stream.write_all(b"a").await.is_ok() {
            sent += 1;
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    timeout(TEST_TIMEOUT, sending).await.unwrap();
    assert!(sent < 990, "the connection was closed before the command was complete");
    wait_until(|| api.metrics.open_connections() == 0).await;
}

/// A client without the token has the time of one command to authenticate, whatever else it sends.
#[tokio::test]
async fn unauthenticated_connection_is_closed() {
    let timeouts = ClientTimeouts { command: 10 * SHORT, ..ClientTimeouts::default() };
    let token = Some("open-sesame-open-sesame");
    let api = TestApi::start_with(TestSettings { timeouts, token, ..TestSettings::default() }).await;
    let (mut authenticated, mut unauthenticated) = (api.connect().await, api.connect().await);
    assert_eq!(authenticated.call("AUTH open-sesame-open-sesame").await, "+OK\r\n");
    let sending = async {
        // Each command is in time.
        while unauthenticated.stream.write_all(b"PING\r\n").await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    timeout(TEST_TIMEOUT, sending).await.unwrap();
    wait_until(|| api.metrics.open_connections() == 1).await;
    assert_eq!(authenticated.call("PING").await, "+PONG\r\n");
}

/// Many complete commands, each in time, are not a slow command.
#[tokio::test]
async fn overlapping_partial_commands_are_not_timed_out() {
    let timeouts = ClientTimeouts { command: SHORT, ..ClientTimeouts::default() };
    let api = TestApi::start_with(TestSettings { timeouts, ..TestSettings::default() }).await;
    let mut client = api.connect().await;
    client.send(b"PI").await;
    // In total, longer than the time of one command.
    for _ in 0..30 {
        tokio::time::sleep(SHORT / 10).await;
        client.send(b"NG\r\nPI").await;
        assert_eq!(client.reply().await, "+PONG\r\n");
    }
}

#[tokio::test]
async fn client_that_does_not_read_is_closed() {
    let timeouts = ClientTimeouts { write: SHORT, ..ClientTimeouts::default() };
    let api = TestApi::start_with(TestSettings { timeouts, ..TestSettings::default() }).await;
    let mut client = api.connect().await;
    let echo = [&b"*2\r\n$4\r\nECHO\r\n$8192\r\n"[..], &[b'a'; 8192], b"\r\n"].concat();
    let mut sent = 0_usize;
    let sending = async {
        while client.stream.write_all(&echo).await.is_ok() {
            sent += echo.len();
        }
    };
    timeout(TEST_TIMEOUT, sending).await.unwrap();
    // At most what the sockets of both sides buffer.
    assert!(sent < 64 << 20, "{sent} bytes were accepted from a client that does not read");
    wait_until(|| api.metrics.open_connections() == 0).await;
    assert_eq!(api.connect().await.call("PING").await, "+PONG\r\n");
}

/// Replies that are much longer than their commands are sent before they accumulate.
#[tokio::test]
async fn many_long_replies_arrive_complete() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    let count = 2_000;
    let (mut reader, mut writer) = (api.connect().await, client.stream.split().1);
    let one = reader.call("COMMAND").await;
    writer.write_all(&command("COMMAND").repeat(count)).await.unwrap();
    for _ in 0..count {
        assert_eq!(client.reply().await, one);
    }
}

/// Empty lines are not commands.
#[tokio::test]
async fn empty_lines_are_not_answered() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    client.send(&b"\r\n*0\r\n \n".repeat(20_000)).await;
    assert_eq!(client.call("PING").await, "+PONG\r\n");
    assert_eq!(api.info().await["commands_other"], "1");
}
