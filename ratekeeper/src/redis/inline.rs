//! Inline limits, and refunds.

use std::sync::Arc;

use futures_util::future::join_all;
use ratekeeper_core::{Limit, Time};
use smallvec::{SmallVec, smallvec};

use super::call::{ChargeOp, Item, Task};
use super::protocol::PackedLimit;
use super::{Inner, StoreError};
use crate::store::{ChargeError, InlineLimit, Key, StoreUnavailable, Verdict};

impl Inner {
    /// The charge of an inline limit. The key's name contains everything that its state depends on and, for a bucket,
    /// also the capacity, as in the memory store.
    pub(super) fn inline_item(&self, limit: &Limit, key: Key, cost: u32) -> Item {
        let packed = PackedLimit::new(limit, limit.limit());
        let mut scale = packed.scale();
        if let Limit::Bucket(bucket) = limit {
            scale.extend(bucket.capacity().to_le_bytes());
        }
        Item { key: self.names.inline_name(limit.name(), &scale, key), limit: Arc::new(packed), cost }
    }

    pub(super) async fn decide_inline(
        self: &Arc<Self>,
        limit: InlineLimit<'_>,
        key: Key,
        cost: u32,
        is_peek: bool,
    ) -> Result<Verdict, ChargeError> {
        let item = match limit {
            InlineLimit::Limit(Limit::Log(_) | Limit::Counter(_)) => {
                return Err(ChargeError::UnsupportedInline);
            }
            InlineLimit::Limit(limit) => self.inline_item(limit, key, cost),
            // The key's name does not contain the parameters: it has one state, whatever they are.
            InlineLimit::Gcra(gcra) => {
                let limit = Arc::new(PackedLimit::gcra(gcra));
                Item { key: self.names.inline_name("gcra", &[], key), limit, cost }
            }
        };
        match self.execute_item(item, is_peek).await {
            Ok(verdict) => Ok(verdict),
            Err(_) => self.fallback.verdict_inline(limit, key, cost, is_peek),
        }
    }

    async fn execute_item(self: &Arc<Self>, item: Item, is_peek: bool) -> Result<Verdict, StoreError> {
        let slot = self.servers.slot(&item.key);
        let op = if is_peek { ChargeOp::Peek } else { ChargeOp::Charge };
        let task = Task::Charge { items: smallvec![item], op, at: None };
        let reply = self.servers.execute(slot, task, self.deadline).await?;
        Ok(Verdict { at: reply.at, ..reply.verdict })
    }

    /// Refunds charges made at `at` by the server's clock, or at an unknown time.
    pub(super) async fn refund_items(
        &self,
        items: impl Iterator<Item = Item>,
        at: Option<Time>,
    ) -> Result<(), StoreUnavailable> {
        let each: SmallVec<[_; 4]> = items
            .map(|item| {
                let slot = self.servers.slot(&item.key);
                let task = Task::Charge { items: smallvec![item], op: ChargeOp::Refund(at), at: None };
                self.servers.execute(slot, task, self.deadline)
            })
            .collect();
        let done: Result<Vec<_>, StoreError> = join_all(each).await.into_iter().collect();
        done.map(drop).map_err(|why| StoreUnavailable(why.to_string()))
    }
}
