//! Real servers for tests and benchmarks: each on a free port of the loopback, in a folder of its own, and gone when its
//! value is dropped.

mod redis;

pub use redis::RedisServer;
