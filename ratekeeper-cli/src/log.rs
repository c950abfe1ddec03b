//! Structured logs, on stderr.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// Starts logging. `RATEKEEPER_LOG` sets the level (`warn`, `info`, `debug`), optionally per module
/// (`info,ratekeeper_server=debug`).
pub(crate) fn start() {
    let configured = std::env::var("RATEKEEPER_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    let filter = configured.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let lines = tracing_subscriber::fmt::layer().json().flatten_event(true).with_writer(std::io::stderr);
    // Fails only if a subscriber is already installed, and this is the only one.
    let _ = tracing_subscriber::registry().with(filter).with(lines).try_init();
}
