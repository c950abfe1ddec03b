//! Tollgate's doors to the network.
//!
//! | module | what it is |
//! |---|---|
//! | [`gateway`] | a reverse proxy that forwards what its limits allow, and answers 429 to the rest |
//! | [`resp`] | answers commands of the Redis protocol, such as redis-cell's |
//! | [`rls`] | the rate limit service that Envoy asks over gRPC, or others as JSON |
//! | [`check`] | limits asked over HTTP, by any program and by proxies |
//! | [`Doors`] | those beside the gateway, at its limits |
//! | [`admin`] | metrics and health |
//! | [`demo`] | a small upstream, for trying things out |
//! | [`Sockets`] | listening sockets, opened or handed over |
//! | `limits` | a configuration -> the middleware that decides |
//! | `metrics`, `access_log` | what has happened |
//! | `guard`, `problem` | who is let in at the doors for programs, and what the others are told |

mod access_log;
pub mod admin;
pub mod check;
pub mod demo;
mod doors;
pub mod gateway;
mod guard;
mod limits;
mod metrics;
mod problem;
pub mod resp;
pub mod rls;
mod sockets;

pub use doors::Doors;
pub use limits::{LimitsError, Stored};
pub use metrics::Exposition;
pub use sockets::Sockets;
