//! Decisions: which rules apply to a request, what their limits decide, and what follows.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::LocalKey;
use std::time::Duration;

use http::HeaderName;
use http::request::Parts;
use ratekeeper_core::{Decision, RetryAfter, Time};
use ratekeeper_rules::answer::{Answer, Applied, DenialResponse, HeaderSet, Jitter, PolicyName, Situation};
use ratekeeper_rules::client::TrustedProxies;
use ratekeeper_rules::path::PathNormalization;
use ratekeeper_rules::rule::{Asked, Asking, Refused, Rules};
use smallvec::SmallVec;

use super::response::{Note, Notes};
use super::slots::{self, SlotRules};
use super::view::{self, View};
use super::{Claims, KeyExtractor, NonCanonicalPath, RequestContext, RuleSet, Subject};
use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::store::{Charge, Store, Verdict};

/// Returns the peer address of a request's connection.
pub(crate) type PeerOf = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;
/// Receives the outcome of every request.
pub(crate) type Observer = Arc<dyn Fn(&DecisionEvent<'_>) + Send + Sync>;
/// Verifies a request's token.
pub(crate) type Verify = Arc<dyn Fn(&Parts) -> Option<Claims> + Send + Sync>;

/// The outcome of a request, for [`Builder::observe`](super::Builder::observe).
#[derive(Debug)]
#[non_exhaustive]
pub struct DecisionEvent<'a> {
    /// The outcomes of the rules that apply, then of the [concurrency limits](super::slots). If a concurrency limit
    /// denies the request, the rules are not checked and not listed. Empty if the request is rejected before any
    /// check.
    pub rules: &'a [RuleOutcome<'a>],
    /// The result of the request.
    pub outcome: Outcome<'a>,
    /// Whether it is allowed.
    pub allowed: bool,
    /// Whether the store did not answer, so that each limit's failure policy decided.
    pub is_degraded: bool,
    /// The [`Subject`] of the request, if it has one.
    pub subject: Option<&'a (dyn Any + Send + Sync)>,
}

/// The result of a request. All but the first three are determined before any limit is checked, and charge nothing.
///
/// ```
/// use ratekeeper::tower::Outcome;
///
/// /// The name of a counter.
/// fn counter(outcome: Outcome<'_>) -> &'static str {
///     match outcome {
///         Outcome::Allowed => "allowed",
///         Outcome::Denied => "denied",
///         Outcome::Closed | Outcome::Busy => "unavailable",
///         _ => "refused",
///     }
/// }
/// assert_eq!(counter(Outcome::Forbidden { rule: "per-user" }), "refused");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome<'a> {
    /// It is forwarded to the service, immediately or after a delay.
    Allowed,
    /// A limit or a ban denied it: 429, or the response set by [`Builder::answer`](super::Builder::answer).
    Denied,
    /// The store is unavailable, and a limit with the failure policy `closed` denied it: 503.
    Closed,
    /// Too many requests [wait](super::Builder::max_waiting) already: 503.
    Busy,
    /// It has a repeated key header, two different hosts or an ambiguous path: 400.
    Unclear,
    /// Its key is on a rule's deny list, or it has no key where the rule requires one: 403.
    Forbidden {
        /// The rule's name.
        rule: &'a str,
    },
    /// A rule needs the client's address, and the [peer](super::Builder::peer) is unknown: 500.
    NoPeer,
}

/// The outcome of one rule: an element of [`DecisionEvent::rules`], as in the example of
/// [`Builder::observe`](super::Builder::observe).
#[derive(Debug)]
#[non_exhaustive]
pub struct RuleOutcome<'a> {
    /// The rule's name.
    pub name: &'a str,
    /// Its index, from 0 in the order of the [builder](super::Builder::rule); [concurrency limits](super::slots)
    /// follow the rules.
    pub number: usize,
    /// The decision of its limit.
    pub decision: Decision,
    /// Whether the rule is a shadow rule.
    pub is_shadow: bool,
    /// Whether the key is banned.
    pub is_banned: bool,
}

