//! End-to-end tests of the Redis API: real sockets and real clients.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod bounds;
mod check;
mod clients;
mod redis;
mod session;
mod shutdown;
mod support;
