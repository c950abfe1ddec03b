//! The door of the Redis protocol, from outside: real sockets, and the programs that people use.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod bounds;
mod clients;
mod closing;
mod shared;
mod support;
mod talking;
mod throttling;
