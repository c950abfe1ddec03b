//! The rules' limits asked by name, without an HTTP request: for doors that speak other protocols.
//!
//! A [`Demand`] says which rule, whose budget and how much. Several are charged together or not at all, lists, overrides
//! by key, bans and shadows included; and the [observer](Builder::observe) hears of them as of any request. What was
//! charged can be given back.

use smallvec::SmallVec;
use tollgate_core::{Decision, Limit, Time};
use tollgate_rules::answer::Answer;
use tollgate_rules::rule::{Asking, Rule};
pub use tollgate_rules::rule::{Named, NotNamed};

#[cfg(doc)]
use super::Builder;
use super::RateLimitLayer;
pub use super::gate::How;
use super::gate::{ASKED, Decided, Gate, Question, reused};
use crate::store::{Charge, Store, Unreached, Verdict};

/// What somebody wants of one limit.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// Which limit.
    pub limit: Which<'a>,
    /// Whose budget.
    pub key: Named<'a>,
    /// How much. Nothing is a look, which every limit allows that is not beyond its end.
    pub cost: u32,
}

/// A limit.
#[derive(Clone, Copy, Debug)]
pub enum Which<'a> {
    /// That of a rule, by its number, from 0 in the order of the [builder](Builder::rule).
    Rule(usize),
    /// One that comes with the demand. Its keys are named by bytes, and are apart from those of all rules.
    Own(&'a Limit),
}

/// What was said to demands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Answered {
    /// To each of them, in their order.
    pub said: SmallVec<[Said; 4]>,
    /// Whether all that decide allowed it.
    pub allowed: bool,
    /// Whether the store did not answer, so that each limit's policy decided.
    pub is_degraded: bool,
    /// Whether it is denied only because of that.
    pub is_closed: bool,
    /// When it was decided, by the store's clock: [`give_back`](RateLimitLayer::give_back) wants to know.
    pub at: Time,
    asked: SmallVec<[(Asking, Decision); 4]>,
}

/// What was said to one demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Said {
    /// What the limit says; none if the rule has no limit for this key.
    pub decision: Option<Decision>,
    /// Whether it only counts.
    pub is_shadow: bool,
    /// Whether the key is banned.
    pub is_banned: bool,
}

/// A demand that cannot be decided.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unasked {
    /// Which of them, from 0.
    pub demand: usize,
    /// Why.
    pub why: NotNamed,
}

impl Unasked {
    /// Without the key, which may be in a sentence about it.
    fn unreached(&self) -> Unreached {
        Unreached(match &self.why {
            NotNamed::Values(_) => "the key is none of this limit's".to_owned(),
            other => other.to_string(),
        })
    }
}

/// Where what is said to a demand comes from.
#[derive(Clone, Copy)]
enum From {
    Nothing,
    Charge(usize),
    Own(usize),
}

