//! Concurrency limits: how many requests may be in flight.
//!
//! ```
//! use ratekeeper::tower::RatekeeperLayer;
//! use ratekeeper::tower::key::{Key, Part};
//! use ratekeeper::tower::slots::Slots;
//!
//! // Twenty requests of each user at once, and two hundred of all.
//! let layer = RatekeeperLayer::builder()
//!     .slots(Slots::new("per-user", 20).key(Key::of(Part::header("X-User-Id"))))
//!     .slots(Slots::new("all", 200))
//!     .build()?;
//! for (name, held) in layer.slots_held() {
//!     println!("{name}: {held} under way");
//! }
//! # Ok::<(), ratekeeper::tower::LayerError>(())
//! ```
//!
//! A request takes one permit of each concurrency limit that applies to it, or none, before its rate limits are
//! checked. If a permit is missing, the request gets 429 and its rate limits are not charged. A request holds its
//! permits while a leaky bucket delays it. It releases them when the response body has ended or is dropped, when the
//! service fails, when a limit denies it, or when its future is dropped because the client disconnected. An upgraded
//! connection (WebSocket) holds no permit: its response ends with the upgrade.
//!
//! With the feature `redis` and `Builder::redis`, processes share the permits. Each process renews its permits
//! periodically; those of a crashed process expire after a few seconds (`Settings::slots_hold`). A released permit is
//! kept for a few milliseconds, so that the next request of the same key needs no call to Redis. While Redis is
//! unavailable, the failure policy of the settings (`Settings::failure`) decides: all requests are allowed, all are
//! denied, or each process enforces its share of the limit locally.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use ratekeeper_core::{Decision, RetryAfter};
use ratekeeper_rules::answer::{Full, PolicyName};
use ratekeeper_rules::key::{Key, NoKey};
use ratekeeper_rules::path::PathNormalization;
use ratekeeper_rules::rule::{Rules, RulesError};
pub use ratekeeper_rules::slots::Slots;
use smallvec::SmallVec;

use super::engine::{
    ANSWER, DecisionEvent, Gate, Next, NotAsked, Outcome, Question, RuleOutcome, leave, reused,
};
use super::view::View;
use super::{Builder, LayerError, RatekeeperLayer, RequestContext, RuleSet};
use crate::slots::{Counter, Found, Held, Taken, Wanted};
use crate::store::Store;

/// The indices of the [concurrency limits](Builder::slots) that apply to a request, from 0 in the order of the
/// builder, for the extensions of a request; without it, all apply. The conditions of each limit still hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencySet(pub Arc<[usize]>);

impl Builder {
    /// Adds a concurrency limit: see [`slots`](self). A request must get a permit of each concurrency limit that
    /// applies to it before its rate limits are checked.
    ///
    /// In memory, permits of about [`max_keys`](Self::max_keys) keys are counted, one million by default. A key
    /// without requests in flight needs no entry; requests of further keys are denied while all entries are in use.
    #[must_use]
    pub fn slots(mut self, slots: Slots) -> Builder {
        self.slots.push(slots);
        self
    }
}

impl<S> RatekeeperLayer<S> {
    /// The number of requests of this process in flight, by name of the [concurrency limit](Builder::slots).
    pub fn slots_held(&self) -> impl Iterator<Item = (&str, usize)> {
        let held = self.gate.slots.as_ref().map(|it| it.counter.held()).unwrap_or_default();
        self.gate.slots.iter().flat_map(|it| it.all.iter().map(|slots| slots.name.as_str())).zip(held)
    }
}

impl<S> Gate<S> {
    /// The name of a rule; concurrency limits are numbered after the rules.
    pub(crate) fn rule_name(&self, number: usize) -> &str {
        match number.checked_sub(self.names.len()) {
            None => &self.rules.rule(number).name,
            Some(slots) => self.slots.as_ref().map_or("", |rules| &rules.all[slots].name),
        }
    }
}

/// An opaque permit counter.
#[doc(hidden)]
#[derive(Debug)]
pub struct SlotCounter(pub(crate) Counter);

/// The concurrency limits and their permit counter.
#[derive(Debug)]
pub(crate) struct SlotRules {
    all: Vec<Slots>,
    names: Vec<PolicyName>,
    counter: Counter,
}

impl SlotRules {
    /// The limits' names and keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (&String, &Key)> {
        self.all.iter().map(|slots| (&slots.name, &slots.key))
    }

    /// The permit counter, if `others` have the same names and sizes.
    pub(crate) fn counter_of_same(&self, others: &[Slots]) -> Option<Counter> {
        let of = |all: &[Slots]| all.iter().map(|it| (it.name.clone(), it.most)).collect::<Vec<_>>();
        (of(&self.all) == of(others)).then(|| self.counter.clone())
    }

    /// Returns `None` if there are no concurrency limits.
    pub(crate) fn new(
        all: &[Slots],
        spelling: PathNormalization,
        rules: &Rules,
        counter: impl FnOnce() -> Result<Counter, LayerError>,
    ) -> Result<Option<SlotRules>, LayerError> {
        let mut names = Vec::with_capacity(all.len());
        for (number, Slots { name, .. }) in all.iter().enumerate() {
            let is_taken = all[..number].iter().any(|other| other.name == *name)
                || rules.rules().any(|rule| rule.name == *name);
            if is_taken {
                return Err(LayerError::Rules(RulesError::SameName(name.clone())));
            }
            names.push(PolicyName::new(name).map_err(|error| LayerError::Name(name.clone(), error))?);
        }
        let spelt = |slots: &Slots| {
            let wrong = |error| LayerError::Pattern(slots.name.clone(), error);
            slots.clone().spelt(spelling).map_err(wrong)
        };
        match all.is_empty() {
            true => Ok(None),
            false => Ok(Some(SlotRules {
                all: all.iter().map(spelt).collect::<Result<_, _>>()?,
                names,
                counter: counter()?,
            })),
        }
    }
}

