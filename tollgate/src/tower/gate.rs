//! Decides about requests: which rules concern them, what their limits say, and what else follows from that.

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
use smallvec::SmallVec;
use tollgate_core::{Decision, RetryAfter, Time};
use tollgate_rules::answer::{Answer, Applied, Custom, HeaderSet, Jitter, PolicyName, Situation};
use tollgate_rules::client::Trust;
use tollgate_rules::path::Spelling;
use tollgate_rules::rule::{Asked, Asking, Refused, Rules};

use super::slots::{self, SlotRules};
use super::told::{Note, Notes};
use super::view::{self, View};
use super::{About, Chosen, Claims, KeyExtractor, OtherSpellings, Subject};
use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::store::{Charge, Store, Verdict};

/// Where a request comes from: the address at the other end of its connection.
pub(crate) type PeerOf = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;
/// Is told of every request.
pub(crate) type Observer = Arc<dyn Fn(&Observed<'_>) + Send + Sync>;
/// Verifies a request's token.
pub(crate) type Verify = Arc<dyn Fn(&Parts) -> Option<Claims> + Send + Sync>;

/// What was decided about a request, for whoever counts: [`Builder::observe`](super::Builder::observe).
#[derive(Debug)]
#[non_exhaustive]
pub struct Observed<'a> {
    /// The rules that concerned it, and what their limits said; then those of [slots](super::slots). If there was no slot,
    /// the limits were not asked, and are not here. None if neither was asked.
    pub rules: &'a [Ruled<'a>],
    /// What became of it.
    pub outcome: Outcome<'a>,
    /// Whether it passed.
    pub allowed: bool,
    /// Whether the store did not answer, so that each limit's policy decided.
    pub is_degraded: bool,
    /// The [`Subject`] of the request, if somebody gave it one.
    pub subject: Option<&'a (dyn Any + Send + Sync)>,
}

/// What became of a request. All but the first three are told before any limit is asked, and take nothing.
///
/// ```
/// use tollgate::tower::Outcome;
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
    /// It goes on to the service, at once or after a delay.
    Allowed,
    /// A limit or a ban denied it: 429, or what [`Builder::answer`](super::Builder::answer) says.
    Denied,
    /// It was denied because the store is away, by a limit whose policy is that nothing passes then: 503.
    Closed,
    /// Too many [wait](super::Builder::max_waiting) already: 503.
    Busy,
    /// It says twice whose it is, or has a path that servers read in different ways: 400.
    Unclear,
    /// It is on a list of those whom a rule always denies, or does not say whose it is where it must: 403.
    Forbidden {
        /// The rule's name.
        rule: &'a str,
    },
    /// A rule wanted to know its address, and [nobody said](super::Builder::peer) from where requests come: 500.
    NoPeer,
}

/// What a rule said to a request: one of [`Observed::rules`], as in the example of
/// [`Builder::observe`](super::Builder::observe).
#[derive(Debug)]
#[non_exhaustive]
pub struct Ruled<'a> {
    /// The rule's name.
    pub name: &'a str,
    /// Its number, from 0 in the order of the [builder](super::Builder::rule); [slots](super::slots) come behind the rules.
    pub number: usize,
    /// What its limit said.
    pub decision: Decision,
    /// Whether it only counts.
    pub is_shadow: bool,
    /// Whether the key is banned.
    pub is_banned: bool,
}

