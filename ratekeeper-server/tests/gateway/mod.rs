//! End-to-end tests of the gateway: real sockets on both sides, and an upstream that records the requests it
//! receives.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod balancing;
mod bypass;
mod connection_setup;
mod early_responses;
mod forwarding;
mod grpc;
mod http2;
mod http2_abuse;
mod http2_stalls;
mod interim_responses;
mod limits;
mod observability;
mod overload;
mod panics;
pub(crate) mod peers;
mod proxy_protocol;
mod retries;
mod screening;
mod streaming;
pub(crate) mod support;
mod timeouts;
mod tls;
mod trailers;
mod upgrade;
mod upstream_connections;
mod upstream_failures;
