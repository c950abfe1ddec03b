//! The gateway, end to end: real sockets on both sides, and an upstream that tells what it got.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod limits;
mod proxying;
mod screening;
mod support;
mod waiting;
