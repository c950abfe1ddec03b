//! Checks by rule or inline limit, without an HTTP request: for APIs of other protocols.
//!
//! A [`Check`] names a limit, a key and a cost. All checks of a call are charged or none; allow and deny lists,
//! overrides by key, bans and shadow rules apply to them. The [observer](Builder::observe) receives checks
//! that charge like requests, unless an inline limit denies them. A charge can be refunded.

use ratekeeper_core::{Decision, Limit, Time};
use ratekeeper_rules::answer::Answer;
use ratekeeper_rules::rule::{Asking, Rule};
pub use ratekeeper_rules::rule::{KeyError, KeyInput};
use smallvec::SmallVec;

#[cfg(doc)]
use super::Builder;
use super::RatekeeperLayer;
pub use super::engine::How;
use super::engine::{ASKED, Decided, Gate, Question, reused};
use crate::store::{Charge, Store, StoreUnavailable, Verdict};

/// A check of one limit.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The limit.
    pub limit: LimitRef<'a>,
    /// The key.
    pub key: KeyInput<'a>,
    /// The units to charge. A cost of 0 charges nothing, and is allowed unless the key is over its limit.
    pub cost: u32,
}

/// A reference to a limit.
#[derive(Clone, Copy, Debug)]
pub enum LimitRef<'a> {
    /// The limit of a rule, by index from 0 in the order of the [builder](Builder::rule).
    Rule(usize),
    /// An inline limit. Its keys are bytes, separate from the keys of all rules.
    Inline(&'a Limit),
}

/// The outcome of several checks.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckOutcome {
    /// The outcome of each check, in order.
    pub said: SmallVec<[LimitOutcome; 4]>,
    /// Whether all enforced limits allowed the checks.
    pub allowed: bool,
    /// Whether the store did not answer, so that each limit's failure policy decided.
    pub is_degraded: bool,
    /// Whether the checks are denied only because the store is unavailable.
    pub is_closed: bool,
    /// The time of the decision by the store's clock, for [`refund`](RatekeeperLayer::refund).
    pub at: Time,
    asked: SmallVec<[(Asking, Decision); 4]>,
}

/// The outcome of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitOutcome {
    /// The limit's decision; `None` if the rule has no limit for this key.
    pub decision: Option<Decision>,
    /// Whether the rule is a shadow rule.
    pub is_shadow: bool,
    /// Whether the key is banned.
    pub is_banned: bool,
}

/// A check that cannot be decided.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckError {
    /// The index of the check, from 0.
    pub check: usize,
    /// The reason.
    pub why: KeyError,
}

impl CheckError {
    /// Leaves out the key, which the message of a [`KeyError`] may contain.
    fn unreached(&self) -> StoreUnavailable {
        StoreUnavailable(match &self.why {
            KeyError::Values(_) => "the key is none of this limit's".to_owned(),
            other => other.to_string(),
        })
    }
}

/// The source of a check's outcome.
#[derive(Clone, Copy)]
enum From {
    Nothing,
    Charge(usize),
    Own(usize),
}

