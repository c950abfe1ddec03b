//! Decisions: which rules apply to a request, what their limits decide, and what follows.

use std::cell::Cell;
use std::fmt;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread::LocalKey;
use std::time::Duration;

use http::HeaderName;
use http::request::Parts;
use ratekeeper_core::{Decision, RetryAfter, Time};
use ratekeeper_rules::client::TrustedProxies;
use ratekeeper_rules::path::{PathNormalization, Pattern, hides_match};
use ratekeeper_rules::request::Request;
use ratekeeper_rules::response::{
    DenialResponse, HeaderSet, Jitter, LimitDecision, LimitResponse, LimitText, PolicyName, ResponseContext,
};
use ratekeeper_rules::rule::{ChargeList, ForbiddenReason, Rejection, RuleCharge, Rules};
use ratekeeper_rules::spelling::HeaderAliases;
use smallvec::SmallVec;

use super::concurrency::{ConcurrencySet, InFlightLimits, PermitChecks};
use super::event::{DecisionEvent, Outcome, RuleNames, RuleOutcome};
use super::http_response::{ResponseHeader, ResponseHeaders};
use super::view::View;
use super::{Claims, KeyExtractor, NonCanonicalPath, RequestContext, Route, RuleSet};
use crate::clock::Clock;
use crate::concurrency::Permits;
use crate::limiter::Limiter;
use crate::store::{Charge, Store, Verdict};

/// Returns the peer address of a request's connection.
pub(crate) type PeerLookup = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;
/// Receives the outcome of every request.
pub(crate) type Observer = Arc<dyn Fn(&DecisionEvent, RuleNames<'_>) + Send + Sync>;
/// Verifies a request's token.
pub(crate) type TokenVerifier = Arc<dyn Fn(&Parts) -> Option<Claims> + Send + Sync>;

/// The state that a layer and its services share.
pub(crate) struct Engine<S> {
    pub(crate) limiter: Limiter<S>,
    pub(crate) rules: Rules,
    pub(crate) concurrency: Option<InFlightLimits>,
    pub(crate) names: Vec<PolicyName>,
    pub(crate) deny_responses: Vec<DenialResponse>,
    /// For each limit, the text of its responses.
    pub(crate) limit_texts: Vec<LimitText>,
    pub(crate) trusted_proxies: TrustedProxies,
    pub(crate) path_normalization: PathNormalization,
    pub(crate) non_canonical_paths: NonCanonicalPath,
    pub(crate) headers: HeaderSet,
    pub(crate) jitter_secs: u64,
    pub(crate) peer: PeerLookup,
    pub(crate) verify: Option<TokenVerifier>,
    /// The header that holds the tokens for `verify`.
    pub(crate) token_header: Option<HeaderName>,
    /// The headers that rules and `verify` read and that have other spellings.
    pub(crate) header_names: Vec<HeaderName>,
    pub(crate) header_aliases: HeaderAliases,
    /// The path patterns of all rules and concurrency limits.
    pub(crate) patterns: Vec<Pattern>,
    pub(crate) extractors: Vec<(String, Arc<dyn KeyExtractor>)>,
    pub(crate) observer: Option<Observer>,
    /// For each limit, whether it delays requests.
    pub(crate) delays: Vec<bool>,
    pub(crate) max_waiting: usize,
    /// The number of requests that wait.
    pub(crate) waiting: Arc<AtomicUsize>,
    pub(crate) clock: Box<dyn Clock + Send + Sync>,
    /// Counts responses, so that no two have the same jitter.
    pub(crate) responses: AtomicU64,
}

impl<S> fmt::Debug for Engine<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("rules", &self.names).finish_non_exhaustive()
    }
}

/// Why a request is rejected before any limit is checked.
#[derive(Debug)]
#[non_exhaustive]
pub enum RequestRejection {
    /// 400: the reason.
    Malformed(String),
    /// 403: the index of the rule that rejects the request, and the reason.
    Forbidden(usize, ForbiddenReason),
    /// 500: the peer address is unknown.
    NoPeer,
}

