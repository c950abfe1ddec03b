//! End-to-end tests of the gateway: real sockets on both sides, and an upstream that records the requests it
//! receives.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod balancing;
mod bounds;
mod early_answers;
mod evasion;
mod faults;
mod grpc;
mod http2;
mod http2_abuse;
mod interim;
mod limits;
mod openings;
mod panics;
mod peers;
mod proxy_protocol;
mod proxying;
mod retries;
mod screening;
mod stalls;
mod streaming;
mod support;
mod tls;
mod trailers;
mod upgrade;
mod upstream_connections;
mod waiting;
mod watching;
