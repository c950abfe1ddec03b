//! Decides about requests: which rules concern them, what their limits say, and what else follows from that.

use std::cell::Cell;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::LocalKey;
use std::time::Duration;

use http::request::Parts;
use smallvec::SmallVec;
use tollgate_core::{Decision, RetryAfter};
use tollgate_rules::answer::{Answer, Applied, Custom, HeaderSet, Jitter, PolicyName, Situation};
use tollgate_rules::client::Trust;
use tollgate_rules::path::Spelling;
use tollgate_rules::rule::{Asked, Asking, Refused, Rules};

use super::told::{Note, Notes};
use super::view::{self, View};
use super::{Chosen, Claims, KeyExtractor, OtherSpellings};
use crate::clock::{Clock, SystemClock};
use crate::limiter::Limiter;
use crate::store::{Charge, Store, Verdict};

/// Where a request comes from: the address at the other end of its connection.
pub(crate) type PeerOf = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;
/// Is told of every decision.
pub(crate) type Observer = Arc<dyn Fn(&Observed<'_>) + Send + Sync>;
/// Verifies a request's token.
pub(crate) type Verify = Arc<dyn Fn(&Parts) -> Option<Claims> + Send + Sync>;

/// What was decided about a request, for whoever counts.
#[derive(Debug)]
#[non_exhaustive]
pub struct Observed<'a> {
    /// The rules that concerned it, and what their limits said.
    pub rules: &'a [Ruled<'a>],
    /// Whether it passed.
    pub allowed: bool,
    /// Whether the store did not answer, so that each limit's policy decided.
    pub is_degraded: bool,
}

/// What a rule said to a request.
#[derive(Debug)]
#[non_exhaustive]
pub struct Ruled<'a> {
    /// The rule's name.
    pub name: &'a str,
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
    pub(crate) names: Vec<PolicyName>,
    pub(crate) customs: Vec<Custom>,
    pub(crate) trust: Trust,
    pub(crate) spelling: Spelling,
    pub(crate) other_spellings: OtherSpellings,
    pub(crate) headers: HeaderSet,
    pub(crate) jitter_secs: u64,
    pub(crate) peer: PeerOf,
    pub(crate) verify: Option<Verify>,
    pub(crate) extractors: Vec<(String, Arc<dyn KeyExtractor>)>,
    pub(crate) observer: Option<Observer>,
    /// Of each limit, whether it delays requests.
    pub(crate) delays: Vec<bool>,
    pub(crate) max_waiting: usize,
    /// Requests that wait now.
    pub(crate) waiting: AtomicUsize,
    pub(crate) clock: SystemClock,
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
    /// It is answered with 403: one of the rules has it on a list.
    Forbidden,
    /// Nobody said where requests come from.
    NoPeer,
}

/// What is asked about a request.
#[derive(Debug)]
pub(crate) struct Question {
    asked: Asked,
    /// Which of the charges are of rules that decide, and which of rules that only count.
    enforced: SmallVec<[usize; 4]>,
    shadows: SmallVec<[usize; 4]>,
    /// Whether a limit may say that it has to wait.
    pub(crate) may_wait: bool,
}

/// What is done with a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It goes on, after a wait if there is one, and the client is told with its response.
    Allowed { delay: Duration, notes: Notes },
    /// The client is told instead of a response.
    Denied {
        answer: Answer,
        /// Only because the store is away.
        is_closed: bool,
    },
}

thread_local! {
    /// Answers are written into the same memory one after the other.
    static ANSWER: Cell<Answer> = Cell::default();
    /// And so is what is asked about requests.
    static ASKED: Cell<Asked> = Cell::default();
}

/// What the last request of this thread has left behind, to be written over.
fn reused<T: Default>(buffer: &'static LocalKey<Cell<T>>) -> T {
    // A thread that is about to end has no buffer any more.
    buffer.try_with(Cell::take).unwrap_or_default()
}

/// Leaves it to the next request of this thread.
fn leave<T>(buffer: &'static LocalKey<Cell<T>>, used: T) {
    let _ = buffer.try_with(|buffer| buffer.set(used));
}

impl Question {
    /// Whether no rule concerns the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.asked.charges.is_empty()
    }

    /// Its memory is for the next one.
    pub(crate) fn leave(self) {
        leave(&ASKED, self.asked);
    }
}

impl<S: Store> Gate<S> {
    /// What is asked about a request, by the rules that concern it. If that goes by another spelling of its path than
    /// the one that came, the request has that one from now on.
    pub(crate) fn question(&self, parts: &mut Parts) -> Result<Question, NotAsked> {
        let view = View::new(parts, self)?;
        // A router in front may have chosen some of the rules.
        let mut asked = reused(&ASKED);
        let all = match parts.extensions.get::<Chosen>() {
            Some(chosen) => self.rules.ask_into(&mut asked, &view, chosen.numbers(self.names.len())),
            None => self.rules.ask_into(&mut asked, &view, 0..self.names.len()),
        };
        // Whatever the rules made of a request whose address they wanted and did not get does not count.
        if view.lacks_peer() {
            return Err(NotAsked::NoPeer);
        }
        all.map_err(|refused| match refused {
            Refused::Denied { .. } => NotAsked::Forbidden,
            Refused::Unclear(why) => NotAsked::Bad(why.to_string()),
        })?;
        let is_shadow = |at: &usize| self.rules.rule(asked.charges[*at].rule).is_shadow;
        let (shadows, enforced): (SmallVec<_>, SmallVec<_>) = (0..asked.charges.len()).partition(is_shadow);
        let may_wait = enforced.iter().any(|at: &usize| self.delays[asked.charges[*at].limit]);
        if let Some(uri) = view::respelt(&parts.uri, self.spelling, self.other_spellings)? {
            parts.uri = uri;
        }
        Ok(Question { asked, enforced, shadows, may_wait })
    }