/// The state that a layer and its services share.
pub(crate) struct Gate<S> {
    pub(crate) limiter: Limiter<S>,
    pub(crate) rules: Rules,
    pub(crate) slots: Option<SlotRules>,
    pub(crate) names: Vec<PolicyName>,
    pub(crate) customs: Vec<DenialResponse>,
    pub(crate) trust: TrustedProxies,
    pub(crate) spelling: PathNormalization,
    pub(crate) other_spellings: NonCanonicalPath,
    pub(crate) headers: HeaderSet,
    pub(crate) jitter_secs: u64,
    pub(crate) peer: PeerOf,
    pub(crate) verify: Option<Verify>,
    /// The header that holds the tokens for `verify`.
    pub(crate) token_header: Option<HeaderName>,
    pub(crate) extractors: Vec<(String, Arc<dyn KeyExtractor>)>,
    pub(crate) observer: Option<Observer>,
    /// For each limit, whether it delays requests.
    pub(crate) delays: Vec<bool>,
    pub(crate) max_waiting: usize,
    /// The number of requests that wait.
    pub(crate) waiting: Arc<AtomicUsize>,
    pub(crate) clock: Box<dyn Clock + Send + Sync>,
    /// Counts responses, so that no two have the same jitter.
    pub(crate) answers: AtomicU64,
}

impl<S> fmt::Debug for Gate<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("rules", &self.names).finish_non_exhaustive()
    }
}

/// Why a request is rejected before any limit is checked.
#[derive(Debug)]
pub(crate) enum NotAsked {
    /// 400: the reason.
    Bad(String),
    /// 403: the index of the rule that rejects the key.
    Forbidden(usize),
    /// 500: the peer address is unknown.
    NoPeer,
}

/// The checks of one request.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) asked: Asked,
    /// Indices of the charges of enforced rules and of shadow rules.
    pub(crate) enforced: SmallVec<[usize; 4]>,
    pub(crate) shadows: SmallVec<[usize; 4]>,
    pub(crate) slots: slots::Asked,
    /// Whether a limit may delay the request.
    pub(crate) may_wait: bool,
    pub(crate) subject: Option<Subject>,
}

/// Whether a check charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Decide and charge.
    Charge,
    /// Decide without charging.
    Peek,
}

/// The decisions about one request.
#[derive(Debug)]
pub(crate) struct Decided {
    /// Decisions of the enforced rules, in the order of their charges.
    pub(crate) decisions: SmallVec<[Decision; 4]>,
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
pub(crate) enum Next {
    /// It is forwarded after the delay, and `notes` are added to the response.
    Allowed { delay: Duration, notes: Notes },
    /// It is denied with this response.
    Denied {
        answer: Answer,
        /// Only because the store is unavailable.
        is_closed: bool,
    },
}

/// Retry-After of a denial that the store could not decide.
const UNDECIDED_FOR: Duration = Duration::from_secs(1);

thread_local! {
    /// Reused buffer for responses.
    pub(crate) static ANSWER: Cell<Answer> = Cell::default();
    /// Reused buffer for checks.
    pub(crate) static ASKED: Cell<Asked> = Cell::default();
}

/// Takes the buffer that the last request on this thread left for reuse.
pub(crate) fn reused<T: Default>(buffer: &'static LocalKey<Cell<T>>) -> T {
    // A thread that is terminating has no buffer.
    buffer.try_with(Cell::take).unwrap_or_default()
}

/// Leaves a buffer for the next request on this thread.
pub(crate) fn leave<T>(buffer: &'static LocalKey<Cell<T>>, used: T) {
    let _ = buffer.try_with(|buffer| buffer.set(used));
}

impl Question {
    /// Whether no rule applies to the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.asked.charges.is_empty() && self.slots.is_empty()
    }

    /// The charges of the enforced rules.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Asking> {
        self.enforced.iter().map(|at| &self.asked.charges[*at])
    }

    /// Leaves the buffer for the next request.
    pub(crate) fn leave(self) {
        leave(&ASKED, self.asked);
    }
}

