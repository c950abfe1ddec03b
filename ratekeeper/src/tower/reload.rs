//! Configuration reloads: rules that change while they are in use.

use std::sync::Arc;

use ratekeeper_rules::rule::{MovedKey, Rules};

use super::RatekeeperLayer;
#[cfg(feature = "redis")]
use super::builder::settings_for;
use super::builder::{LayerBuilder, limiter_builder};
use super::concurrency::{InFlightLimits, OpaquePermitCounter};
use super::engine::Engine;
use super::error::LayerError;
use crate::clock::SystemClock;
use crate::limiter::Limiter;
use crate::memory::{Memory, MovedState};

/// A store that supports reloads: it migrates its state to changed limits.
pub trait Reload: Sized {
    /// Builds a limiter for the rules with the state of `before`, except for the states of the returned keys.
    #[doc(hidden)]
    fn reload_limiter(
        builder: &LayerBuilder,
        rules: &Rules,
        before: &RatekeeperLayer<Self>,
    ) -> Result<(Limiter<Self>, MovedStates), LayerError>;

    /// Copies the states of keys that another limit of their rule applies to than before.
    #[doc(hidden)]
    fn move_keys(_limiter: &Limiter<Self>, _before: &RatekeeperLayer<Self>, _moved: &MovedStates) {}

    /// The permit counter, with the permits that `before` counts.
    #[doc(hidden)]
    fn counter(
        builder: &LayerBuilder,
        limiter: &Limiter<Self>,
        before: Option<&OpaquePermitCounter>,
    ) -> Result<OpaquePermitCounter, LayerError>;
}

/// The keys whose states a reload moves from one limit to another.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct MovedStates(Vec<MovedState>);

impl Reload for Memory {
    fn reload_limiter(
        builder: &LayerBuilder,
        rules: &Rules,
        before: &RatekeeperLayer,
    ) -> Result<(Limiter, MovedStates), LayerError> {
        let limits = builder.bounded(limiter_builder(rules, builder)?);
        let from = rules.predecessors(&before.engine.rules);
        let moved = moved_states(rules, &from, &before.engine);
        let limiter =
            limits.reload_moving(&before.engine.limiter, &from, &moved).map_err(LayerError::Memory)?;
        Ok((limiter, MovedStates(moved)))
    }

    fn move_keys(limiter: &Limiter, before: &RatekeeperLayer, MovedStates(moved): &MovedStates) {
        limiter.store().move_states(before.engine.limiter.store(), moved);
    }

    fn counter(
        builder: &LayerBuilder,
        _: &Limiter,
        before: Option<&OpaquePermitCounter>,
    ) -> Result<OpaquePermitCounter, LayerError> {
        Ok(OpaquePermitCounter(builder.counter_in_memory(before.map(|before| &before.0))))
    }
}

#[cfg(feature = "redis")]
impl Reload for crate::redis::Redis {
    fn reload_limiter(
        builder: &LayerBuilder,
        rules: &Rules,
        before: &RatekeeperLayer<Self>,
    ) -> Result<(Limiter<Self>, MovedStates), LayerError> {
        let settings = settings_for(rules, before.engine.limiter.store().base());
        let from = rules.predecessors(&before.engine.rules);
        let limiter = limiter_builder(rules, builder)?
            .reload_redis(&before.engine.limiter, &from, &settings)
            .map_err(LayerError::Redis)?;
        // In Redis, the limits of a rule share the states of their keys.
        Ok((limiter, MovedStates::default()))
    }

    fn counter(
        builder: &LayerBuilder,
        limiter: &Limiter<Self>,
        before: Option<&OpaquePermitCounter>,
    ) -> Result<OpaquePermitCounter, LayerError> {
        builder.counter_in_redis(limiter, before.map(|before| &before.0)).map(OpaquePermitCounter)
    }
}

