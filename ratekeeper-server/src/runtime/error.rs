//! Why the server cannot start, or cannot apply a configuration.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use super::backend::LimitsError;
use super::tls::TlsError;

/// Why the server cannot start or cannot reload its configuration.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration has neither a gateway nor an API.
    NoService,
    /// The server cannot listen on the address of a setting.
    Listen {
        /// The name of the setting.
        setting: &'static str,
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        error: io::Error,
    },
    /// A certificate cannot be used.
    Tls(TlsError),
    /// The limits cannot be set up.
    Limits(LimitsError),
    /// The store is unavailable and the failure policy is `closed`.
    Store(String),
    /// The named setting cannot be changed without a restart.
    NeedsRestart(&'static str),
    /// A thread cannot be started.
    Thread(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::NoService => {
                write!(
                    f,
                    "the configuration has neither a gateway nor an API; write `gateway: {{ routes: [...] }}` or \
                     `apis: {{ http: 127.0.0.1:9181 }}`"
                )
            }
            StartError::Listen { setting, address, error } if error.kind() == io::ErrorKind::AddrInUse => {
                write!(f, "{address} is in use by another program; stop it, or change `{setting}`")
            }
            StartError::Listen { setting, address, error } => {
                write!(f, "cannot listen on {address} for `{setting}`: {error}")
            }
            StartError::Tls(error) => write!(f, "{error}"),
            StartError::Limits(error) => write!(f, "{error}"),
            StartError::Store(error) => write!(
                f,
                "{error}; start Redis, or write `on_store_failure: local` or `on_store_failure: open` to start without it"
            ),
            StartError::NeedsRestart(what) => {
                write!(f, "{what} cannot be changed while the server runs; restart to change it")
            }
            StartError::Thread(error) => write!(f, "cannot start a thread: {error}"),
        }
    }
}

impl std::error::Error for StartError {}
