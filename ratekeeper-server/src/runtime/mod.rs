//! What all services share. Nothing here depends on a service.
//!
//! | module | what it is |
//! |---|---|
//! | [`Sockets`] | listening sockets, inherited or opened |
//! | `metrics`, `access_log` | counters and the request log |
//! | `log_text` | text from outside in log lines |
//! | `http_listener`, `connection_timeouts` | connections of the HTTP API and the admin listener |
//! | `frame_bound` | a bound on HTTP/2 control frames, for the gateway and the Envoy API |
//! | `open_files` | the share of file descriptors that the gateway keeps |
//! | `guard`, `problem` | access checks of the HTTP API and the admin listener, and their error responses |

pub(crate) mod access_log;
mod connection_timeouts;
pub(crate) mod frame_bound;
pub(crate) mod guard;
pub(crate) mod http_listener;
pub(crate) mod log_text;
pub(crate) mod metrics;
pub(crate) mod open_files;
pub(crate) mod problem;
mod sockets;

pub use sockets::Sockets;
