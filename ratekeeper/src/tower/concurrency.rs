//! Concurrency limits: how many requests may be in flight.
//!
//! ```
//! use ratekeeper::tower::RatekeeperLayer;
//! use ratekeeper::tower::key::{Key, KeyPart};
//! use ratekeeper::tower::concurrency::InFlightLimit;
//!
//! // Twenty requests of each user at once, and two hundred of all.
//! let layer = RatekeeperLayer::builder()
//!     .in_flight_limit(InFlightLimit::new("per-user", 20).key(Key::of(KeyPart::header("X-User-Id"))))
//!     .in_flight_limit(InFlightLimit::new("all", 200))
//!     .build()?;
//! for (name, held) in layer.in_flight() {
//!     println!("{name}: {held} in flight");
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
//! With the feature `redis` and `LayerBuilder::redis`, processes share the permits. Each process renews its permits
//! periodically; those of a crashed process expire after a few seconds (`Settings::permit_hold`). A released permit
//! is kept for a few milliseconds, so that the next request of the same key needs no call to Redis. While Redis is
//! unavailable, the failure policy of the settings (`Settings::on_store_failure`) decides: all requests are allowed,
//! all are denied, or each process enforces its share of the limit locally.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper_core::{Decision, RetryAfter};
pub use ratekeeper_rules::concurrency::InFlightLimit;
use ratekeeper_rules::key::{Key, NoKey};
use ratekeeper_rules::path::{PathNormalization, Pattern};
use ratekeeper_rules::request::Request;
use ratekeeper_rules::response::{ExhaustedLimit, PolicyName};
use ratekeeper_rules::rule::{ForbiddenReason, Rules, RulesError};
use smallvec::SmallVec;

use super::engine::{
    Engine, NextStep, RESPONSE, RequestChecks, RequestRejection, RequestVerdict, return_buffer, take_buffer,
};
use super::event::{DecisionEvent, Outcome, RuleOutcome};
use super::{LayerBuilder, LayerError, RatekeeperLayer, RuleSet};
use crate::concurrency::{Acquisition, LimitId, PermitAvailability, PermitCounter, PermitRequest, Permits};
use crate::store::Store;

/// The indices of the [concurrency limits](LayerBuilder::in_flight_limit) that apply to a request, from 0 in the
/// order of the builder, for the extensions of a request; without it, all apply. The conditions of each limit still
/// hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencySet(pub Arc<[usize]>);

impl LayerBuilder {
    /// Adds a concurrency limit: see the [module](self). A request must get a permit of each concurrency limit that
    /// applies to it before its rate limits are checked.
    ///
    /// In memory, permits of about [`max_keys`](Self::max_keys) keys are counted, one million by default. A key
    /// without requests in flight needs no entry; requests of further keys are denied while all entries are in use.
    #[must_use]
    pub fn in_flight_limit(mut self, limit: InFlightLimit) -> LayerBuilder {
        self.in_flight_limits.push(limit);
        self
    }
}

impl<S> RatekeeperLayer<S> {
    /// The number of requests of this process in flight, by name of the [concurrency
    /// limit](LayerBuilder::in_flight_limit).
    pub fn in_flight(&self) -> impl Iterator<Item = (&str, usize)> {
        let held = self.engine.concurrency.as_ref().map(|it| it.counter.held(&it.ids)).unwrap_or_default();
        self.engine.concurrency.iter().flat_map(|it| it.all.iter().map(|limit| limit.name.as_str())).zip(held)
    }
}

impl<S> Engine<S> {
    pub(crate) fn in_flight_limits(&self) -> &[InFlightLimit] {
        self.concurrency.as_ref().map_or(&[], |limits| &limits.all)
    }
}

/// An opaque permit counter.
#[doc(hidden)]
#[derive(Debug)]
pub struct OpaquePermitCounter(pub(crate) PermitCounter);

/// The concurrency limits and their permit counter.
#[derive(Debug)]
pub(crate) struct InFlightLimits {
    all: Vec<InFlightLimit>,
    ids: Vec<LimitId>,
    names: Vec<PolicyName>,
    counter: PermitCounter,
}

impl InFlightLimits {
    /// The limits' names and keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (&String, &Key)> {
        self.all.iter().map(|limit| (&limit.name, &limit.key))
    }

    /// Every header that the limits may read, in lower case.
    pub(crate) fn header_names(&self) -> impl Iterator<Item = &str> {
        self.all.iter().flat_map(InFlightLimit::header_names)
    }

    pub(crate) fn patterns(&self) -> impl Iterator<Item = &Pattern> {
        self.all.iter().flat_map(InFlightLimit::patterns)
    }

    /// Returns `None` if there are no concurrency limits, and have never been any. After a reload, `counter` counts
    /// the permits that are held.
    pub(crate) fn new(
        all: &[InFlightLimit],
        path_normalization: PathNormalization,
        rules: &Rules,
        before: Option<&InFlightLimits>,
        counter: impl FnOnce(Option<&PermitCounter>) -> Result<PermitCounter, LayerError>,
    ) -> Result<Option<InFlightLimits>, LayerError> {
        let mut names = Vec::with_capacity(all.len());
        for (number, InFlightLimit { name, .. }) in all.iter().enumerate() {
            let is_taken = all[..number].iter().any(|other| other.name == *name)
                || rules.rules().any(|rule| rule.name == *name);
            if is_taken {
                return Err(LayerError::Rules(RulesError::SameName(name.clone())));
            }
            names.push(PolicyName::new(name).map_err(|error| LayerError::Name(name.clone(), error))?);
        }
        let normalized = |limit: &InFlightLimit| {
            let wrong = |error| LayerError::Pattern(limit.name.clone(), error);
            limit.clone().with_normalization(path_normalization).map_err(wrong)
        };
        match all.is_empty() && before.is_none() {
            true => Ok(None),
            false => Ok(Some(InFlightLimits {
                all: all.iter().map(normalized).collect::<Result<_, _>>()?,
                ids: all.iter().map(|limit| LimitId::of(&limit.name)).collect(),
                names,
                counter: counter(before.map(|before| &before.counter))?,
            })),
        }
    }
}

