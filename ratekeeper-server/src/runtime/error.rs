//! Why the server cannot start, or cannot apply a configuration.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use super::backend::LimitsError;
use super::tls::TlsError;

/// Why the server cannot start or cannot reload its configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration has neither a gateway nor an API.
    #[error(
        "the configuration has neither a gateway nor an API; write `gateway: {{ routes: [...] }}` or \
         `apis: {{ http: 127.0.0.1:9181 }}`"
    )]
    NoService,
    /// The server cannot listen on the address of a setting.
    #[error(fmt = cannot_listen)]
    Listen {
        /// The name of the setting.
        setting: &'static str,
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        #[source]
        error: io::Error,
    },
    /// A certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The limits cannot be set up.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The store is unavailable and the failure policy is `closed`.
    #[error(
        "{0}; start Redis, or write `on_store_failure: local` or `on_store_failure: open` to start without it"
    )]
    Store(String),
    /// The named setting cannot be changed without a restart.
    #[error("{0} cannot be changed while the server runs; restart to change it")]
    NeedsRestart(&'static str),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
}

fn cannot_listen(
    setting: &&'static str,
    address: &SocketAddr,
    error: &io::Error,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            write!(f, "{address} is in use by another program; stop it, or change `{setting}`")
        }
        _ => write!(f, "cannot listen on {address} for `{setting}`: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use ratekeeper::tower::LayerError;
    use ratekeeper::tower::response::NameError;

    use super::*;

    #[test]
    fn start_error_has_its_cause_as_source() {
        let listen = |kind: io::ErrorKind| StartError::Listen {
            setting: "gateway.listen",
            address: SocketAddr::from(([127, 0, 0, 1], 80)),
            error: kind.into(),
        };
        for kind in [io::ErrorKind::AddrInUse, io::ErrorKind::PermissionDenied] {
            let error = listen(kind);
            let source = error.source().and_then(|source| source.downcast_ref());
            assert_eq!(source.map(io::Error::kind), Some(kind), "{error}");
        }

        // Errors with the message of their cause are not repeated in the chain.
        let error = StartError::from(LimitsError::from(LayerError::Name(String::new(), NameError::Empty)));
        let source = error.source().and_then(|source| source.downcast_ref());
        assert_eq!(source, Some(&NameError::Empty));
    }
}
