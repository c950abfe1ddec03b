//! Configuration reloads: rules that change while they are in use.

use std::collections::HashMap;
use std::sync::Arc;

use ratekeeper_rules::rule::Rules;

use super::RatekeeperLayer;
#[cfg(feature = "redis")]
use super::builder::settings_for;
use super::builder::{Builder, limiter_builder};
use super::engine::Gate;
use super::error::LayerError;
use super::slots::{SlotCounter, SlotRules};
use crate::clock::SystemClock;
use crate::limiter::Limiter;
use crate::memory::Memory;

/// A store that supports reloads: it migrates its state to changed limits.
pub trait Reload: Sized {
    /// Builds a limiter for the rules with the state of `before`.
    #[doc(hidden)]
    fn renewed(
        builder: &Builder,
        rules: &Rules,
        before: &RatekeeperLayer<Self>,
    ) -> Result<Limiter<Self>, LayerError>;

    /// Builds the permit counter.
    #[doc(hidden)]
    fn counter(builder: &Builder, limiter: &Limiter<Self>) -> Result<SlotCounter, LayerError>;
}

impl Reload for Memory {
    fn renewed(builder: &Builder, rules: &Rules, before: &RatekeeperLayer) -> Result<Limiter, LayerError> {
        let limits = builder.bounded(limiter_builder(rules, builder)?);
        limits.reload_from(&before.gate.limiter, &places(rules, &before.gate)).map_err(LayerError::Memory)
    }

    fn counter(builder: &Builder, _: &Limiter) -> Result<SlotCounter, LayerError> {
        Ok(SlotCounter(builder.counter_in_memory()))
    }
}

#[cfg(feature = "redis")]
impl Reload for crate::redis::Redis {
    fn renewed(
        builder: &Builder,
        rules: &Rules,
        before: &RatekeeperLayer<Self>,
    ) -> Result<Limiter<Self>, LayerError> {
        let settings = settings_for(rules, before.gate.limiter.store().base());
        limiter_builder(rules, builder)?
            .reload_redis(&before.gate.limiter, &places(rules, &before.gate), &settings)
            .map_err(LayerError::Redis)
    }

    fn counter(builder: &Builder, limiter: &Limiter<Self>) -> Result<SlotCounter, LayerError> {
        builder.counter_in_redis(limiter).map(SlotCounter)
    }
}

/// The index of each limit in `before`, by name.
fn places<S>(rules: &Rules, before: &Gate<S>) -> Vec<Option<usize>> {
    let before = before.rules.limits().iter().enumerate();
    let places: HashMap<&str, usize> = before.map(|(place, kept)| (kept.name.as_str(), place)).collect();
    rules.limits().iter().map(|kept| places.get(kept.name.as_str()).copied()).collect()
}

impl Builder {
    /// Builds a layer with these rules and the state of `before`. Requests that `before` is deciding are still
    /// decided by its rules.
    ///
    /// Rules are matched by name. The usage of each key is kept if the limit is raised or lowered. It is reset if the
    /// algorithm, one of its variants or the window changes; with state in Redis, also if a bucket's rate changes.
    /// Overrides are matched by their position in the rule.
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
    /// In memory, an unchanged limit is shared by both layers and keeps its capacity; the bounds of this builder
    /// apply to the other limits. The state of `before` stays in memory until it expires, through at most eight
    /// changes of a limit. If both layers decide about a key, each counts separately from then on: together they
    /// allow at most the sum of both limits. A bucket whose usage exceeds twice its new capacity is migrated with a
    /// usage of twice that capacity.
    ///
    /// In Redis, connections are kept, and so are the cached denials and leases of unchanged limits; leases of
    /// changed limits are refunded. Processes with different limits of one name share their counters, which are reset
    /// in the same cases as in one process. Must be called on a tokio runtime.
    ///
    /// [Concurrency limits](super::slots) keep their permits if all of them are unchanged. Otherwise, in memory,
    /// permits held under the old limits do not count towards the new ones.
    ///
    /// # Errors
    /// As for a new layer; `before` is unchanged then.
    pub fn reload_from<S: Reload>(
        self,
        before: &RatekeeperLayer<S>,
    ) -> Result<RatekeeperLayer<S>, LayerError> {
        let rules = self.spelt_rules()?;
        let limiter = S::renewed(&self, &rules, before)?;
        let slots = SlotRules::new(&self.slots, self.spelling, &rules, || {
            let same = before.gate.slots.as_ref().and_then(|before| before.counter_of_same(&self.slots));
            same.map_or_else(|| S::counter(&self, &limiter).map(|made| made.0), Ok)
        })?;
        let mut gate = self.gate(rules, limiter, slots, SystemClock::new())?;
        // Requests that wait in the old layer count towards the new bound.
        gate.waiting = before.gate.waiting.clone();
        Ok(RatekeeperLayer { gate: Arc::new(gate) })
    }
}