/// Everything that a layer and its services share.
pub(crate) struct Gate<S> {
    pub(crate) limiter: Limiter<S>,
    pub(crate) rules: Rules,
    pub(crate) slots: Option<SlotRules>,
    pub(crate) names: Vec<PolicyName>,
    pub(crate) customs: Vec<Custom>,
    pub(crate) trust: Trust,
    pub(crate) spelling: Spelling,
    pub(crate) other_spellings: OtherSpellings,
    pub(crate) headers: HeaderSet,
    pub(crate) jitter_secs: u64,
    pub(crate) peer: PeerOf,
    pub(crate) verify: Option<Verify>,
    /// The header that the tokens which it verifies stand in.
    pub(crate) token_header: Option<HeaderName>,
    pub(crate) extractors: Vec<(String, Arc<dyn KeyExtractor>)>,
    pub(crate) observer: Option<Observer>,
    /// Of each limit, whether it delays requests.
    pub(crate) delays: Vec<bool>,
    pub(crate) max_waiting: usize,
    /// Requests that wait now.
    pub(crate) waiting: Arc<AtomicUsize>,
    pub(crate) clock: Box<dyn Clock + Send + Sync>,
    /// Counts answers, so that no two have the same jitter.
    pub(crate) answers: AtomicU64,
}

impl<S> fmt::Debug for Gate<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("rules", &self.names).finish_non_exhaustive()
    }
}

/// Why a request is not asked about.
#[derive(Debug)]
pub(crate) enum NotAsked {
    /// It is answered with 400: a sentence why.
    Bad(String),
    /// It is answered with 403: the rule of this number has it on a list.
    Forbidden(usize),
    /// Nobody said where requests come from.
    NoPeer,
}

/// What is asked about a request.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) asked: Asked,
    /// Which of the charges are of rules that decide, and which of rules that only count.
    pub(crate) enforced: SmallVec<[usize; 4]>,
    pub(crate) shadows: SmallVec<[usize; 4]>,
    pub(crate) slots: slots::Asked,
    /// Whether a limit may say that it has to wait.
    pub(crate) may_wait: bool,
    pub(crate) subject: Option<Subject>,
}

/// Whether limits are charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// As a request that passes is.
    Charge,
    /// They say what they would decide, and nothing is taken.
    Look,
}

/// What the limits said to a request.
#[derive(Debug)]
pub(crate) struct Decided {
    /// Those that decide, in the order of their charges.
    pub(crate) decisions: SmallVec<[Decision; 4]>,
    /// What those of them are told whose keys are banned; nothing if none of them has bans.
    pub(crate) banned: SmallVec<[Option<Decision>; 4]>,
    /// Those that only count.
    pub(crate) shadowed: SmallVec<[Decision; 2]>,
    pub(crate) allowed: bool,
    pub(crate) is_degraded: bool,
    pub(crate) is_closed: bool,
    pub(crate) at: Time,
}

/// What is done with a request that its limits have decided about.
#[derive(Debug)]
pub(crate) enum Next {
    /// It goes on, after a wait if there is one, and the client is told with its response.
    Allowed { delay: Duration, notes: Notes },
    /// The client is told instead of a response.
    Denied {
        answer: Answer,
        /// Only because the store is away.
        is_closed: bool,
    },
}

/// When to try again where a store could not decide.
const UNDECIDED_FOR: Duration = Duration::from_secs(1);

thread_local! {
    /// Answers are written into the same memory one after the other.
    pub(crate) static ANSWER: Cell<Answer> = Cell::default();
    /// And so is what is asked about requests.
    pub(crate) static ASKED: Cell<Asked> = Cell::default();
}

/// What the last request of this thread has left behind, to be written over.
pub(crate) fn reused<T: Default>(buffer: &'static LocalKey<Cell<T>>) -> T {
    // A thread that is about to end has no buffer any more.
    buffer.try_with(Cell::take).unwrap_or_default()
}

/// Leaves it to the next request of this thread.
pub(crate) fn leave<T>(buffer: &'static LocalKey<Cell<T>>, used: T) {
    let _ = buffer.try_with(|buffer| buffer.set(used));
}

impl Question {
    /// Whether no rule concerns the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.asked.charges.is_empty() && self.slots.is_empty()
    }

    /// The charges of the rules that decide.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Asking> {
        self.enforced.iter().map(|at| &self.asked.charges[*at])
    }

    /// Its memory is for the next one.
    pub(crate) fn leave(self) {
        leave(&ASKED, self.asked);
    }
}