/// The checks of one request, as [`RatekeeperLayer::read`](super::RatekeeperLayer::read) returns them.
#[derive(Debug)]
pub struct RequestChecks {
    pub(crate) list: ChargeList,
    /// Indices of the charges of enforced rules and of shadow rules.
    pub(crate) enforced: SmallVec<[usize; 4]>,
    pub(crate) shadows: SmallVec<[usize; 4]>,
    pub(crate) permits: PermitChecks,
    /// Whether a limit may delay the request.
    pub(crate) may_wait: bool,
    pub(crate) route: Option<Route>,
}

/// Whether a check charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckMode {
    /// Decide and charge.
    Charge,
    /// Decide without charging.
    Peek,
}

/// The decisions about one request.
#[derive(Debug)]
pub(crate) struct CheckDecisions {
    /// Decisions of the enforced rules, in the order of their charges.
    pub(crate) enforced: SmallVec<[Decision; 4]>,
    /// For each enforced charge, the denial if its key is banned; empty if no rule has bans.
    pub(crate) banned: SmallVec<[Option<Decision>; 4]>,
    /// Decisions of the shadow rules.
    pub(crate) shadowed: SmallVec<[Decision; 2]>,
    pub(crate) allowed: bool,
    pub(crate) is_degraded: bool,
    pub(crate) is_closed: bool,
    pub(crate) at: Time,
}

/// What happens to a request after its limits have decided.
#[derive(Debug)]
pub(crate) enum NextStep {
    /// It is forwarded after the delay, and `headers` are added to the response.
    Allowed { delay: Duration, headers: ResponseHeaders },
    /// It is denied with this response.
    Denied {
        response: LimitResponse,
        /// Only because the store is unavailable.
        is_closed: bool,
    },
}

/// The verdict on a request.
#[derive(Debug)]
pub(crate) struct RequestVerdict {
    pub(crate) next: NextStep,
    /// The permits that the request holds, if it is allowed.
    pub(crate) permits: Permits,
    pub(crate) event: DecisionEvent,
}

/// A verdict that the store has not returned yet.
pub(crate) type DecisionFuture = Pin<Box<dyn Future<Output = RequestVerdict> + Send>>;

const HIDDEN_MATCH: &str = "some servers ignore the end of a path segment (a dot, white space, or text from %3B on), \
    and a limit applies to the path without it; send the path without it";

/// Retry-After of a denial that the store could not decide.
const UNDECIDED_FOR: Duration = Duration::from_secs(1);

thread_local! {
    /// Reused buffer for responses.
    pub(crate) static RESPONSE: Cell<LimitResponse> = Cell::default();
    /// Reused buffer for checks.
    pub(crate) static CHARGE_LIST: Cell<ChargeList> = Cell::default();
}

/// Takes the buffer that the last request on this thread left for reuse.
pub(crate) fn take_buffer<T: Default>(buffer: &'static LocalKey<Cell<T>>) -> T {
    // A thread that is terminating has no buffer.
    buffer.try_with(Cell::take).unwrap_or_default()
}

/// Leaves a buffer for the next request on this thread.
pub(crate) fn return_buffer<T>(buffer: &'static LocalKey<Cell<T>>, used: T) {
    let _ = buffer.try_with(|buffer| buffer.set(used));
}

/// The output of a future that is ready at the first poll.
fn ready_output<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

impl RequestChecks {
    /// Whether no rule applies to the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.charges.is_empty() && self.permits.is_empty()
    }

    /// The charges of the enforced rules.
    pub(crate) fn enforced_charges(&self) -> impl Iterator<Item = &RuleCharge> + Clone {
        self.enforced.iter().map(|at| &self.list.charges[*at])
    }

    /// Leaves the buffer for the next request.
    pub(crate) fn recycle(self) {
        return_buffer(&CHARGE_LIST, self.list);
    }
}

impl<S: Store> Engine<S> {
    /// Reads the checks of a request from the rules that apply to it. If the path is normalized, the request's target
    /// is replaced by the normalized one.
    pub(crate) fn read_checks(
        &self,
        parts: &mut Parts,
        context: &RequestContext<'_>,
    ) -> Result<RequestChecks, RequestRejection> {
        let view = View::new(parts, context, self)?;
        // A router in front may have selected some of the rules.
        let rules = context.rules.or_else(|| parts.extensions.get());
        let checks = self.read_rules(&view, rules, context.concurrency.or_else(|| parts.extensions.get()));
        // Without the address that a rule needs, the results of the rules are meaningless.
        if view.lacks_peer() {
            return Err(RequestRejection::NoPeer);
        }
        view.check_token()?;
        let checks = checks?;
        if let Some(uri) = view.forwarded_target()? {
            parts.uri = uri;
        }
        Ok(checks)
    }

