//! Several limits of one request whose keys are in different slots of a cluster, so that no single call can charge them.
//!
//! All are asked first; if one denies, that is the answer, and nothing was taken. Then all are charged at once. If
//! another request was quicker meanwhile and one denies now, what was charged is given back. So never more is admitted
//! than each limit allows. What can go wrong is that less is: between the charge and its return others are told that
//! there is less left, and if this process dies in between, the charge stays until it expires. A bucket takes back what
//! has not refilled since.

use std::sync::Arc;

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};
use tollgate_core::Time;

use super::link::{Items, Told};
use super::{Inner, StoreError, Task, What};
use crate::clock::Clock as _;
use crate::store::{NO_LIMIT, Verdict};

/// The charges of one slot.
#[derive(Clone)]
struct Part {
    slot: u16,
    items: Items,
    /// Where each of them stands in the request.
    places: SmallVec<[usize; 2]>,
}

impl Inner {
    /// Goes on even if nobody waits for it any more: what was charged is not to be left behind.
    pub(super) async fn ask_across(
        self: &Arc<Self>,
        items: Items,
        is_look: bool,
        at: Option<Time>,
    ) -> Result<Verdict, StoreError> {
        let inner = self.clone();
        let asking = tokio::spawn(async move { inner.ask_parts(items, is_look, at).await });
        asking.await.unwrap_or_else(|_| Err(StoreError::driver_has_ended()))
    }

    async fn ask_parts(
        self: &Arc<Self>,
        items: Items,
        is_look: bool,
        at: Option<Time>,
    ) -> Result<Verdict, StoreError> {
        let start = self.clock.now();
        let parts = self.parts(items);
        let mut verdict = Verdict::default();
        for (part, told) in parts.iter().zip(self.each(&parts, What::Look, at, start).await) {
            part.enter(told?, &mut verdict);
        }
        if is_look {
            return Ok(verdict);
        }
        if !verdict.allowed() {
            // A log of all requests counts this one, too.
            let counting = self.counting(&parts);
            for (part, told) in counting.iter().zip(self.each(&counting, What::Make, at, start).await) {
                part.enter(told?, &mut verdict);
            }
            return Ok(verdict);
        }
        let charged = self.each(&parts, What::Make, at, start).await;
        verdict.at = Time::EPOCH;
        let is_allowed = |told: &Result<Told, _>| told.as_ref().is_ok_and(|told| told.verdict.allowed());
        if charged.iter().all(is_allowed) {
            for (part, told) in parts.iter().zip(charged) {
                part.enter(told?, &mut verdict);
            }
            return Ok(verdict);
        }
        let mut failure = None;
        for (part, told) in parts.into_iter().zip(charged) {
            match told {
                Ok(told) if told.verdict.allowed() => self.give_back(part, told.at, at),
                Ok(told) => part.enter(told, &mut verdict),
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(verdict), Err)
    }

    fn parts(&self, items: Items) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for (place, item) in items.into_iter().enumerate() {
            let slot = self.servers.slot(&item.key);
            match parts.iter_mut().find(|part| part.slot == slot) {
                Some(part) => {
                    part.items.push(item);
                    part.places.push(place);
                }
                None => parts.push(Part { slot, items: smallvec![item], places: smallvec![place] }),
            }
        }
        parts
    }

    /// The charges of logs that count all requests, one by one.
    fn counting(&self, parts: &[Part]) -> Vec<Part> {
        let each = parts.iter().flat_map(|part| {
            part.items.iter().zip(&part.places).map(|(item, place)| (part.slot, item, *place))
        });
        each.filter(|(_, item, _)| item.limit.counts_all())
            .map(|(slot, item, place)| Part {
                slot,
                items: smallvec![item.clone()],
                places: smallvec![place],
            })
            .collect()
    }

    /// Does the same with all parts at once, in what is left of the time since `start`.
    async fn each(
        &self,
        parts: &[Part],
        what: What,
        at: Option<Time>,
        start: Time,
    ) -> Vec<Result<Told, StoreError>> {
        let left = self.deadline.saturating_sub(self.clock.now().saturating_since(start));
        let tasks = parts.iter().map(|part| {
            let task = Task::Charge { items: part.items.clone(), what, at };
            self.servers.carry_out(part.slot, task, left)
        });
        join_all(tasks).await
    }

    /// Undoes a charge. The request does not wait for that.
    fn give_back(self: &Arc<Self>, part: Part, charged_at: Time, at: Option<Time>) {
        let inner = self.clone();
        let task = Task::Charge { items: part.items, what: What::GiveBack(Some(charged_at)), at };
        tokio::spawn(async move {
            // What cannot be given back expires.
            let _ = inner.servers.carry_out(part.slot, task, inner.deadline).await;
        });
    }
}

impl Part {
    /// Writes what was told to the places of the charges.
    fn enter(&self, told: Told, verdict: &mut Verdict) {
        // The first of them all: whoever gives back later gets no more than is still there of each.
        verdict.at = if verdict.at == Time::EPOCH { told.at } else { verdict.at.min(told.at) };
        for (place, decision) in self.places.iter().zip(told.verdict.decisions) {
            if verdict.decisions.len() <= *place {
                verdict.decisions.resize(place + 1, NO_LIMIT);
            }
            verdict.decisions[*place] = decision;
        }
    }
}