/// Demands, read.
struct Read<'a> {
    question: Question,
    own: SmallVec<[(&'a Limit, crate::Key, u32); 2]>,
    from: SmallVec<[From; 4]>,
}

impl<S: Store> RateLimitLayer<S> {
    /// The rules, in the order of their numbers.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &Rule> {
        self.gate.rules.rules()
    }

    /// Decides about demands: all are charged, or none.
    ///
    /// Where a limit that comes with its demand denies after others were charged, those are given back: nobody is let in
    /// beyond a limit for that, but others may be told for a moment that there is less left.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::tower::direct::{Demand, How, Named, Which};
    /// use tollgate::tower::key::{Key, Part};
    /// use tollgate::tower::rule::Rule;
    /// use tollgate::{Align, Limit};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = Limit::fixed_window(10, Duration::from_secs(3600), Align::FirstRequest)?;
    /// let rule = Rule::new("tokens", limit).key(Key::of(Part::header("X-User-Id")));
    /// let layer = RateLimitLayer::builder().rule(rule).build()?;
    ///
    /// let demand = [Demand { limit: Which::Rule(0), key: Named::Values(&["alice"]), cost: 7 }];
    /// let answered = layer.ask(&demand, How::Charge).await.unwrap();
    /// assert_eq!(answered.said[0].decision.unwrap().remaining, 3);
    /// layer.give_back(&demand, Some(answered.at)).await.unwrap();
    /// let answered = layer.ask(&demand, How::Look).await.unwrap();
    /// assert_eq!(answered.said[0].decision.unwrap().remaining, 10);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If one of them names no rule or no key of its rule, or a key that the rule always denies: then nothing is charged.
    pub async fn ask(&self, demands: &[Demand<'_>], how: How) -> Result<Answered, Unasked> {
        let read = self.gate.read_demands(demands)?;
        Ok(self.gate.answered(read, how).await)
    }

    /// The same for one limit that comes with its demand, and no rule: cheaper, for doors that do nothing else. The observer
    /// does not hear of it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::tower::direct::How;
    /// use tollgate::{Limit, Rate, Style};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RateLimitLayer::builder().may_lack_rules().build()?;
    /// let limit = Limit::token_bucket(10, Rate::new(1, Duration::from_secs(60))?, Style::Smooth)?;
    /// assert_eq!(layer.ask_by(&limit, b"alice", 7, How::Charge).await.decision().remaining, 3);
    /// assert_eq!(layer.ask_by(&limit, b"bob", 0, How::Look).await.decision().remaining, 10);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ask_by(&self, limit: &Limit, key: &[u8], cost: u32, how: How) -> Verdict {
        let key = self.gate.limiter.store().key(key);
        self.gate.charged_by(limit, key, cost, how == How::Look).await
    }

    /// What a client is told of an answer: headers, and if it was denied a status and a body.
    pub fn told(&self, answered: &Answered) -> Answer {
        let each = answered.asked.iter().map(|(asking, decision)| (asking, decision));
        self.gate.answer(each, answered.is_closed)
    }

    /// Undoes the charges of demands that were allowed [at a time](Answered::at): never more comes back than if they had
    /// not been made. If the time is not known, what is given back is the oldest that still counts, and never more than
    /// there is.
    ///
    /// # Errors
    /// If the store does not do it. What names no rule or key gives nothing back.
    pub async fn give_back(&self, demands: &[Demand<'_>], at: Option<Time>) -> Result<(), Unreached> {
        let read = self.gate.read_demands(demands).map_err(|unasked| unasked.unreached())?;
        self.gate.give_back(&read, at).await
    }

    /// Forgets the keys of demands: for their rules they are as good as new, bans included.
    ///
    /// # Errors
    /// If the store does not do it.
    pub async fn forget(&self, demands: &[Demand<'_>]) -> Result<(), Unreached> {
        let read = self.gate.read_demands(demands).map_err(|unasked| unasked.unreached())?;
        let asked = &read.question.asked;
        let each = asked.charges.iter().flat_map(|it| {
            let of = move |limit| self.gate.charge(asked, it, limit, 0);
            [Some(it.limit), it.ban.map(|ban| ban.denials), it.ban.map(|ban| ban.ban)]
                .into_iter()
                .flatten()
                .map(of)
        });
        let charges: SmallVec<[Charge; 4]> = each.collect();
        self.gate.limiter.store().forget(&charges).await
    }
}

impl<S: Store> Gate<S> {
    fn read_demands<'a>(&self, demands: &[Demand<'a>]) -> Result<Read<'a>, Unasked> {
        let mut asked = reused(&ASKED);
        asked.clear();
        let (mut own, mut from) = (SmallVec::new(), SmallVec::new());
        for (number, demand) in demands.iter().enumerate() {
            from.push(match demand.limit {
                Which::Own(limit) => {
                    let bytes = match demand.key {
                        Named::Bytes(bytes) => bytes,
                        Named::Values(_) => &[],
                    };
                    own.push((limit, self.limiter.store().key(bytes), demand.cost));
                    From::Own(own.len() - 1)
                }
                Which::Rule(rule) => {
                    let asking = self.rules.ask_by_name(&mut asked, rule, demand.key, demand.cost);
                    let asking = asking.map_err(|why| Unasked { demand: number, why })?;
                    asking.map_or(From::Nothing, From::Charge)
                }
            });
        }
        Ok(Read { question: self.question_of(asked), own, from })
    }

    /// What a limit that came with its demand says. A store that says nothing has allowed nothing.
    async fn charged_by(&self, limit: &Limit, key: crate::Key, cost: u32, is_look: bool) -> Verdict {
        let said = self.limiter.store().charge_by(limit, key, cost, is_look).await;
        let said = said.ok().filter(|said| !said.decisions().is_empty());
        said.unwrap_or_else(|| self.undecided([limit.limit()].into_iter()))
    }

    async fn answered(&self, read: Read<'_>, how: How) -> Answered {
        let mut own = SmallVec::<[Verdict; 2]>::new();
        let mut own_allow = true;
        for (limit, key, cost) in &read.own {
            // Behind one that denies, the others are only looked at.
            let is_look = how == How::Look || !own_allow;
            let verdict = self.charged_by(limit, *key, *cost, is_look).await;
            own_allow &= verdict.allowed();
            own.push(verdict);
        }
        let decided = self.decided(&read.question, if own_allow { how } else { How::Look }).await;
        let allowed = decided.allowed && own_allow;
        if !allowed && how == How::Charge {
            let charged = own.iter().position(|verdict| !verdict.allowed()).unwrap_or(own.len());
            // What a policy has allowed was taken from nobody.
            let made = read.own.iter().zip(&own).take(charged).filter(|(_, verdict)| !verdict.is_degraded());
            for ((limit, key, cost), verdict) in made {
                // What cannot be given back ends by itself.
                let _ = self.limiter.store().give_back_by(limit, *key, *cost, Some(verdict.at)).await;
            }
        }
        let Read { question, from, .. } = read;
        let said = from.iter().map(|from| match *from {
            From::Nothing => Said { decision: None, is_shadow: false, is_banned: false },
            From::Own(at) => Said { decision: Some(own[at].decision()), is_shadow: false, is_banned: false },
            From::Charge(at) => question.said(&decided, at),
        });
        let answered = Answered {
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

    async fn give_back(&self, read: &Read<'_>, at: Option<Time>) -> Result<(), Unreached> {
        let (store, asked) = (self.limiter.store(), &read.question.asked);
        let charges: SmallVec<[Charge; 4]> =
            asked.charges.iter().map(|it| self.charge(asked, it, it.limit, it.cost)).collect();
        if !charges.is_empty() {
            store.give_back(&charges, at).await?;
        }
        for (limit, key, cost) in &read.own {
            store.give_back_by(limit, *key, *cost, at).await?;
        }
        Ok(())
    }
}

impl Question {
    /// What was said to the charge of this number.
    fn said(&self, decided: &Decided, number: usize) -> Said {
        let among = |numbers: &[usize]| numbers.iter().position(|it| *it == number);
        match (among(&self.enforced), among(&self.shadows)) {
            (Some(at), _) => Said {
                decision: decided.decisions.get(at).copied(),
                is_shadow: false,
                is_banned: decided.banned.get(at).is_some_and(Option::is_some),
            },
            (None, at) => Said {
                decision: at.and_then(|at| decided.shadowed.get(at).copied()),
                is_shadow: true,
                is_banned: false,
            },
        }
    }
}
