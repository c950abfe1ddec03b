//! Checks by rule or inline limit, without an HTTP request: for APIs of other protocols.
//!
//! A [`Check`] names a limit, a key and a cost. All checks of a call are charged or none; allow and deny lists,
//! overrides by key, bans and shadow rules apply to them. The [observer](LayerBuilder::observe) receives checks
//! that charge like requests, unless an inline limit denies them. A charge can be refunded.

use ratekeeper_core::{Decision, Gcra, Limit, Time};
use ratekeeper_rules::response::LimitResponse;
use ratekeeper_rules::rule::{ChargeList, Rule, RuleCharge, Tier};
pub use ratekeeper_rules::rule::{KeyError, KeyInput};
use smallvec::SmallVec;

#[cfg(doc)]
use super::LayerBuilder;
use super::RatekeeperLayer;
pub use super::engine::CheckMode;
use super::engine::{CHARGE_LIST, CheckDecisions, Engine, RequestChecks, take_buffer};
use crate::store::{Charge, InlineLimit, Store, StoreUnavailable, Verdict};

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
    /// The limit of a rule, by index from 0 in the order of the [builder](LayerBuilder::rule).
    Rule(usize),
    /// An inline limit. Its keys are bytes, separate from the keys of all rules.
    Inline(&'a Limit),
}

/// The outcome of several checks.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckOutcome {
    /// The outcome of each check, in order.
    pub limits: SmallVec<[LimitOutcome; 4]>,
    /// Whether all enforced limits allowed the checks.
    pub allowed: bool,
    /// Whether the store did not answer, so that each limit's failure policy decided.
    pub is_degraded: bool,
    /// Whether the checks are denied only because the store is unavailable.
    pub is_closed: bool,
    /// The time of the decision by the store's clock, for [`refund`](RatekeeperLayer::refund).
    pub at: Time,
    charges: SmallVec<[(RuleCharge, Decision); 2]>,
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

/// The outcome of one tier: an override with conditions on requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierOutcome {
    /// The position of the override in its rule, from 0.
    pub index: usize,
    /// The decision of its limit; `None` if the tier is unlimited.
    pub decision: Option<Decision>,
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
    fn to_store_unavailable(&self) -> StoreUnavailable {
        StoreUnavailable(match &self.why {
            KeyError::Values(_) => "the key does not fit this limit".to_owned(),
            other => other.to_string(),
        })
    }
}

/// The source of a check's outcome.
#[derive(Clone, Copy)]
enum OutcomeSource {
    NoLimit,
    Charge(usize),
    Inline(usize),
}

