//! The commands that check a limit.

use std::time::Duration;

use super::support::{TestApi, TestSettings, array, command, layer};

/// The cases of redis-cell's tests: a burst of five, and one more each second. Milliseconds since the start, the
/// quantity, and the complete reply; seconds are rounded up, as in redis-cell.
#[rustfmt::skip]
const REDIS_CELL_CASES: [(u64, u32, [i64; 5]); 15] = [
    // More than the capacity: no wait helps.
    (0, 6, [1, 5, 5, -1, 0]),
    (0, 1, [0, 5, 4, -1, 1]),
    (0, 1, [0, 5, 3, -1, 2]),
    (0, 1, [0, 5, 2, -1, 3]),
    (0, 1, [0, 5, 1, -1, 4]),
    (0, 1, [0, 5, 0, -1, 5]),
    (0, 1, [1, 5, 0, 1, 5]),
    (3000, 1, [0, 5, 2, -1, 3]),
    // 3.9 seconds, rounded up.
    (3100, 1, [0, 5, 1, -1, 4]),
    (4000, 1, [0, 5, 1, -1, 4]),
    (8000, 1, [0, 5, 4, -1, 1]),
    (9500, 1, [0, 5, 4, -1, 1]),
    // A quantity of 0 charges nothing.
    (9500, 0, [0, 5, 4, -1, 1]),
    (9500, 2, [0, 5, 2, -1, 3]),
    (9500, 5, [1, 5, 2, 3, 3]),
];

#[tokio::test]
async fn cl_throttle_replies_match_redis_cell() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    let mut past = 0;
    for (number, (at, quantity, expected)) in REDIS_CELL_CASES.into_iter().enumerate() {
        api.clock.advance(Duration::from_millis(at - past));
        past = at;
        let numbers = client.numbers(&format!("CL.THROTTLE user 4 1 1 {quantity}")).await;
        assert_eq!(numbers, expected, "case {number}");
    }
}

/// The arithmetic of redis-cell: one instant per key, whatever the parameters. Allowed, and units remaining.
#[derive(Default)]
pub(crate) struct RedisCell {
    full_at_ns: i128,
}

impl RedisCell {
    pub(crate) fn throttle(&mut self, now_ns: i128, [burst, count, period, quantity]: [i64; 4]) -> [i64; 2] {
        let interval = i128::from(period) * 1_000_000_000 / i128::from(count);
        let tolerance = interval * i128::from(burst + 1);
        let missing = (self.full_at_ns - now_ns).max(0);
        let after = missing + interval * i128::from(quantity);
        let allowed = after <= tolerance;
        let missing = if allowed { after } else { missing };
        if allowed && quantity > 0 {
            self.full_at_ns = now_ns + missing;
        }
        [i64::from(!allowed), ((tolerance - missing).max(0) / interval) as i64]
    }
}

/// Bursts, counts, periods and quantities that a client alternates between; the longest fills in 41 days.
pub(crate) const THROTTLE_PARAMETERS: [[i64; 4]; 8] = [
    [4, 1, 3600, 1],
    [5, 1, 3600, 1],
    [4, 2, 3600, 1],
    [9, 5, 36000, 3],
    [0, 1, 60, 1],
    [999, 1, 3600, 2],
    [4, 1, 3600, 0],
    [2, 1, 86400, 1],
];

#[tokio::test]
async fn key_of_cl_throttle_keeps_its_instant_if_the_parameters_change() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    let mut allowed = 0;
    for number in 0..30 {
        let reply = client.numbers(&format!("CL.THROTTLE user {} 1 3600", 4 + number % 2)).await;
        allowed += 1 - reply[0];
    }
    assert_eq!(allowed, 6, "redis-cell allows the larger burst once");
    allowed = 0;
    for number in 0..30 {
        allowed += client.numbers(&format!("THROTTLE other {} 1 3600", 4 + number % 2)).await[0];
    }
    assert_eq!(allowed, 5, "so does throttlecrab, whose burst includes the first");

    // As redis-cell decides, for parameters that change with each command.
    let (mut cell, mut now_ns, mut random) = (RedisCell::default(), 0, 1_u64);
    for step in 0..2000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pick = (random >> 33) as usize;
        let parameters = THROTTLE_PARAMETERS[pick % THROTTLE_PARAMETERS.len()];
        let pause = Duration::from_secs([0, 0, 1, 59, 3600, 86_400][pick / 8 % 6]);
        api.clock.advance(pause);
        now_ns += pause.as_nanos() as i128;
        let [burst, count, period, quantity] = parameters;
        let reply = client.numbers(&format!("CL.THROTTLE mixed {burst} {count} {period} {quantity}")).await;
        let expected = cell.throttle(now_ns, parameters);
        assert_eq!([reply[0], reply[2]], expected, "step {step}: {parameters:?}");
    }
}

