//! Limits that change while their states are in use: states are converted in place, line by line.
//!
//! All generations of a limit share one table. What a state means depends on the limit only for buckets: their states
//! are in a *scale*, the capacity and the rate of one generation. A table has one current scale. Each line has a bit
//! that alternates with the scale, so that a request knows whether the line is still in the scale before; then it
//! converts the whole line. A generation's scale becomes the current one when the generation is first used. Before a
//! further scale is created, all lines are converted to the current one, so no line is ever two scales behind.
//!
//! A generation that is no longer current, because requests of an earlier configuration are still in flight, decides
//! by the current scale.

use std::ops::Deref;
use std::sync::Arc;

use ratekeeper_core::{Algorithm, Limit, Time};

use super::predecessor::Migratable;
use crate::sync::{AtomicU64, Mutex, Ordering, fence, lock};

/// The changes of a table's limit that a state of its predecessor is migrated through one by one. Beyond that, a
/// state skips the oldest of them: its units stay used, but refill at the rate before for longer.
const CHANGES_MAX: usize = 16;

/// Identifies a scale of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaleId {
    number: u64,
    /// The bit of the lines in this scale.
    pub(crate) bit: bool,
}

/// The meaning of the states of one generation.
#[derive(Debug)]
pub(crate) struct Scale<A> {
    pub(crate) id: ScaleId,
    pub(crate) algorithm: A,
    pub(crate) limit: Limit,
    /// The scale that this one replaces.
    replaced: Option<ReplacedScale>,
    /// The limits of this table since its predecessor, each with the instant of its reload.
    pub(crate) changes: Vec<(Limit, Time)>,
}

#[derive(Debug)]
struct ReplacedScale {
    number: u64,
    limit: Limit,
    at: Time,
}

impl<A: Migratable> Scale<A> {
    /// Converts a state of the scale that this one replaces.
    pub(crate) fn convert(&self, state: A::State) -> A::State {
        let Some(ReplacedScale { limit, at, .. }) = &self.replaced else { return state };
        let migrated = self.limit.migrate_state(limit, A::any_state(state), *at);
        // Both scales have the same algorithm and layout, so a state of one is always a state of the other.
        migrated.and_then(|state| self.algorithm.own_state(state)).unwrap_or_else(|| self.algorithm.fresh())
    }
}

/// The scales of a table.
#[derive(Debug)]
pub(crate) struct Scales<A> {
    /// The number of the current scale.
    number: AtomicU64,
    current: Mutex<Arc<Scale<A>>>,
    /// The highest number given to a scale.
    last: AtomicU64,
}

impl<A: Algorithm + Clone> Scales<A> {
    pub(crate) fn new(algorithm: &A, limit: &Limit, changes: Vec<(Limit, Time)>) -> Scales<A> {
        let first = Scale {
            id: ScaleId { number: 0, bit: false },
            algorithm: algorithm.clone(),
            limit: limit.clone(),
            replaced: None,
            changes,
        };
        Scales { number: AtomicU64::new(0), current: Mutex::new(Arc::new(first)), last: AtomicU64::new(0) }
    }

    pub(crate) fn current(&self) -> Arc<Scale<A>> {
        lock(&self.current).clone()
    }

    /// Whether a scale is the current one. A thread that has seen a line in a newer scale sees that it is not.
    #[inline]
    pub(crate) fn is_current(&self, own: ScaleId) -> bool {
        self.number.load(Ordering::Relaxed) == own.number
    }

    /// The scale in which a line that this thread has locked is read and written: `own`, unless another generation is
    /// newer.
    #[inline]
    pub(crate) fn of_locked_line<'a>(&self, own: &'a Arc<Scale<A>>) -> CurrentScale<'a, A>
    where
        A: Migratable,
    {
        if A::HAS_SCALE {
            // Pairs with the fence of `settled`: if that has not seen the lock, this thread sees the scale.
            fence(Ordering::SeqCst);
            if !self.is_current(own.id) {
                return CurrentScale::Other(self.adopt(own));
            }
        }
        CurrentScale::Own(own)
    }

    /// The current scale: `own`, from its first use on, unless a newer one is in use.
    #[cold]
    fn adopt(&self, own: &Arc<Scale<A>>) -> Arc<Scale<A>> {
        let mut current = lock(&self.current);
        if own.replaced.as_ref().is_some_and(|replaced| replaced.number == current.id.number) {
            *current = own.clone();
            self.number.store(current.id.number, Ordering::Relaxed);
        }
        current.clone()
    }

    /// The current scale, before all lines are converted to it. `own` is in use: it is being replaced.
    pub(crate) fn settled(&self, own: &Arc<Scale<A>>) -> Arc<Scale<A>> {
        let current = self.adopt(own);
        fence(Ordering::SeqCst);
        current
    }

    /// A scale for the next generation, which replaces the current one. If states have no scale, they mean the same
    /// in both.
    pub(crate) fn next(&self, current: &Scale<A>, algorithm: A, limit: &Limit, at: Time) -> Scale<A>
    where
        A: Migratable,
    {
        let mut changes = current.changes.clone();
        if !changes.is_empty() {
            let skipped = usize::from(changes.len() >= CHANGES_MAX);
            changes.drain(..skipped);
            changes.push((limit.clone(), at));
        }
        let replaced = ReplacedScale { number: current.id.number, limit: current.limit.clone(), at };
        let (id, replaced) = match A::HAS_SCALE {
            true => {
                let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
                (ScaleId { number, bit: !current.id.bit }, Some(replaced))
            }
            false => (current.id, None),
        };
        Scale { id, algorithm, limit: limit.clone(), replaced, changes }
    }
}

/// The scale of a locked line.
pub(crate) enum CurrentScale<'a, A> {
    Own(&'a Scale<A>),
    Other(Arc<Scale<A>>),
}

impl<A> Deref for CurrentScale<'_, A> {
    type Target = Scale<A>;

    #[inline]
    fn deref(&self) -> &Scale<A> {
        match self {
            CurrentScale::Own(own) => own,
            CurrentScale::Other(current) => current,
        }
    }
}
