use ratekeeper_core::{Algorithm, Decision, Limit, Time};

/// One key under one limit of any algorithm.
pub(crate) trait Key {
    fn decide(&mut self, now: Time, cost: u32) -> Decision;
    fn peek(&self, now: Time, cost: u32) -> Decision;
    fn is_fresh(&self, now: Time) -> bool;
    fn counts_denied(&self) -> bool;
    fn heap_bytes(&self) -> usize;
    /// A second key in the same state.
    fn copy(&self) -> Box<dyn Key>;
}

#[derive(Clone)]
struct KeyState<A: Algorithm> {
    algorithm: A,
    state: A::State,
}

impl<A: Algorithm + Clone + 'static> Key for KeyState<A> {
    fn decide(&mut self, now: Time, cost: u32) -> Decision {
        self.algorithm.decide(&mut self.state, now, cost)
    }

    fn peek(&self, now: Time, cost: u32) -> Decision {
        self.algorithm.peek(&self.state, now, cost)
    }

    fn is_fresh(&self, now: Time) -> bool {
        self.algorithm.is_fresh(&self.state, now)
    }

    fn counts_denied(&self) -> bool {
        self.algorithm.counts_denied()
    }

    fn heap_bytes(&self) -> usize {
        self.algorithm.heap_bytes(&self.state)
    }

    fn copy(&self) -> Box<dyn Key> {
        Box::new(self.clone())
    }
}

/// A fresh key.
pub(crate) fn fresh(limit: &Limit) -> Box<dyn Key> {
    fn boxed<A: Algorithm + Clone + 'static>(algorithm: &A) -> Box<dyn Key> {
        Box::new(KeyState { algorithm: algorithm.clone(), state: algorithm.fresh() })
    }
    match limit {
        Limit::Bucket(it) => boxed(it),
        Limit::SteppedBucket(it) => boxed(it),
        Limit::FixedWindow(it) => boxed(it),
        Limit::Log(it) => boxed(it),
        Limit::Counter(it) => boxed(it),
    }
}
