//! What all services share. Nothing here depends on a service.
//!
//! | module | what it is |
//! |---|---|
//! | [`Sockets`] | listening sockets, inherited or opened |
//! | `metrics`, `access_log` | counters and the request log |
//! | `log_text` | text from outside in log lines |
//! | `guard`, `problem` | access checks of the HTTP API and the admin listener, and their error responses |

pub(crate) mod access_log;
pub(crate) mod guard;
pub(crate) mod log_text;
pub(crate) mod metrics;
pub(crate) mod problem;
mod sockets;

pub use sockets::Sockets;