    /// Reads the checks of a request from a view of it.
    pub(crate) fn read_rules(
        &self,
        view: &impl Request,
        rules: Option<&RuleSet>,
        concurrency: Option<&ConcurrencySet>,
    ) -> Result<RequestChecks, RequestRejection> {
        if hides_match(view.path(), self.path_normalization, self.patterns.iter()) {
            return Err(RequestRejection::Malformed(HIDDEN_MATCH.to_owned()));
        }
        let mut list = take_buffer(&CHARGE_LIST);
        match rules {
            Some(RuleSet(rules)) => {
                self.rules.charges_into(&mut list, view, RuleSet::sorted(rules, self.names.len()))
            }
            None => self.rules.charges_into(&mut list, view, 0..self.names.len()),
        }
        .map_err(|rejection| match rejection {
            Rejection::Forbidden { rule, reason } => RequestRejection::Forbidden(rule, reason),
            Rejection::Ambiguous(why) => RequestRejection::Malformed(why.to_string()),
        })?;
        let permits = self.needed_permits(view, concurrency)?;
        Ok(RequestChecks { permits, ..self.split_charges(list) })
    }

    /// Splits charges into enforced and shadow.
    pub(crate) fn split_charges(&self, list: ChargeList) -> RequestChecks {
        let (mut enforced, mut shadows) = (SmallVec::new(), SmallVec::new());
        let mut may_wait = false;
        for (at, charge) in list.charges.iter().enumerate() {
            if self.rules.rule(charge.rule).is_shadow {
                shadows.push(at);
            } else {
                enforced.push(at);
                may_wait |= self.delays[charge.limit];
            }
        }
        RequestChecks { list, enforced, shadows, permits: PermitChecks::default(), may_wait, route: None }
    }

    pub(crate) fn charge(
        &self,
        list: &ChargeList,
        rule_charge: &RuleCharge,
        limit: usize,
        cost: u32,
    ) -> Charge {
        Charge { limit, key: self.limiter.store().key(list.key(rule_charge)), cost }
    }

    /// The store's verdict on charges. The charges come from the rules, each limit once, so the store has no reason
    /// to reject them. If it does, or leaves a charge without a decision, all are denied.
    fn verdict_or_denial(&self, charges: &[Charge], result: Result<Verdict, S::Error>) -> Verdict {
        let verdict = result.ok().filter(|verdict| verdict.decisions().len() == charges.len());
        verdict.unwrap_or_else(|| {
            self.undecided_verdict(
                charges.iter().map(|charge| self.rules.limits()[charge.limit].limit.limit()),
            )
        })
    }

    /// Denials by limits of these sizes, for a store that returned no decision.
    pub(crate) fn undecided_verdict(&self, limits: impl Iterator<Item = u32>) -> Verdict {
        let decisions = limits.map(|limit| Decision {
            allowed: false,
            limit,
            remaining: 0,
            retry_after: RetryAfter::After(UNDECIDED_FOR),
            reset_after: UNDECIDED_FOR,
            delay: Duration::ZERO,
        });
        Verdict { decisions: decisions.collect(), is_degraded: true, is_closed: true, at: self.clock.now() }
    }

    /// What the store charges for the enforced rules.
    fn charges_of(&self, checks: &RequestChecks) -> SmallVec<[Charge; 4]> {
        checks.enforced_charges().map(|it| self.charge(&checks.list, it, it.limit, it.cost)).collect()
    }

    async fn charge_limits(&self, charges: &[Charge]) -> Verdict {
        self.verdict_or_denial(charges, self.limiter.store().charge(charges).await)
    }

    pub(crate) async fn peek_limits(&self, charges: &[Charge]) -> Verdict {
        self.verdict_or_denial(charges, self.limiter.store().peek(charges).await)
    }

