use std::time::Duration;

use crate::math::Ticks;
use crate::{Algorithm, CountRing, Counts, Decision, EdgePolicy, RetryAfter, Time};

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
/// `C` holds the counts: an array where the number of buckets is small, a [`CountRing`] otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CounterState<C> {
    /// The number of the newest bucket since the epoch.
    pub newest: u64,
    /// Units charged in each bucket; at least one more than the window has buckets.
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

/// The counts as they are some buckets later.
struct View<'a, C> {
    counts: &'a C,
    /// The number of buckets that have passed since the counts' newest.
    moved: usize,
}

impl<C: Counts> View<'_, C> {
    #[inline]
    fn get(&self, age: usize) -> u32 {
        age.checked_sub(self.moved).map_or(0, |age| self.counts.get(age))
    }

    #[inline]
    fn sum(&self, age_max: usize) -> u64 {
        age_max.checked_sub(self.moved).map_or(0, |age_max| self.counts.sum(age_max))
    }

    #[inline]
    fn newest_used(&self) -> Option<usize> {
        Some(self.counts.newest_used()? + self.moved)
    }

    #[inline]
    fn oldest_used(&self) -> usize {
        self.counts.oldest_used() + self.moved
    }
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

    /// This counter. If `C` is an array of two counts, the compiler now knows that there is one bucket.
    #[inline(always)]
    fn with_buckets_of<C: Counts>(&self) -> Counter {
        Counter { buckets: self.buckets.clamp(1, C::AGE_MAX as u32), ..*self }
    }

    /// The age of the bucket at the window's edge.
    #[inline]
    fn edge_age(&self) -> usize {
        self.buckets as usize
    }

    /// Shifts the counts to `now` and returns the position within the newest bucket.
    #[inline]
    fn settle<C: Counts>(&self, state: &mut CounterState<C>, now: Time) -> Position {
        let position = self.position(now);
        let counts = &mut state.counts;
        let oldest = self.edge_age();
        if position.bucket >= state.newest {
            let steps = position.bucket - state.newest;
            if steps > 0 {
                counts.shift(steps, oldest);
                state.newest = position.bucket;
            }
            position
        } else if self.is_unused(&View { counts, moved: 0 }, 0) {
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
                let both = counts.get(oldest - 1).saturating_add(counts.get(oldest));
                counts.set(oldest - 1, both.min(self.limit));
                counts.set(oldest, 0);
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
    fn used<C: Counts>(&self, counts: &View<'_, C>, passed: u64) -> u64 {
        let edge = self.edge_age();
        counts.sum(edge - 1) + u64::from(self.edge_share(counts.get(edge), passed))
    }

    /// Whether the estimate is zero.
    #[inline]
    fn is_unused<C: Counts>(&self, counts: &View<'_, C>, passed: u64) -> bool {
        let edge = self.edge_age();
        match counts.newest_used() {
            Some(age) if age < edge => false,
            Some(age) if age == edge => self.edge_share(counts.get(edge), passed) == 0,
            _ => true,
        }
    }

    /// Time until the estimate has fallen from above `used_max` to `used_max`, without further charges.
    fn until<C: Counts>(
        &self,
        counts: &View<'_, C>,
        position: Position,
        now: Time,
        used_max: u64,
    ) -> Duration {
        let edge = self.edge_age();
        let mut inside = counts.sum(edge - 1);
        // The estimate stays the same until the oldest count is at the edge.
        let first = if inside > used_max { edge.saturating_sub(counts.oldest_used()) } else { 0 };
        // While bucket `position.bucket + step` is current, the bucket of the age `edge - step` is at the edge.
        for step in first..=edge {
            let at_edge = u64::from(counts.get(edge - step));
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
        let instant = self.start(position.bucket + edge as u64 + 1);
        crate::math::nanos(instant.saturating_sub(u128::from(now.as_nanos())))
    }

    /// Time until the estimate is zero, without further charges.
    #[inline]
    fn until_unused<C: Counts>(&self, counts: &View<'_, C>, position: Position, now: Time) -> Duration {
        let newest = counts.newest_used().filter(|age| *age <= self.edge_age());
        newest.map_or(Duration::ZERO, |age| self.until_gone(age, counts.get(age), position, now))
    }

    /// Time until the newest count, which the bucket of this age has, no longer counts.
    #[inline]
    fn until_gone(&self, age: usize, count: u32, position: Position, now: Time) -> Duration {
        // The number of the current bucket when that bucket is at the edge.
        let bucket = position.bucket + (self.edge_age() - age) as u64;
        let instant = match self.edge {
            EdgePolicy::Drop => self.start(bucket),
            EdgePolicy::Keep => self.start(bucket + 1),
            EdgePolicy::Weigh => self.start_of_share(bucket, u64::from(count), 0),
        };
        crate::math::nanos(instant.saturating_sub(u128::from(now.as_nanos())))
    }

    /// The first instant of `bucket` at which the counted share of `at_edge` is at most `share_max`.
    fn start_of_share(&self, bucket: u64, at_edge: u64, share_max: u64) -> u128 {
        if at_edge <= share_max {
            return self.start(bucket);
        }
        // floor(at_edge * (window - passed) / window) <= share_max
        //   <=>  (window - passed) * at_edge < window * (share_max + 1)
        //   <=>  passed > window - ceil(window * (share_max + 1) / at_edge)
        let left = u128::product(self.window_ns, share_max + 1).div_up(at_edge);
        (u128::product(bucket, self.window_ns) + (u128::from(self.window_ns) - left) + 1)
            .div_up(u64::from(self.buckets))
    }

    /// The decision without charging.
    #[inline(always)]
    fn decision<C: Counts>(
        &self,
        counts: &View<'_, C>,
        position: Position,
        now: Time,
        cost: u32,
    ) -> Decision {
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
            reset_after: self.until_unused(counts, position, now),
            delay: Duration::ZERO,
        }
    }

    /// [`Algorithm::decide`] for any container of counts.
    #[inline(always)]
    pub fn decide_on<C: Counts>(&self, state: &mut CounterState<C>, now: Time, cost: u32) -> Decision {
        let it = self.with_buckets_of::<C>();
        let position = it.settle(state, now);
        let used = it.used(&View { counts: &state.counts, moved: 0 }, position.passed);
        let left = u64::from(it.limit).saturating_sub(used) as u32;
        if cost == 0 || cost > left {
            return it.decision(&View { counts: &state.counts, moved: 0 }, position, now, cost);
        }
        let newest = state.counts.get(0) + cost;
        state.counts.set(0, newest);
        Decision {
            allowed: true,
            limit: it.limit,
            remaining: left - cost,
            retry_after: RetryAfter::Now,
            reset_after: it.until_gone(0, newest, position, now),
            delay: Duration::ZERO,
        }
    }

    /// [`Algorithm::refund`] for any container of counts.
    ///
    /// The cost is part of the count of the bucket at `at` while the state holds that bucket. If the clock had
    /// stepped back, the cost was charged to a newer bucket, which leaves later; the refund is then smaller.
    pub fn refund_on<C: Counts>(&self, state: &mut CounterState<C>, now: Time, cost: u32, at: Option<Time>) {
        let (newest, held) = (state.newest, u64::from(self.buckets));
        let current = self.position(now).bucket;
        if newest.saturating_sub(current) > held {
            return;
        }
        let counts = &mut state.counts;
        if let Some(at) = at {
            let age = newest.checked_sub(self.position(at).bucket).filter(|age| *age <= held);
            if let Some(age) = age.map(|age| age as usize) {
                counts.set(age, counts.get(age).saturating_sub(cost));
            }
            return;
        }
        // Number of buckets by which the window has moved since the last charge.
        let moved = current.saturating_sub(newest).min(held + 1) as usize;
        let mut left = cost;
        for age in self.oldest_first().filter_map(|age| age.checked_sub(moved)) {
            let taken = left.min(counts.get(age));
            if taken > 0 {
                counts.set(age, counts.get(age) - taken);
                left -= taken;
            }
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
    #[inline]
    pub fn peek_on<C: Counts>(&self, state: &CounterState<C>, now: Time, cost: u32) -> Decision {
        let it = self.with_buckets_of::<C>();
        let position = it.position(now);
        match it.moved(state, position) {
            Some(moved) => it.decision(&View { counts: &state.counts, moved }, position, now, cost),
            None => {
                let mut state = state.clone();
                let position = it.settle(&mut state, now);
                it.decision(&View { counts: &state.counts, moved: 0 }, position, now, cost)
            }
        }
    }

    /// [`Algorithm::is_fresh`] for any container of counts.
    #[inline]
    pub fn is_fresh_on<C: Counts>(&self, state: &CounterState<C>, now: Time) -> bool {
        let it = self.with_buckets_of::<C>();
        let position = it.position(now);
        // If the state lies ahead, it moves back or waits, and all of its counts stay.
        let (moved, passed) = it.moved(state, position).map_or((0, 0), |moved| (moved, position.passed));
        it.is_unused(&View { counts: &state.counts, moved }, passed)
    }

    /// The number of buckets that have passed since the state's newest, as far as it matters. None if the state lies
    /// ahead.
    #[inline]
    fn moved<C>(&self, state: &CounterState<C>, position: Position) -> Option<usize> {
        let steps = position.bucket.checked_sub(state.newest)?;
        Some(steps.min(u64::from(self.buckets) + 1) as usize)
    }
}

impl Algorithm for Counter {
    type State = CounterState<CountRing>;

    fn fresh(&self) -> Self::State {
        CounterState { newest: 0, counts: CountRing::new(self.edge_age() + 1) }
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
        state.counts.heap_bytes()
    }

    #[inline]
    fn touch(&self, state: &Self::State) -> u64 {
        state.counts.touch()
    }
}
