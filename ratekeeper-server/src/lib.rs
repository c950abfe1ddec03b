//! The Ratekeeper server: gateway, network APIs and admin listener.
//!
//! | module | what it is |
//! |---|---|
//! | [`gateway`] | a reverse proxy that forwards what its limits allow, and answers 429 to the rest |
//! | [`redis_api`] | the Redis API: commands in the Redis protocol, such as redis-cell's `CL.THROTTLE` |
//! | [`envoy`] | the Envoy API: Envoy's rate limit service (RLS) over gRPC, or as JSON |
//! | [`http_api`] | the HTTP API: limits checked over HTTP, by any program and by proxies |
//! | [`Apis`] | the HTTP, Envoy and Redis APIs, on the gateway's limits |
//! | [`admin`] | metrics and health |
//! | [`demo`] | a small demo upstream |
//! | [`Sockets`] | listening sockets, inherited or opened |
//! | `backend` | builds the middleware from a configuration |
//! | `runtime` | what all services share: metrics, access log, access checks, error responses |

pub mod admin;
mod apis;
mod backend;
pub mod demo;
pub mod envoy;
pub mod gateway;
pub mod http_api;
pub mod redis_api;
mod runtime;

pub use apis::Apis;
pub use backend::{Backend, LimitsError};
pub use runtime::Sockets;
pub use runtime::access_log::LogStyle;
pub use runtime::log_text::Printable;
pub use runtime::metrics::Exposition;
