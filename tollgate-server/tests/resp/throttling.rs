//! What limits say by their commands.

use std::time::Duration;

use super::support::{Running, Setup, array, command, layer};

/// What redis-cell itself is tested with: five at once, and one more each second. Milliseconds since the start, the
/// quantity, and then all that is told; seconds are rounded up, as redis-cell does.
#[rustfmt::skip]
const CELL: [(u64, u32, [i64; 5]); 15] = [
    // More than there can ever be: no wait helps.
    (0, 6, [1, 5, 5, -1, 0]),
    (0, 1, [0, 5, 4, -1, 1]),
    (0, 1, [0, 5, 3, -1, 2]),
    (0, 1, [0, 5, 2, -1, 3]),
    (0, 1, [0, 5, 1, -1, 4]),
    (0, 1, [0, 5, 0, -1, 5]),
    (0, 1, [1, 5, 0, 1, 5]),
    (3000, 1, [0, 5, 2, -1, 3]),
    // 3.9 seconds.
    (3100, 1, [0, 5, 1, -1, 4]),
    (4000, 1, [0, 5, 1, -1, 4]),
    (8000, 1, [0, 5, 4, -1, 1]),
    (9500, 1, [0, 5, 4, -1, 1]),
    // Nothing is taken.
    (9500, 0, [0, 5, 4, -1, 1]),
    (9500, 2, [0, 5, 2, -1, 3]),
    (9500, 5, [1, 5, 2, 3, 3]),
];

#[tokio::test]
async fn cl_throttle_is_told_what_redis_cell_says() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    let mut past = 0;
    for (number, (at, quantity, expected)) in CELL.into_iter().enumerate() {
        door.clock.advance(Duration::from_millis(at - past));
        past = at;
        let numbers = client.numbers(&format!("CL.THROTTLE user 4 1 1 {quantity}")).await;
        assert_eq!(numbers, expected, "case {number}");
    }
}

/// The same numbers, the other way round: 1 is yes, the limit is `max_burst` itself, and the waits change places.
#[tokio::test]
async fn throttle_is_told_in_the_order_of_throttlecrab() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    for remaining in (0..5).rev() {
        let expected = [1, 5, remaining, 5 - remaining, 0];
        assert_eq!(client.numbers("THROTTLE user 5 1 1").await, expected);
    }
    assert_eq!(client.numbers("throttle user 5 1 1").await, [0, 5, 0, 5, 1]);
    assert_eq!(client.numbers("THROTTLE user 5 1 1 0").await, [1, 5, 0, 5, 0]);
    assert_eq!(client.numbers("THROTTLE user 5 1 1 6").await, [0, 5, 0, 5, -1]);
    door.clock.advance(Duration::from_millis(1100));
    assert_eq!(client.numbers("THROTTLE user 5 1 1 2").await, [0, 5, 1, 4, 1]);
}

#[tokio::test]
async fn keys_are_apart_whatever_is_in_them() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    for key in [&b""[..], b"\0", b"\r\n", b"\xff\xfe", b"a", b"A", &[b'a'; 8192]] {
        client.send(&array(&[b"CL.THROTTLE", key, b"0", b"1", b"60"])).await;
        assert_eq!(client.reply().await, "*5\r\n:0\r\n:1\r\n:0\r\n:-1\r\n:60\r\n", "{}", key.escape_ascii());
        client.send(&array(&[b"CL.THROTTLE", key, b"0", b"1", b"60"])).await;
        assert_eq!(client.reply().await, "*5\r\n:1\r\n:1\r\n:0\r\n:60\r\n:60\r\n", "{}", key.escape_ascii());
    }
}

