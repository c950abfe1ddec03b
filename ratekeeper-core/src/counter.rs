use std::time::Duration;

use crate::math::Ticks;
use crate::{Algorithm, Decision, EdgePolicy, RetryAfter, Time};

/// A sliding window estimated from counters per bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Counter {
    limit: u32,
    window_ns: u64,
    buckets: u32,
    edge: EdgePolicy,
}

/// The state of one key of a sliding window counter.
///
/// `C` holds the counts: an array where the number of buckets is small, a boxed slice otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CounterState<C> {
    /// The number of the newest bucket since the epoch.
    pub newest: u64,
    /// Units charged in each bucket, newest first; at least one more than the window has buckets.
    pub counts: C,
}

/// The position of an instant within its bucket.
#[derive(Clone, Copy)]
struct Position {
    /// The current bucket.
    bucket: u64,
    /// Elapsed part of the current bucket, in 1 / buckets nanoseconds.
    passed: u64,
}

impl Counter {
    pub(crate) fn new(limit: u32, window_ns: u64, buckets: u32, edge: EdgePolicy) -> Counter {
        Counter { limit, window_ns, buckets, edge }
    }

    /// Maximum estimate that is allowed.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// The window's length.
    pub fn window(&self) -> Duration {
        Duration::from_nanos(self.window_ns)
    }

    /// Number of buckets in the window.
    pub fn buckets(&self) -> u32 {
        self.buckets
    }

    /// How the bucket at the window's edge counts.
    pub fn edge(&self) -> EdgePolicy {
        self.edge
    }

    /// The largest bucket number that a state can hold, from which a store derives how many bits to keep.
    pub fn bucket_max(&self) -> u64 {
        self.position(Time::MAX).bucket
    }

    /// A bucket need not be a whole number of nanoseconds, so instants are compared in 1 / buckets of one. The bucket
    /// number fits 64 bits: it is below 2^63 * 1024 / 10^6.
    #[inline]
    fn position(&self, now: Time) -> Position {
        let (bucket, passed) = u128::product(now.as_nanos(), u64::from(self.buckets)).div_rem(self.window_ns);
        Position { bucket: bucket as u64, passed }
    }

    /// The first instant of a bucket, in nanoseconds since the epoch.
    fn start(&self, bucket: u64) -> u128 {
        u128::product(bucket, self.window_ns).div_up(u64::from(self.buckets))
    }

    /// Shifts the counts to `now` and returns the position within the newest bucket.
    #[inline]
    fn settle<C: AsMut<[u32]>>(&self, state: &mut CounterState<C>, now: Time) -> Position {
        let position = self.position(now);
        let counts = state.counts.as_mut();
        let counts = &mut counts[..=self.buckets as usize];
        if position.bucket >= state.newest {
            let steps = position.bucket - state.newest;
            if steps > 0 {
                if steps > u64::from(self.buckets) {
                    counts.fill(0);
                } else {
                    counts.copy_within(..counts.len() - steps as usize, steps as usize);
                    counts[..steps as usize].fill(0);
                }
                state.newest = position.bucket;
            }
            position
        } else if self.used(counts, 0) == 0 {
            // No count is inside the window, so the state may move back.
            state.newest = position.bucket;
            position
        } else if state.newest - position.bucket <= u64::from(self.buckets) {
            // The clock stepped back: the key stays in its bucket until time has caught up.
            Position { bucket: state.newest, passed: 0 }
        } else {
            // A wrong clock wrote the counts: move them to now. How much of the edge bucket counted is unknown, and
            // none of it may return to the budget, so it is added to the next bucket.
            state.newest = position.bucket;
            if self.edge == EdgePolicy::Weigh {
                let oldest = self.buckets as usize;
                let both = counts[oldest - 1].saturating_add(counts[oldest]);
                counts[oldest - 1] = both.min(self.limit);
                counts[oldest] = 0;
            }
            position
        }
    }

    /// The part of the edge bucket that counts.
    #[inline]
    fn edge_share(&self, count: u32, passed: u64) -> u32 {
        match self.edge {
            EdgePolicy::Drop => 0,
            EdgePolicy::Keep => count,
            EdgePolicy::Weigh if count == 0 => 0,
            // At most `count`.
            EdgePolicy::Weigh => {
                u128::product(u64::from(count), self.window_ns - passed).div_rem(self.window_ns).0 as u32
            }
        }
    }

    /// The estimate, rounded down.
    #[inline]
    fn used(&self, counts: &[u32], passed: u64) -> u64 {
        let inside = &counts[..self.buckets as usize];
        let sum: u64 = inside.iter().map(|&count| u64::from(count)).sum();
        sum + u64::from(self.edge_share(counts[self.buckets as usize], passed))
    }

    /// Time until the estimate over settled counts has fallen to `used_max`, without further charges.
    fn until(&self, counts: &[u32], position: Position, now: Time, used_max: u64) -> Duration {
        if self.used(counts, position.passed) <= used_max {
            return Duration::ZERO;
        }
        let buckets = self.buckets as usize;
        let mut inside: u64 = counts[..buckets].iter().map(|&count| u64::from(count)).sum();
        // While bucket `position.bucket + step` is current, `counts[buckets - step]` is at the edge.
        for step in 0..=buckets {
            let at_edge = u64::from(counts[buckets - step]);
            if step > 0 {
                inside -= at_edge;
            }
            let bucket = position.bucket + step as u64;
            if inside > used_max {
                continue;
            }
            let instant = match self.edge {
                EdgePolicy::Drop => self.start(bucket),
                EdgePolicy::Keep if inside + at_edge <= used_max => self.start(bucket),
                EdgePolicy::Keep => continue,
                EdgePolicy::Weigh => self.start_of_share(bucket, at_edge, used_max - inside),
            };
            return crate::math::nanos(instant.saturating_sub(u128::from(now.as_nanos())));
        }
        // After the last count: the edge bucket itself has left the window.
        let instant = self.start(position.bucket + buckets as u64 + 1);
        crate::math::nanos(instant.saturating_sub(u128::from(now.as_nanos())))
    }