/// Checks with their keys resolved.
struct Read<'a> {
    question: Question,
    own: SmallVec<[(&'a Limit, crate::Key, u32); 2]>,
    from: SmallVec<[From; 4]>,
}

impl<S: Store> RatekeeperLayer<S> {
    /// The rules, in the order of their indices.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &Rule> {
        self.gate.rules.rules()
    }

    /// Decides several checks and charges all of them or none.
    ///
    /// If an inline limit or a rule denies after inline limits were charged, those charges are refunded. No limit is
    /// exceeded by that, but concurrent checks may briefly see a smaller remaining quota.
    ///
    /// ```
    /// use std::time::Duration;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::tower::check::{Check, How, KeyInput, LimitRef};
    /// use ratekeeper::tower::key::{Key, Part};
    /// use ratekeeper::tower::rule::Rule;
    /// use ratekeeper::{WindowAlign, Limit};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?;
    /// let rule = Rule::new("tokens", limit).key(Key::of(Part::header("X-User-Id")));
    /// let layer = RatekeeperLayer::builder().rule(rule).build()?;
    ///
    /// let check = [Check { limit: LimitRef::Rule(0), key: KeyInput::Values(&["alice"]), cost: 7 }];
    /// let answered = layer.check(&check, How::Charge).await.unwrap();
    /// assert_eq!(answered.said[0].decision.unwrap().remaining, 3);
    /// layer.refund(&check, Some(answered.at)).await.unwrap();
    /// let answered = layer.check(&check, How::Peek).await.unwrap();
    /// assert_eq!(answered.said[0].decision.unwrap().remaining, 10);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a check names an unknown rule, a key that does not fit the rule, or a key on the rule's deny list; then
    /// nothing is charged.
    pub async fn check(&self, checks: &[Check<'_>], how: How) -> Result<CheckOutcome, CheckError> {
        let read = self.gate.read_demands(checks)?;
        Ok(self.gate.answered(read, how).await)
    }

    /// Checks one inline limit without any rule: cheaper, for APIs that need nothing else. The observer is not
    /// called.
    ///
    /// ```
    /// use std::time::Duration;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::tower::check::How;
    /// use ratekeeper::{Limit, Rate, RefillStyle};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RatekeeperLayer::builder().may_lack_rules().build()?;
    /// let limit = Limit::token_bucket(10, Rate::new(1, Duration::from_secs(60))?, RefillStyle::Smooth)?;
    /// assert_eq!(layer.check_inline(&limit, b"alice", 7, How::Charge).await.decision().remaining, 3);
    /// assert_eq!(layer.check_inline(&limit, b"bob", 0, How::Peek).await.decision().remaining, 10);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn check_inline(&self, limit: &Limit, key: &[u8], cost: u32, how: How) -> Verdict {
        let key = self.gate.limiter.store().key(key);
        self.gate.charged_by(limit, key, cost, how == How::Peek).await
    }

    /// The response to a client: headers and, for a denial, a status and a body.
    pub fn response(&self, answered: &CheckOutcome) -> Answer {
        let each = answered.asked.iter().map(|(asking, decision)| (asking, decision));
        self.gate.answer(each, answered.is_closed)
    }

    /// Refunds checks that were allowed [at a time](CheckOutcome::at): the key gets back at most what it would have
    /// without the charges. If the time is unknown, the oldest usage that still counts is refunded, at most all of
    /// it.
    ///
    /// # Errors
    /// If the store does not perform the refund. A check with an unknown rule or key refunds nothing.
    pub async fn refund(&self, checks: &[Check<'_>], at: Option<Time>) -> Result<(), StoreUnavailable> {
        let read = self.gate.read_demands(checks).map_err(|unasked| unasked.unreached())?;
        self.gate.refund(&read, at).await
    }

    /// Resets the keys of checks to their full budget, and lifts their bans.
    ///
    /// # Errors
    /// If the store does not perform the reset.
    pub async fn reset(&self, checks: &[Check<'_>]) -> Result<(), StoreUnavailable> {
        let read = self.gate.read_demands(checks).map_err(|unasked| unasked.unreached())?;
        let asked = &read.question.asked;
        let each = asked.charges.iter().flat_map(|it| {
            let of = move |limit| self.gate.charge(asked, it, limit, 0);
            [Some(it.limit), it.ban.map(|ban| ban.denials), it.ban.map(|ban| ban.ban)]
                .into_iter()
                .flatten()
                .map(of)
        });
        let charges: SmallVec<[Charge; 4]> = each.collect();
        self.gate.limiter.store().reset(&charges).await
    }
}

impl<S: Store> Gate<S> {
    fn read_demands<'a>(&self, checks: &[Check<'a>]) -> Result<Read<'a>, CheckError> {
        let mut asked = reused(&ASKED);
        asked.clear();
        let (mut own, mut from) = (SmallVec::new(), SmallVec::new());
        for (number, check) in checks.iter().enumerate() {
            from.push(match check.limit {
                LimitRef::Inline(limit) => {
                    let bytes = match check.key {
                        KeyInput::Bytes(bytes) => bytes,
                        KeyInput::Values(_) => &[],
                    };
                    own.push((limit, self.limiter.store().key(bytes), check.cost));
                    From::Own(own.len() - 1)
                }
                LimitRef::Rule(rule) => {
                    let asking = self.rules.ask_by_name(&mut asked, rule, check.key, check.cost);
                    let asking = asking.map_err(|why| CheckError { check: number, why })?;
                    asking.map_or(From::Nothing, From::Charge)
                }
            });
        }
        Ok(Read { question: self.question_of(asked), own, from })
    }

    /// The verdict of an inline limit; a denial if the store returns no decision.
    async fn charged_by(&self, limit: &Limit, key: crate::Key, cost: u32, is_look: bool) -> Verdict {
        let said = self.limiter.store().charge_inline(limit, key, cost, is_look).await;
        let said = said.ok().filter(|said| !said.decisions().is_empty());
        said.unwrap_or_else(|| self.undecided([limit.limit()].into_iter()))
    }

    async fn answered(&self, read: Read<'_>, how: How) -> CheckOutcome {
        let mut own = SmallVec::<[Verdict; 2]>::new();
        let mut own_allow = true;
        for (limit, key, cost) in &read.own {
            // After a denial, the remaining inline limits are only peeked at.
            let is_look = how == How::Peek || !own_allow;
            let verdict = self.charged_by(limit, *key, *cost, is_look).await;
            own_allow &= verdict.allowed();
            own.push(verdict);
        }
        let decided = self.decided(&read.question, if own_allow { how } else { How::Peek }).await;
        let allowed = decided.allowed && own_allow;
        if !allowed && how == How::Charge {
            let charged = own.iter().position(|verdict| !verdict.allowed()).unwrap_or(own.len());
            // A check that the failure policy allowed has charged nothing in the store.
            let made = read.own.iter().zip(&own).take(charged).filter(|(_, verdict)| !verdict.is_degraded());
            for ((limit, key, cost), verdict) in made {
                // A charge that cannot be refunded expires.
                let _ = self.limiter.store().refund_by(limit, *key, *cost, Some(verdict.at)).await;
            }
        }
        let Read { question, from, .. } = read;
        let said = from.iter().map(|from| match *from {
            From::Nothing => LimitOutcome { decision: None, is_shadow: false, is_banned: false },
            From::Own(at) => {
                LimitOutcome { decision: Some(own[at].decision()), is_shadow: false, is_banned: false }
            }
            From::Charge(at) => question.said(&decided, at),
        });
        let answered = CheckOutcome {
            said: said.collect(),
            allowed,
            is_degraded: decided.is_degraded || own.iter().any(Verdict::is_degraded),
            is_closed: !allowed && (decided.is_closed || own.iter().any(Verdict::is_closed)),
            at: own.last().map_or(decided.at, |verdict| verdict.at.max(decided.at)),
            asked: question.each().cloned().zip(decided.decisions).collect(),
        };
        question.leave();
        answered
    }

    async fn refund(&self, read: &Read<'_>, at: Option<Time>) -> Result<(), StoreUnavailable> {
        let (store, asked) = (self.limiter.store(), &read.question.asked);
        let charges: SmallVec<[Charge; 4]> =
            asked.charges.iter().map(|it| self.charge(asked, it, it.limit, it.cost)).collect();
        if !charges.is_empty() {
            store.refund(&charges, at).await?;
        }
        for (limit, key, cost) in &read.own {
            store.refund_by(limit, *key, *cost, at).await?;
        }
        Ok(())
    }
}

impl Question {
    /// The outcome of the charge with this index.
    fn said(&self, decided: &Decided, number: usize) -> LimitOutcome {
        let among = |numbers: &[usize]| numbers.iter().position(|it| *it == number);
        match (among(&self.enforced), among(&self.shadows)) {
            (Some(at), _) => LimitOutcome {
                decision: decided.decisions.get(at).copied(),
                is_shadow: false,
                is_banned: decided.banned.get(at).is_some_and(Option::is_some),
            },
            (None, at) => LimitOutcome {
                decision: at.and_then(|at| decided.shadowed.get(at).copied()),
                is_shadow: true,
                is_banned: false,
            },
        }
    }
}