#[tokio::test]
async fn what_is_no_limit_is_told_why() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    let usage =
        "-Cell error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]\r\n";
    for (line, expected) in [
        ("CL.THROTTLE", usage),
        ("CL.THROTTLE k 1 1", usage),
        ("CL.THROTTLE k 1 1 1 1 1", usage),
        ("CL.THROTTLE k x 1 1", "-Cell error: Couldn't parse as integer: x\r\n"),
        ("CL.THROTTLE k 1 1 1.5", "-Cell error: Couldn't parse as integer: 1.5\r\n"),
        (
            "CL.THROTTLE k 1 1 1 99999999999999999999",
            "-Cell error: Couldn't parse as integer: 99999999999999999999\r\n",
        ),
        ("CL.THROTTLE k 1 0 1", "-Cell error: Zero rates are not supported\r\n"),
        ("CL.THROTTLE k 1 1 0", "-Cell error: Zero rates are not supported\r\n"),
        ("CL.THROTTLE k -1 1 1", "-Cell error: max_burst is -1; it must be 0 to 4294967294\r\n"),
        (
            "CL.THROTTLE k 9223372036854775807 1 1",
            "-Cell error: max_burst is 9223372036854775807; it must be 0 to 4294967294\r\n",
        ),
        ("CL.THROTTLE k 1 -1 1", "-Cell error: count is -1; it must be at least 1\r\n"),
        ("CL.THROTTLE k 1 1 -1", "-Cell error: period is -1; it must be at least 1\r\n"),
        ("CL.THROTTLE k 1 1 1 -1", "-Cell error: quantity is -1; it must be 0 to 4294967295\r\n"),
        (
            "CL.THROTTLE k 1 1 9223372036854775807",
            "-Cell error: a rate per 9223372036854775807s is out of range; the period must be 1 ms to 366 days\r\n",
        ),
        (
            "CL.THROTTLE k 1 9223372036854775807 1",
            "-Cell error: 9223372036854775807 per 1s is too fast; a rate must be at most 10000000 per second\r\n",
        ),
        ("THROTTLE k 1 1", "-ERR wrong number of arguments for 'throttle' command\r\n"),
        ("THROTTLE k 1 1 1 1 1", "-ERR wrong number of arguments for 'throttle' command\r\n"),
        ("THROTTLE k 0 1 1", "-ERR invalid max_burst; it must be 1 to 4294967295\r\n"),
        ("THROTTLE k 1 x 1", "-ERR invalid count_per_period; it must be 1 to 4294967295\r\n"),
        ("THROTTLE k 1 1 -1", "-ERR invalid period; it must be 1 to 4294967295\r\n"),
        ("THROTTLE k 1 1 1 -1", "-ERR invalid quantity; it must be 0 to 4294967295\r\n"),
        ("TG.CHECK", "-ERR wrong number of arguments for 'tg.check' command\r\n"),
    ] {
        assert_eq!(client.ask(line).await, expected, "{line}");
    }
    // The widest that there is, and redis-cell's "zero rate": more than a thousand a second.
    assert_eq!(client.numbers("CL.THROTTLE k 4294967294 10000000 1").await[..2], [0, 4294967295]);
    assert_eq!(client.numbers("CL.THROTTLE k 0 2000 1").await, [0, 1, 0, -1, 1]);
    assert_eq!(client.numbers("CL.THROTTLE k 0 1 31622400").await, [0, 1, 0, -1, 31622400]);
}

#[tokio::test]
async fn a_configuration_s_limits_are_asked_by_name() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    assert_eq!(client.numbers("TG.CHECK per-user alice").await, [1, 3, 2, -1, 60_000, 0]);
    assert_eq!(client.numbers("TG.CHECK per-user bob 3").await, [1, 3, 0, -1, 60_000, 0]);
    assert_eq!(client.numbers("TG.CHECK per-user alice 3").await, [0, 3, 2, 60_000, 60_000, 0]);
    door.clock.advance(Duration::from_micros(1_500));
    assert_eq!(client.numbers("TG.CHECK per-user bob").await, [0, 3, 0, 59_999, 59_999, 0]);
    assert_eq!(client.numbers("TG.CHECK per-user bob 0").await, [1, 3, 0, -1, 59_999, 0]);
    assert_eq!(client.numbers("TG.CHECK per-user bob 4").await[..4], [0, 3, 0, -1]);
    // Several parts: the first before the cost, the others behind it.
    assert_eq!(client.numbers("TG.CHECK per-user-and-method alice 1 GET").await[..3], [1, 3, 2]);
    assert_eq!(client.numbers("TG.CHECK per-user-and-method alice 1 POST").await[..3], [1, 3, 2]);
    assert_eq!(client.numbers("TG.CHECK per-user-and-method alice 1 GET").await[..3], [1, 3, 1]);
    // One that is everybody's.
    assert_eq!(client.numbers("TG.CHECK all").await[..3], [1, 3, 2]);
    assert_eq!(client.numbers("TG.CHECK all  2").await[..3], [1, 3, 0]);
    for (line, expected) in [
        ("TG.CHECK nobody alice", "there is no limit 'nobody' in the configuration"),
        ("TG.CHECK edge/user alice", "there is no limit 'edge/user' in the configuration"),
        ("TG.CHECK per-user alice x", "invalid cost; it must be 0 to 4294967295"),
        ("TG.CHECK per-user", "the key of this limit has 1 part, and 0 were given"),
        ("TG.CHECK per-user alice 1 GET", "the key of this limit has 1 part, and 2 were given"),
        ("TG.CHECK per-user-and-method alice", "the key of this limit has 2 parts, and 1 were given"),
        ("TG.CHECK per-user-and-method  1 GET", "a part of the key is empty; say whose budget it is"),
        ("TG.CHECK all alice", "this limit is one for all, and has no key; leave the key out"),
    ] {
        assert_eq!(client.ask(line).await, format!("-ERR {expected}\r\n"), "{line}");
    }
    client.send(&array(&[b"TG.CHECK", b"per-user", b"\xff"])).await;
    assert_eq!(client.reply().await, "-ERR a part of the key is not UTF-8\r\n");
}

