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

use super::call::{Items, Reply};
use super::{ChargeOp, Inner, StoreError, Task};
use crate::clock::Clock as _;
use crate::store::{NO_LIMIT, Verdict};

/// The charges of one hash slot.
#[derive(Clone)]
struct HashSlotCharges {
    slot: u16,
    items: Items,
    /// The index of each charge in the request.
    indices: SmallVec<[usize; 2]>,
}

impl Inner {
    /// Runs as a task, so that it completes and makes its refunds even if the caller gives up.
    pub(super) async fn decide_cross_slot(
        self: &Arc<Self>,
        items: Items,
        is_peek: bool,
        at: Option<Time>,
    ) -> Result<Verdict, StoreError> {
        let inner = self.clone();
        let task = tokio::spawn(async move { inner.run_cross_slot(items, is_peek, at).await });
        task.await.unwrap_or_else(|_| Err(StoreError::driver_ended()))
    }

    async fn run_cross_slot(
        self: &Arc<Self>,
        items: Items,
        is_peek: bool,
        at: Option<Time>,
    ) -> Result<Verdict, StoreError> {
        let start = self.clock.now();
        let groups = self.groups(items);
        let mut verdict = Verdict::default();
        for (group, reply) in groups.iter().zip(self.each(&groups, ChargeOp::Peek, at, start).await) {
            group.copy_into(reply?, &mut verdict);
        }
        if is_peek {
            return Ok(verdict);
        }
        if !verdict.allowed() {
            // A log that counts all requests counts this one too.
            let counting = self.counting(&groups);
            for (group, reply) in counting.iter().zip(self.each(&counting, ChargeOp::Charge, at, start).await)
            {
                group.copy_into(reply?, &mut verdict);
            }
            return Ok(verdict);
        }
        let charged = self.each(&groups, ChargeOp::Charge, at, start).await;
        verdict.at = Time::EPOCH;
        let is_allowed =
            |reply: &Result<Box<Reply>, _>| reply.as_ref().is_ok_and(|reply| reply.verdict.allowed());
        if charged.iter().all(is_allowed) {
            for (group, reply) in groups.iter().zip(charged) {
                group.copy_into(reply?, &mut verdict);
            }
            return Ok(verdict);
        }
        let mut failure = None;
        for (group, reply) in groups.into_iter().zip(charged) {
            match reply {
                Ok(reply) if reply.verdict.allowed() => self.refund(group, reply.at, at),
                Ok(reply) => group.copy_into(reply, &mut verdict),
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(verdict), Err)
    }

    fn groups(&self, items: Items) -> Vec<HashSlotCharges> {
        let mut groups: Vec<HashSlotCharges> = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let slot = self.servers.slot(&item.key);
            match groups.iter_mut().find(|group| group.slot == slot) {
                Some(group) => {
                    group.items.push(item);
                    group.indices.push(index);
                }
                None => {
                    groups.push(HashSlotCharges { slot, items: smallvec![item], indices: smallvec![index] });
                }
            }
        }
        groups
    }

    /// The charges of logs that count all requests, each as a separate part.
    fn counting(&self, groups: &[HashSlotCharges]) -> Vec<HashSlotCharges> {
        let each = groups.iter().flat_map(|group| {
            group.items.iter().zip(&group.indices).map(|(item, index)| (group.slot, item, *index))
        });
        each.filter(|(_, item, _)| item.limit.counts_all())
            .map(|(slot, item, index)| HashSlotCharges {
                slot,
                items: smallvec![item.clone()],
                indices: smallvec![index],
            })
            .collect()
    }

    /// Sends the same operation for all parts concurrently, within what remains of the deadline since `start`.
    async fn each(
        &self,
        groups: &[HashSlotCharges],
        op: ChargeOp,
        at: Option<Time>,
        start: Time,
    ) -> Vec<Result<Box<Reply>, StoreError>> {
        let left = self.deadline.saturating_sub(self.clock.now().saturating_since(start));
        let tasks = groups.iter().map(|group| {
            let task = Task::Charge { items: group.items.clone(), op, at };
            self.servers.execute(group.slot, task, left)
        });
        join_all(tasks).await
    }

    /// Refunds a charge in the background.
    fn refund(self: &Arc<Self>, group: HashSlotCharges, charged_at: Time, at: Option<Time>) {
        let inner = self.clone();
        let task = Task::Charge { items: group.items, op: ChargeOp::Refund(Some(charged_at)), at };
        tokio::spawn(async move {
            // A charge that cannot be refunded expires.
            let _ = inner.servers.execute(group.slot, task, inner.deadline).await;
        });
    }
}

impl HashSlotCharges {
    /// Copies the decisions to the indexes of their charges.
    fn copy_into(&self, reply: Box<Reply>, verdict: &mut Verdict) {
        // The earliest charge of all: a later refund then returns at most what still counts for each limit.
        verdict.at = if verdict.at == Time::EPOCH { reply.at } else { verdict.at.min(reply.at) };
        for (index, decision) in self.indices.iter().zip(reply.verdict.decisions) {
            if verdict.decisions.len() <= *index {
                verdict.decisions.resize(index + 1, NO_LIMIT);
            }
            verdict.decisions[*index] = decision;
        }
    }
}