impl<S: Store> Gate<S> {
    /// Reads the checks of a request from the rules that apply to it. If the path is normalised, the request's target
    /// is replaced by the normalised one.
    pub(crate) fn question(
        &self,
        parts: &mut Parts,
        mut about: RequestContext<'_>,
    ) -> Result<Question, NotAsked> {
        about.subject = about.subject.or_else(|| parts.extensions.get().cloned());
        self.read(parts, &about).inspect_err(|why| {
            let outcome = match why {
                NotAsked::Bad(_) => Outcome::Unclear,
                NotAsked::Forbidden(rule) => Outcome::Forbidden { rule: self.rule_name(*rule) },
                NotAsked::NoPeer => Outcome::NoPeer,
            };
            self.observe_unasked(outcome, about.subject.as_ref());
        })
    }

    fn read(&self, parts: &mut Parts, about: &RequestContext<'_>) -> Result<Question, NotAsked> {
        let view = View::new(parts, about, self)?;
        // A router in front may have selected some of the rules.
        let mut asked = reused(&ASKED);
        let all = match about.chosen.or_else(|| parts.extensions.get::<RuleSet>()) {
            Some(RuleSet(chosen)) => {
                self.rules.ask_into(&mut asked, &view, RuleSet::numbers(chosen, self.names.len()))
            }
            None => self.rules.ask_into(&mut asked, &view, 0..self.names.len()),
        };
        let slots = self.wanted_slots(parts, about, &view);
        // Without the address that a rule needs, the results of the rules are meaningless.
        if view.lacks_peer() {
            return Err(NotAsked::NoPeer);
        }
        view.check_token()?;
        all.map_err(|refused| match refused {
            Refused::Denied { rule } => NotAsked::Forbidden(rule),
            Refused::Unclear(why) => NotAsked::Bad(why.to_string()),
        })?;
        let slots = slots?;
        if let Some(uri) = view::respelt(&parts.uri, self.spelling, self.other_spellings)? {
            parts.uri = uri;
        }
        Ok(Question { slots, subject: about.subject.clone(), ..self.question_of(asked) })
    }

    /// Splits charges into enforced and shadow.
    pub(crate) fn question_of(&self, asked: Asked) -> Question {
        let is_shadow = |at: &usize| self.rules.rule(asked.charges[*at].rule).is_shadow;
        let (shadows, enforced): (SmallVec<_>, SmallVec<_>) = (0..asked.charges.len()).partition(is_shadow);
        let may_wait = enforced.iter().any(|at: &usize| self.delays[asked.charges[*at].limit]);
        Question { asked, enforced, shadows, slots: slots::Asked::default(), may_wait, subject: None }
    }

    pub(crate) fn charge(&self, asked: &Asked, asking: &Asking, limit: usize, cost: u32) -> Charge {
        Charge { limit, key: self.limiter.store().key(asked.key(asking)), cost }
    }

    /// The store's verdict on charges. The charges come from the rules, each limit once, so the store has no reason
    /// to reject them. If it does, or leaves a charge without a decision, all are denied.
    fn said(&self, charges: &[Charge], said: Result<Verdict, S::Error>) -> Verdict {
        let said = said.ok().filter(|verdict| verdict.decisions().len() == charges.len());
        said.unwrap_or_else(|| {
            self.undecided(charges.iter().map(|charge| self.rules.limits()[charge.limit].limit.limit()))
        })
    }

