use std::time::Duration;

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

    /// Undoes a charge of `cost` that was made at an instant: the key is never better off than if it had not been made, on
    /// a clock that did not step back in between, but that a window or period which the charge began stays where it is.
    /// Where that cannot be told, too little is given back; a state so far ahead that its clock was wrong gives nothing.
    ///
    /// If the instant is not known, what is given back is the oldest that still counts: whichever charge it was, no
    /// younger one leaves before its time. Nothing is given back that was not taken.
    fn give_back(&self, state: &mut Self::State, now: Time, cost: u32, at: Option<Time>);

    /// Whether denied requests count against the key, too (a log with [`Count::All`](crate::Count::All)).
    fn counts_denied(&self) -> bool {
        false
    }

    /// The time over which a key is judged. A clock may step back by so much without giving anything back: a store
    /// that wants to keep that promise forgets no state that was not fresh so long ago.
    fn window(&self) -> Duration;

    /// [`decide`](Algorithm::decide) for a state that must not grow. Where there is no room to remember a request
    /// exactly, it is remembered as a later one: nothing is ever given back too early.
    fn decide_in_place(&self, state: &mut Self::State, now: Time, cost: u32) -> Decision {
        self.decide(state, now, cost)
    }

    /// A [`fresh`](Algorithm::fresh) state with the least memory that [`decide_in_place`](Algorithm::decide_in_place)
    /// needs.
    fn fresh_in_place(&self) -> Self::State {
        self.fresh()
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
