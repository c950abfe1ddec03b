//! The Ratekeeper server: gateway, network APIs and admin listener.
//!
//! | module | what it is |
//! |---|---|
//! | [`Server`] | the engine and the services that a configuration describes |
//! | `gateway` | a reverse proxy that forwards what its limits allow, and answers 429 to the rest |
//! | [`redis_api`] | the Redis API: commands in the Redis protocol, such as redis-cell's `CL.THROTTLE` |
//! | [`envoy`] | the Envoy API: Envoy's rate limit service (RLS) over gRPC, or as JSON |
//! | [`http_api`] | the HTTP API: limits checked over HTTP, by any program and by proxies |
//! | [`admin`] | metrics and health |
//! | [`demo`] | a small demo upstream |
//! | [`Sockets`] | listening sockets, inherited or opened |
//! | `runtime` | what all services share: limits, reloads, metrics, access log, access checks, error responses |
//!
//! The services know `runtime` and not each other; only `server` knows all of them.

pub mod admin;
pub mod demo;
pub mod envoy;
mod gateway;
pub mod http_api;
pub mod redis_api;
mod runtime;
mod server;

pub use runtime::Sockets;
pub use runtime::access_log::LogStyle;
pub use runtime::backend::{Backend, LimitsError};
pub use runtime::current::Current;
pub use runtime::error::StartError;
pub use runtime::log_text::Printable;
pub use runtime::metrics::{Exposition, LimitTraffic, Traffic};
pub use runtime::service::ServiceAddress;
pub use runtime::status::StatusSource;
pub use runtime::tls::TlsError;
pub use server::Server;