    /// Denials by limits of these sizes, for a store that returned no decision.
    pub(crate) fn undecided(&self, limits: impl Iterator<Item = u32>) -> Verdict {
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

    async fn charged(&self, charges: &[Charge]) -> Verdict {
        self.said(charges, self.limiter.store().charge(charges).await)
    }

    async fn looked(&self, charges: &[Charge]) -> Verdict {
        self.said(charges, self.limiter.store().peek(charges).await)
    }

    /// Decides, and prepares the response headers or the denial.
    pub(crate) async fn decide(&self, question: &Question) -> Next {
        let decided = self.decided(question, How::Charge).await;
        let delay = decided.decisions.iter().map(|decision| decision.delay).max().unwrap_or_default();
        self.next(
            question.each().zip(&decided.decisions),
            decided.allowed.then_some(delay),
            decided.is_closed,
        )
    }

    /// Decides about a request, and charges it unless `how` is [`How::Peek`] or a key is banned.
    pub(crate) async fn decided(&self, question: &Question, how: How) -> Decided {
        let Question { asked, shadows, .. } = question;
        let each = || question.each();

        let banned = self.banned(question).await;
        let is_banned = banned.iter().any(Option::is_some);
        let charges: SmallVec<[Charge; 4]> =
            each().map(|it| self.charge(asked, it, it.limit, it.cost)).collect();
        let is_look = how == How::Peek || is_banned;
        let Verdict { mut decisions, mut is_degraded, is_closed, mut at } =
            match (charges.is_empty(), is_look) {
                (true, _) => Verdict::default(),
                (false, true) => self.looked(&charges).await,
                (false, false) => self.charged(&charges).await,
            };
        for (decision, banned) in decisions.iter_mut().zip(&banned) {
            *decision = banned.unwrap_or(*decision);
        }
        let allowed = decisions.iter().all(|decision| decision.allowed);
        if !allowed && !is_look && !is_degraded {
            self.count_denials(asked, each().zip(&decisions)).await;
        }
        // Each shadow rule is charged separately, so that a denial by one does not stop the others. Like any rule, it
        // is not charged for a request that is denied.
        let mut shadowed = SmallVec::<[Decision; 2]>::new();
        for number in shadows {
            let asking = &asked.charges[*number];
            let charge = [self.charge(asked, asking, asking.limit, asking.cost)];
            let is_look = !allowed || how == How::Peek;
            let told = if is_look { self.looked(&charge).await } else { self.charged(&charge).await };
            // If only shadow rules were charged, a refund needs the time of their charges.
            if charges.is_empty() {
                (at, is_degraded) = (told.at, is_degraded || told.is_degraded);
            }
            shadowed.extend_from_slice(told.decisions());
        }
        let decided = Decided { decisions, banned, shadowed, allowed, is_degraded, is_closed, at };
        if how == How::Charge {
            self.observe(question, &decided);
        }
        decided
    }

    /// For each charge in order, the denial if its key is banned; empty if no rule has bans.
    async fn banned(&self, question: &Question) -> SmallVec<[Option<Decision>; 4]> {
        let asked = &question.asked;
        let each = || question.each();
        let bans: SmallVec<[Charge; 2]> =
            each().filter_map(|it| Some(self.charge(asked, it, it.ban?.ban, 0))).collect();
        if bans.is_empty() {
            return SmallVec::new();
        }
        let looked = self.looked(&bans).await;
        // A degraded decision about a ban comes from the failure policy and does not mean that the key is banned.
        let mut looked = looked.decisions().iter().filter(|_| !looked.is_degraded());
        let told = |ban: &Decision| Decision {
            allowed: false,
            retry_after: RetryAfter::After(ban.reset_after),
            ..*ban
        };
        let of = |it: &Asking| it.ban.and_then(|_| looked.next()).filter(|ban| ban.remaining == 0).map(told);
        each().map(of).collect()
    }

    /// Counts denials, and bans keys that are denied too often.
    async fn count_denials<'a>(
        &self,
        asked: &Asked,
        decided: impl Iterator<Item = (&'a Asking, &'a Decision)>,
    ) {
        for (asking, _) in decided.filter(|(_, decision)| !decision.allowed) {
            let Some(ban) = asking.ban else { continue };
            let counted = self.charged(&[self.charge(asked, asking, ban.denials, 1)]).await;
            // A degraded store bans no key.
            if !counted.is_degraded() && counted.decisions().iter().any(|counted| counted.remaining == 0) {
                // If another request has banned the key first, the charge is denied without effect.
                let _ = self.charged(&[self.charge(asked, asking, ban.ban, 1)]).await;
            }
        }
    }