/// The same decisions in the order of throttlecrab: 1 means allowed, the limit is `max_burst`, and the two waits are
/// swapped.
#[tokio::test]
async fn throttle_replies_match_throttlecrab() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    for remaining in (0..5).rev() {
        let expected = [1, 5, remaining, 5 - remaining, 0];
        assert_eq!(client.numbers("THROTTLE user 5 1 1").await, expected);
    }
    assert_eq!(client.numbers("throttle user 5 1 1").await, [0, 5, 0, 5, 1]);
    assert_eq!(client.numbers("THROTTLE user 5 1 1 0").await, [1, 5, 0, 5, 0]);
    assert_eq!(client.numbers("THROTTLE user 5 1 1 6").await, [0, 5, 0, 5, -1]);
    api.clock.advance(Duration::from_millis(1100));
    assert_eq!(client.numbers("THROTTLE user 5 1 1 2").await, [0, 5, 1, 4, 1]);
}

#[tokio::test]
async fn keys_of_any_bytes_have_separate_budgets() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    for key in [&b""[..], b"\0", b"\r\n", b"\xff\xfe", b"a", b"A", &[b'a'; 8192]] {
        client.send(&array(&[b"CL.THROTTLE", key, b"0", b"1", b"60"])).await;
        assert_eq!(client.reply().await, "*5\r\n:0\r\n:1\r\n:0\r\n:-1\r\n:60\r\n", "{}", key.escape_ascii());
        client.send(&array(&[b"CL.THROTTLE", key, b"0", b"1", b"60"])).await;
        assert_eq!(client.reply().await, "*5\r\n:1\r\n:1\r\n:0\r\n:60\r\n:60\r\n", "{}", key.escape_ascii());
    }
}

#[tokio::test]
async fn invalid_limits_are_rejected_with_a_reason() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
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
        ("RK.CHECK", "-ERR wrong number of arguments for 'rk.check' command\r\n"),
    ] {
        assert_eq!(client.call(line).await, expected, "{line}");
    }
    // The largest valid values, and more than a thousand per second, which redis-cell rejects as a zero rate.
    assert_eq!(client.numbers("CL.THROTTLE k 4294967294 10000000 1").await[..2], [0, 4294967295]);
    assert_eq!(client.numbers("CL.THROTTLE fast 0 2000 1").await, [0, 1, 0, -1, 1]);
    assert_eq!(client.numbers("CL.THROTTLE slow 0 1 31622400").await, [0, 1, 0, -1, 31622400]);
}

#[tokio::test]
async fn configured_limits_are_checked_by_name() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    assert_eq!(client.numbers("RK.CHECK per-user alice").await, [1, 3, 2, -1, 60_000, 0]);
    assert_eq!(client.numbers("RK.CHECK per-user bob 3").await, [1, 3, 0, -1, 60_000, 0]);
    assert_eq!(client.numbers("RK.CHECK per-user alice 3").await, [0, 3, 2, 60_000, 60_000, 0]);
    api.clock.advance(Duration::from_micros(1_500));
    assert_eq!(client.numbers("RK.CHECK per-user bob").await, [0, 3, 0, 59_999, 59_999, 0]);
    assert_eq!(client.numbers("RK.CHECK per-user bob 0").await, [1, 3, 0, -1, 59_999, 0]);
    assert_eq!(client.numbers("RK.CHECK per-user bob 4").await[..4], [0, 3, 0, -1]);
    // Several parts: the first precedes the cost, the others follow it.
    assert_eq!(client.numbers("RK.CHECK per-user-and-method alice 1 GET").await[..3], [1, 3, 2]);
    assert_eq!(client.numbers("RK.CHECK per-user-and-method alice 1 POST").await[..3], [1, 3, 2]);
    assert_eq!(client.numbers("RK.CHECK per-user-and-method alice 1 GET").await[..3], [1, 3, 1]);
    // A limit without a key.
    assert_eq!(client.numbers("RK.CHECK all").await[..3], [1, 3, 2]);
    assert_eq!(client.numbers("RK.CHECK all  2").await[..3], [1, 3, 0]);
    for (line, expected) in [
        ("RK.CHECK nobody alice", "unknown limit 'nobody'; send the name of a configured limit"),
        ("RK.CHECK edge/user alice", "unknown limit 'edge/user'; send the name of a configured limit"),
        ("RK.CHECK per-user alice x", "invalid cost; it must be 0 to 4294967295"),
        ("RK.CHECK per-user", "the key of this limit has 1 part, and 0 were given"),
        ("RK.CHECK per-user alice 1 GET", "the key of this limit has 1 part, and 2 were given"),
        ("RK.CHECK per-user-and-method alice", "the key of this limit has 2 parts, and 1 were given"),
        ("RK.CHECK per-user-and-method  1 GET", "a part of the key is empty; say whose budget it is"),
        ("RK.CHECK all alice", "this limit is one for all, and has no key; leave the key out"),
    ] {
        assert_eq!(client.call(line).await, format!("-ERR {expected}\r\n"), "{line}");
    }
    client.send(&array(&[b"RK.CHECK", b"per-user", b"\xff"])).await;
    assert_eq!(client.reply().await, "-ERR a part of the key is not UTF-8\r\n");
}

