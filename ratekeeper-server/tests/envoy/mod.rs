//! End-to-end tests of the Envoy API: gRPC clients over real sockets, and a real Envoy.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod bounds;
mod check;
mod json;
mod listener;
mod real_envoy;
mod support;
