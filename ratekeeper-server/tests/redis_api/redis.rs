//! Limits that several APIs share through Redis.

use std::time::Duration;

use ratekeeper::redis::{Redis, Settings};
use ratekeeper::{FailurePolicy, ManualClock};
use testbed::{RedisServer, TEST_TIMEOUT};

use super::check::{RedisCell, THROTTLE_PARAMETERS};
use super::support::{Client, TestApi, TestSettings, command, rules};

fn open(redis: &RedisServer, failure: FailurePolicy) -> TestApi<Redis> {
    let settings = Settings::new(&redis.url()).on_store_failure(failure).deadline(TEST_TIMEOUT);
    TestApi::open(rules().redis(&settings).unwrap(), ManualClock::default(), TestSettings::default())
}

#[tokio::test]
async fn apis_share_budgets_through_redis() {
    let redis = RedisServer::start().unwrap();
    let (one, other) = (open(&redis, FailurePolicy::Closed), open(&redis, FailurePolicy::Closed));
    let (mut one, mut other) = (one.connect().await, other.connect().await);
    assert_eq!(one.numbers("CL.THROTTLE user 1 1 3600").await, [0, 2, 1, -1, 3600]);
    assert_eq!(other.numbers("CL.THROTTLE user 1 1 3600").await[..4], [0, 2, 0, -1]);
    assert_eq!(one.numbers("CL.THROTTLE user 1 1 3600").await[..3], [1, 2, 0]);
    assert_eq!(one.numbers("RK.CHECK per-user alice 2").await[..3], [1, 3, 1]);
    assert_eq!(other.numbers("RK.CHECK per-user alice 2").await[..3], [0, 3, 1]);
}

/// The state is one instant of the key, in Redis as in memory. The units take an hour, so the time between two commands
/// does not matter.
#[tokio::test]
async fn key_of_cl_throttle_in_redis_keeps_its_instant_if_the_parameters_change() {
    let redis = RedisServer::start().unwrap();
    let api = open(&redis, FailurePolicy::Closed);
    let mut client = api.connect().await;
    let mut allowed = 0;
    for number in 0..30 {
        allowed += 1 - client.numbers(&format!("CL.THROTTLE user {} 1 3600", 4 + number % 2)).await[0];
    }
    assert_eq!(allowed, 6);
    let mut cell = RedisCell::default();
    for step in 0..400 {
        let parameters @ [burst, count, period, quantity] = THROTTLE_PARAMETERS[step * 5 / 3 % 8];
        let reply = client.numbers(&format!("CL.THROTTLE mixed {burst} {count} {period} {quantity}")).await;
        let expected = cell.throttle(0, parameters);
        assert_eq!([reply[0], reply[2]], expected, "step {step}: {parameters:?}");
    }
    // Rates whose units are not whole nanoseconds read each other's instants, too.
    for (command, remaining) in [("7 3 1000", 7), ("7 7 1000", 4), ("7 3 1000", 5), ("8 1 1000", 7)] {
        assert_eq!(client.numbers(&format!("CL.THROTTLE odd {command}")).await[2], remaining, "{command}");
    }
}

/// The number of function calls that Redis has executed.
async fn calls(redis: &RedisServer) -> usize {
    let info = Client::connect(([127, 0, 0, 1], redis.port()).into()).await.call("INFO commandstats").await;
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().unwrap())
}

/// Concurrent checks share calls to Redis, and so do the pipelined commands of one client.
#[tokio::test]
async fn pipelined_commands_share_calls_to_redis() {
    let redis = RedisServer::start().unwrap();
    let api = open(&redis, FailurePolicy::Closed);
    let mut client = api.connect().await;
    assert_eq!(client.numbers("CL.THROTTLE first 0 1 3600").await[0], 0);
    let before = calls(&redis).await;
    let count = 640;
    let all: Vec<u8> =
        (0..count).flat_map(|user| command(&format!("CL.THROTTLE user:{user} 0 1 3600"))).collect();
    client.send(&[all, command("ECHO done")].concat()).await;
    for _ in 0..count {
        assert!(client.reply().await.starts_with("*5\r\n:0\r\n:1\r\n:0\r\n"));
    }
    assert_eq!(client.reply().await, "$4\r\ndone\r\n");
    let used = calls(&redis).await - before;
    assert!(used < count / 2, "{used} calls for {count} commands");
}

/// Each command sees the charge of the previous one, in the order in which they were sent.
#[tokio::test]
async fn commands_with_one_key_run_in_order() {
    let redis = RedisServer::start().unwrap();
    let api = open(&redis, FailurePolicy::Closed);
    let mut client = api.connect().await;
    let pair = [command("CL.THROTTLE a 99 1 3600"), command("CL.THROTTLE b 99 1 3600"), b"PING\r\n".to_vec()];
    client.send(&pair.concat().repeat(100)).await;
    for remaining in (0..100).rev() {
        let expected = format!("*5\r\n:0\r\n:100\r\n:{remaining}\r\n");
        for _ in 0..2 {
            let reply = client.reply().await;
            assert!(reply.starts_with(&expected), "{reply} for {expected}");
        }
        assert_eq!(client.reply().await, "+PONG\r\n");
    }
}

#[tokio::test]
async fn failure_policy_decides_when_redis_is_unavailable() {
    let mut redis = RedisServer::start().unwrap();
    let settings = Settings::new(&redis.url())
        .on_store_failure(FailurePolicy::Closed)
        .deadline(Duration::from_millis(50));
    let closed = rules().redis(&settings).unwrap();
    let closed = TestApi::open(closed, ManualClock::default(), TestSettings::default());
    let local = rules().redis(&settings.on_store_failure(FailurePolicy::Local { instances: 1 })).unwrap();
    let local = TestApi::open(local, ManualClock::default(), TestSettings::default());
    redis.kill().unwrap();
    let (mut one, mut other) = (closed.connect().await, local.connect().await);
    for line in ["CL.THROTTLE user 1 1 60", "THROTTLE user 1 1 60"] {
        let reply = one.call(line).await;
        assert!(reply.starts_with("-UNAVAILABLE store unavailable"), "{line}: {reply}");
        assert_eq!(other.call(line).await.split("\r\n").next(), Some("*5"), "{line}");
    }
    assert!(one.call("RK.CHECK all").await.starts_with("-UNAVAILABLE"));
    assert_eq!(other.numbers("RK.CHECK all").await[..3], [1, 3, 2]);
    assert_eq!(one.call("PING").await, "+PONG\r\n");
    assert_eq!(closed.info().await["commands_unavailable"], "3");
}
