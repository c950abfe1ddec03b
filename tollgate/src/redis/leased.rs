//! How leases are used: what is spent, and what is done for that in the background.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};
use tollgate_core::{Decision, Time};

use super::Inner;
use super::lease::{Chores, Spent, Unspent};
use super::link::{StoreError, Task, Told, What};
use crate::clock::Clock as _;
use crate::store::{Charge, NO_LIMIT, Verdict};

/// How long what happens in the background may take.
const UNHURRIED: Duration = Duration::from_secs(1);
/// How many slices are given back at the same time.
const GIVEN_BACK_AT_ONCE: usize = 64;

impl Inner {
    /// Spends what was taken ahead for the charges, and asks Redis for the others unless it is known what it says.
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
            // With several nodes another request may have been charged for a moment, and is given back.
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
        // The first of them all: whoever gives back later gets no more than is still there of each.
        let taken = spending.each().filter_map(|(_, spent)| spent.as_ref().map(|spent| spent.taken_at));
        let at = taken.chain((!others.is_empty()).then_some(told.at)).min().unwrap_or(now);
        let mut told = told.decisions.into_iter();
        let decisions = spending.each().map(|(charge, spent)| match spent {
            Some(Spent { decision, .. }) if is_allowed => *decision,
            // Nothing was taken after all.
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

    /// Nobody waits for these.
    fn start(self: &Arc<Self>, chores: Chores) {
        for charge in chores.take {
            let inner = self.clone();
            tokio::spawn(async move { inner.take_ahead(charge).await });
        }
        if !chores.give_back.is_empty() {
            let inner = self.clone();
            tokio::spawn(async move { inner.give_back_all(chores.give_back).await });
        }
    }

    /// Takes a slice.
    async fn take_ahead(&self, charge: Charge) {
        let asked_at = self.clock.now();
        let told = self.carry_out(&charge, What::Make).await.ok();
        let told = told.and_then(|told| Some((*told.verdict.decisions.first()?, told.at)));
        if let Some(unspent) = self.leases.taken(charge, asked_at, self.clock.now(), told) {
            self.give_back_all(vec![unspent]).await;
        }
    }

    pub(super) async fn give_back_all(&self, unspent: Vec<Unspent>) {
        // So many at once, which then share calls.
        for unspent in unspent.chunks(GIVEN_BACK_AT_ONCE) {
            join_all(unspent.iter().map(|unspent| self.give_back_one(*unspent))).await;
        }
    }

    async fn give_back_one(&self, unspent: Unspent) {
        let given_back = self.carry_out(&unspent.charge, What::GiveBack(Some(unspent.taken_at))).await;
        // What was not sent is tried again. What may have been is not: it would be given back twice.
        if let Err(StoreError::Away | StoreError::Busy | StoreError::Unreachable(_)) = given_back {
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

/// What a request has spent, until it is known whether it passes. If it does not, or nobody waits for it any more, that
/// is taken back.
struct Spending<'a> {
    inner: &'a Arc<Inner>,
    charges: &'a [Charge],
    spent: SmallVec<[Option<Spent>; 4]>,
}

impl Spending<'_> {
    fn each(&self) -> impl Iterator<Item = (&Charge, &Option<Spent>)> {
        self.charges.iter().zip(&self.spent)
    }

    /// The request passes.
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

/// Gives back what nobody has spent in time, as long as the store is there.
pub(super) async fn sweep(store: Weak<Inner>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(store) = store.upgrade() else { return };
        let unspent = store.leases.sweep(store.clock.now());
        store.give_back_all(unspent).await;
    }
}