/// Lists and bans are reported like any other decision.
#[tokio::test]
async fn deny_lists_and_bans_apply() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    assert_eq!(client.numbers("RK.CHECK listed mallory").await, [0, 0, 0, -1, 0, 0]);
    for _ in 0..3 {
        assert_eq!(client.numbers("RK.CHECK listed root 2").await, [1, -1, -1, -1, 0, 0]);
    }
    assert_eq!(client.numbers("RK.CHECK listed alice 2").await[..3], [1, 2, 0]);
    assert_eq!(client.numbers("RK.CHECK listed alice").await[..4], [0, 2, 0, 60_000]);
    // The second denial triggers the ban: the wait is the ban's.
    let banned = client.numbers("RK.CHECK listed alice").await;
    assert_eq!((banned[0], banned[3]), (0, 3_600_000));
}

/// A shadow limit denies nothing.
#[tokio::test]
async fn shadow_limit_always_allows() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    for _ in 0..3 {
        assert_eq!(client.numbers("RK.CHECK planned alice").await[..3], [1, 1, 0]);
    }
}

/// The caller has to apply the delay.
#[tokio::test]
async fn delay_is_reported() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    for delay in [0, 1000, 2000] {
        let numbers = client.numbers("RK.CHECK shaped alice").await;
        assert_eq!((numbers[0], numbers[5]), (1, delay));
    }
    assert_eq!(client.numbers("RK.CHECK shaped alice").await[0], 0);
}

#[tokio::test]
async fn commands_are_counted_by_outcome() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    for line in
        ["RK.CHECK all", "CL.THROTTLE k 0 1 60", "CL.THROTTLE k 0 1 60", "CL.THROTTLE k x 1 60", "PING"]
    {
        client.call(line).await;
    }
    api.set_limits(None);
    assert_eq!(client.call("RK.CHECK all").await, "-UNAVAILABLE no limits are configured; retry later\r\n");
    let info = api.info().await;
    for (name, expected) in
        [("allowed", "2"), ("denied", "1"), ("error", "1"), ("unavailable", "1"), ("other", "1")]
    {
        assert_eq!(info[&format!("commands_{name}")], expected, "{name}");
    }
}

#[tokio::test]
async fn reload_applies_from_the_next_command() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    assert_eq!(client.numbers("RK.CHECK all  3").await[..3], [1, 3, 0]);
    api.set_limits(Some(layer(&api.clock)));
    assert_eq!(client.numbers("RK.CHECK all  3").await[..3], [1, 3, 0]);
}

/// All commands are answered, in order.
#[tokio::test]
async fn pipelined_commands_are_answered_in_order() {
    let api = TestApi::start_with(TestSettings::default()).await;
    let mut client = api.connect().await;
    let count = 10_000;
    let all = command("CL.THROTTLE user 9998 1 3600").repeat(count);
    client.send(&all).await;
    for remaining in (0..count - 1).rev() {
        let reply = client.reply().await;
        assert!(reply.starts_with(&format!("*5\r\n:0\r\n:9999\r\n:{remaining}\r\n")), "{reply}");
    }
    assert!(client.reply().await.starts_with("*5\r\n:1\r\n:9999\r\n:0\r\n:3600\r\n"));
}