    fn charge(&self, asked: &Asked, asking: &Asking, limit: usize, cost: u32) -> Charge {
        Charge { limit, key: self.limiter.store().key(asked.key(asking)), cost }
    }

    /// Decides, and works out what to tell. The charges are the rules' own, each limit once, so a store finds nothing
    /// wrong with them.
    pub(crate) async fn decide(&self, question: &Question) -> Outcome {
        let Question { asked, enforced, shadows, .. } = question;
        let store = self.limiter.store();
        let each = || enforced.iter().map(|at| &asked.charges[*at]);

        let banned = self.banned(question).await;
        let is_banned = banned.iter().any(Option::is_some);
        let charges: SmallVec<[Charge; 4]> =
            each().map(|it| self.charge(asked, it, it.limit, it.cost)).collect();
        let verdict = match (charges.is_empty(), is_banned) {
            (true, _) => Verdict::default(),
            (false, true) => store.look(&charges).await.unwrap_or_default(),
            (false, false) => store.charge(&charges).await.unwrap_or_default(),
        };
        let decisions: SmallVec<[Decision; 4]> = verdict
            .decisions()
            .iter()
            .zip(&banned)
            .map(|(decision, banned)| banned.unwrap_or(*decision))
            .collect();
        let allowed = decisions.iter().all(|decision| decision.allowed);
        if !allowed && !is_banned && !verdict.is_degraded() {
            self.count_denials(asked, each().zip(&decisions)).await;
        }
        // Each by itself, so that one of them keeps no other from being charged. Like any rule, they take nothing from
        // a request that others deny.
        let mut shadowed = SmallVec::<[Decision; 2]>::new();
        for at in shadows {
            let asking = &asked.charges[*at];
            let charge = [self.charge(asked, asking, asking.limit, asking.cost)];
            let told = if allowed { store.charge(&charge).await } else { store.look(&charge).await };
            shadowed.extend(told.unwrap_or_default().decisions().first().copied());
        }
        self.observe(question, &decisions, &banned, &shadowed, allowed, verdict.is_degraded());
        let delay = decisions.iter().map(|decision| decision.delay).max().unwrap_or_default();
        self.outcome(each().zip(&decisions), allowed.then_some(delay), verdict.is_closed())
    }

    /// What those charges are told whose keys are banned, in their order.
    async fn banned(&self, question: &Question) -> SmallVec<[Option<Decision>; 4]> {
        let Question { asked, enforced, .. } = question;
        let each = || enforced.iter().map(|at| &asked.charges[*at]);
        let bans: SmallVec<[Charge; 2]> =
            each().filter_map(|it| Some(self.charge(asked, it, it.ban?.ban, 0))).collect();
        let looked = match bans.is_empty() {
            true => Verdict::default(),
            false => self.limiter.store().look(&bans).await.unwrap_or_default(),
        };
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
        let store = self.limiter.store();
        for (asking, _) in decided.filter(|(_, decision)| !decision.allowed) {
            let Some(ban) = asking.ban else { continue };
            let counted =
                store.charge(&[self.charge(asked, asking, ban.denials, 1)]).await.unwrap_or_default();
            if counted.decisions().first().is_some_and(|counted| counted.remaining == 0) {
                // If another was quicker, it is banned already.
                let _ = store.charge(&[self.charge(asked, asking, ban.ban, 1)]).await;
            }
        }
    }

    /// What follows from the decisions, for a request that goes on after a delay, or not at all.
    fn outcome<'a>(
        &self,
        decided: impl Iterator<Item = (&'a Asking, &'a Decision)>,
        goes_on_after: Option<Duration>,
        is_closed: bool,
    ) -> Outcome {
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
        match goes_on_after {
            Some(delay) => {
                let notes = answer.headers().filter_map(Note::new).collect();
                leave(&ANSWER, answer);
                Outcome::Allowed { delay, notes }
            }
            None => Outcome::Denied { answer, is_closed },
        }
    }

    /// Spread over all numbers; nobody gains from guessing it.
    fn random(&self) -> u64 {
        let count = self.answers.fetch_add(1, Ordering::Relaxed);
        count.wrapping_add(self.clock.now().as_nanos()).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    }

    fn observe(
        &self,
        question: &Question,
        decisions: &[Decision],
        banned: &[Option<Decision>],
        shadowed: &[Decision],
        allowed: bool,
        is_degraded: bool,
    ) {
        let Some(observer) = &self.observer else { return };
        let name = |at: usize| self.rules.rule(question.asked.charges[at].rule).name.as_str();
        let enforced = question.enforced.iter().zip(decisions).zip(banned).map(|((at, decision), banned)| {
            Ruled { name: name(*at), decision: *decision, is_shadow: false, is_banned: banned.is_some() }
        });
        let shadows = question.shadows.iter().zip(shadowed).map(|(at, decision)| Ruled {
            name: name(*at),
            decision: *decision,
            is_shadow: true,
            is_banned: false,
        });
        let rules: SmallVec<[Ruled<'_>; 4]> = enforced.chain(shadows).collect();
        observer(&Observed { rules: &rules, allowed, is_degraded });
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
