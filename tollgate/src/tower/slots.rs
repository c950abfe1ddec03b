//! How many requests may be under way at once.
//!
//! ```
//! use tollgate::tower::RateLimitLayer;
//! use tollgate::tower::key::{Key, Part};
//! use tollgate::tower::slots::Slots;
//!
//! // Twenty requests of each user at once, and two hundred of all.
//! let layer = RateLimitLayer::builder()
//!     .slots(Slots::new("per-user", 20).key(Key::of(Part::header("X-User-Id"))))
//!     .slots(Slots::new("all", 200))
//!     .build()?;
//! for (name, held) in layer.slots_held() {
//!     println!("{name}: {held} under way");
//! }
//! # Ok::<(), tollgate::tower::LayerError>(())
//! ```
//!
//! A request takes a slot of each rule that concerns it, or none and is answered with 429, before its limits are asked:
//! what has no slot takes nothing from them. It holds its slots while a leaky bucket delays it, and gives them back when
//! the body of its response has been read to its end or dropped, when the service fails, when a limit denies it, or when
//! its client has left and its future is dropped. A connection that is upgraded (WebSocket) holds none: its response ends
//! with the upgrade.
//!
//! With the feature `redis` and `Builder::redis`, processes share the slots. Each says how many of its requests are under way, and says so
//! again all the time: those of a process that has died are free again
//! some seconds later (`Settings::slots_hold`). A slot that was given back is kept for some milliseconds,
//! in case the next request of its key wants it: then Redis is not even asked. While Redis does not answer, the
//! policy of its settings (`Settings::failure`) decides: all requests pass, or none, or each process counts
//! by itself, with its share of the slots.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use smallvec::SmallVec;
use tollgate_core::{Decision, RetryAfter};
use tollgate_rules::answer::{Full, PolicyName};
use tollgate_rules::key::{Key, NoKey};
use tollgate_rules::path::Spelling;
use tollgate_rules::rule::{Rules, RulesError};
pub use tollgate_rules::slots::Slots;

use super::gate::{ANSWER, Gate, Next, NotAsked, Observed, Outcome, Question, Ruled, leave, reused};
use super::view::View;
use super::{About, Builder, Chosen, LayerError, RateLimitLayer};
use crate::slots::{Counter, Found, Held, Taken, Wanted};
use crate::store::Store;

/// The numbers of the [slots](Builder::slots) that concern a request, from 0 in the order of the builder, for the
/// extensions of a request; without it, all do. What they say themselves about which requests they concern still holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenSlots(pub Arc<[usize]>);

impl Builder {
    /// Adds a rule of how many requests may be under way at once: see [`slots`](self). A request must get a slot of each
    /// that concerns it, before its limits are asked.
    ///
    /// In memory there is room for about as many keys as [`max_keys`](Self::max_keys) says, a million if it says
    /// nothing. A key of which no request is under way needs none; requests of more keys at once are denied.
    #[must_use]
    pub fn slots(mut self, slots: Slots) -> Builder {
        self.slots.push(slots);
        self
    }
}

impl<S> RateLimitLayer<S> {
    /// How many requests of this process are under way now, by the names of the [slots](Builder::slots).
    pub fn slots_held(&self) -> impl Iterator<Item = (&str, usize)> {
        let held = self.gate.slots.as_ref().map(|it| it.counter.held()).unwrap_or_default();
        self.gate.slots.iter().flat_map(|it| it.all.iter().map(|slots| slots.name.as_str())).zip(held)
    }
}

impl<S> Gate<S> {
    /// The name of a rule; those of slots are counted behind the others.
    pub(crate) fn rule_name(&self, number: usize) -> &str {
        match number.checked_sub(self.names.len()) {
            None => &self.rules.rule(number).name,
            Some(slots) => self.slots.as_ref().map_or("", |rules| &rules.all[slots].name),
        }
    }
}

/// What counts slots, for those who only hand it on.
#[doc(hidden)]
#[derive(Debug)]
pub struct SlotCounter(pub(crate) Counter);

/// Rules of slots, and where they are counted.
#[derive(Debug)]
pub(crate) struct SlotRules {
    all: Vec<Slots>,
    names: Vec<PolicyName>,
    counter: Counter,
}

impl SlotRules {
    /// Their names and keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (&String, &Key)> {
        self.all.iter().map(|slots| (&slots.name, &slots.key))
    }

    /// What counts them, if these are the same.
    pub(crate) fn counter_of_same(&self, others: &[Slots]) -> Option<Counter> {
        let of = |all: &[Slots]| all.iter().map(|it| (it.name.clone(), it.most)).collect::<Vec<_>>();
        (of(&self.all) == of(others)).then(|| self.counter.clone())
    }

    /// None if there are no such rules.
    pub(crate) fn new(
        all: &[Slots],
        spelling: Spelling,
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

/// The slots of a request: what it wants, and what it was told.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    wanted: SmallVec<[Wanted; 2]>,
    found: SmallVec<[Found; 2]>,
    pub(crate) is_degraded: bool,
}

impl Asked {
    /// Whether no rule of slots concerns the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }
}

thread_local! {
    /// Keys are written into the same memory one after the other.
    static KEY: Cell<Vec<u8>> = Cell::default();
}

impl<S: Store> Gate<S> {
    /// The slots that a request wants.
    pub(crate) fn wanted_slots(
        &self,
        parts: &Parts,
        about: &About<'_>,
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
        // A router in front may have chosen some of them.
        match about.slots.or_else(|| parts.extensions.get()) {
            Some(ChosenSlots(chosen)) => {
                Chosen::numbers(chosen, all.len()).into_iter().try_for_each(&mut want)
            }
            None => (0..all.len()).try_for_each(&mut want),
        }?;
        leave(&KEY, key);
        Ok(asked)
    }

    /// Takes the slots of a request and asks its limits. It keeps the slots if it is let in, and only then.
    pub(crate) async fn admit(&self, question: &mut Question) -> (Next, Held) {
        let Some(rules) = self.slots.as_ref().filter(|_| !question.slots.is_empty()) else {
            return (self.decide(question).await, Held::default());
        };
        let Taken { held, found, allowed, is_degraded, is_closed } =
            rules.counter.take(&question.slots.wanted).await;
        (question.slots.found, question.slots.is_degraded) = (found, is_degraded);
        if !allowed {
            if let Some(observer) = &self.observer {
                let ruled: SmallVec<[Ruled<'_>; 2]> = self.slots_said(&question.slots).collect();
                let outcome = if is_closed { Outcome::Closed } else { Outcome::Denied };
                let subject = question.subject.as_ref().map(|subject| &*subject.0);
                observer(&Observed { rules: &ruled, outcome, allowed, is_degraded, subject });
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

    /// What the slots said, as whoever observes is told.
    pub(crate) fn slots_said<'a>(&'a self, asked: &'a Asked) -> impl Iterator<Item = Ruled<'a>> {
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
            Ruled { name, number, decision, is_shadow: *is_shadow, is_banned: false }
        })
    }
}
