//! Encoding of key states as 64-bit words, in as few words as a limit allows.

use std::time::Duration;

use ratekeeper_core::{
    Algorithm, Bucket, Counter, CounterState, Decision, FixedWindow, FixedWindowState, NarrowBucket,
    SteppedBucket, SteppedBucketState, Time,
};

/// An algorithm whose states are kept in `W` words each.
pub(crate) trait PackState<const W: usize>: Algorithm {
    fn pack(&self, state: &Self::State) -> [u64; W];
    fn unpack(&self, words: [u64; W]) -> Self::State;
}

impl PackState<1> for NarrowBucket {
    #[inline]
    fn pack(&self, full_at: &u64) -> [u64; 1] {
        [*full_at]
    }

    #[inline]
    fn unpack(&self, [full_at]: [u64; 1]) -> u64 {
        full_at
    }
}

impl PackState<2> for Bucket {
    #[inline]
    fn pack(&self, full_at: &u128) -> [u64; 2] {
        [*full_at as u64, (*full_at >> 64) as u64]
    }

    #[inline]
    fn unpack(&self, [low, high]: [u64; 2]) -> u128 {
        u128::from(low) | u128::from(high) << 64
    }
}

impl PackState<2> for SteppedBucket {
    #[inline]
    fn pack(&self, state: &SteppedBucketState) -> [u64; 2] {
        [state.period_start, u64::from(state.used)]
    }

    #[inline]
    fn unpack(&self, [period_start, used]: [u64; 2]) -> SteppedBucketState {
        SteppedBucketState { period_start, used: used as u32 }
    }
}

/// The number of bits that can represent any number up to `max`.
#[inline]
fn bits(max: u64) -> u32 {
    u64::BITS - max.leading_zeros()
}

#[inline]
fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// A fixed window whose state is one word. The count gets all bits that the window's number does not need, so that it
/// can represent a count migrated from a higher limit.
#[derive(Clone, Debug)]
pub(crate) struct SmallWindow {
    window: FixedWindow,
    count_bits: u32,
}

impl SmallWindow {
    /// The window, if the limit fits into the count's bits.
    pub(crate) fn new(window: &FixedWindow) -> Option<SmallWindow> {
        let count_bits = (u64::BITS - bits(window.window_max() + 1)).min(u32::BITS);
        let is_enough = u64::from(window.limit()) <= mask(count_bits);
        is_enough.then(|| SmallWindow { window: window.clone(), count_bits })
    }

    /// Caps the count at what its bits can represent, which is at least the limit.
    pub(crate) fn capped(&self, state: FixedWindowState) -> FixedWindowState {
        let max = mask(self.count_bits) as u32;
        FixedWindowState { count: state.count.min(max), ..state }
    }
}

impl Algorithm for SmallWindow {
    type State = FixedWindowState;

    #[inline]
    fn fresh(&self) -> FixedWindowState {
        self.window.fresh()
    }

    #[inline]
    fn is_fresh(&self, state: &FixedWindowState, now: Time) -> bool {
        self.window.is_fresh(state, now)
    }

    #[inline(always)]
    fn decide(&self, state: &mut FixedWindowState, now: Time, cost: u32) -> Decision {
        self.window.decide(state, now, cost)
    }

    #[inline]
    fn peek(&self, state: &FixedWindowState, now: Time, cost: u32) -> Decision {
        self.window.peek(state, now, cost)
    }

    fn refund(&self, state: &mut FixedWindowState, now: Time, cost: u32, at: Option<Time>) {
        self.window.refund(state, now, cost, at);
    }

    fn window(&self) -> Duration {
        self.window.window()
    }
}

impl PackState<1> for SmallWindow {
    #[inline]
    fn pack(&self, state: &FixedWindowState) -> [u64; 1] {
        [state.window << self.count_bits | u64::from(state.count)]
    }

    #[inline]
    fn unpack(&self, [word]: [u64; 1]) -> FixedWindowState {
        let bits = self.count_bits;
        FixedWindowState { window: word >> bits, count: (word & mask(bits)) as u32 }
    }
}

impl PackState<2> for FixedWindow {
    #[inline]
    fn pack(&self, state: &FixedWindowState) -> [u64; 2] {
        [state.window, u64::from(state.count)]
    }

