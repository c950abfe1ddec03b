//! Conversion of the states in a table when its limit changes.

use ratekeeper_core::{Limit, Time};

use super::Table;
use crate::memory::line::{self, LockedLine};
use crate::memory::overflow::WhenFull;
use crate::memory::pack::PackState;
use crate::memory::predecessor::Migratable;
use crate::memory::scale::Scale;
use crate::memory::shard::scale;
use crate::sync::lock;

impl<A: PackState<W> + Migratable, const W: usize> Table<A, W> {
    /// Converts all lines that are still in the scale before.
    pub(super) fn convert_all(&self, current: &Scale<A>) {
        if !A::HAS_SCALE {
            return;
        }
        for (index, line) in self.shared.lines()[..self.shared.lines].iter().enumerate() {
            // Most lines of a large table have never been written, and have no memory yet.
            if !line::is_empty::<W>(line) {
                self.convert(&mut line::lock(line), index, current);
            }
        }
        drop(self.shared.overflow.hold(WhenFull::Share, current.id.bit, |state| current.convert(state)));
    }

    /// Before `limit`, with windows of another length, replaces the current limit at `now`: removes the counts of
    /// windows that have ended, which a longer window would revive.
    pub(super) fn end_windows(&self, limit: &Limit, now: Time) {
        let before = &self.scale.limit;
        // States with a scale are converted when they are first used.
        if A::HAS_SCALE || limit.window() == before.window() {
            return;
        }
        let end = |state: A::State| {
            let migrated = limit.migrate_state(before, A::any_state(state), now);
            migrated
                .and_then(|state| self.algorithm.own_state(state))
                .unwrap_or_else(|| self.algorithm.fresh())
        };
        for (index, line) in self.shared.lines()[..self.shared.lines].iter().enumerate() {
            if !line::is_empty::<W>(line) {
                self.rewrite(&mut line::lock(line), index, end);
            }
        }
        self.shared.overflow.rewrite(end);
    }

    /// Converts the line with this index and its spilled keys, if it is still in the scale before.
    pub(super) fn convert(&self, locked: &mut LockedLine<'_>, index: usize, current: &Scale<A>) {
        if !A::HAS_SCALE || locked.scale() == current.id.bit {
            return;
        }
        self.rewrite(locked, index, |state| current.convert(state));
        locked.set_scale(current.id.bit);
    }

    /// Replaces the states of the line with this index and of its spilled keys.
    fn rewrite(&self, locked: &mut LockedLine<'_>, index: usize, change: impl Fn(A::State) -> A::State) {
        for entry in 0..line::entries::<W>() {
            if line::is_in_use(locked.line(), entry) {
                let state = self.algorithm.unpack(line::state(locked.line(), entry));
                locked.set_state(entry, self.algorithm.pack(&change(state)));
            }
        }
        if locked.has_spilled() {
            // The hashes of a line are adjacent, and so are the shards of its spilled keys.
            let first_hash = |line: usize| ((line as u128) << 64).div_ceil(self.shared.lines as u128);
            let shard = |hash: u128| scale(hash as u64, self.shared.spill.len());
            for spill in &self.shared.spill[shard(first_hash(index))..=shard(first_hash(index + 1) - 1)] {
                for (hash, state) in lock(spill).iter_mut() {
                    if scale(hash, self.shared.lines) == index {
                        *state = change(state.clone());
                    }
                }
            }
        }
    }
}
