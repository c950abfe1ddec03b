//! Real servers for tests and benchmarks: each listens on a free loopback port, has its own directory, and is killed
//! when its value is dropped. Also a proxy that injects network faults, and HTTP/2 at the byte level for tests with
//! malicious peers.

mod cluster;
mod envoy;
mod generated;
pub mod http2;
pub mod process;
mod proxy;
mod redis;
mod resp_client;
mod wait;

pub use cluster::{RedisCluster, SlotMove};
pub use envoy::Envoy;
pub use generated::assert_generated;
pub use proxy::{Fault, FaultProxy};
pub use redis::RedisServer;

/// The size of a test: `ordinary` by default, `long` with `cargo xtask test --long`.
///
/// Both must check the same promise. The long run checks it harder; it does not replace the ordinary one.
pub fn ordinary_or_long<T>(ordinary: T, long: T) -> T {
    match std::env::var_os("RATEKEEPER_LONG_TESTS") {
        None => ordinary,
        Some(_) => long,
    }
}