/// Checks with their keys resolved.
struct ResolvedChecks<'a> {
    checks: RequestChecks,
    inline: SmallVec<[(&'a Limit, crate::Key, u32); 2]>,
    sources: SmallVec<[OutcomeSource; 4]>,
}

impl<S: Store> RatekeeperLayer<S> {
    /// The rules, in the order of their indices.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &Rule> {
        self.engine.rules.rules()
    }

    /// The time by the layer's clock.
    pub fn now(&self) -> Time {
        self.engine.clock.now()
    }

    /// Decides several checks and charges all of them or none.
    ///
    /// If an inline limit or a rule denies after inline limits were charged, those charges are refunded. No limit is
    /// exceeded by that, but concurrent checks may briefly see a smaller remaining quota.
    ///
    /// ```
    /// use std::time::Duration;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::tower::check::{Check, CheckMode, KeyInput, LimitRef};
    /// use ratekeeper::tower::key::{Key, KeyPart};
    /// use ratekeeper::tower::rule::Rule;
    /// use ratekeeper::{WindowAlign, Limit};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?;
    /// let rule = Rule::new("tokens", limit).key(Key::of(KeyPart::header("X-User-Id")));
    /// let layer = RatekeeperLayer::builder().rule(rule).build()?;
    ///
    /// let check = [Check { limit: LimitRef::Rule(0), key: KeyInput::Values(&["alice"]), cost: 7 }];
    /// let outcome = layer.check(&check, CheckMode::Charge).await.unwrap();
    /// assert_eq!(outcome.limits[0].decision.unwrap().remaining, 3);
    /// layer.refund(&check, Some(outcome.at)).await.unwrap();
    /// let outcome = layer.check(&check, CheckMode::Peek).await.unwrap();
    /// assert_eq!(outcome.limits[0].decision.unwrap().remaining, 10);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a check names an unknown rule, a key that does not fit the rule, or a key on the rule's deny list; then
    /// nothing is charged.
    pub async fn check(&self, checks: &[Check<'_>], mode: CheckMode) -> Result<CheckOutcome, CheckError> {
        let resolved = self.engine.resolve_checks(checks)?;
        let engine = &self.engine;
        let is_charge = mode == CheckMode::Charge && resolved.inline.is_empty();
        if is_charge && engine.is_only_charged(&resolved.checks) {
            let decisions = match engine.charge_now(&resolved.checks) {
                Some(decisions) => decisions,
                None => engine.charge_only(&resolved.checks).await,
            };
            return Ok(engine.outcome(resolved, &decisions, &[], decisions.allowed, mode));
        }
        // The state for every kind of check would be expensive to move.
        Ok(Box::pin(engine.run_resolved(resolved, mode)).await)
    }

    /// Checks parameters that may differ from request to request, without any rule: a key has one state, whatever the
    /// parameters. The observer is not called.
    ///
    /// ```
    /// use std::time::Duration;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::tower::check::CheckMode;
    /// use ratekeeper::{Gcra, Rate};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RatekeeperLayer::builder().allow_no_rules().build()?;
    /// let rate = Rate::new(1, Duration::from_secs(60))?;
    /// let (ten, twenty) = (Gcra::new(10, rate)?, Gcra::new(20, rate)?);
    /// assert_eq!(layer.check_gcra(&ten, b"alice", 7, CheckMode::Charge).await.decision().remaining, 3);
    /// assert_eq!(layer.check_gcra(&twenty, b"alice", 0, CheckMode::Peek).await.decision().remaining, 13);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn check_gcra(&self, gcra: &Gcra, key: &[u8], cost: u32, mode: CheckMode) -> Verdict {
        let key = self.engine.limiter.store().key(key);
        self.engine.charge_inline(InlineLimit::Gcra(gcra), key, cost, mode == CheckMode::Peek).await
    }

    /// The response to a client: headers and, for a denial, a status and a body.
    pub fn response(&self, outcome: &CheckOutcome) -> LimitResponse {
        let each = outcome.charges.iter().map(|(rule_charge, decision)| (rule_charge, decision));
        self.engine.write_response(each, outcome.is_closed)
    }

    /// Refunds checks that were allowed [at a time](CheckOutcome::at): the key gets back at most what it would have
    /// without the charges. If the time is unknown, the oldest usage that still counts is refunded, at most all of
    /// it.
    ///
    /// # Errors
    /// If the store does not perform the refund. A check with an unknown rule or key refunds nothing.
    pub async fn refund(&self, checks: &[Check<'_>], at: Option<Time>) -> Result<(), StoreUnavailable> {
        let resolved = self.engine.resolve_checks(checks).map_err(|error| error.to_store_unavailable())?;
        self.engine.refund(&resolved, at).await
    }

    /// Decides a check without charging, by each tier of its rule that may apply to the key: the overrides with
    /// conditions on requests, which [`check`](Self::check) ignores. If the key is banned, all tiers that have a limit
    /// deny it. Empty for an inline limit.
    ///
    /// # Errors
    /// If the check names an unknown rule or a key that does not fit the rule.
    pub async fn peek_tiers(&self, check: &Check<'_>) -> Result<SmallVec<[TierOutcome; 2]>, KeyError> {
        let mut list = ChargeList::default();
        let tiers = self.engine.add_tiers(&mut list, check)?;
        let charges: SmallVec<[Charge; 4]> =
            list.charges.iter().map(|it| self.engine.charge(&list, it, it.limit, it.cost)).collect();
        let verdict = match charges.is_empty() {
            true => Verdict::default(),
            false => self.engine.peek_limits(&charges).await,
        };
        // Bans of a shadow rule are not enforced.
        let enforced = list.charges.iter().filter(|it| !self.engine.rules.rule(it.rule).is_shadow);
        let banned = self.engine.find_bans(&list, enforced).await;
        let outcome = |tier: &Tier| {
            let ban = tier.charge.and_then(|at| banned.get(at).copied().flatten());
            let decision = tier.charge.and_then(|at| verdict.decisions().get(at).copied());
            TierOutcome { index: tier.index, decision: ban.or(decision) }
        };
        Ok(tiers.iter().map(outcome).collect())
    }

    /// Resets the keys of checks to their full budget in all tiers, and lifts their bans.
    ///
    /// # Errors
    /// If the store does not perform the reset.
    pub async fn reset(&self, checks: &[Check<'_>]) -> Result<(), StoreUnavailable> {
        let mut resolved =
            self.engine.resolve_checks(checks).map_err(|error| error.to_store_unavailable())?;
        for (index, check) in checks.iter().enumerate() {
            let added = self.engine.add_tiers(&mut resolved.checks.list, check);
            added.map_err(|why| CheckError { check: index, why }.to_store_unavailable())?;
        }
        let list = &resolved.checks.list;
        let each = list.charges.iter().flat_map(|it| {
            let of = move |limit| self.engine.charge(list, it, limit, 0);
            [Some(it.limit), it.ban.map(|ban| ban.denials), it.ban.map(|ban| ban.ban)]
                .into_iter()
                .flatten()
                .map(of)
        });
        let charges: SmallVec<[Charge; 4]> = each.collect();
        self.engine.limiter.store().reset(&charges).await
    }
}

impl<S: Store> Engine<S> {
    fn add_tiers(&self, list: &mut ChargeList, check: &Check<'_>) -> Result<Vec<Tier>, KeyError> {
        match check.limit {
            LimitRef::Rule(rule) => self.rules.add_tiers(list, rule, check.key, check.cost),
            LimitRef::Inline(_) => Ok(Vec::new()),
        }
    }

    fn resolve_checks<'a>(&self, checks: &[Check<'a>]) -> Result<ResolvedChecks<'a>, CheckError> {
        let mut list = take_buffer(&CHARGE_LIST);
        list.clear();
        let (mut inline, mut sources) = (SmallVec::new(), SmallVec::new());
        for (index, check) in checks.iter().enumerate() {
            sources.push(match check.limit {
                LimitRef::Inline(limit) => {
                    let bytes = match check.key {
                        KeyInput::Bytes(bytes) => bytes,
                        KeyInput::Values(_) => &[],
                    };
                    inline.push((limit, self.limiter.store().key(bytes), check.cost));
                    OutcomeSource::Inline(inline.len() - 1)
                }
                LimitRef::Rule(rule) => {
                    let rule_charge = self.rules.add_charge(&mut list, rule, check.key, check.cost);
                    let rule_charge = rule_charge.map_err(|why| CheckError { check: index, why })?;
                    rule_charge.map_or(OutcomeSource::NoLimit, OutcomeSource::Charge)
                }
            });
        }
        Ok(ResolvedChecks { checks: self.split_charges(list), inline, sources })
    }

    /// The verdict of an inline limit; a denial if the store returns no decision.
    async fn charge_inline(
        &self,
        limit: InlineLimit<'_>,
        key: crate::Key,
        cost: u32,
        is_peek: bool,
    ) -> Verdict {
        let verdict = self.limiter.store().charge_inline(limit, key, cost, is_peek).await;
        let verdict = verdict.ok().filter(|verdict| !verdict.decisions().is_empty());
        verdict.unwrap_or_else(|| self.undecided_verdict([limit.limit()].into_iter()))
    }

    async fn run_resolved(&self, resolved: ResolvedChecks<'_>, mode: CheckMode) -> CheckOutcome {
        let mut inline = SmallVec::<[Verdict; 2]>::new();
        let mut is_allowed_inline = true;
        for (limit, key, cost) in &resolved.inline {
            // After a denial, the remaining inline limits are only peeked at.
            let is_peek = mode == CheckMode::Peek || !is_allowed_inline;
            let verdict = self.charge_inline(InlineLimit::Limit(limit), *key, *cost, is_peek).await;
            is_allowed_inline &= verdict.allowed();
            inline.push(verdict);
        }
        let mode_of_rules = if is_allowed_inline { mode } else { CheckMode::Peek };
        let decisions = self.run_checks(&resolved.checks, mode_of_rules).await;
        let allowed = decisions.allowed && is_allowed_inline;
        if !allowed && mode == CheckMode::Charge {
            let charged = inline.iter().position(|verdict| !verdict.allowed()).unwrap_or(inline.len());
            // A check that the failure policy allowed has charged nothing in the store.
            let made = resolved
                .inline
                .iter()
                .zip(&inline)
                .take(charged)
                .filter(|(_, verdict)| !verdict.is_degraded());
            for ((limit, key, cost), verdict) in made {
                // A charge that cannot be refunded expires.
                let _ = self.limiter.store().refund_inline(limit, *key, *cost, Some(verdict.at)).await;
            }
        }
        self.outcome(resolved, &decisions, &inline, allowed, mode_of_rules)
    }

    fn outcome(
        &self,
        resolved: ResolvedChecks<'_>,
        decisions: &CheckDecisions,
        inline: &[Verdict],
        allowed: bool,
        mode: CheckMode,
    ) -> CheckOutcome {
        let ResolvedChecks { mut checks, sources, .. } = resolved;
        let limits = sources.iter().map(|source| match *source {
            OutcomeSource::NoLimit => LimitOutcome { decision: None, is_shadow: false, is_banned: false },
            OutcomeSource::Inline(at) => {
                LimitOutcome { decision: Some(inline[at].decision()), is_shadow: false, is_banned: false }
            }
            OutcomeSource::Charge(at) => checks.limit_outcome(decisions, at),
        });
        let outcome = CheckOutcome {
            limits: limits.collect(),
            allowed,
            is_degraded: decisions.is_degraded || inline.iter().any(Verdict::is_degraded),
            is_closed: !allowed && (decisions.is_closed || inline.iter().any(Verdict::is_closed)),
            at: inline.last().map_or(decisions.at, |verdict| verdict.at.max(decisions.at)),
            charges: checks.enforced_charges().cloned().zip(decisions.enforced.iter().copied()).collect(),
        };
        match mode {
            CheckMode::Charge => drop(self.event(&mut checks, decisions)),
            CheckMode::Peek => checks.recycle(),
        }
        outcome
    }

    async fn refund(&self, resolved: &ResolvedChecks<'_>, at: Option<Time>) -> Result<(), StoreUnavailable> {
        let (store, list) = (self.limiter.store(), &resolved.checks.list);
        let charges: SmallVec<[Charge; 4]> =
            list.charges.iter().map(|it| self.charge(list, it, it.limit, it.cost)).collect();
        if !charges.is_empty() {
            store.refund(&charges, at).await?;
        }
        for (limit, key, cost) in &resolved.inline {
            store.refund_inline(limit, *key, *cost, at).await?;
        }
        Ok(())
    }
}

impl RequestChecks {
    /// The outcome of the charge with this index.
    fn limit_outcome(&self, decisions: &CheckDecisions, index: usize) -> LimitOutcome {
        let among = |indices: &[usize]| indices.iter().position(|it| *it == index);
        match (among(&self.enforced), among(&self.shadows)) {
            (Some(at), _) => LimitOutcome {
                decision: decisions.enforced.get(at).copied(),
                is_shadow: false,
                is_banned: decisions.banned.get(at).is_some_and(Option::is_some),
            },
            (None, at) => LimitOutcome {
                decision: at.and_then(|at| decisions.shadowed.get(at).copied()),
                is_shadow: true,
                is_banned: false,
            },
        }
    }
}
