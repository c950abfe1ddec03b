//! The outcome of a request: one value, for observers, metrics and logs.

use std::cell::Cell;
use std::cmp::Reverse;
use std::time::Duration;

use ratekeeper_core::{Decision, RetryAfter};
use ratekeeper_rules::concurrency::InFlightLimit;
use ratekeeper_rules::rule::{ChargeList, ForbiddenReason, RuleCharge, Rules};

use super::Route;
use super::engine::{CHARGE_LIST, return_buffer, take_buffer};

thread_local! {
    /// Reused buffer for the outcomes of rules.
    static RULE_OUTCOMES: Cell<Vec<RuleOutcome>> = const { Cell::new(Vec::new()) };
}

/// The outcome of a request: what each limit decided, and what followed.
///
/// [`LayerBuilder::observe`](super::LayerBuilder::observe) receives it, and
/// [`RatekeeperLayer::call_with`](super::RatekeeperLayer::call_with) returns it.
#[derive(Debug)]
#[non_exhaustive]
pub struct DecisionEvent {
    /// The route, if a router in front has set it.
    pub route: Option<Route>,
    /// The outcomes of the rules that apply, then of the [concurrency limits](super::concurrency). If a concurrency
    /// limit denies the request, the rules are not checked and not listed. Empty if the request is rejected before
    /// any check.
    pub rules: Vec<RuleOutcome>,
    /// The result of the request.
    pub outcome: Outcome,
    /// Whether the store did not answer, so that each limit's failure policy decided.
    pub is_degraded: bool,
    /// The charges, whose keys the outcomes refer to.
    charges: ChargeList,
}

/// The result of a request. All but the first three are determined before any limit is checked, and charge nothing.
///
/// ```
/// use ratekeeper::tower::Outcome;
/// use ratekeeper::tower::rule::ForbiddenReason;
///
/// /// The name of a counter.
/// fn counter(outcome: Outcome) -> &'static str {
///     match outcome {
///         Outcome::Allowed => "allowed",
///         Outcome::Denied => "denied",
///         Outcome::Closed | Outcome::Shed => "unavailable",
///         _ => "rejected",
///     }
/// }
/// let reason = ForbiddenReason::DenyList;
/// assert_eq!(counter(Outcome::Forbidden { rule: 0, reason }), "rejected");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It is forwarded to the service, immediately or after a delay.
    Allowed,
    /// A limit or a ban denied it: 429, or the response set by
    /// [`LayerBuilder::deny_response`](super::LayerBuilder::deny_response).
    Denied,
    /// The store is unavailable, and a limit with the failure policy `closed` denied it: 503.
    Closed,
    /// Too many requests [wait](super::LayerBuilder::max_waiting) already: 503.
    Shed,
    /// It has a repeated key header, another spelling of a header that a rule reads, two different hosts or an
    /// ambiguous path: 400.
    Malformed,
    /// Its key is on a rule's deny list, or it has no key where the rule requires one: 403.
    Forbidden {
        /// The rule's index.
        rule: usize,
        /// Which of the two.
        reason: ForbiddenReason,
    },
    /// A rule needs the client's address, and the [peer](super::LayerBuilder::peer) is unknown: 500.
    NoPeer,
}

/// The outcome of one rule: an element of [`DecisionEvent::rules`], as in the example of
/// [`LayerBuilder::observe`](super::LayerBuilder::observe).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RuleOutcome {
    /// The rule's index, from 0 in the order of the [builder](super::LayerBuilder::rule); [concurrency
    /// limits](super::concurrency) follow the rules.
    pub index: usize,
    /// The tier: the position of the override whose limit decided, from 0; none if the rule's own limit did.
    pub tier: Option<usize>,
    /// The decision of its limit.
    pub decision: Decision,
    /// Whether the rule is a shadow rule.
    pub is_shadow: bool,
    /// Whether the key is banned.
    pub is_banned: bool,
    /// Its charge; concurrency limits have none.
    pub(super) charge: Option<usize>,
}

