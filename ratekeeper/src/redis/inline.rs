//! Inline limits, and refunds.

use std::sync::Arc;

use futures_util::future::join_all;
use ratekeeper_core::{Limit, Time};
use smallvec::{SmallVec, smallvec};

use super::batcher::{Item, Task, What};
use super::protocol::Packed;
use super::{Inner, StoreError};
use crate::store::{ChargeError, Key, StoreUnavailable, Verdict};

impl Inner {
    /// The charge of an inline limit. The key's name contains everything that its state depends on and, for a bucket,
    /// also the capacity, as in the memory store.
    pub(super) fn brought(&self, limit: &Limit, key: Key, cost: u32) -> Item {
        let packed = Packed::new(limit, limit.limit());
        let mut scale = packed.scale();
        if let Limit::Bucket(bucket) = limit {
            scale.extend(bucket.capacity().to_le_bytes());
        }
        Item { key: self.names.brought(limit.name(), &scale, key), limit: Arc::new(packed), cost }
    }

    pub(super) async fn decide_by(
        self: &Arc<Self>,
        limit: &Limit,
        key: Key,
        cost: u32,
        is_look: bool,
    ) -> Result<Verdict, ChargeError> {
        if matches!(limit, Limit::Log(_) | Limit::Counter(_)) {
            return Err(ChargeError::UnsupportedInline);
        }
        let item = self.brought(limit, key, cost);
        let slot = self.servers.slot(&item.key);
        let what = if is_look { What::Look } else { What::Make };
        let task = Task::Charge { items: smallvec![item], what, at: None };
        match self.servers.carry_out(slot, task, self.deadline).await {
            Ok(told) => Ok(Verdict { at: told.at, ..told.verdict }),
            Err(_) => self.fallback.verdict_by(limit, key, cost, is_look),
        }
    }

    /// Refunds charges made at `at` by the server's clock, or at an unknown time.
    pub(super) async fn undo(
        &self,
        items: impl Iterator<Item = Item>,
        at: Option<Time>,
    ) -> Result<(), StoreUnavailable> {
        let each: SmallVec<[_; 4]> = items
            .map(|item| {
                let slot = self.servers.slot(&item.key);
                let task = Task::Charge { items: smallvec![item], what: What::GiveBack(at), at: None };
                self.servers.carry_out(slot, task, self.deadline)
            })
            .collect();
        let done: Result<Vec<_>, StoreError> = join_all(each).await.into_iter().collect();
        done.map(drop).map_err(|why| StoreUnavailable(why.to_string()))
    }
}
