//! The engine: the limits of the active configuration, which all services share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use ratekeeper::tower::token::Tokens;
use ratekeeper::tower::{NonCanonicalPath, RatekeeperLayer};
use ratekeeper_config::{Config, Timeouts};

use super::backend::{self, Backend};
use super::error::StartError;
use super::metrics::{Exposition, Metrics, MetricsDraft, count_decisions, families};

/// The limits, their metrics and the state of the process.
#[derive(Debug)]
pub(crate) struct Engine<S> {
    state: ArcSwap<EngineState<S>>,
    pub(crate) metrics: Metrics,
    is_draining: AtomicBool,
}

/// The limits of one configuration. A reload replaces it.
#[derive(Debug)]
pub(crate) struct EngineState<S> {
    /// None if neither limits nor APIs are configured.
    pub(crate) layer: Option<RatekeeperLayer<S>>,
    /// Names of all limits, by index.
    pub(crate) limit_names: Arc<[String]>,
    /// Verifies the tokens whose claims rules read.
    pub(crate) tokens: Option<Arc<Tokens>>,
    /// How long a graceful shutdown waits for requests in flight.
    pub(crate) drain_timeout: Duration,
}

impl<S: Backend> EngineState<S> {
    /// Builds the limits of a configuration, and starts the migration of state from `before`. On an error, nothing
    /// has changed.
    pub(crate) fn new(
        config: &Config,
        metrics: &mut MetricsDraft,
        before: Option<&EngineState<S>>,
    ) -> Result<EngineState<S>, StartError> {
        let limit_names: Arc<[String]> = backend::limit_names(config).collect();
        let tokens = backend::tokens(config)?;
        // API clients may send inline limits.
        let has_limits = !limit_names.is_empty() || !config.apis.are_none();
        let layer = has_limits.then(|| {
            let counters = limit_names.iter().map(|name| metrics.limit(name)).collect();
            let rules = config.rules.rules().filter(|rule| rule.is_shadow).map(|rule| &rule.name);
            let concurrency = config.concurrency.iter().filter(|it| it.is_shadow).map(|it| &it.name);
            rules.chain(concurrency).for_each(|name| metrics.mark_shadow(name));
            // The gateway normalizes paths before it looks up the route.
            let builder = backend::builder(config, tokens.as_ref())
                .non_canonical_paths(NonCanonicalPath::Keep)
                .observe(count_decisions(counters));
            let builder = if config.apis.are_none() { builder } else { builder.allow_no_rules() };
            let before = before.and_then(|before| before.layer.as_ref());
            S::limits(config, builder, before)
        });
        let timeouts = config.gateway.as_ref().map_or(Timeouts::default(), |gateway| gateway.timeouts);
        Ok(EngineState { layer: layer.transpose()?, limit_names, tokens, drain_timeout: timeouts.drain })
    }
}

impl<S: Backend> Engine<S> {
    pub(crate) fn new(state: Arc<EngineState<S>>, metrics: Metrics) -> Engine<S> {
        Engine { state: ArcSwap::new(state), metrics, is_draining: AtomicBool::new(false) }
    }

    pub(crate) fn state(&self) -> Guard<Arc<EngineState<S>>> {
        self.state.load()
    }

    /// Replaces the limits.
    pub(crate) fn replace(&self, state: Arc<EngineState<S>>) {
        self.state.store(state);
    }

    /// From now on, health checks report that the process is not ready.
    pub(crate) fn start_draining(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    pub(crate) fn is_ready(&self) -> bool {
        !self.is_draining.load(Ordering::Acquire)
    }

    /// Writes the metrics of limits, requests and the store.
    pub(crate) fn write_metrics(&self, out: &mut Exposition) {
        self.metrics.write(out);
        let state = self.state();
        let Some(layer) = &state.layer else { return };
        out.single(&families::REQUESTS_DELAYED, layer.waiting());
        let mut permits = out.family(&families::CONCURRENCY_PERMITS);
        for (name, held) in layer.in_flight() {
            permits.sample([name], held);
        }
        S::write_metrics(layer.limiter(), out);
    }
}
