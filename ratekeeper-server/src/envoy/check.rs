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

use super::descriptors::{Hits, ResolvedDescriptor};
use super::error::EnvoyApiError;

/// The verdict on a request.
#[derive(Debug)]
pub(super) struct EnvoyVerdict {
    /// The decision on each descriptor, in their order.
    pub(super) decisions: SmallVec<[DescriptorDecision; 2]>,
    pub(super) allowed: bool,
}

/// The decision on one descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct DescriptorDecision {
    /// None if the descriptor has no limit.
    pub(super) decision: Option<Decision>,
    /// Whether the limit would deny, even if it is a shadow limit.
    pub(super) is_over: bool,
}

/// Decides a request. Parts that few requests need are boxed, as the state of a call is moved several times.
pub(super) async fn decide<S: Store + Send + Sync>(
    layer: Option<&RatekeeperLayer<S>>,
    descriptors: &[ResolvedDescriptor<'_>],
) -> Result<EnvoyVerdict, EnvoyApiError> {
    let decisions = descriptors.iter().map(|it| DescriptorDecision {
        decision: layer.and_then(|layer| it.blocked_decision(layer.now())),
        is_over: it.is_always_denied(),
    });
    let mut check = RequestCheck { layer, descriptors, decisions: decisions.collect() };
    let is_plain = |it: &ResolvedDescriptor<'_>| {
        matches!(it.hits, Hits::Charge(_)) && !it.is_quota && !it.is_always_denied()
    };
    if !descriptors.iter().all(is_plain) {
        Box::pin(check.check(CheckMode::Peek, |_, _| true)).await?;
    }
    // Each further round excludes at least one more quota descriptor.
    for _ in 0..=descriptors.len() {
        if check.is_denied() {
            break;
        }
        let is_charged = |it: &ResolvedDescriptor<'_>, decision: &DescriptorDecision| {
            matches!(it.hits, Hits::Charge(_))
                && (it.is_shadow || !decision.is_over)
                && !it.is_always_denied()
        };
        let charged = check.check(CheckMode::Charge, is_charged).await?;
        if charged.as_ref().is_none_or(|charged| charged.allowed) {
            if descriptors.iter().any(|it| matches!(it.hits, Hits::Refund(_))) {
                Box::pin(check.refund(charged.as_ref(), is_charged)).await?;
            }
            check.charge_remaining().await;
            return Ok(EnvoyVerdict { decisions: check.decisions, allowed: true });
        }
    }
    check.charge_remaining().await;
    Ok(EnvoyVerdict { decisions: check.decisions, allowed: false })
}

/// The check of one request.
struct RequestCheck<'w, S> {
    layer: Option<&'w RatekeeperLayer<S>>,
    descriptors: &'w [ResolvedDescriptor<'w>],
    decisions: SmallVec<[DescriptorDecision; 2]>,
}

impl<'w, S: Store + Send + Sync> RequestCheck<'w, S> {
    /// A descriptor that is over its limit denies, unless it is a shadow. Quota descriptors deny only if all are
    /// over.
    fn is_denied(&self) -> bool {
        let pairs =
            || self.descriptors.iter().zip(&self.decisions).filter(|(descriptor, _)| !descriptor.is_shadow);
        let mut quota_members = pairs().filter(|(descriptor, _)| descriptor.is_quota_member()).peekable();
        pairs().any(|(descriptor, decision)| decision.is_over && !descriptor.is_quota_member())
            || (quota_members.peek().is_some() && quota_members.all(|(_, decision)| decision.is_over))
    }