/// What a limit says of a key by its lists and bans is told as any decision is.
#[tokio::test]
async fn lists_and_bans_count() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    assert_eq!(client.numbers("TG.CHECK listed mallory").await, [0, 0, 0, -1, 0, 0]);
    for _ in 0..3 {
        assert_eq!(client.numbers("TG.CHECK listed root 2").await, [1, -1, -1, -1, 0, 0]);
    }
    assert_eq!(client.numbers("TG.CHECK listed alice 2").await[..3], [1, 2, 0]);
    assert_eq!(client.numbers("TG.CHECK listed alice").await[..4], [0, 2, 0, 60_000]);
    // That was once too often: it has to wait for the end of the ban.
    let banned = client.numbers("TG.CHECK listed alice").await;
    assert_eq!((banned[0], banned[3]), (0, 3_600_000));
}

/// One that only counts denies nothing.
#[tokio::test]
async fn a_shadow_always_allows() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    for _ in 0..3 {
        assert_eq!(client.numbers("TG.CHECK planned alice").await[..3], [1, 1, 0]);
    }
}

/// Whoever asks has to wait himself.
#[tokio::test]
async fn a_delay_is_told() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    for delay in [0, 1000, 2000] {
        let numbers = client.numbers("TG.CHECK shaped alice").await;
        assert_eq!((numbers[0], numbers[5]), (1, delay));
    }
    assert_eq!(client.numbers("TG.CHECK shaped alice").await[0], 0);
}

#[tokio::test]
async fn what_became_of_commands_is_counted() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    for line in
        ["TG.CHECK all", "CL.THROTTLE k 0 1 60", "CL.THROTTLE k 0 1 60", "CL.THROTTLE k x 1 60", "PING"]
    {
        client.ask(line).await;
    }
    *door.limits.layer.lock().unwrap() = None;
    assert_eq!(
        client.ask("TG.CHECK all").await,
        "-UNAVAILABLE there are no limits to ask now; try again\r\n"
    );
    let info = door.info().await;
    for (name, expected) in
        [("allowed", "2"), ("denied", "1"), ("error", "1"), ("unavailable", "1"), ("other", "1")]
    {
        assert_eq!(info[&format!("commands_{name}")], expected, "{name}");
    }
}

#[tokio::test]
async fn new_limits_count_from_the_next_command_on() {
    let door = Running::start().await;
    let mut client = door.connect().await;
    assert_eq!(client.numbers("TG.CHECK all  3").await[..3], [1, 3, 0]);
    *door.limits.layer.lock().unwrap() = Some(layer(&door.clock));
    assert_eq!(client.numbers("TG.CHECK all  3").await[..3], [1, 3, 0]);
}

/// Everything that has come is answered, in its order.
#[tokio::test]
async fn commands_may_come_many_at_a_time() {
    let door = Running::start_with(Setup::default()).await;
    let mut client = door.connect().await;
    let count = 10_000;
    let all = command("CL.THROTTLE user 9998 1 3600").repeat(count);
    client.send(&all).await;
    for left in (0..count - 1).rev() {
        let reply = client.reply().await;
        assert!(reply.starts_with(&format!("*5\r\n:0\r\n:9999\r\n:{left}\r\n")), "{reply}");
    }
    assert!(client.reply().await.starts_with("*5\r\n:1\r\n:9999\r\n:0\r\n:3600\r\n"));
}
