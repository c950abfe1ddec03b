//! Spends leases, and takes and refunds them in the background.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper_core::{Decision, Time};
use smallvec::{SmallVec, smallvec};

use super::Inner;
use super::call::{ChargeOp, Reply, Task};
use super::lease::{LeaseTasks, SpentUnits, UnspentUnits};
use super::store_error::StoreError;
use crate::clock::Clock as _;
use crate::store::{Charge, NO_LIMIT, Verdict};

/// Time limit of background calls.
const BACKGROUND_TIMEOUT: Duration = Duration::from_secs(1);
/// Refunds sent at the same time.
const CONCURRENT_REFUNDS: usize = 64;

/// A verdict on charges of which some are spent from leases.
type SpendFuture<'a> = Pin<Box<dyn Future<Output = Result<Verdict, StoreError>> + Send + 'a>>;

impl Inner {
    /// Spends leases where there are any and checks the other charges in Redis, unless the denial cache has the
    /// verdict.
    pub(super) async fn spend_or_call(
        self: &Arc<Self>,
        charges: &[Charge],
        now: Time,
    ) -> Result<Verdict, StoreError> {
        // Boxed, so that limits without leases do not reserve memory for it.
        if let Some(spending) = self.spend(charges, now) {
            return spending.await;
        }
        if let Some(verdict) = self.denials.get(charges, now) {
            return Ok(verdict);
        }
        let verdict = self.call(charges, false, None).await?;
        // In a cluster, keys in several hash slots may be charged briefly by a request that is denied and
        // refunded, so their denials are not cached.
        if !self.servers.is_cluster() || charges.iter().all(|charge| charge.key == charges[0].key) {
            self.denials.insert(charges, &verdict, now);
        }
        Ok(verdict)
    }

    /// Spends leases. `None` if none of the charges has one.
    fn spend<'a>(self: &'a Arc<Self>, charges: &'a [Charge], now: Time) -> Option<SpendFuture<'a>> {
        let mut tasks = LeaseTasks::default();
        let spent: SmallVec<[Option<SpentUnits>; 4]> =
            charges.iter().map(|charge| self.leases.spend(charge, now, &mut tasks)).collect();
        self.start(tasks);
        if spent.iter().all(Option::is_none) {
            return None;
        }
        Some(Box::pin(self.charge_others(SpendGuard { inner: self, charges, spent }, now)))
    }

    /// Checks the charges that are not spent from leases.
    async fn charge_others(
        self: &Arc<Self>,
        guard: SpendGuard<'_>,
        now: Time,
    ) -> Result<Verdict, StoreError> {
        let others: SmallVec<[Charge; 4]> =
            guard.each().filter(|(_, spent)| spent.is_none()).map(|(charge, _)| *charge).collect();
        let verdict = match others.is_empty() {
            true => Verdict::default(),
            false => self.call(&others, false, None).await?,
        };
        let is_allowed = verdict.allowed();
        // The earliest charge of all: a later refund then returns at most what still counts for each limit.
        let taken = guard.each().filter_map(|(_, spent)| spent.as_ref().map(|spent| spent.taken_at));
        let at = taken.chain((!others.is_empty()).then_some(verdict.at)).min().unwrap_or(now);
        let mut decided = verdict.decisions.into_iter();
        let decisions = guard.each().map(|(charge, spent)| match spent {
            Some(SpentUnits { decision, .. }) if is_allowed => *decision,
            // The spend is reversed.
            Some(SpentUnits { decision, .. }) => Decision {
                remaining: decision.remaining.saturating_add(charge.cost).min(decision.limit),
                ..*decision
            },
            None => decided.next().unwrap_or(NO_LIMIT),
        });
        let decisions = decisions.collect();
        if is_allowed {
            guard.keep();
        }
        Ok(Verdict { decisions, at, ..Verdict::default() })
    }

    /// Starts background tasks.
    fn start(self: &Arc<Self>, tasks: LeaseTasks) {
        for charge in tasks.take {
            let inner = self.clone();
            tokio::spawn(async move { inner.request_lease(charge).await });
        }
        if !tasks.refund.is_empty() {
            let inner = self.clone();
            tokio::spawn(async move { inner.refund_all(tasks.refund).await });
        }
    }

    /// Takes a lease.
    async fn request_lease(&self, charge: Charge) {
        let requested_at = self.clock.now();
        let reply = self.execute(&charge, ChargeOp::Charge).await.ok();
        let reply = reply.and_then(|reply| Some((*reply.verdict.decisions.first()?, reply.at)));
        if let Some(unspent) = self.leases.store_lease(charge, requested_at, self.clock.now(), reply) {
            self.refund_all(vec![unspent]).await;
        }
    }

    pub(super) async fn refund_all(&self, unspent: Vec<UnspentUnits>) {
        // Bounded concurrency; concurrent refunds share calls.
        for unspent in unspent.chunks(CONCURRENT_REFUNDS) {
            join_all(unspent.iter().map(|unspent| self.refund_one(*unspent))).await;
        }
    }

    async fn refund_one(&self, unspent: UnspentUnits) {
        let refunded = self.execute(&unspent.charge, ChargeOp::Refund(Some(unspent.taken_at))).await;
        // Refunds that were not sent are retried. Others may have been applied, and a retry could refund twice.
        if let Err(StoreError::CircuitOpen | StoreError::Overloaded | StoreError::Unreachable(_)) = refunded {
            self.leases.keep_refund(unspent);
        }
    }

    async fn execute(&self, charge: &Charge, op: ChargeOp) -> Result<Box<Reply>, StoreError> {
        let item = self.item(charge);
        let slot = self.servers.slot(&item.key);
        let task = Task::Charge { items: smallvec![item], op, at: None };
        self.servers.execute(slot, task, BACKGROUND_TIMEOUT).await
    }
}

/// Units a request has spent, until its verdict is known. Dropping this reverses the spend, because the request was
/// denied or cancelled.
struct SpendGuard<'a> {
    inner: &'a Arc<Inner>,
    charges: &'a [Charge],
    spent: SmallVec<[Option<SpentUnits>; 4]>,
}

impl SpendGuard<'_> {
    fn each(&self) -> impl Iterator<Item = (&Charge, &Option<SpentUnits>)> {
        self.charges.iter().zip(&self.spent)
    }

    /// Makes the spend permanent, because the request is allowed.
    fn keep(mut self) {
        self.spent.clear();
    }
}

impl Drop for SpendGuard<'_> {
    fn drop(&mut self) {
        let leases = &self.inner.leases;
        let too_late = self.each().filter_map(|(charge, spent)| leases.unspend(charge, spent.as_ref()?));
        too_late.for_each(|unspent| leases.keep_refund(unspent));
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
