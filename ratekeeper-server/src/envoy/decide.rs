//! Checks the limits of a request: charges all of them, or none.
//!
//! Most requests are one check. All limits are peeked at first if a descriptor can deny without being charged with
//! the others: descriptors with zero hits, descriptors that are always denied, and quota descriptors, which deny only
//! if all of them are over.
//!
//! A descriptor with its own `hits_addend` is the exception: if its limit denies, it is charged what remains.

use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::tower::check::{Check, CheckMode, CheckOutcome};
use ratekeeper::{Decision, Store};
use smallvec::SmallVec;

use super::descriptors::{Hits, Wanted};
use super::refused::Refused;

/// The verdict on a request.
#[derive(Debug)]
pub(super) struct Decided {
    /// The decision on each descriptor, in their order.
    pub(super) each: SmallVec<[Each; 2]>,
    pub(super) allowed: bool,
}

/// The decision on one descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Each {
    /// None if the descriptor has no limit.
    pub(super) decision: Option<Decision>,
    /// Whether the limit would deny, even if it is a shadow limit.
    pub(super) is_over: bool,
}

/// Decides a request.
pub(super) async fn decide<S: Store + Send + Sync>(
    layer: Option<&RatekeeperLayer<S>>,
    wanted: &[Wanted<'_>],
) -> Result<Decided, Refused> {
    let each = wanted.iter().map(|wanted| Each { decision: None, is_over: wanted.is_hopeless() }).collect();
    let mut asking = Asking { layer, wanted, each };
    let is_plain = |it: &Wanted<'_>| matches!(it.hits, Hits::Take(_)) && !it.is_quota && !it.is_hopeless();
    if !wanted.iter().all(is_plain) {
        asking.ask(CheckMode::Peek, |_, _| true).await?;
    }
    // Each further round excludes at least one more quota descriptor.
    for _ in 0..=wanted.len() {
        if asking.is_denied() {
            break;
        }
        let takes = |it: &Wanted<'_>, each: &Each| {
            matches!(it.hits, Hits::Take(_)) && (it.is_shadow || !each.is_over) && !it.is_hopeless()
        };
        let taken = asking.ask(CheckMode::Charge, takes).await?;
        if taken.as_ref().is_none_or(|taken| taken.allowed) {
            asking.refund(taken.as_ref(), takes).await?;
            asking.take_what_is_left().await;
            return Ok(Decided { each: asking.each, allowed: true });
        }
    }
    asking.take_what_is_left().await;
    Ok(Decided { each: asking.each, allowed: false })
}

/// The state of a decision.
struct Asking<'w, S> {
    layer: Option<&'w RatekeeperLayer<S>>,
    wanted: &'w [Wanted<'w>],
    each: SmallVec<[Each; 2]>,
}

impl<'w, S: Store + Send + Sync> Asking<'w, S> {
    /// A descriptor that is over its limit denies, unless it is a shadow. Quota descriptors deny only if all are
    /// over.
    fn is_denied(&self) -> bool {
        let both = || self.wanted.iter().zip(&self.each).filter(|(wanted, _)| !wanted.is_shadow);
        let mut of_quota = both().filter(|(wanted, _)| wanted.is_of_quota()).peekable();
        both().any(|(wanted, each)| each.is_over && !wanted.is_of_quota())
            || (of_quota.peek().is_some() && of_quota.all(|(_, each)| each.is_over))
    }

    /// Checks the picked limits. None if there were none to check.
    async fn ask(
        &mut self,
        how: CheckMode,
        picked: impl Fn(&Wanted<'_>, &Each) -> bool,
    ) -> Result<Option<CheckOutcome>, Refused> {
        let (numbers, demands) = self.demands(false, picked);
        if demands.is_empty() {
            return Ok(None);
        }
        let answered = self.layer.ok_or(Refused::Away)?.check(&demands, how).await;
        let answered = answered.map_err(|unasked| Refused::Broken(unasked.why.to_string()))?;
        if answered.is_closed {
            return Err(Refused::Away);
        }
        for (number, said) in numbers.into_iter().zip(&answered.limits) {
            let Some(decision) = said.decision else { continue };
            let is_over = match self.wanted[number].hits {
                Hits::Take(_) => !decision.allowed,
                // A later charge needs at least one unit: otherwise it would be denied and charge nothing, every
                // time.
                Hits::Look => decision.remaining == 0,
                Hits::BeyondAll => true,
                Hits::GiveBack(_) => false,
            };
            self.each[number] = Each { decision: Some(decision), is_over };
        }
        Ok(Some(answered))
    }

    /// Makes the refunds, after the rest is allowed. If they fail, the charges are refunded and the request fails.
    async fn refund(
        &mut self,
        taken: Option<&CheckOutcome>,
        takes: impl Fn(&Wanted<'_>, &Each) -> bool,
    ) -> Result<(), Refused> {
        let gives = |it: &Wanted<'_>, _: &Each| matches!(it.hits, Hits::GiveBack(_));
        let (_, demands) = self.demands(true, gives);
        if demands.is_empty() {
            return Ok(());
        }
        let layer = self.layer.ok_or(Refused::Away)?;
        if layer.refund(&demands, None).await.is_err() {
            if let Some(taken) = taken {
                // A charge that cannot be refunded expires with its limit.
                let _ = layer.refund(&self.demands(false, takes).1, Some(taken.at)).await;
            }
            return Err(Refused::Away);
        }
        // Reads the new state. The refund is complete, so an error here does not matter.
        let _ = self.ask(CheckMode::Peek, gives).await;
        Ok(())
    }

    /// Charges what remains of limits that deny a descriptor with its own `hits_addend`.
    ///
    /// Envoy often sends this cost after the work: it first sends zero hits, and the true cost when the response
    /// has ended. If the denied cost charged nothing, the remainder would stay, every check with zero hits would find
    /// it, and the budget would never run out.
    async fn take_what_is_left(&mut self) {
        let Some(layer) = self.layer else { return };
        for (wanted, each) in self.wanted.iter().zip(&mut self.each) {
            let denies_own = each.is_over && wanted.has_own_hits;
            let Some(demand) = wanted.demand(false).filter(|_| denies_own) else { continue };
            // Retried once, in case a concurrent request took some of it.
            for _ in 0..2 {
                let left = each.decision.map_or(0, |decision| decision.remaining);
                let cost = demand.cost.min(left);
                if cost == 0 {
                    break;
                }
                // The verdict is already a denial, so an error here does not matter.
                let Ok(answered) = layer.check(&[Check { cost, ..demand }], CheckMode::Charge).await else {
                    break;
                };
                let said = answered.limits.first().and_then(|said| said.decision);
                let Some(decision) = said.filter(|_| !answered.is_closed) else { break };
                each.decision = Some(decision);
                if decision.allowed {
                    break;
                }
            }
        }
    }

    /// The checks of the picked descriptors, and the numbers of those descriptors.
    fn demands(
        &self,
        gives_back: bool,
        picked: impl Fn(&Wanted<'_>, &Each) -> bool,
    ) -> (SmallVec<[usize; 4]>, SmallVec<[Check<'w>; 2]>) {
        let both = self.wanted.iter().zip(&self.each).enumerate();
        let picked = both.filter(|(_, (wanted, each))| picked(wanted, each));
        picked.filter_map(|(number, (wanted, _))| Some((number, wanted.demand(gives_back)?))).unzip()
    }
}
