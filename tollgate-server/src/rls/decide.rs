//! What is wanted -> what the limits say, all of them charged or none.
//!
//! Most requests are one question to the limits. Where something might deny that cannot be charged with the others, all
//! are looked at first: descriptors that only look, those that are denied whatever is left, and those of a quota, which
//! deny only together.
//!
//! A cost of a descriptor's own is the exception: it takes what is left of the limit that denies it.

use smallvec::SmallVec;
use tollgate::tower::RateLimitLayer;
use tollgate::tower::direct::{Answered, Demand, How};
use tollgate::{Decision, Store};

use super::refused::Refused;
use super::wanted::{Hits, Wanted};

/// What was decided.
#[derive(Debug)]
pub(super) struct Decided {
    /// Of each descriptor, in their order.
    pub(super) each: SmallVec<[Each; 2]>,
    pub(super) allowed: bool,
}

/// What a limit said to a descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Each {
    /// None if there is no limit to ask.
    pub(super) decision: Option<Decision>,
    /// Whether there is too little left, even if the limit only counts.
    pub(super) is_over: bool,
}

/// Decides.
pub(super) async fn decide<S: Store + Send + Sync>(
    layer: Option<&RateLimitLayer<S>>,
    wanted: &[Wanted<'_>],
) -> Result<Decided, Refused> {
    let each = wanted.iter().map(|wanted| Each { decision: None, is_over: wanted.is_hopeless() }).collect();
    let mut asking = Asking { layer, wanted, each };
    let is_plain = |it: &Wanted<'_>| matches!(it.hits, Hits::Take(_)) && !it.is_quota && !it.is_hopeless();
    if !wanted.iter().all(is_plain) {
        asking.ask(How::Look, |_, _| true).await?;
    }
    // Each further round leaves out one more of the quota at least.
    for _ in 0..=wanted.len() {
        if asking.is_denied() {
            break;
        }
        let takes = |it: &Wanted<'_>, each: &Each| {
            matches!(it.hits, Hits::Take(_)) && (it.is_shadow || !each.is_over) && !it.is_hopeless()
        };
        let taken = asking.ask(How::Charge, takes).await?;
        if taken.as_ref().is_none_or(|taken| taken.allowed) {
            asking.give_back(taken.as_ref(), takes).await?;
            asking.take_what_is_left().await;
            return Ok(Decided { each: asking.each, allowed: true });
        }
    }
    asking.take_what_is_left().await;
    Ok(Decided { each: asking.each, allowed: false })
}

/// How far it has come.
struct Asking<'w, S> {
    layer: Option<&'w RateLimitLayer<S>>,
    wanted: &'w [Wanted<'w>],
    each: SmallVec<[Each; 2]>,
}

impl<'w, S: Store + Send + Sync> Asking<'w, S> {
    /// One that is over denies, unless it only counts. Those of a quota deny if all are over.
    fn is_denied(&self) -> bool {
        let both = || self.wanted.iter().zip(&self.each).filter(|(wanted, _)| !wanted.is_shadow);
        let mut of_quota = both().filter(|(wanted, _)| wanted.is_of_quota()).peekable();
        both().any(|(wanted, each)| each.is_over && !wanted.is_of_quota())
            || (of_quota.peek().is_some() && of_quota.all(|(_, each)| each.is_over))
    }

    /// Asks some of the limits. None if there was nothing to ask.
    async fn ask(
        &mut self,
        how: How,
        picked: impl Fn(&Wanted<'_>, &Each) -> bool,
    ) -> Result<Option<Answered>, Refused> {
        let (numbers, demands) = self.demands(false, picked);
        if demands.is_empty() {
            return Ok(None);
        }
        let answered = self.layer.ok_or(Refused::Away)?.ask(&demands, how).await;
        let answered = answered.map_err(|unasked| Refused::Broken(unasked.why.to_string()))?;
        if answered.is_closed {
            return Err(Refused::Away);
        }
        for (number, said) in numbers.into_iter().zip(&answered.said) {
            let Some(decision) = said.decision else { continue };
            let is_over = match self.wanted[number].hits {
                Hits::Take(_) => !decision.allowed,
                // What is charged later must find something, or it would be denied and take nothing, for ever.
                Hits::Look => decision.remaining == 0,
                Hits::BeyondAll => true,
                Hits::GiveBack(_) => false,
            };
            self.each[number] = Each { decision: Some(decision), is_over };
        }
        Ok(Some(answered))
    }

    /// Gives back what is to be given back, now that the rest has passed. If that fails, so does the rest.
    async fn give_back(
        &mut self,
        taken: Option<&Answered>,
        takes: impl Fn(&Wanted<'_>, &Each) -> bool,
    ) -> Result<(), Refused> {
        let gives = |it: &Wanted<'_>, _: &Each| matches!(it.hits, Hits::GiveBack(_));
        let (_, demands) = self.demands(true, gives);
        if demands.is_empty() {
            return Ok(());
        }
        let layer = self.layer.ok_or(Refused::Away)?;
        if layer.give_back(&demands, None).await.is_err() {
            if let Some(taken) = taken {
                // What cannot be given back ends by itself.
                let _ = layer.give_back(&self.demands(false, takes).1, Some(taken.at)).await;
            }
            return Err(Refused::Away);
        }
        // How much there is now. It is done already, so it does not matter if nobody says.
        let _ = self.ask(How::Look, gives).await;
        Ok(())
    }

    /// Takes what is left from limits that deny a cost which a descriptor has of its own.
    ///
    /// Such a cost is often that of something that is done already: Envoy looks first, with none, and tells the true cost
    /// when the response has ended. If it took nothing because there is too little left, that little would stay, every look
    /// would find it, and the budget would never run out.
    async fn take_what_is_left(&mut self) {
        let Some(layer) = self.layer else { return };
        for (wanted, each) in self.wanted.iter().zip(&mut self.each) {
            let denies_own = each.is_over && wanted.has_own_hits;
            let Some(demand) = wanted.demand(false).filter(|_| denies_own) else { continue };
            // Once more if somebody else was quicker.
            for _ in 0..2 {
                let left = each.decision.map_or(0, |decision| decision.remaining);
                let cost = demand.cost.min(left);
                if cost == 0 {
                    break;
                }
                // It is denied already, so it does not matter if nobody answers.
                let Ok(answered) = layer.ask(&[Demand { cost, ..demand }], How::Charge).await else { break };
                let said = answered.said.first().and_then(|said| said.decision);
                let Some(decision) = said.filter(|_| !answered.is_closed) else { break };
                each.decision = Some(decision);
                if decision.allowed {
                    break;
                }
            }
        }
    }

    /// What is asked of the limits, and which descriptors want it.
    fn demands(
        &self,
        gives_back: bool,
        picked: impl Fn(&Wanted<'_>, &Each) -> bool,
    ) -> (SmallVec<[usize; 4]>, SmallVec<[Demand<'w>; 2]>) {
        let both = self.wanted.iter().zip(&self.each).enumerate();
        let picked = both.filter(|(_, (wanted, each))| picked(wanted, each));
        picked.filter_map(|(number, (wanted, _))| Some((number, wanted.demand(gives_back)?))).unzip()
    }
}