    /// Takes the permits of a request, checks its limits and prepares the response headers or the denial. The
    /// request keeps the permits only if it is allowed.
    pub(crate) async fn decide(&self, checks: &mut RequestChecks) -> RequestVerdict {
        let permits = match self.acquire_permits(checks).await {
            Ok(permits) => permits,
            Err(verdict) => return verdict,
        };
        let decisions = self.run_checks(checks, CheckMode::Charge).await;
        self.request_verdict(checks, &decisions, permits)
    }

    /// The verdict on a request, if the store answers immediately or is not needed.
    pub(crate) fn decide_now(&self, checks: &mut RequestChecks) -> Option<RequestVerdict> {
        if let Some(decisions) = self.charge_now(checks) {
            return Some(self.request_verdict(checks, &decisions, Permits::default()));
        }
        (S::IS_IMMEDIATE || checks.is_empty()).then(|| ready_output(self.decide(checks))).flatten()
    }

    /// The verdict on a request whose store has to be waited for. Boxed by kind: the state of a request that is only
    /// charged is small.
    pub(crate) fn decide_later(self: Arc<Self>, mut checks: RequestChecks) -> DecisionFuture
    where
        S: Send + Sync + 'static,
    {
        match self.is_only_charged(&checks) {
            true => Box::pin(async move {
                let decisions = self.charge_only(&checks).await;
                self.request_verdict(&mut checks, &decisions, Permits::default())
            }),
            false => Box::pin(async move { self.decide(&mut checks).await }),
        }
    }

    /// Whether the checks are made by one charge, as most are. [`run_checks`](Self::run_checks) decides the same, but
    /// its state for every kind of check is expensive to move.
    pub(crate) fn is_only_charged(&self, checks: &RequestChecks) -> bool {
        let has_bans = || checks.list.charges.iter().any(|it| it.ban.is_some());
        !checks.enforced.is_empty() && checks.shadows.is_empty() && checks.permits.is_empty() && !has_bans()
    }

    /// The decisions about checks that are only charged, if the store answers immediately.
    pub(crate) fn charge_now(&self, checks: &RequestChecks) -> Option<CheckDecisions> {
        let is_immediate = S::IS_IMMEDIATE && self.is_only_charged(checks);
        is_immediate.then(|| ready_output(self.charge_only(checks))).flatten()
    }

    /// The decisions about checks that are only charged.
    pub(crate) async fn charge_only(&self, checks: &RequestChecks) -> CheckDecisions {
        let charges = self.charges_of(checks);
        let Verdict { decisions, is_degraded, is_closed, at } = self.charge_limits(&charges).await;
        let allowed = decisions.iter().all(|decision| decision.allowed);
        let (banned, shadowed) = (SmallVec::new(), SmallVec::new());
        CheckDecisions { enforced: decisions, banned, shadowed, allowed, is_degraded, is_closed, at }
    }

    /// What follows from the decisions of a request's limits.
    fn request_verdict(
        &self,
        checks: &mut RequestChecks,
        decisions: &CheckDecisions,
        permits: Permits,
    ) -> RequestVerdict {
        let delay = decisions.enforced.iter().map(|decision| decision.delay).max().unwrap_or_default();
        let next = self.next_step(
            checks.enforced_charges().zip(&decisions.enforced),
            decisions.allowed.then_some(delay),
            decisions.is_closed,
        );
        let permits = if decisions.allowed { permits } else { Permits::default() };
        RequestVerdict { next, permits, event: self.event(checks, decisions) }
    }

