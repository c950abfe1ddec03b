//! Requests whose limits have keys in different hash slots of a cluster, so that one call cannot charge them all.
//!
//! All limits are peeked first; if one denies, the request is denied and nothing is charged. Then all are charged
//! concurrently. If another request was faster and a limit denies now, the other charges are refunded. So no limit is
//! ever exceeded, but less may be allowed: between a charge and its refund other requests see less budget, and if
//! this process dies in between, the charge stays until it expires. A bucket is refunded only the units that have not
//! refilled since.

use std::sync::Arc;

use futures_util::future::join_all;
use ratekeeper_core::Time;
use smallvec::{SmallVec, smallvec};

use super::batcher::{Items, Told};
use super::{Inner, StoreError, Task, What};
use crate::clock::Clock as _;
use crate::store::{NO_LIMIT, Verdict};

/// The charges of one hash slot.
#[derive(Clone)]
struct Part {
    slot: u16,
    items: Items,
    /// The index of each charge in the request.
    places: SmallVec<[usize; 2]>,
}

impl Inner {
    /// Runs as a task, so that it completes and makes its refunds even if the caller gives up.
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
            // A log that counts all requests counts this one too.
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
                Ok(told) if told.verdict.allowed() => self.refund(part, told.at, at),
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

    /// The charges of logs that count all requests, each as a separate part.
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

    /// Sends the same operation for all parts concurrently, within what remains of the deadline since `start`.
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

    /// Refunds a charge in the background.
    fn refund(self: &Arc<Self>, part: Part, charged_at: Time, at: Option<Time>) {
        let inner = self.clone();
        let task = Task::Charge { items: part.items, what: What::GiveBack(Some(charged_at)), at };
        tokio::spawn(async move {
            // A charge that cannot be refunded expires.
            let _ = inner.servers.carry_out(part.slot, task, inner.deadline).await;
        });
    }
}

impl Part {
    /// Copies the decisions to the indexes of their charges.
    fn enter(&self, told: Told, verdict: &mut Verdict) {
        // The earliest charge of all: a later refund then returns at most what still counts for each limit.
        verdict.at = if verdict.at == Time::EPOCH { told.at } else { verdict.at.min(told.at) };
        for (place, decision) in self.places.iter().zip(told.verdict.decisions) {
            if verdict.decisions.len() <= *place {
                verdict.decisions.resize(place + 1, NO_LIMIT);
            }
            verdict.decisions[*place] = decision;
        }
    }
}
