//! Raw calls to the library: at an injected time, several charges in one call, and operations that only a cluster
//! sends.

use std::time::Duration;

use ratekeeper::redis::wire;
use ratekeeper::{Decision, Limit, Time};
use redis::aio::MultiplexedConnection;
use testbed::RedisServer;

/// The year 2096.
const MARK_MS: i64 = 4_000_000_000_000;

/// One operation of a call.
#[derive(Clone, Copy)]
pub(crate) enum Operation {
    Charge { key: u64, cost: u32 },
    Refund { key: u64, cost: u32, at: Option<Time> },
}

/// A connection that charges one limit.
pub(crate) struct Raw<'a> {
    connection: MultiplexedConnection,
    function: String,
    limit: &'a Limit,
    /// Separates the keys of different tests.
    name: String,
}

impl<'a> Raw<'a> {
    pub(crate) async fn new(server: &RedisServer, limit: &'a Limit, name: impl ToString) -> Raw<'a> {
        Raw::with_constants(server, limit, name, &[]).await
    }

    /// Replaces these texts in the library, each of which must occur once.
    pub(crate) async fn with_constants(
        server: &RedisServer,
        limit: &'a Limit,
        name: impl ToString,
        constants: &[(&str, &str)],
    ) -> Raw<'a> {
        let client = redis::Client::open(server.url()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let (mut library, function) = wire::library();
        for (from, to) in constants {
            assert_eq!(library.matches(from).count(), 1, "{from}");
            library = library.replace(from, to);
        }
        let load = redis::cmd("FUNCTION").arg(&["LOAD", "REPLACE", &library]).to_owned();
        load.query_async::<String>(&mut connection).await.unwrap();
        Raw { connection, function, limit, name: name.to_string() }
    }

    fn key(&self, key: u64) -> String {
        format!("{}:{key}", self.name)
    }

    /// Sends one call, at the server's time if `at` is None. Returns its time and the decisions on the charges, in
    /// order.
    pub(crate) async fn call(&mut self, at: Option<Time>, operations: &[Operation]) -> (Time, Vec<Decision>) {
        let mut command = redis::cmd("FCALL");
        command.arg(&self.function).arg(operations.len());
        for Operation::Charge { key, .. } | Operation::Refund { key, .. } in operations {
            command.arg(self.key(*key));
        }
        for operation in operations {
            command.arg(match *operation {
                Operation::Charge { cost, .. } => wire::charge(self.limit, cost),
                Operation::Refund { cost, at, .. } => wire::refund(self.limit, cost, at),
            });
        }
        if let Some(at) = at {
            command.arg(wire::time(at));
        }
        let reply: Vec<u8> = command.query_async(&mut self.connection).await.unwrap();
        let mut rest = reply.as_slice();
        let now = wire::take_time(&mut rest).unwrap();
        let mut decisions = Vec::new();
        for operation in operations {
            match operation {
                Operation::Charge { cost, .. } => {
                    decisions.push(wire::take_decision(&mut rest, self.limit, *cost, now).unwrap());
                }
                Operation::Refund { .. } => wire::take_refunded(&mut rest).unwrap(),
            }
        }
        assert!(rest.is_empty(), "{rest:?} is left of the reply");
        (now, decisions)
    }

    pub(crate) async fn charge(&mut self, at: Time, key: u64, cost: u32) -> Decision {
        self.call(Some(at), &[Operation::Charge { key, cost }]).await.1.remove(0)
    }

    pub(crate) async fn refund(&mut self, now: Time, key: u64, cost: u32, at: impl Into<Option<Time>>) {
        self.call(Some(now), &[Operation::Refund { key, cost, at: at.into() }]).await;
    }

    /// Whether the log of a key is folded, and its size.
    pub(crate) async fn log_layout(&mut self, key: u64) -> (bool, usize) {
        let state: Vec<u8> = self.query(redis::cmd("GET").arg(self.key(key))).await;
        (state.get(33) == Some(&255), state.len())
    }

    pub(crate) async fn expires_after(&mut self, key: u64) -> Option<Duration> {
        let left: i64 = self.query(redis::cmd("PTTL").arg(self.key(key))).await;
        u64::try_from(left).ok().map(Duration::from_millis)
    }

    /// Sets an expiry that the library would never set.
    pub(crate) async fn mark_expiry(&mut self, key: u64) {
        let _: i64 = self.query(redis::cmd("PEXPIREAT").arg(self.key(key)).arg(MARK_MS)).await;
    }

    /// Whether the key still has the expiry of `mark_expiry`.
    pub(crate) async fn is_marked(&mut self, key: u64) -> bool {
        let at: i64 = self.query(redis::cmd("PEXPIRETIME").arg(self.key(key))).await;
        at == MARK_MS
    }

    async fn query<T: redis::FromRedisValue>(&mut self, command: &redis::Cmd) -> T {
        command.query_async(&mut self.connection).await.unwrap()
    }
}