    /// Decides about a request, and charges it unless `mode` is [`CheckMode::Peek`] or a key is banned.
    pub(crate) async fn run_checks(&self, checks: &RequestChecks, mode: CheckMode) -> CheckDecisions {
        let RequestChecks { list, shadows, .. } = checks;
        let enforced_charges = || checks.enforced_charges();
        let banned = self.find_bans(&checks.list, checks.enforced_charges()).await;
        let is_banned = banned.iter().any(Option::is_some);
        let charges = self.charges_of(checks);
        let is_peek = mode == CheckMode::Peek || is_banned;
        let Verdict { mut decisions, mut is_degraded, is_closed, mut at } =
            match (charges.is_empty(), is_peek) {
                (true, _) => Verdict::default(),
                (false, true) => self.peek_limits(&charges).await,
                (false, false) => self.charge_limits(&charges).await,
            };
        for (decision, banned) in decisions.iter_mut().zip(&banned) {
            *decision = banned.unwrap_or(*decision);
        }
        let allowed = decisions.iter().all(|decision| decision.allowed);
        if !allowed && !is_peek && !is_degraded {
            self.count_denials(list, enforced_charges().zip(&decisions)).await;
        }
        // Each shadow rule is charged separately, so that a denial by one does not stop the others. Like any rule, it
        // is not charged for a request that is denied.
        let mut shadowed = SmallVec::<[Decision; 2]>::new();
        for index in shadows {
            let rule_charge = &list.charges[*index];
            let charge = [self.charge(list, rule_charge, rule_charge.limit, rule_charge.cost)];
            let is_peek = !allowed || mode == CheckMode::Peek;
            let verdict =
                if is_peek { self.peek_limits(&charge).await } else { self.charge_limits(&charge).await };
            // If only shadow rules were charged, a refund needs the time of their charges.
            if charges.is_empty() {
                (at, is_degraded) = (verdict.at, is_degraded || verdict.is_degraded);
            }
            shadowed.extend_from_slice(verdict.decisions());
        }
        CheckDecisions { enforced: decisions, banned, shadowed, allowed, is_degraded, is_closed, at }
    }

