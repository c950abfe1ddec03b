//! What tests and benchmarks share.
//!
//! Real servers: each listens on a free loopback port, has its own directory, and is killed when its value is dropped.
//! A proxy injects network faults. Clients work on bytes, for tests with malicious peers: HTTP/1.1 and HTTP/2. Tests
//! wait for conditions, run properties and compare generated files.

mod cluster;
mod envoy;
mod generated;
pub mod http;
pub mod http2;
pub mod process;
pub mod property;
mod proxy;
mod redis;
mod resp_client;
mod wait;

pub use cluster::{RedisCluster, SlotMove};
pub use envoy::Envoy;
pub use generated::assert_generated;
pub use proxy::{Fault, FaultProxy};
pub use redis::RedisServer;
pub use wait::{TEST_TIMEOUT, wait_for, wait_until, wait_until_stable};

/// The size of a test: `ordinary` by default, `long` with `cargo xtask test --long`.
///
/// Both must check the same promise. The long run checks it harder; it does not replace the ordinary one.
pub fn ordinary_or_long<T>(ordinary: T, long: T) -> T {
    match std::env::var_os("RATEKEEPER_LONG_TESTS") {
        None => ordinary,
        Some(_) => long,
    }
}