/// The keys whose states move to another limit, where limit n of `rules` continues limit `from[n]` of `before`.
fn moved_states(rules: &Rules, from: &[Option<usize>], before: &Engine<Memory>) -> Vec<MovedState> {
    let moved = rules.moved_keys(&before.rules, from).into_iter();
    let state = |it: MovedKey| MovedState {
        key: before.limiter.store().key(it.key.as_slice()),
        from: it.from,
        to: it.to,
    };
    moved.map(state).collect()
}

impl LayerBuilder {
    /// Builds a layer with these rules and the state of `before`. Requests that `before` is deciding are still
    /// decided by its rules.
    ///
    /// Rules are matched by name. The usage of each key is kept if the limit is raised or lowered. It is reset if the
    /// algorithm, one of its variants or the window changes; with state in Redis, also if a bucket's rate changes.
    /// Windows that begin with the first request may change their length: they keep their start. So do bans.
    ///
    /// Overrides for keys keep the usage of their keys as if they were one limit with that of the rule: if an override is
    /// added, removed, moved or changed, a key keeps its usage in the same cases. With state in memory, that does not
    /// apply to keys that an override has by a network, unless they share the override with a listed key before and
    /// after. Overrides with conditions are matched by their conditions.
    ///
    /// ```
    /// use std::time::Duration;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::{WindowAlign, Limit};
    ///
    /// let hourly = |limit| Limit::fixed_window(limit, Duration::from_secs(3600), WindowAlign::Clock);
    /// let layer = RatekeeperLayer::builder().per_client("per-client", hourly(100)?).build()?;
    /// // Whoever has used 30 has 170 left.
    /// let raised = RatekeeperLayer::builder().per_client("per-client", hourly(200)?).reload_from(&layer)?;
    /// # let _ = raised;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// In memory, both layers share the usage of each limit. `max_bytes` bounds both layers together. A used-up key stays
    /// used up through any number of changes, also if the limit is lowered and raised again. A limit that needs wider
    /// states than before, or gets more keys by a higher `max_keys` or `max_bytes`, gets new states, and a key's usage is
    /// migrated when the limit first sees the key; from then on requests of the old layer no longer count for it. The
    /// usage of a key that gets another override is copied by the reload, and the same applies. Lower bounds apply to new
    /// limits; the others keep their capacity.
    ///
    /// In Redis, connections are kept, and so are the cached denials and leases of unchanged limits; leases of
    /// changed limits are refunded. Processes with different limits of one name share their counters, which are reset
    /// in the same cases as in one process. Must be called on a tokio runtime.
    ///
    /// [Concurrency limits](super::concurrency) keep their permits: a request in flight counts towards the limit of the
    /// same name, whatever its size becomes, also if a reload in between had no limit of that name. After a limit's key
    /// was changed, requests in flight count for their former keys.
    ///
    /// # Errors
    /// As for a new layer; `before` is unchanged then.
    pub fn reload_from<S: Reload>(
        self,
        before: &RatekeeperLayer<S>,
    ) -> Result<RatekeeperLayer<S>, LayerError> {
        let rules = self.normalized_rules()?;
        let (limiter, moved) = S::reload_limiter(&self, &rules, before)?;
        let held = before.engine.concurrency.as_ref();
        let concurrency =
            InFlightLimits::new(&self.in_flight_limits, self.path_normalization, &rules, held, |counter| {
                let counter = counter.cloned().map(OpaquePermitCounter);
                S::counter(&self, &limiter, counter.as_ref()).map(|counter| counter.0)
            })?;
        let mut engine = self.engine(rules, limiter, concurrency, SystemClock::new())?;
        // Last, because requests of `before` no longer count for these keys.
        S::move_keys(&engine.limiter, before, &moved);
        // Requests that wait in the old layer count towards the new bound.
        engine.waiting = before.engine.waiting.clone();
        Ok(RatekeeperLayer { engine: Arc::new(engine) })
    }
}
