//! Clients that mean no good: whatever they send or do not, the others are served, and nothing grows.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tollgate_server::resp::Patience;
use tollgate_server::resp::wire::{COMMAND_BYTES_MAX, LINE_BYTES_MAX, WORD_BYTES_MAX, WORDS_MAX};

use super::support::{PATIENCE, Running, Setup, command};

const SHORT: Duration = Duration::from_millis(100);

#[tokio::test]
async fn what_is_too_large_is_refused_before_it_comes() {
    let door = Running::start().await;
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
        let mut client = door.connect().await;
        client.send(&bytes).await;
        let said = client.rest().await;
        assert!(said.starts_with(&format!("-ERR Protocol error: {expected}")), "{said}");
        assert_eq!(said.matches("\r\n").count(), 1, "{said}");
    }
    // What came before it is answered.
    let mut client = door.connect().await;
    client.send(b"PING\r\n*1\r\n$-5\r\nPING\r\n").await;
    let said = client.rest().await;
    assert!(said.starts_with("+PONG\r\n-ERR Protocol error") && !said.ends_with("+PONG\r\n"), "{said}");
    door.until(|door| door.counts.open() == 0).await;
}

#[tokio::test]
async fn there_is_room_for_so_many() {
    let door = Running::start_with(Setup { max_connections: 50, ..Setup::default() }).await;
    let mut inside = Vec::new();
    for _ in 0..50 {
        let mut client = door.connect().await;
        assert_eq!(client.ask("PING").await, "+PONG\r\n");
        inside.push(client);
    }
    for _ in 0..1000 {
        assert_eq!(door.connect().await.rest().await, "-ERR max number of clients reached\r\n");
    }
    assert_eq!((door.counts.open(), door.counts.turned_away()), (50, 1000));
    // Those inside do not notice, and who leaves makes room.
    for client in &mut inside {
        assert_eq!(client.ask("PING").await, "+PONG\r\n");
    }
    inside.truncate(49);
    door.until(|door| door.counts.open() == 49).await;
    let mut next = door.connect().await;
    assert_eq!(next.ask("PING").await, "+PONG\r\n");
}

#[tokio::test]
async fn one_with_nothing_to_say_is_not_waited_for() {
    let patience = Patience { idle: SHORT, ..Patience::default() };
    let door = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut silent = door.connect().await;
    assert_eq!(silent.rest().await, "");
    let mut silent = door.connect().await;
    assert_eq!(silent.ask("PING").await, "+PONG\r\n");
    assert_eq!(silent.rest().await, "");
    door.until(|door| door.counts.open() == 0).await;
}

/// Each byte comes in time for an idle client, and the command never does.
#[tokio::test]
async fn a_command_that_comes_byte_by_byte_has_one_time_for_all() {
    let patience = Patience { command: SHORT, ..Patience::default() };
    let door = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut slow = door.connect().await;
    assert_eq!(slow.ask("PING").await, "+PONG\r\n");
    let mut sent = 0;
    let dripping = async {
        slow.stream.write_all(b"*1\r\n$1000\r\n").await.unwrap();
        // Until the socket says that nobody is there.
        while slow.stream.write_all(b"a").await.is_ok() {
            sent += 1;
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    timeout(PATIENCE, dripping).await.unwrap();
    assert!(sent < 990, "it was closed before the end");
    door.until(|door| door.counts.open() == 0).await;
}

/// Whoever does not know the token has as long as for a command to say it, whatever else it says.
#[tokio::test]
async fn strangers_do_not_stay() {
    let patience = Patience { command: 10 * SHORT, ..Patience::default() };
    let token = Some("open-sesame-open-sesame");
    let door = Running::start_with(Setup { patience, token, ..Setup::default() }).await;
    let (mut friend, mut stranger) = (door.connect().await, door.connect().await);
    assert_eq!(friend.ask("AUTH open-sesame-open-sesame").await, "+OK\r\n");
    let talking = async {
        while stranger.stream.write_all(b"PING\r\n").await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    timeout(PATIENCE, talking).await.unwrap();
    door.until(|door| door.counts.open() == 1).await;
    assert_eq!(friend.ask("PING").await, "+PONG\r\n");
}

/// Many whole commands, each in time, are no slow command.
#[tokio::test]
async fn one_who_always_has_half_a_command_open_is_served() {
    let patience = Patience { command: SHORT, ..Patience::default() };
    let door = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut client = door.connect().await;
    client.send(b"PI").await;
    for _ in 0..30 {
        tokio::time::sleep(SHORT / 10).await;
        client.send(b"NG\r\nPI").await;
        assert_eq!(client.reply().await, "+PONG\r\n");
    }
}

#[tokio::test]
async fn one_who_does_not_read_is_closed() {
    let patience = Patience { write: SHORT, ..Patience::default() };
    let door = Running::start_with(Setup { patience, ..Setup::default() }).await;
    let mut deaf = door.connect().await;
    let echo = [&b"*2\r\n$4\r\nECHO\r\n$8192\r\n"[..], &[b'a'; 8192], b"\r\n"].concat();
    let mut sent = 0_usize;
    let shouting = async {
        while deaf.stream.write_all(&echo).await.is_ok() {
            sent += echo.len();
        }
    };
    timeout(PATIENCE, shouting).await.unwrap();
    // What the sockets hold on both sides, and no more.
    assert!(sent < 64 << 20, "{sent} bytes were taken from one who reads nothing");
    door.until(|door| door.counts.open() == 0).await;
    assert_eq!(door.connect().await.ask("PING").await, "+PONG\r\n");
}

/// Replies that are much longer than their commands are sent before there are too many of them.
#[tokio::test]
async fn many_long_replies_come_whole() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    let count = 2_000;
    let (mut reader, mut writer) = (door.connect().await, client.stream.split().1);
    let one = reader.ask("COMMAND").await;
    writer.write_all(&command("COMMAND").repeat(count)).await.unwrap();
    for _ in 0..count {
        assert_eq!(client.reply().await, one);
    }
}

/// Empty lines are no commands and cost nothing but their bytes.
#[tokio::test]
async fn emptiness_is_not_answered() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    client.send(&b"\r\n*0\r\n \n".repeat(20_000)).await;
    assert_eq!(client.ask("PING").await, "+PONG\r\n");
    assert_eq!(door.info().await["commands_other"], "1");
}
