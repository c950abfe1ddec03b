//! Real servers for tests and benchmarks: each on a free port of the loopback, in a folder of its own, and gone when its
//! value is dropped. And what goes wrong on the way to them: a proxy with faults that a test switches on and off, and HTTP/2
//! byte by byte for peers that mean no good.

mod cluster;
mod conversation;
mod envoy;
pub mod http2;
mod patience;
pub mod process;
mod proxy;
mod redis;

pub use cluster::{RedisCluster, SlotMove};
pub use envoy::Envoy;
pub use proxy::{Fault, FaultProxy};
pub use redis::RedisServer;

/// How much a test does: `ordinary` in every run, `long` where `cargo xtask test --long` asks for more.
///
/// Both must keep the same promise. The long run makes it harder to break, it does not replace the ordinary one.
pub fn ordinary_or_long<T>(ordinary: T, long: T) -> T {
    match std::env::var_os("TOLLGATE_LONG_TESTS") {
        None => ordinary,
        Some(_) => long,
    }
}