    /// The next step: forward after a delay if `goes_on_after` is set, deny otherwise.
    fn next<'a>(
        &self,
        decided: impl Iterator<Item = (&'a Asking, &'a Decision)>,
        goes_on_after: Option<Duration>,
        is_closed: bool,
    ) -> Next {
        let answer = self.answer(decided, is_closed);
        match goes_on_after {
            Some(delay) => {
                let notes = answer.headers().filter_map(Note::new).collect();
                leave(&ANSWER, answer);
                Next::Allowed { delay, notes }
            }
            None => Next::Denied { answer, is_closed },
        }
    }

    /// The headers, and for a denial the status and body, of the response to these decisions.
    pub(crate) fn answer<'a>(
        &self,
        decided: impl Iterator<Item = (&'a Asking, &'a Decision)>,
        is_closed: bool,
    ) -> Answer {
        let limits = self.rules.limits();
        let applied: SmallVec<[Applied<'_>; 4]> = decided
            .map(|(asking, decision)| Applied {
                cost: asking.cost,
                custom: Some(&self.customs[asking.rule]),
                ..Applied::new(&self.names[asking.rule], &limits[asking.limit].limit, *decision)
            })
            .collect();
        let jitter =
            (self.jitter_secs > 0).then(|| Jitter { at_most: self.jitter_secs, random: self.random() });
        let situation = Situation { is_degraded: is_closed, jitter, ..Situation::at(self.clock.now()) };
        let mut answer = reused(&ANSWER);
        answer.write(self.headers, &applied, &situation);
        answer
    }

    /// Spread over the whole range of `u64`; predicting it gives no advantage.
    fn random(&self) -> u64 {
        let count = self.answers.fetch_add(1, Ordering::Relaxed);
        count.wrapping_add(self.clock.now().as_nanos()).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    }

    fn observe(&self, question: &Question, decided: &Decided) {
        let Some(observer) = &self.observer else { return };
        let Decided { decisions, banned, shadowed, allowed, is_degraded, is_closed, .. } = decided;
        let ruled = |at: usize, decision: Decision, is_shadow: bool, is_banned: bool| {
            let number = question.asked.charges[at].rule;
            RuleOutcome { name: &self.rules.rule(number).name, number, decision, is_shadow, is_banned }
        };
        let is_banned = |at: usize| banned.get(at).is_some_and(Option::is_some);
        let enforced = question.enforced.iter().zip(decisions).enumerate();
        let enforced = enforced.map(|(at, (of, decision))| ruled(*of, *decision, false, is_banned(at)));
        let shadows = question.shadows.iter().zip(shadowed);
        let shadows = shadows.map(|(at, decision)| ruled(*at, *decision, true, false));
        let slots = self.slots_said(&question.slots);
        let rules: SmallVec<[RuleOutcome<'_>; 4]> = enforced.chain(shadows).chain(slots).collect();
        let outcome = match (allowed, is_closed) {
            (true, _) => Outcome::Allowed,
            (false, false) => Outcome::Denied,
            (false, true) => Outcome::Closed,
        };
        let is_degraded = *is_degraded || question.slots.is_degraded;
        let subject = question.subject.as_ref().map(|subject| &*subject.0);
        observer(&DecisionEvent { rules: &rules, outcome, allowed: *allowed, is_degraded, subject });
    }

    /// Reports a request that was rejected before any limit was checked.
    pub(crate) fn observe_unasked(&self, outcome: Outcome<'_>, subject: Option<&Subject>) {
        if let Some(observer) = &self.observer {
            let subject = subject.map(|subject| &*subject.0);
            observer(&DecisionEvent { rules: &[], outcome, allowed: false, is_degraded: false, subject });
        }
    }
}

/// One of the `max_waiting` waiting requests; dropping it ends the wait.
pub(crate) struct Waiting<S>(Arc<Gate<S>>);

impl<S> Waiting<S> {
    /// Returns `None` if `max_waiting` requests wait already.
    pub(crate) fn enter(gate: &Arc<Gate<S>>) -> Option<Waiting<S>> {
        let enter = |waiting: usize| (waiting < gate.max_waiting).then_some(waiting + 1);
        gate.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).ok()?;
        Some(Waiting(gate.clone()))
    }
}

impl<S> Drop for Waiting<S> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}
