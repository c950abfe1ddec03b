use std::time::Duration;

use crate::{Decision, Time};

/// The arithmetic of one limit: pure functions over the state of one key.
///
/// A store keeps the [`State`](Algorithm::State) of each key and runs [`decide`](Algorithm::decide) atomically. Equal
/// states give equal decisions.
pub trait Algorithm {
    /// The state of one key.
    type State: Clone;

    /// The state of a key without requests.
    fn fresh(&self) -> Self::State;

    /// Whether the state can be evicted: from `now` on, every decision equals that of a fresh key.
    fn is_fresh(&self, state: &Self::State, now: Time) -> bool;

    /// Decides a request and charges its cost to the state if it is allowed.
    ///
    /// A denied request is not charged, except as [`counts_denied`](Algorithm::counts_denied) states. A cost of zero
    /// charges nothing, and is allowed unless the key is over its limit.
    fn decide(&self, state: &mut Self::State, now: Time, cost: u32) -> Decision;

    /// Decides without charging. `remaining` and `reset_after` are those of the unchanged key.
    fn peek(&self, state: &Self::State, now: Time, cost: u32) -> Decision;

    /// Refunds a charge of `cost` that was made at the instant `at`.
    ///
    /// The key never ends up with more budget than if the charge had not been made, provided that the clock did not
    /// step back in between; a window or period that the charge started keeps its start. If the exact amount is
    /// unknown, the refund is too small. A state so far ahead that it was written by a wrong clock gets no refund.
    ///
    /// Without `at`, the oldest units that still count are refunded, so that no younger charge expires early. A
    /// refund never exceeds what was charged.
    fn refund(&self, state: &mut Self::State, now: Time, cost: u32, at: Option<Time>);

    /// Whether denied requests are charged, too (a log with [`LogPolicy::All`](crate::LogPolicy::All)).
    fn counts_denied(&self) -> bool {
        false
    }

    /// The time over which a key is limited. A clock may step back by this much without returning budget; a store
    /// that guarantees this keeps every state for this long after it became fresh.
    fn window(&self) -> Duration;

    /// [`decide`](Algorithm::decide) for a state that must not grow. If there is no memory to record a request
    /// exactly, it is recorded as a later one, so no budget returns too early.
    fn decide_in_place(&self, state: &mut Self::State, now: Time, cost: u32) -> Decision {
        self.decide(state, now, cost)
    }

    /// A [`fresh`](Algorithm::fresh) state with the least memory that [`decide_in_place`](Algorithm::decide_in_place)
    /// needs.
    fn fresh_in_place(&self) -> Self::State {
        self.fresh()
    }

    /// Heap bytes that the state holds, for the memory limit of a store.
    fn heap_bytes(&self, _state: &Self::State) -> usize {
        0
    }

    /// Maximum growth of [`heap_bytes`](Algorithm::heap_bytes) by the next decision.
    fn growth_bytes(&self, _state: &Self::State) -> usize {
        0
    }

    /// Reads the memory that the next decision reads first, so that it is cached by then. The value has no meaning.
    fn touch(&self, _state: &Self::State) -> u64 {
        0
    }
}
