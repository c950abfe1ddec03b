//! Structured logs, on stderr.

use tracing_subscriber::EnvFilter;

/// From now on, what happens is told. `TOLLGATE_LOG` says how much: `warn`, `info`, `debug`.
pub(crate) fn start() {
    let filter = EnvFilter::try_from_env("TOLLGATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let started = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_writer(std::io::stderr)
        .with_env_filter(filter);
    // A second one is never started.
    let _ = started.try_init();
}
