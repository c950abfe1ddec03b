//! End-to-end tests of the HTTP API: real sockets, real proxies and a manual clock.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod authorize;
mod check;
mod corpora;
mod faulty_records;
mod guarantees;
mod idempotency;
mod nginx;
mod openapi;
mod redis;
mod rejections;
mod reserve;
mod schemathesis;
mod support;