impl DecisionEvent {
    /// The outcome of a request without checks.
    pub(super) fn without_checks(route: Option<Route>, outcome: Outcome) -> DecisionEvent {
        let (rules, charges) = (Vec::new(), ChargeList::default());
        DecisionEvent { route, rules, outcome, is_degraded: false, charges }
    }

    pub(super) fn new(
        route: Option<Route>,
        outcome: Outcome,
        is_degraded: bool,
        rules: impl Iterator<Item = RuleOutcome>,
    ) -> DecisionEvent {
        // A reused buffer: an event is moved several times, so it must be small.
        let mut buffer = take_buffer(&RULE_OUTCOMES);
        buffer.extend(rules);
        DecisionEvent { route, rules: buffer, outcome, is_degraded, charges: ChargeList::default() }
    }

    /// The event with the charges that its outcomes refer to.
    pub(super) fn with_charges(mut self, charges: ChargeList) -> DecisionEvent {
        self.charges = charges;
        self
    }

    /// Whether the request is allowed.
    pub fn is_allowed(&self) -> bool {
        self.outcome == Outcome::Allowed
    }

    /// The name in logs of the reason why the request is rejected before any limit is checked, if its own content is
    /// that reason.
    pub fn reason(&self) -> Option<&'static str> {
        match self.outcome {
            Outcome::Forbidden { reason, .. } => Some(reason.name()),
            Outcome::Malformed => Some("malformed"),
            _ => None,
        }
    }

    /// The enforced rules and concurrency limits.
    fn enforced(&self) -> impl Iterator<Item = &RuleOutcome> {
        self.rules.iter().filter(|rule| !rule.is_shadow)
    }

    /// The rule that denied the request or delays it longest, or else the one with the fewest units left.
    pub fn deciding_rule(&self) -> Option<&RuleOutcome> {
        match self.is_allowed() {
            true => {
                self.enforced().min_by_key(|rule| (Reverse(rule.decision.delay), rule.decision.remaining))
            }
            false => self.enforced().find(|rule| !rule.decision.allowed),
        }
    }

    /// How long an allowed request waits before it is forwarded.
    pub fn delay(&self) -> Duration {
        self.enforced().map(|rule| rule.decision.delay).max().unwrap_or_default()
    }

    /// The longest wait of the rules that deny the request; [`RetryAfter::Now`] if none does.
    pub fn retry_after(&self) -> RetryAfter {
        self.enforced().map(|rule| rule.decision.retry_after).max().unwrap_or(RetryAfter::Now)
    }

    /// The key as the rule wrote it; [`shown`](super::key::shown) makes it readable. Empty for one budget for all and
    /// for concurrency limits.
    pub fn key(&self, rule: &RuleOutcome) -> &[u8] {
        let charge = rule.charge.and_then(|at| self.charges.charges.get(at));
        charge.map_or(&[], |charge: &RuleCharge| self.charges.key(charge))
    }
}

impl Drop for DecisionEvent {
    /// Leaves the buffers for the next request on this thread.
    fn drop(&mut self) {
        if self.rules.capacity() > 0 {
            self.rules.clear();
            return_buffer(&RULE_OUTCOMES, std::mem::take(&mut self.rules));
        }
        if self.charges.charges.capacity() > 0 {
            return_buffer(&CHARGE_LIST, std::mem::take(&mut self.charges));
        }
    }
}

/// The names of rules and concurrency limits, by index.
#[derive(Clone, Copy, Debug)]
pub struct RuleNames<'a> {
    pub(super) rules: &'a Rules,
    pub(super) concurrency: &'a [InFlightLimit],
}

impl<'a> RuleNames<'a> {
    /// The name of the rule or concurrency limit with this index; empty if there is none.
    pub fn get(&self, index: usize) -> &'a str {
        let count = self.rules.rules().len();
        match index.checked_sub(count) {
            None => &self.rules.rule(index).name,
            Some(limit) => self.concurrency.get(limit).map_or("", |limit| &limit.name),
        }
    }
}
