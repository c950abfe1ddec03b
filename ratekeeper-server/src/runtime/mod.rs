//! What all services share. Nothing here depends on a service.
//!
//! | module | what it is |
//! |---|---|
//! | `engine`, `backend` | the limits of the active configuration, in their store |
//! | `current` | settings that a reload replaces |
//! | `service` | the interface of a service |
//! | `store_monitor` | watches the store |
//! | `records` | values that a service keeps between requests |
//! | `error` | why the server cannot start |
//! | `tls` | certificates |
//! | `status` | what the admin listener reports |
//! | [`Sockets`] | listening sockets, inherited or opened |
//! | `accept`, `connection_end` | how connections of all services begin and end |
//! | `metrics`, `access_log` | counters and the request log |
//! | `log_text` | text from outside in log lines |
//! | `http_listener`, `connection_timeouts` | connections of the HTTP API and the admin listener |
//! | `observed_stream` | a stream whose reads and writes are observed: timeouts, frame bounds, framing |
//! | `frame_bound` | a bound on HTTP/2 control frames, for the gateway and the Envoy API |
//! | `open_files` | the share of file descriptors that the gateway keeps |
//! | `guard`, `problem` | access checks of the HTTP API and the admin listener, and their error responses |

pub(crate) mod accept;
pub(crate) mod access_log;
pub(crate) mod backend;
pub(crate) mod connection_end;
mod connection_timeouts;
pub(crate) mod current;
pub(crate) mod engine;
pub(crate) mod error;
pub(crate) mod frame_bound;
pub(crate) mod guard;
pub(crate) mod http_listener;
pub(crate) mod log_text;
pub(crate) mod metrics;
pub(crate) mod observed_stream;
pub(crate) mod open_files;
pub(crate) mod problem;
pub(crate) mod records;
pub(crate) mod service;
pub(crate) mod sockets;
pub(crate) mod status;
pub(crate) mod store_monitor;
pub(crate) mod tls;

pub use sockets::Sockets;
pub(crate) use sockets::{AddressSetting, BoundSocket};