    /// Checks the limits that `filter` selects. None if there were none to check.
    async fn check(
        &mut self,
        mode: CheckMode,
        filter: impl Fn(&ResolvedDescriptor<'_>, &DescriptorDecision) -> bool,
    ) -> Result<Option<CheckOutcome>, EnvoyApiError> {
        let (numbers, checks) = self.to_checks(false, filter);
        if checks.is_empty() {
            return Ok(None);
        }
        let outcome = self.layer.ok_or(EnvoyApiError::StoreUnavailable)?.check(&checks, mode).await;
        let outcome = outcome.map_err(|error| EnvoyApiError::Mismatch(error.why))?;
        if outcome.is_closed {
            return Err(EnvoyApiError::StoreUnavailable);
        }
        for (number, limit) in numbers.into_iter().zip(&outcome.limits) {
            let Some(decision) = limit.decision else { continue };
            let is_over = match self.descriptors[number].hits {
                Hits::Charge(_) => !decision.allowed,
                // A later charge needs at least one unit: otherwise it would be denied and charge nothing, every
                // time.
                Hits::Peek => decision.remaining == 0,
                Hits::AboveAnyLimit => true,
                Hits::Refund(_) => false,
            };
            self.decisions[number] = DescriptorDecision { decision: Some(decision), is_over };
        }
        Ok(Some(outcome))
    }

    /// Makes the refunds, after the rest is allowed. If they fail, the charges are refunded and the request fails.
    async fn refund(
        &mut self,
        charged: Option<&CheckOutcome>,
        is_charged: impl Fn(&ResolvedDescriptor<'_>, &DescriptorDecision) -> bool,
    ) -> Result<(), EnvoyApiError> {
        let is_refund =
            |it: &ResolvedDescriptor<'_>, _: &DescriptorDecision| matches!(it.hits, Hits::Refund(_));
        let (_, checks) = self.to_checks(true, is_refund);
        if checks.is_empty() {
            return Ok(());
        }
        let layer = self.layer.ok_or(EnvoyApiError::StoreUnavailable)?;
        if layer.refund(&checks, None).await.is_err() {
            if let Some(charged) = charged {
                // A charge that cannot be refunded expires with its limit.
                let _ = layer.refund(&self.to_checks(false, is_charged).1, Some(charged.at)).await;
            }
            return Err(EnvoyApiError::StoreUnavailable);
        }
        // Reads the new state. The refund is complete, so an error here does not matter.
        let _ = self.check(CheckMode::Peek, is_refund).await;
        Ok(())
    }

    /// Charges what remains of limits that deny a descriptor with its own `hits_addend`.
    ///
    /// Envoy often sends this cost after the work: it first sends zero hits, and the true cost when the response
    /// has ended. If the denied cost charged nothing, the remainder would stay, every check with zero hits would find
    /// it, and the budget would never run out.
    async fn charge_remaining(&mut self) {
        let Some(layer) = self.layer else { return };
        for (descriptor, current) in self.descriptors.iter().zip(&mut self.decisions) {
            let is_denied = current.is_over && descriptor.has_own_hits;
            if let Some(check) = descriptor.to_check(false).filter(|_| is_denied) {
                Box::pin(charge_remaining(layer, check, current)).await;
            }
        }
    }

    /// The checks of the descriptors that `filter` selects, and the numbers of those descriptors.
    fn to_checks(
        &self,
        is_refund: bool,
        filter: impl Fn(&ResolvedDescriptor<'_>, &DescriptorDecision) -> bool,
    ) -> (SmallVec<[usize; 4]>, SmallVec<[Check<'w>; 2]>) {
        let pairs = self.descriptors.iter().zip(&self.decisions).enumerate();
        let filter = pairs.filter(|(_, (descriptor, decision))| filter(descriptor, decision));
        filter.filter_map(|(number, (descriptor, _))| Some((number, descriptor.to_check(is_refund)?))).unzip()
    }
}

/// Charges what remains of a limit that denied a check, after its `current` decision.
async fn charge_remaining<S: Store + Send + Sync>(
    layer: &RatekeeperLayer<S>,
    check: Check<'_>,
    current: &mut DescriptorDecision,
) {
    // Retried once, in case a concurrent request took some of it.
    for _ in 0..2 {
        let remaining = current.decision.map_or(0, |decision| decision.remaining);
        let cost = check.cost.min(remaining);
        if cost == 0 {
            break;
        }
        // The verdict is already a denial, so an error here does not matter.
        let Ok(outcome) = layer.check(&[Check { cost, ..check }], CheckMode::Charge).await else {
            break;
        };
        let decision = outcome.limits.first().and_then(|limit| limit.decision);
        let Some(decision) = decision.filter(|_| !outcome.is_closed) else { break };
        current.decision = Some(decision);
        if decision.allowed {
            break;
        }
    }
}
