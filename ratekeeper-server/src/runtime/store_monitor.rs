//! Watches the store: at startup, and while the process runs.

use std::sync::Arc;
use std::time::Duration;

use ratekeeper::FailurePolicy;
use ratekeeper_config::{Config, Store};
use tokio::time::{Instant, sleep};

use super::backend::{Backend, Incidents};
use super::engine::{Engine, EngineState};
use super::error::StartError;

/// Interval between store availability checks.
const STORE_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// How long startup retries the store before the server starts without it.
const STORE_STARTUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of log lines about incidents of a store that is available.
const INCIDENT_LOG_INTERVAL: Duration = Duration::from_secs(30);
const STORE_UNAVAILABLE: &str = "store unavailable, applying failure policy";

/// Whether the store answers. With failure policy `closed`, an unavailable store fails startup.
pub(crate) async fn reach_store<S: Backend>(
    config: &Config,
    state: &EngineState<S>,
) -> Result<bool, StartError> {
    let Some(layer) = &state.layer else { return Ok(true) };
    let begun = Instant::now();
    loop {
        let Err(error) = S::reach(layer.limiter()).await else { return Ok(true) };
        if begun.elapsed() < STORE_STARTUP_TIMEOUT {
            sleep(STORE_CHECK_INTERVAL).await;
            continue;
        }
        if matches!(&config.store, Store::Redis(redis) if redis.failure == FailurePolicy::Closed) {
            return Err(StartError::Store(error));
        }
        tracing::warn!(error, "{STORE_UNAVAILABLE}");
        return Ok(false);
    }
}

/// Logs when the store becomes unavailable and when it recovers, also without traffic, and, at a bounded rate, what
/// happens meanwhile.
pub(crate) async fn monitor_store<S: Backend>(engine: Arc<Engine<S>>, mut was_up: bool) {
    let (mut logged, mut logged_at): (u64, Option<Instant>) = (0, None);
    let mut error = None;
    loop {
        sleep(STORE_CHECK_INTERVAL).await;
        let state = Arc::clone(&engine.state());
        let Some(layer) = &state.layer else { continue };
        // One late reply is not an outage: the store must also report itself degraded.
        let is_up = S::reach(layer.limiter()).await.is_ok() || (was_up && !S::is_degraded(layer.limiter()));
        let Incidents { count, what, why } = S::incidents(layer.limiter());
        error = why.or(error);
        let is_due = logged_at.is_none_or(|at| at.elapsed() >= INCIDENT_LOG_INTERVAL);
        match (was_up, is_up) {
            (true, false) => {
                tracing::warn!(error = error.as_deref(), "{STORE_UNAVAILABLE}");
                (logged, logged_at) = (count, Some(Instant::now()));
            }
            (false, true) => tracing::info!("store available again"),
            _ if count > logged && is_due => {
                tracing::warn!(error = error.as_deref(), count = count - logged, "{what}");
                (logged, logged_at) = (count, Some(Instant::now()));
            }
            // A reload may have replaced the counters.
            _ => logged = logged.min(count),
        }
        was_up = is_up;
    }
}
