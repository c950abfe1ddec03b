//! Limits that several doors share, in Redis.

use std::time::Duration;

use testbed::RedisServer;
use tollgate::redis::{Redis, Settings};
use tollgate::{Failure, ManualClock};

use super::support::{Client, PATIENCE, Running, Setup, command, rules};

fn open(redis: &RedisServer, failure: Failure) -> Running<Redis> {
    let settings = Settings::new(&redis.url()).failure(failure).deadline(PATIENCE);
    Running::open(rules().redis(&settings).unwrap(), ManualClock::default(), Setup::default())
}

#[tokio::test]
async fn what_one_door_gives_the_other_does_not_have() {
    let redis = RedisServer::start().unwrap();
    let (one, other) = (open(&redis, Failure::Closed), open(&redis, Failure::Closed));
    let (mut one, mut other) = (one.connect().await, other.connect().await);
    assert_eq!(one.numbers("CL.THROTTLE user 1 1 3600").await, [0, 2, 1, -1, 3600]);
    assert_eq!(other.numbers("CL.THROTTLE user 1 1 3600").await[..4], [0, 2, 0, -1]);
    assert_eq!(one.numbers("CL.THROTTLE user 1 1 3600").await[..3], [1, 2, 0]);
    assert_eq!(one.numbers("TG.CHECK per-user alice 2").await[..3], [1, 3, 1]);
    assert_eq!(other.numbers("TG.CHECK per-user alice 2").await[..3], [0, 3, 1]);
}

/// How often Redis was asked something.
async fn calls(redis: &RedisServer) -> usize {
    let info = Client::connect(([127, 0, 0, 1], redis.port()).into()).await.ask("INFO commandstats").await;
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().unwrap())
}

/// Those who ask at the same time go to Redis together, and so do commands that a client sends at once.
#[tokio::test]
async fn many_commands_do_not_wait_for_each_other() {
    let redis = RedisServer::start().unwrap();
    let door = open(&redis, Failure::Closed);
    let mut client = door.connect().await;
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
    let asked = calls(&redis).await - before;
    assert!(asked < count / 2, "{asked} calls for {count} commands");
}

/// What the one before it took, the next does not have: in the order in which they were sent.
#[tokio::test]
async fn commands_of_one_key_go_one_after_the_other() {
    let redis = RedisServer::start().unwrap();
    let door = open(&redis, Failure::Closed);
    let mut client = door.connect().await;
    let pair = [command("CL.THROTTLE a 99 1 3600"), command("CL.THROTTLE b 99 1 3600"), b"PING\r\n".to_vec()];
    client.send(&pair.concat().repeat(100)).await;
    for left in (0..100).rev() {
        let expected = format!("*5\r\n:0\r\n:100\r\n:{left}\r\n");
        for _ in 0..2 {
            let reply = client.reply().await;
            assert!(reply.starts_with(&expected), "{reply} for {expected}");
        }
        assert_eq!(client.reply().await, "+PONG\r\n");
    }
}

#[tokio::test]
async fn a_store_that_is_away_is_told() {
    let mut redis = RedisServer::start().unwrap();
    let settings = Settings::new(&redis.url()).failure(Failure::Closed).deadline(Duration::from_millis(50));
    let closed = rules().redis(&settings).unwrap();
    let closed = Running::open(closed, ManualClock::default(), Setup::default());
    let local = rules().redis(&settings.failure(Failure::Local { nodes: 1 })).unwrap();
    let local = Running::open(local, ManualClock::default(), Setup::default());
    redis.kill().unwrap();
    let (mut one, mut other) = (closed.connect().await, local.connect().await);
    for line in ["CL.THROTTLE user 1 1 60", "THROTTLE user 1 1 60"] {
        let reply = one.ask(line).await;
        assert!(reply.starts_with("-UNAVAILABLE the store does not answer"), "{line}: {reply}");
        assert_eq!(other.ask(line).await.split("\r\n").next(), Some("*5"), "{line}");
    }
    assert!(one.ask("TG.CHECK all").await.starts_with("-UNAVAILABLE"));
    assert_eq!(other.numbers("TG.CHECK all").await[..3], [1, 3, 2]);
    assert_eq!(one.ask("PING").await, "+PONG\r\n");
    assert_eq!(closed.info().await["commands_unavailable"], "3");
}
