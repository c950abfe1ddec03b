//! Rules that change while they are in use.

use std::collections::HashMap;
use std::sync::Arc;

use tollgate_rules::rule::Rules;

use super::RateLimitLayer;
#[cfg(feature = "redis")]
use super::builder::settings_for;
use super::builder::{Builder, limiter_builder};
use super::error::LayerError;
use super::gate::Gate;
use super::slots::{SlotCounter, SlotRules};
use crate::clock::SystemClock;
use crate::limiter::Limiter;
use crate::memory::Memory;

/// A store that can go on under other limits.
pub trait Renewable: Sized {
    /// A limiter for the rules that goes on where that of `before` stands.
    #[doc(hidden)]
    fn renewed(
        builder: &Builder,
        rules: &Rules,
        before: &RateLimitLayer<Self>,
    ) -> Result<Limiter<Self>, LayerError>;

    /// What counts the slots of the builder.
    #[doc(hidden)]
    fn counter(builder: &Builder, limiter: &Limiter<Self>) -> Result<SlotCounter, LayerError>;
}

impl Renewable for Memory {
    fn renewed(builder: &Builder, rules: &Rules, before: &RateLimitLayer) -> Result<Limiter, LayerError> {
        let limits = builder.bounded(limiter_builder(rules, builder)?);
        limits.renew(&before.gate.limiter, &places(rules, &before.gate)).map_err(LayerError::Memory)
    }

    fn counter(builder: &Builder, _: &Limiter) -> Result<SlotCounter, LayerError> {
        Ok(SlotCounter(builder.counter_in_memory()))
    }
}

#[cfg(feature = "redis")]
impl Renewable for crate::redis::Redis {
    fn renewed(
        builder: &Builder,
        rules: &Rules,
        before: &RateLimitLayer<Self>,
    ) -> Result<Limiter<Self>, LayerError> {
        let settings = settings_for(rules, before.gate.limiter.store().base());
        limiter_builder(rules, builder)?
            .renew_redis(&before.gate.limiter, &places(rules, &before.gate), &settings)
            .map_err(LayerError::Redis)
    }

    fn counter(builder: &Builder, limiter: &Limiter<Self>) -> Result<SlotCounter, LayerError> {
        builder.counter_in_redis(limiter).map(SlotCounter)
    }
}

/// Where each limit stood before, by its name.
fn places<S>(rules: &Rules, before: &Gate<S>) -> Vec<Option<usize>> {
    let before = before.rules.limits().iter().enumerate();
    let places: HashMap<&str, usize> = before.map(|(place, kept)| (kept.name.as_str(), place)).collect();
    rules.limits().iter().map(|kept| places.get(kept.name.as_str()).copied()).collect()
}

impl Builder {
    /// The layer by these rules that goes on where another stands, whose requests on the way are still decided by it: for
    /// rules that change while they are in use.
    ///
    /// A rule is the same if it has the same name; then what each key has used of its limit stays used, also if the limit
    /// is raised or lowered. It begins anew if the algorithm, one of its variants or the window is another; with its
    /// states in Redis, also if a bucket's rate is. Overrides are told apart by their place in the rule.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::{Align, Limit};
    ///
    /// let hourly = |limit| Limit::fixed_window(limit, Duration::from_secs(3600), Align::Clock);
    /// let layer = RateLimitLayer::builder().per_client("per-client", hourly(100)?).build()?;
    /// // Whoever has used 30 has 170 left.
    /// let raised = RateLimitLayer::builder().per_client("per-client", hourly(200)?).renew(&layer)?;
    /// # let _ = raised;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// In memory, a limit that has not changed is shared by both layers and keeps the room that it has; the room that this
    /// builder gives is that of the others. What `before` has counted stays in memory for as long as it counts, for eight
    /// changes of a limit at most. Where both decide about a key, each counts for itself from then on: together they admit
    /// no more than both limits allow. A bucket that was used for more than twice what it holds now counts as used so much.
    ///
    /// In Redis, connections are kept, and so is what is known or taken ahead of limits that have not changed; of others it
    /// is given back. Processes with different limits of one name share their counts, and begin anew where one of the
    /// process alone would. Must be called on a tokio runtime.
    ///
    /// [Slots](super::slots) go on if all of them are the same. If not, requests that hold some of the old ones do not count
    /// among the new ones in memory.
    ///
    /// # Errors
    /// As for a layer of its own. Then `before` is as it was.
    pub fn renew<S: Renewable>(self, before: &RateLimitLayer<S>) -> Result<RateLimitLayer<S>, LayerError> {
        let rules = self.spelt_rules()?;
        let limiter = S::renewed(&self, &rules, before)?;
        let slots = SlotRules::new(&self.slots, self.spelling, &rules, || {
            let same = before.gate.slots.as_ref().and_then(|before| before.counter_of_same(&self.slots));
            same.map_or_else(|| S::counter(&self, &limiter).map(|made| made.0), Ok)
        })?;
        let mut gate = self.gate(rules, limiter, slots, SystemClock::new())?;
        // Those who wait there count here.
        gate.waiting = before.gate.waiting.clone();
        Ok(RateLimitLayer { gate: Arc::new(gate) })
    }
}