impl<S: Store> Gate<S> {
    /// What is asked about a request, by the rules that concern it. If that goes by another spelling of its path than
    /// the one that came, the request has that one from now on.
    pub(crate) fn question(&self, parts: &mut Parts, mut about: About<'_>) -> Result<Question, NotAsked> {
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

    fn read(&self, parts: &mut Parts, about: &About<'_>) -> Result<Question, NotAsked> {
        let view = View::new(parts, about, self)?;
        // A router in front may have chosen some of the rules.
        let mut asked = reused(&ASKED);
        let all = match about.chosen.or_else(|| parts.extensions.get::<Chosen>()) {
            Some(Chosen(chosen)) => {
                self.rules.ask_into(&mut asked, &view, Chosen::numbers(chosen, self.names.len()))
            }
            None => self.rules.ask_into(&mut asked, &view, 0..self.names.len()),
        };
        let slots = self.wanted_slots(parts, about, &view);
        // Whatever the rules made of a request whose address they wanted and did not get does not count.
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

    /// What is asked, by these charges.
    pub(crate) fn question_of(&self, asked: Asked) -> Question {
        let is_shadow = |at: &usize| self.rules.rule(asked.charges[*at].rule).is_shadow;
        let (shadows, enforced): (SmallVec<_>, SmallVec<_>) = (0..asked.charges.len()).partition(is_shadow);
        let may_wait = enforced.iter().any(|at: &usize| self.delays[asked.charges[*at].limit]);
        Question { asked, enforced, shadows, slots: slots::Asked::default(), may_wait, subject: None }
    }

    pub(crate) fn charge(&self, asked: &Asked, asking: &Asking, limit: usize, cost: u32) -> Charge {
        Charge { limit, key: self.limiter.store().key(asked.key(asking)), cost }
    }

    /// What a store said to charges. They are the rules' own, each limit once, so it finds nothing wrong with them. One
    /// that does all the same, or leaves a charge without an answer, has allowed nothing.
    fn said(&self, charges: &[Charge], said: Result<Verdict, S::Error>) -> Verdict {
        let said = said.ok().filter(|verdict| verdict.decisions().len() == charges.len());
        said.unwrap_or_else(|| {
            self.undecided(charges.iter().map(|charge| self.rules.limits()[charge.limit].limit.limit()))
        })
    }

    /// What limits of these sizes say where the store does not.
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
        self.said(charges, self.limiter.store().look(charges).await)
    }

    /// Decides, and works out what to tell.
    pub(crate) async fn decide(&self, question: &Question) -> Next {
        let decided = self.decided(question, How::Charge).await;
        let delay = decided.decisions.iter().map(|decision| decision.delay).max().unwrap_or_default();
        self.next(
            question.each().zip(&decided.decisions),
            decided.allowed.then_some(delay),
            decided.is_closed,
        )
    }

    /// What the limits say to a request, which is charged unless they are only looked at.
    pub(crate) async fn decided(&self, question: &Question, how: How) -> Decided {
        let Question { asked, shadows, .. } = question;
        let each = || question.each();

        let banned = self.banned(question).await;
        let is_banned = banned.iter().any(Option::is_some);
        let charges: SmallVec<[Charge; 4]> =
            each().map(|it| self.charge(asked, it, it.limit, it.cost)).collect();
        let is_look = how == How::Look || is_banned;
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
        // Each by itself, so that one of them keeps no other from being charged. Like any rule, they take nothing from
        // a request that others deny.
        let mut shadowed = SmallVec::<[Decision; 2]>::new();
        for number in shadows {
            let asking = &asked.charges[*number];
            let charge = [self.charge(asked, asking, asking.limit, asking.cost)];
            let is_look = !allowed || how == How::Look;
            let told = if is_look { self.looked(&charge).await } else { self.charged(&charge).await };
            // If no other was charged, what these were is given back.
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

    /// What those charges are told whose keys are banned, in their order; nothing if none of them has bans.
    async fn banned(&self, question: &Question) -> SmallVec<[Option<Decision>; 4]> {
        let asked = &question.asked;
        let each = || question.each();
        let bans: SmallVec<[Charge; 2]> =
            each().filter_map(|it| Some(self.charge(asked, it, it.ban?.ban, 0))).collect();
        if bans.is_empty() {
            return SmallVec::new();
        }
        let looked = self.looked(&bans).await;
        // What a policy says of a ban while the store is away is no ban.
        let mut looked = looked.decisions().iter().filter(|_| !looked.is_degraded());
        let told = |ban: &Decision| Decision {
            allowed: false,
            retry_after: RetryAfter::After(ban.reset_after),
            ..*ban
        };
        let of = |it: &Asking| it.ban.and_then(|_| looked.next()).filter(|ban| ban.remaining == 0).map(told);
        each().map(of).collect()
    }

    /// Keys that are denied too often are banned.
    async fn count_denials<'a>(
        &self,
        asked: &Asked,
        decided: impl Iterator<Item = (&'a Asking, &'a Decision)>,
    ) {
        for (asking, _) in decided.filter(|(_, decision)| !decision.allowed) {
            let Some(ban) = asking.ban else { continue };
            let counted = self.charged(&[self.charge(asked, asking, ban.denials, 1)]).await;
            // Nobody is banned by a store that is away.
            if !counted.is_degraded() && counted.decisions().iter().any(|counted| counted.remaining == 0) {
                // If another was quicker, it is banned already.
                let _ = self.charged(&[self.charge(asked, asking, ban.ban, 1)]).await;
            }
        }
    }

    /// What follows from the decisions, for a request that goes on after a delay, or not at all.
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

    /// What a client is told of decisions.
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

    /// Spread over all numbers; nobody gains from guessing it.
    fn random(&self) -> u64 {
        let count = self.answers.fetch_add(1, Ordering::Relaxed);
        count.wrapping_add(self.clock.now().as_nanos()).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    }

    fn observe(&self, question: &Question, decided: &Decided) {
        let Some(observer) = &self.observer else { return };
        let Decided { decisions, banned, shadowed, allowed, is_degraded, is_closed, .. } = decided;
        let ruled = |at: usize, decision: Decision, is_shadow: bool, is_banned: bool| {
            let number = question.asked.charges[at].rule;
            Ruled { name: &self.rules.rule(number).name, number, decision, is_shadow, is_banned }
        };
        let is_banned = |at: usize| banned.get(at).is_some_and(Option::is_some);
        let enforced = question.enforced.iter().zip(decisions).enumerate();
        let enforced = enforced.map(|(at, (of, decision))| ruled(*of, *decision, false, is_banned(at)));
        let shadows = question.shadows.iter().zip(shadowed);
        let shadows = shadows.map(|(at, decision)| ruled(*at, *decision, true, false));
        let slots = self.slots_said(&question.slots);
        let rules: SmallVec<[Ruled<'_>; 4]> = enforced.chain(shadows).chain(slots).collect();
        let outcome = match (allowed, is_closed) {
            (true, _) => Outcome::Allowed,
            (false, false) => Outcome::Denied,
            (false, true) => Outcome::Closed,
        };
        let is_degraded = *is_degraded || question.slots.is_degraded;
        let subject = question.subject.as_ref().map(|subject| &*subject.0);
        observer(&Observed { rules: &rules, outcome, allowed: *allowed, is_degraded, subject });
    }

    /// Tells of a request whose limits were not asked.
    pub(crate) fn observe_unasked(&self, outcome: Outcome<'_>, subject: Option<&Subject>) {
        if let Some(observer) = &self.observer {
            let subject = subject.map(|subject| &*subject.0);
            observer(&Observed { rules: &[], outcome, allowed: false, is_degraded: false, subject });
        }
    }
}

/// A place among those that wait, given back when it is dropped.
pub(crate) struct Waiting<S>(Arc<Gate<S>>);

impl<S> Waiting<S> {
    /// None if too many wait already.
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
