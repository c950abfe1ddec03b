//! How leases are used: what is spent, and what is done for that in the background.

use std::sync::{Arc, Weak};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tollgate_core::{Decision, Time};

use super::Inner;
use super::lease::{Chores, Spent, Unspent};
use super::link::{StoreError, Task, Told, What};
use crate::clock::Clock as _;
use crate::store::{Charge, NO_LIMIT, Verdict};

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
            self.denials.learn(charges, &verdict, now);
            return Ok(verdict);
        }
        let each = || charges.iter().zip(&spent);
        let others: SmallVec<[Charge; 4]> =
            each().filter(|(_, spent)| spent.is_none()).map(|(charge, _)| *charge).collect();
        let asked = match others.is_empty() {
            true => Ok(Verdict::default()),
            false => self.ask(&others, false, None).await,
        };
        let is_allowed = asked.as_ref().is_ok_and(Verdict::allowed);
        if !is_allowed {
            let taken_back =
                each().filter_map(|(charge, spent)| self.leases.unspend(charge, spent.as_ref()?));
            self.start(Chores { give_back: taken_back.collect(), ..Chores::default() });
        }
        let mut told = asked?.decisions.into_iter();
        let decisions = each().map(|(charge, spent)| match spent {
            Some(Spent { decision, .. }) if is_allowed => *decision,
            // Nothing was taken after all.
            Some(Spent { decision, .. }) => Decision {
                remaining: decision.remaining.saturating_add(charge.cost).min(decision.limit),
                ..*decision
            },
            None => told.next().unwrap_or(NO_LIMIT),
        });
        Ok(Verdict { decisions: decisions.collect(), ..Verdict::default() })
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

    async fn give_back_all(&self, unspent: Vec<Unspent>) {
        for Unspent { charge, taken_at } in unspent {
            // What cannot be given back expires.
            let _ = self.carry_out(&charge, What::GiveBack(taken_at)).await;
        }
    }

    async fn carry_out(&self, charge: &Charge, what: What) -> Result<Told, StoreError> {
        let item = self.item(charge);
        let slot = self.servers.slot(&item.key);
        let task = Task::Charge { items: smallvec![item], what, at: None };
        self.servers.carry_out(slot, task, self.deadline).await
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
