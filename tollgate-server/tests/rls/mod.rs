//! The rate limit service of Envoy, end to end: asked by clients of gRPC over real sockets, and by Envoy itself.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod deciding;
mod door;
mod envoy;
mod hostile;
mod json;
mod support;