/// The permits of a request: those it needs, and whether each was available.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    wanted: SmallVec<[Wanted; 2]>,
    found: SmallVec<[Found; 2]>,
    pub(crate) is_degraded: bool,
}

impl Asked {
    /// Whether no concurrency limit applies to the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }
}

thread_local! {
    /// Reused buffer for keys.
    static KEY: Cell<Vec<u8>> = Cell::default();
}

impl<S: Store> Gate<S> {
    /// The permits that a request needs.
    pub(crate) fn wanted_slots(
        &self,
        parts: &Parts,
        about: &RequestContext<'_>,
        view: &View<'_, S>,
    ) -> Result<Asked, NotAsked> {
        let mut asked = Asked::default();
        let Some(SlotRules { all, .. }) = &self.slots else { return Ok(asked) };
        let mut key = reused(&KEY);
        let mut want = |rule: usize| {
            key.clear();
            match all[rule].ask(view, &mut key) {
                Ok(true) => {
                    let key = self.limiter.store().key(key.as_slice());
                    asked.wanted.push(Wanted::new(rule, key, all[rule].is_shadow));
                    Ok(())
                }
                Ok(false) => Ok(()),
                Err(NoKey::Denied) => Err(NotAsked::Forbidden(self.names.len() + rule)),
                Err(unclear) => Err(NotAsked::Bad(unclear.to_string())),
            }
        };
        // A router in front may have selected some of the limits.
        match about.slots.or_else(|| parts.extensions.get()) {
            Some(ConcurrencySet(chosen)) => {
                RuleSet::numbers(chosen, all.len()).into_iter().try_for_each(&mut want)
            }
            None => (0..all.len()).try_for_each(&mut want),
        }?;
        leave(&KEY, key);
        Ok(asked)
    }

    /// Takes the permits of a request and checks its rate limits. The request keeps the permits only if it is
    /// allowed.
    pub(crate) async fn admit(&self, question: &mut Question) -> (Next, Held) {
        let Some(rules) = self.slots.as_ref().filter(|_| !question.slots.is_empty()) else {
            return (self.decide(question).await, Held::default());
        };
        let Taken { held, found, allowed, is_degraded, is_closed } =
            rules.counter.take(&question.slots.wanted).await;
        (question.slots.found, question.slots.is_degraded) = (found, is_degraded);
        if !allowed {
            if let Some(observer) = &self.observer {
                let ruled: SmallVec<[RuleOutcome<'_>; 2]> = self.slots_said(&question.slots).collect();
                let outcome = if is_closed { Outcome::Closed } else { Outcome::Denied };
                let subject = question.subject.as_ref().map(|subject| &*subject.0);
                observer(&DecisionEvent { rules: &ruled, outcome, allowed, is_degraded, subject });
            }
            return (self.no_slot(rules, &question.slots, is_closed), Held::default());
        }
        match self.decide(question).await {
            next @ Next::Allowed { .. } => (next, held),
            next @ Next::Denied { .. } => (next, Held::default()),
        }
    }

    fn no_slot(&self, rules: &SlotRules, asked: &Asked, is_closed: bool) -> Next {
        let full = asked.wanted.iter().zip(&asked.found);
        let full = full.filter(|(wanted, found)| !wanted.is_shadow && !found.is_free);
        let full: SmallVec<[Full<'_>; 2]> = full
            .map(|(wanted, _)| {
                let rule = wanted.place.rule;
                Full { name: &rules.names[rule], most: rules.all[rule].most }
            })
            .collect();
        let mut answer = reused(&ANSWER);
        answer.write_full(self.headers, &full, is_closed);
        Next::Denied { answer, is_closed }
    }

    /// The outcomes of the concurrency limits, for the observer.
    pub(crate) fn slots_said<'a>(&'a self, asked: &'a Asked) -> impl Iterator<Item = RuleOutcome<'a>> {
        let all = self.slots.as_ref().map_or(&[][..], |rules| &rules.all);
        asked.wanted.iter().zip(&asked.found).map(|(wanted, found)| {
            let Slots { name, most, is_shadow, .. } = &all[wanted.place.rule];
            let decision = Decision {
                allowed: found.is_free,
                limit: *most,
                remaining: found.left,
                retry_after: match found.is_free {
                    true => RetryAfter::Now,
                    false => RetryAfter::After(Duration::from_secs(1)),
                },
                reset_after: Duration::ZERO,
                delay: Duration::ZERO,
            };
            let number = self.names.len() + wanted.place.rule;
            RuleOutcome { name, number, decision, is_shadow: *is_shadow, is_banned: false }
        })
    }
}
