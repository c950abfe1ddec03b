//! Integration tests of the library. One program, so that it is linked once; the loom tests need another build.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod child;
mod flood;
// By path: `testbed` must not know our crates, and a library for one file of tests would be more than it saves.
#[allow(dead_code, reason = "without the feature `redis`, some are unused")]
#[path = "../../ratekeeper-core/tests/core/limits.rs"]
mod limits;
mod memory;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "jwt")]
mod tokens;
#[cfg(feature = "tower")]
mod tower;
