//! The library, tested from outside. One program, so that everything is linked once; loom needs another build.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod child;
mod flood;
mod memory;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "jwt")]
mod tokens;
#[cfg(feature = "tower")]
mod tower;