    #[inline]
    fn unpack(&self, [window, count]: [u64; 2]) -> FixedWindowState {
        FixedWindowState { window, count: count as u32 }
    }
}

/// A sliding window counter with at most `N` - 1 buckets, whose counts are stored inline.
#[derive(Clone, Debug)]
pub(crate) struct SmallCounter<const N: usize> {
    counter: Counter,
    /// Bits of each count.
    count_bits: u32,
}

impl<const N: usize> SmallCounter<N> {
    /// The counter, if its counts fit.
    pub(crate) fn new(counter: &Counter) -> Option<SmallCounter<N>> {
        let counter = counter.clone();
        ((counter.buckets() as usize) < N).then_some(SmallCounter { counter, count_bits: u32::BITS })
    }

    /// Caps a count at what its bits can represent, which is at least the limit.
    pub(crate) fn capped(&self, count: u32) -> u32 {
        count.min(mask(self.count_bits) as u32)
    }
}

impl<const N: usize> Algorithm for SmallCounter<N> {
    type State = CounterState<[u32; N]>;

    #[inline]
    fn fresh(&self) -> Self::State {
        CounterState { newest: 0, counts: [0; N] }
    }

    #[inline]
    fn is_fresh(&self, state: &Self::State, now: Time) -> bool {
        self.counter.is_fresh_on(state, now)
    }

    #[inline(always)]
    fn decide(&self, state: &mut Self::State, now: Time, cost: u32) -> Decision {
        self.counter.decide_on(state, now, cost)
    }

    #[inline]
    fn peek(&self, state: &Self::State, now: Time, cost: u32) -> Decision {
        self.counter.peek_on(state, now, cost)
    }

    fn refund(&self, state: &mut Self::State, now: Time, cost: u32, at: Option<Time>) {
        self.counter.refund_on(state, now, cost, at);
    }

    fn window(&self) -> Duration {
        self.counter.window()
    }
}

impl SmallCounter<2> {
    /// The counter with states of one word, if the limit fits: like a [`SmallWindow`], with two counts.
    pub(crate) fn in_a_word(counter: &Counter) -> Option<SmallCounter<2>> {
        let count_bits = ((u64::BITS - bits(counter.bucket_max())) / 2).min(u32::BITS);
        let is_enough = u64::from(counter.limit()) <= mask(count_bits);
        SmallCounter::new(counter)
            .filter(|_| is_enough)
            .map(|wide: SmallCounter<2>| SmallCounter { count_bits, ..wide })
    }
}

impl PackState<1> for SmallCounter<2> {
    #[inline]
    fn pack(&self, state: &Self::State) -> [u64; 1] {
        let bits = self.count_bits;
        let [current, previous] = state.counts.map(u64::from);
        [(state.newest << bits | previous) << bits | current]
    }

    #[inline]
    fn unpack(&self, [word]: [u64; 1]) -> Self::State {
        let bits = self.count_bits;
        let count = |word: u64| (word & mask(bits)) as u32;
        CounterState { newest: word >> bits >> bits, counts: [count(word), count(word >> bits)] }
    }
}

impl PackState<2> for SmallCounter<2> {
    #[inline]
    fn pack(&self, state: &Self::State) -> [u64; 2] {
        [state.newest, pair(state.counts)]
    }

    #[inline]
    fn unpack(&self, [newest, counts]: [u64; 2]) -> Self::State {
        CounterState { newest, counts: unpair(counts) }
    }
}

impl PackState<5> for SmallCounter<8> {
    fn pack(&self, state: &Self::State) -> [u64; 5] {
        let [a, b, c, d, e, f, g, h] = state.counts;
        [state.newest, pair([a, b]), pair([c, d]), pair([e, f]), pair([g, h])]
    }

    fn unpack(&self, [newest, ab, cd, ef, gh]: [u64; 5]) -> Self::State {
        let [[a, b], [c, d], [e, f], [g, h]] = [ab, cd, ef, gh].map(unpair);
        CounterState { newest, counts: [a, b, c, d, e, f, g, h] }
    }
}

#[inline]
fn pair([low, high]: [u32; 2]) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline]
fn unpair(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}
