//! End-to-end tests of the gateway and the APIs. One binary, so that everything is linked once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod admin;
mod corpora;
mod envoy;
mod gateway;
mod http_api;
mod redis_api;
mod support;
