//! The bytes of all tables of a store, of all its generations together.

use std::sync::Arc;

use super::overflow::Quota;

/// Bytes that a table may use. They are free again when the table is dropped, which is when the last generation that
/// uses it is gone.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<Quota>,
    bytes: usize,
}

impl Reservation {
    /// Reserves at most `wanted` bytes for the table that replaces another one of the same limit.
    pub(crate) fn for_replacement(budget: &Arc<Quota>, wanted: usize) -> Reservation {
        Reservation::take(budget, wanted.min(budget.left()))
    }

    /// Reserves at most `wanted` bytes for a new table, and at most half of what is left, so that a table which is
    /// added later gets memory, too.
    pub(crate) fn for_new(budget: &Arc<Quota>, wanted: usize) -> Reservation {
        Reservation::take(budget, wanted.min(budget.left() / 2))
    }

    fn take(budget: &Arc<Quota>, mut bytes: usize) -> Reservation {
        // Fails only if another reload has just reserved what was left.
        while !budget.take(bytes) {
            bytes = bytes.min(budget.left()) / 2;
        }
        Reservation { budget: budget.clone(), bytes }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns what the table does not need.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let unused = self.bytes.saturating_sub(bytes);
        self.budget.refund(unused);
        self.bytes -= unused;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.refund(self.bytes);
    }
}
