//! Spends leases, and takes and refunds them in the background.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper_core::{Decision, Time};
use smallvec::{SmallVec, smallvec};

use super::Inner;
use super::batcher::{StoreError, Task, Told, What};
use super::lease::{Chores, Spent, Unspent};
use crate::clock::Clock as _;
use crate::store::{Charge, NO_LIMIT, Verdict};

/// Time limit of background calls.
const UNHURRIED: Duration = Duration::from_secs(1);
/// Refunds sent at the same time.
const GIVEN_BACK_AT_ONCE: usize = 64;

impl Inner {
    /// Spends leases where there are any and checks the other charges in Redis, unless the denial cache has the
    /// verdict.
    pub(super) async fn spend_or_ask(
        self: &Arc<Self>,
        charges: &[Charge],
        now: Time,
    ) -> Result<Verdict, StoreError> {
        let mut chores = Chores::default();
        let spent: SmallVec<[Option<Spent>; 4]> =
            charges.iter().map(|charge| self.leases.spend(charge, now, &mut chores)).collect();
        self.start(chores);
        if spent.iter().all(Option::is_none) {
            if let Some(verdict) = self.denials.known(charges, now) {
                return Ok(verdict);
            }
            let verdict = self.ask(charges, false, None).await?;
            // In a cluster, keys in several hash slots may be charged briefly by a request that is denied and
            // refunded, so their denials are not cached.
            if !self.servers.is_cluster() || charges.iter().all(|charge| charge.key == charges[0].key) {
                self.denials.learn(charges, &verdict, now);
            }
            return Ok(verdict);
        }
        let spending = Spending { inner: self, charges, spent };
        let others: SmallVec<[Charge; 4]> =
            spending.each().filter(|(_, spent)| spent.is_none()).map(|(charge, _)| *charge).collect();
        let told = match others.is_empty() {
            true => Verdict::default(),
            false => self.ask(&others, false, None).await?,
        };
        let is_allowed = told.allowed();
        // The earliest charge of all: a later refund then returns at most what still counts for each limit.
        let taken = spending.each().filter_map(|(_, spent)| spent.as_ref().map(|spent| spent.taken_at));
        let at = taken.chain((!others.is_empty()).then_some(told.at)).min().unwrap_or(now);
        let mut told = told.decisions.into_iter();
        let decisions = spending.each().map(|(charge, spent)| match spent {
            Some(Spent { decision, .. }) if is_allowed => *decision,
            // The spend is reversed.
            Some(Spent { decision, .. }) => Decision {
                remaining: decision.remaining.saturating_add(charge.cost).min(decision.limit),
                ..*decision
            },
            None => told.next().unwrap_or(NO_LIMIT),
        });
        let decisions = decisions.collect();
        if is_allowed {
            spending.keep();
        }
        Ok(Verdict { decisions, at, ..Verdict::default() })
    }

    /// Starts background tasks.
    fn start(self: &Arc<Self>, chores: Chores) {
        for charge in chores.take {
            let inner = self.clone();
            tokio::spawn(async move { inner.take_ahead(charge).await });
        }
        if !chores.refund.is_empty() {
            let inner = self.clone();
            tokio::spawn(async move { inner.refund_all(chores.refund).await });
        }
    }

    /// Takes a lease.
    async fn take_ahead(&self, charge: Charge) {
        let asked_at = self.clock.now();
        let told = self.carry_out(&charge, What::Make).await.ok();
        let told = told.and_then(|told| Some((*told.verdict.decisions.first()?, told.at)));
        if let Some(unspent) = self.leases.taken(charge, asked_at, self.clock.now(), told) {
            self.refund_all(vec![unspent]).await;
        }
    }

    pub(super) async fn refund_all(&self, unspent: Vec<Unspent>) {
        // Bounded concurrency; concurrent refunds share calls.
        for unspent in unspent.chunks(GIVEN_BACK_AT_ONCE) {
            join_all(unspent.iter().map(|unspent| self.refund_one(*unspent))).await;
        }
    }

    async fn refund_one(&self, unspent: Unspent) {
        let refunded = self.carry_out(&unspent.charge, What::GiveBack(Some(unspent.taken_at))).await;
        // Refunds that were not sent are retried. Others may have been applied, and a retry could refund twice.
        if let Err(StoreError::Away | StoreError::Busy | StoreError::Unreachable(_)) = refunded {
            self.leases.keep(unspent);
        }
    }

    async fn carry_out(&self, charge: &Charge, what: What) -> Result<Told, StoreError> {
        let item = self.item(charge);
        let slot = self.servers.slot(&item.key);
        let task = Task::Charge { items: smallvec![item], what, at: None };
        self.servers.carry_out(slot, task, UNHURRIED).await
    }
}

/// Units a request has spent, until its verdict is known. Dropping this reverses the spend, because the request was
/// denied or cancelled.
struct Spending<'a> {
    inner: &'a Arc<Inner>,
    charges: &'a [Charge],
    spent: SmallVec<[Option<Spent>; 4]>,
}

impl Spending<'_> {
    fn each(&self) -> impl Iterator<Item = (&Charge, &Option<Spent>)> {
        self.charges.iter().zip(&self.spent)
    }

    /// Makes the spend permanent, because the request is allowed.
    fn keep(mut self) {
        self.spent.clear();
    }
}

impl Drop for Spending<'_> {
    fn drop(&mut self) {
        let leases = &self.inner.leases;
        let too_late = self.each().filter_map(|(charge, spent)| leases.unspend(charge, spent.as_ref()?));
        too_late.for_each(|unspent| leases.keep(unspent));
    }
}

/// Refunds expired leases periodically until the store is dropped.
pub(super) async fn sweep(store: Weak<Inner>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(store) = store.upgrade() else { return };
        let unspent = store.leases.sweep(store.clock.now());
        store.refund_all(unspent).await;
    }
}
