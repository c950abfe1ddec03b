use crate::{Decision, Time};

/// One limit's arithmetic: pure functions over the state of one key.
///
/// A store keeps the [`State`](Algorithm::State) of each key, and makes [`decide`](Algorithm::decide) one atomic
/// step. Equal states give equal answers.
pub trait Algorithm {
    /// What is remembered of one key.
    type State: Clone;

    /// The state of a key that was never seen.
    fn fresh(&self) -> Self::State;

    /// Whether the state can be forgotten: from `now` on every answer equals that of a fresh key.
    fn is_fresh(&self, state: &Self::State, now: Time) -> bool;

    /// Decides a request, and takes its cost from the state if it is allowed.
    ///
    /// A denied request takes nothing, with the exception named by [`counts_denied`](Algorithm::counts_denied). A
    /// cost of zero only looks, and is allowed wherever the key is not beyond its limit.
    fn decide(&self, state: &mut Self::State, now: Time, cost: u32) -> Decision;

    /// The decision that the request would get, taking nothing: `remaining` and `reset_after` are those of the
    /// untouched key.
    fn look(&self, state: &Self::State, now: Time, cost: u32) -> Decision;

    /// Whether denied requests count against the key, too (a log with [`Count::All`](crate::Count::All)).
    fn counts_denied(&self) -> bool {
        false
    }

    /// Bytes that the state holds outside of itself, so that a store can keep its bound.
    fn heap_bytes(&self, _state: &Self::State) -> usize {
        0
    }

    /// The most bytes by which the next decision can make [`heap_bytes`](Algorithm::heap_bytes) grow.
    fn growth_bytes(&self, _state: &Self::State) -> usize {
        0
    }
}