    /// For each charge in order, the denial if its key is banned; empty if no rule has bans.
    pub(crate) async fn find_bans<'a>(
        &self,
        list: &ChargeList,
        charges: impl Iterator<Item = &'a RuleCharge> + Clone,
    ) -> SmallVec<[Option<Decision>; 4]> {
        let bans: SmallVec<[Charge; 2]> =
            charges.clone().filter_map(|it| Some(self.charge(list, it, it.ban?.ban, 0))).collect();
        if bans.is_empty() {
            return SmallVec::new();
        }
        let verdict = self.peek_limits(&bans).await;
        // A degraded decision about a ban comes from the failure policy and does not mean that the key is banned.
        let mut decisions = verdict.decisions().iter().filter(|_| !verdict.is_degraded());
        let denial = |ban: &Decision| Decision {
            allowed: false,
            retry_after: RetryAfter::After(ban.reset_after),
            ..*ban
        };
        let of = |it: &RuleCharge| {
            it.ban.and_then(|_| decisions.next()).filter(|ban| ban.remaining == 0).map(denial)
        };
        charges.map(of).collect()
    }

    /// Counts denials, and bans keys that are denied too often.
    async fn count_denials<'a>(
        &self,
        list: &ChargeList,
        decisions: impl Iterator<Item = (&'a RuleCharge, &'a Decision)>,
    ) {
        for (rule_charge, _) in decisions.filter(|(_, decision)| !decision.allowed) {
            let Some(ban) = rule_charge.ban else { continue };
            let counted = self.charge_limits(&[self.charge(list, rule_charge, ban.denials, 1)]).await;
            // A degraded store bans no key.
            if !counted.is_degraded() && counted.decisions().iter().any(|counted| counted.remaining == 0) {
                // If another request has banned the key first, the charge is denied without effect.
                let _ = self.charge_limits(&[self.charge(list, rule_charge, ban.ban, 1)]).await;
            }
        }
    }

    /// The next step: forward after a delay if `delay_if_allowed` is set, deny otherwise.
    fn next_step<'a>(
        &self,
        decisions: impl Iterator<Item = (&'a RuleCharge, &'a Decision)>,
        delay_if_allowed: Option<Duration>,
        is_closed: bool,
    ) -> NextStep {
        let response = self.write_response(decisions, is_closed);
        match delay_if_allowed {
            Some(delay) => {
                let headers = response.headers().filter_map(ResponseHeader::new).collect();
                return_buffer(&RESPONSE, response);
                NextStep::Allowed { delay, headers }
            }
            None => NextStep::Denied { response, is_closed },
        }
    }

    /// The headers, and for a denial the status and body, of the response to these decisions.
    pub(crate) fn write_response<'a>(
        &self,
        decisions: impl Iterator<Item = (&'a RuleCharge, &'a Decision)>,
        is_closed: bool,
    ) -> LimitResponse {
        let limits = self.rules.limits();
        let limit_decisions: SmallVec<[LimitDecision<'_>; 4]> = decisions
            .map(|(rule_charge, decision)| LimitDecision {
                cost: rule_charge.cost,
                custom: Some(&self.deny_responses[rule_charge.rule]),
                text: Some(&self.limit_texts[rule_charge.limit]),
                ..LimitDecision::new(
                    &self.names[rule_charge.rule],
                    &limits[rule_charge.limit].limit,
                    *decision,
                )
            })
            .collect();
        let jitter =
            (self.jitter_secs > 0).then(|| Jitter { at_most: self.jitter_secs, random: self.random() });
        let context =
            ResponseContext { is_degraded: is_closed, jitter, ..ResponseContext::at(self.clock.now()) };
        let mut response = take_buffer(&RESPONSE);
        response.write(self.headers, &limit_decisions, &context);
        response
    }

    /// Spread over the whole range of `u64`; predicting it gives no advantage.
    fn random(&self) -> u64 {
        let count = self.responses.fetch_add(1, Ordering::Relaxed);
        count.wrapping_add(self.clock.now().as_nanos()).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    }

    /// Reports the decisions about a request to the observer, and returns them. The event takes the charges.
    pub(crate) fn event(&self, checks: &mut RequestChecks, decisions: &CheckDecisions) -> DecisionEvent {
        let CheckDecisions { enforced, banned, shadowed, allowed, is_degraded, is_closed, .. } = decisions;
        let rule_outcome = |at: usize, decision: Decision, is_shadow: bool, is_banned: bool| {
            let RuleCharge { rule: index, tier, .. } = checks.list.charges[at];
            RuleOutcome { index, tier, decision, is_shadow, is_banned, charge: Some(at) }
        };
        let is_banned = |at: usize| banned.get(at).is_some_and(Option::is_some);
        let enforced = checks.enforced.iter().zip(enforced).enumerate();
        let enforced =
            enforced.map(|(at, (of, decision))| rule_outcome(*of, *decision, false, is_banned(at)));
        let shadows = checks.shadows.iter().zip(shadowed);
        let shadows = shadows.map(|(at, decision)| rule_outcome(*at, *decision, true, false));
        let rules = enforced.chain(shadows).chain(self.permit_outcomes(&checks.permits));
        let outcome = match (allowed, is_closed) {
            (true, _) => Outcome::Allowed,
            (false, false) => Outcome::Denied,
            (false, true) => Outcome::Closed,
        };
        let is_degraded = *is_degraded || checks.permits.is_degraded;
        let event = DecisionEvent::new(checks.route.take(), outcome, is_degraded, rules);
        self.observed(event.with_charges(std::mem::take(&mut checks.list)))
    }

    /// Reports an event to the observer, and returns it.
    pub(crate) fn observed(&self, event: DecisionEvent) -> DecisionEvent {
        if let Some(observer) = &self.observer {
            observer(&event, RuleNames { rules: &self.rules, concurrency: self.in_flight_limits() });
        }
        event
    }

    /// The event of a request that is rejected before any limit is checked.
    pub(crate) fn rejection_event(&self, route: Option<Route>, why: &RequestRejection) -> DecisionEvent {
        let outcome = match why {
            RequestRejection::Malformed(_) => Outcome::Malformed,
            RequestRejection::Forbidden(rule, reason) => Outcome::Forbidden { rule: *rule, reason: *reason },
            RequestRejection::NoPeer => Outcome::NoPeer,
        };
        self.observed(DecisionEvent::without_checks(route, outcome))
    }
}

/// One of the `max_waiting` waiting requests; dropping it ends the wait.
pub(crate) struct WaitGuard<S>(Arc<Engine<S>>);

impl<S> WaitGuard<S> {
    /// Returns `None` if `max_waiting` requests wait already.
    pub(crate) fn enter(engine: &Arc<Engine<S>>) -> Option<WaitGuard<S>> {
        let enter = |waiting: usize| (waiting < engine.max_waiting).then_some(waiting + 1);
        engine.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).ok()?;
        Some(WaitGuard(engine.clone()))
    }
}

impl<S> Drop for WaitGuard<S> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}