/// The permits of a request: those it needs, and whether each was available.
#[derive(Debug, Default)]
pub(crate) struct PermitChecks {
    requests: SmallVec<[PermitRequest; 2]>,
    found: SmallVec<[PermitAvailability; 2]>,
    pub(crate) is_degraded: bool,
}

impl PermitChecks {
    /// Whether no concurrency limit applies to the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }
}

thread_local! {
    /// Reused buffer for keys.
    static KEY: Cell<Vec<u8>> = Cell::default();
}

impl<S: Store> Engine<S> {
    /// The permits that a request needs.
    pub(crate) fn needed_permits(
        &self,
        view: &impl Request,
        concurrency: Option<&ConcurrencySet>,
    ) -> Result<PermitChecks, RequestRejection> {
        let mut checks = PermitChecks::default();
        let Some(InFlightLimits { all, ids, .. }) = &self.concurrency else { return Ok(checks) };
        let mut key = take_buffer(&KEY);
        let mut add_request = |rule: usize| {
            key.clear();
            match all[rule].write_key(view, &mut key) {
                Ok(true) => {
                    let key = self.limiter.store().key(key.as_slice());
                    let InFlightLimit { max, is_shadow, .. } = all[rule];
                    checks.requests.push(PermitRequest::new(rule, ids[rule], key, max, is_shadow));
                    Ok(())
                }
                Ok(false) => Ok(()),
                Err(NoKey::Denied) => {
                    Err(RequestRejection::Forbidden(self.names.len() + rule, ForbiddenReason::MissingKey))
                }
                Err(why) => Err(RequestRejection::Malformed(why.to_string())),
            }
        };
        match concurrency {
            Some(ConcurrencySet(indices)) => {
                RuleSet::sorted(indices, all.len()).into_iter().try_for_each(&mut add_request)
            }
            None => (0..all.len()).try_for_each(&mut add_request),
        }?;
        return_buffer(&KEY, key);
        Ok(checks)
    }

    /// Takes the permits of a request, or returns its denial.
    pub(crate) async fn acquire_permits(
        &self,
        checks: &mut RequestChecks,
    ) -> Result<Permits, RequestVerdict> {
        let Some(limits) = self.concurrency.as_ref().filter(|_| !checks.permits.is_empty()) else {
            return Ok(Permits::default());
        };
        let Acquisition { held, found, allowed, is_degraded, is_closed } =
            limits.counter.acquire(&checks.permits.requests).await;
        (checks.permits.found, checks.permits.is_degraded) = (found, is_degraded);
        if allowed {
            return Ok(held);
        }
        let outcome = if is_closed { Outcome::Closed } else { Outcome::Denied };
        let rules = self.permit_outcomes(&checks.permits);
        let event = DecisionEvent::new(checks.route.take(), outcome, is_degraded, rules);
        let event = self.observed(event.with_charges(std::mem::take(&mut checks.list)));
        let next = self.deny_exhausted(limits, &checks.permits, is_closed);
        Err(RequestVerdict { next, permits: Permits::default(), event })
    }

    fn deny_exhausted(&self, rules: &InFlightLimits, checks: &PermitChecks, is_closed: bool) -> NextStep {
        let exhausted = checks.requests.iter().zip(&checks.found);
        let exhausted = exhausted.filter(|(request, found)| !request.is_shadow && !found.is_free);
        let exhausted: SmallVec<[ExhaustedLimit<'_>; 2]> = exhausted
            .map(|(request, _)| {
                let rule = request.rule;
                ExhaustedLimit { name: &rules.names[rule], max: rules.all[rule].max }
            })
            .collect();
        let mut response = take_buffer(&RESPONSE);
        response.write_exhausted(self.headers, &exhausted, is_closed);
        NextStep::Denied { response, is_closed }
    }

    /// The outcomes of the concurrency limits.
    pub(crate) fn permit_outcomes(&self, checks: &PermitChecks) -> impl Iterator<Item = RuleOutcome> {
        let all = self.in_flight_limits();
        checks.requests.iter().zip(&checks.found).map(|(request, found)| {
            let InFlightLimit { max, is_shadow, .. } = &all[request.rule];
            let decision = Decision {
                allowed: found.is_free,
                limit: *max,
                remaining: found.left,
                retry_after: match found.is_free {
                    true => RetryAfter::Now,
                    false => RetryAfter::After(Duration::from_secs(1)),
                },
                reset_after: Duration::ZERO,
                delay: Duration::ZERO,
            };
            let index = self.names.len() + request.rule;
            RuleOutcome { index, tier: None, decision, is_shadow: *is_shadow, is_banned: false, charge: None }
        })
    }
}