    /// The first instant of `bucket` at which the counted share of `at_edge` is at most `share_max`.
    fn start_of_share(&self, bucket: u64, at_edge: u64, share_max: u64) -> u128 {
        if at_edge <= share_max {
            return self.start(bucket);
        }
        // floor(at_edge * (window - passed) / window) <= share_max
        //   <=>  passed * at_edge > window * (at_edge - share_max - 1)
        let (passed, _) = u128::product(self.window_ns, at_edge - share_max - 1).div_rem(at_edge);
        (u128::product(bucket, self.window_ns) + passed + 1).div_up(u64::from(self.buckets))
    }

    #[inline(always)]
    fn answer(&self, counts: &[u32], position: Position, now: Time, cost: u32) -> Decision {
        let used = self.used(counts, position.passed);
        let left = u64::from(self.limit).saturating_sub(used) as u32;
        let allowed = cost <= left;
        Decision {
            allowed,
            limit: self.limit,
            remaining: left,
            retry_after: RetryAfter::of(allowed, cost, self.limit, || {
                self.until(counts, position, now, u64::from(self.limit - cost))
            }),
            reset_after: self.until(counts, position, now, 0),
            delay: Duration::ZERO,
        }
    }

    /// [`Algorithm::decide`] for any container of counts.
    #[inline(always)]
    pub fn decide_on<C: AsMut<[u32]>>(&self, state: &mut CounterState<C>, now: Time, cost: u32) -> Decision {
        let position = self.settle(state, now);
        let counts = state.counts.as_mut();
        let mut decision = self.answer(counts, position, now, cost);
        if decision.allowed && cost > 0 {
            counts[0] += cost;
            decision.remaining -= cost;
            decision.reset_after = self.until(counts, position, now, 0);
        }
        decision
    }

    /// [`Algorithm::refund`] for any container of counts.
    ///
    /// The cost is part of the count of the bucket at `at` while the state holds that bucket. If the clock had
    /// stepped back, the cost was charged to a newer bucket, which leaves later; the refund is then smaller.
    pub fn refund_on<C: AsMut<[u32]>>(
        &self,
        state: &mut CounterState<C>,
        now: Time,
        cost: u32,
        at: Option<Time>,
    ) {
        let (newest, held) = (state.newest, u64::from(self.buckets));
        let current = self.position(now).bucket;
        if newest.saturating_sub(current) > held {
            return;
        }
        let counts = state.counts.as_mut();
        if let Some(at) = at {
            let index = newest.checked_sub(self.position(at).bucket).filter(|index| *index <= held);
            if let Some(count) = index.and_then(|index| counts.get_mut(index as usize)) {
                *count = count.saturating_sub(cost);
            }
            return;
        }
        // Number of buckets by which the window has moved since the last charge.
        let moved = current.saturating_sub(newest).min(held + 1) as usize;
        let mut left = cost;
        for index in self.oldest_first().filter_map(|index| index.checked_sub(moved)) {
            let taken = left.min(counts[index]);
            counts[index] -= taken;
            left -= taken;
        }
    }

    /// The buckets to refund from, in the order in which they leave the window. Under `Weigh` only a share of the
    /// edge bucket counts, so it comes last.
    fn oldest_first(&self) -> impl Iterator<Item = usize> {
        let edge = self.buckets as usize;
        let (first, last) = match self.edge {
            EdgePolicy::Keep => (Some(edge), None),
            EdgePolicy::Weigh => (None, Some(edge)),
            EdgePolicy::Drop => (None, None),
        };
        first.into_iter().chain((0..edge).rev()).chain(last)
    }

    /// [`Algorithm::peek`] for any container of counts.
    pub fn peek_on<C: AsMut<[u32]> + Clone>(
        &self,
        state: &CounterState<C>,
        now: Time,
        cost: u32,
    ) -> Decision {
        let mut state = state.clone();
        let position = self.settle(&mut state, now);
        self.answer(state.counts.as_mut(), position, now, cost)
    }

    /// [`Algorithm::is_fresh`] for any container of counts.
    pub fn is_fresh_on<C: AsMut<[u32]> + Clone>(&self, state: &CounterState<C>, now: Time) -> bool {
        let mut state = state.clone();
        let position = self.settle(&mut state, now);
        self.used(state.counts.as_mut(), position.passed) == 0
    }
}

impl Algorithm for Counter {
    type State = CounterState<Box<[u32]>>;

    fn fresh(&self) -> Self::State {
        CounterState { newest: 0, counts: vec![0; self.buckets as usize + 1].into() }
    }

    fn is_fresh(&self, state: &Self::State, now: Time) -> bool {
        self.is_fresh_on(state, now)
    }

    fn decide(&self, state: &mut Self::State, now: Time, cost: u32) -> Decision {
        self.decide_on(state, now, cost)
    }

    fn refund(&self, state: &mut Self::State, now: Time, cost: u32, at: Option<Time>) {
        self.refund_on(state, now, cost, at);
    }

    fn window(&self) -> Duration {
        Counter::window(self)
    }

    fn peek(&self, state: &Self::State, now: Time, cost: u32) -> Decision {
        self.peek_on(state, now, cost)
    }

    fn heap_bytes(&self, state: &Self::State) -> usize {
        size_of_val(&*state.counts)
    }
}
