//! Limits that come with their requests, and charges that are undone.

use std::sync::Arc;

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};
use tollgate_core::{Limit, Time};

use super::link::{Item, Task, What};
use super::protocol::Packed;
use super::{Inner, StoreError};
use crate::store::{ChargeError, Key, Unreached, Verdict};

impl Inner {
    /// The charge of a limit that is none of ours. All that its state means nothing without is in the key's name; of a
    /// bucket also its size, as in memory.
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
            return Err(ChargeError::NotToBeBrought);
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

    /// Undoes charges that were made at a time of the server's clock, or at one that is not known.
    pub(super) async fn undo(
        &self,
        items: impl Iterator<Item = Item>,
        at: Option<Time>,
    ) -> Result<(), Unreached> {
        let each: SmallVec<[_; 4]> = items
            .map(|item| {
                let slot = self.servers.slot(&item.key);
                let task = Task::Charge { items: smallvec![item], what: What::GiveBack(at), at: None };
                self.servers.carry_out(slot, task, self.deadline)
            })
            .collect();
        let done: Result<Vec<_>, StoreError> = join_all(each).await.into_iter().collect();
        done.map(drop).map_err(|why| Unreached(why.to_string()))
    }
}
