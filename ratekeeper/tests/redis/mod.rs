//! The Redis store on real servers that each test starts and stops: same decisions as memory, exact limits across
//! processes, and decisions within the deadline whatever the server does.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bounded_work;
mod cluster;
mod connect;
mod denial_cache;
mod deploys;
mod equivalence;
mod expiry;
mod faults;
mod function_calls;
mod leases;
mod network;
mod processes;
mod records;
mod refund;
mod sharing;

use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper::redis::{Redis, Settings};
use ratekeeper::{Limit, Limiter};
use testbed::RedisServer;
use tokio::task::JoinHandle;

/// Deadline for tests that must not time out on a busy machine.
const PATIENT: Duration = Duration::from_secs(10);

/// A limiter on Redis. Must be called on a tokio runtime.
fn limiter(limits: &[Limit], settings: &Settings) -> Limiter<Redis> {
    let (first, others) = limits.split_first().unwrap();
    let builder = others.iter().cloned().fold(Limiter::builder(first.clone()), |it, limit| it.and(limit));
    builder.redis(settings).unwrap()
}

/// Every test ends with this check: no key may stay in Redis for ever.
fn all_expire(server: &RedisServer) {
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
}

/// The sum of what the tasks return.
async fn sum(tasks: impl Iterator<Item = JoinHandle<u32>>) -> u32 {
    join_all(tasks).await.into_iter().map(Result::unwrap).sum()
}
