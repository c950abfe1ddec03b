//! End-to-end tests of the HTTP API: real sockets, real proxies and a manual clock.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod authorizing;
mod corpora;
mod deciding;
mod keeping;
mod nginx;
mod openapi;
mod promises;
mod redis;
mod refusing;
mod repeating;
mod reserving;
mod schemathesis;
mod support;
