use std::time::Duration;

use crate::{Algorithm, Decision, Rate, RetryAfter, Time};

/// A token bucket that adds a period's tokens together at the end of the period.
///
/// Periods start at the first request of a fresh key. When the bucket is full at the end of a period the key is fresh
/// again, and its next request starts a new period.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SteppedBucket {
    capacity: u32,
    rate: Rate,
    /// Periods from empty to full.
    periods_to_fill: u64,
}

/// The state of one key of a stepped bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SteppedBucketState {
    /// Start of the current period, in nanoseconds since the epoch.
    pub period_start: u64,
    /// Missing tokens; zero is a fresh key.
    pub used: u32,
}

impl SteppedBucket {
    pub(crate) fn new(capacity: u32, rate: Rate) -> SteppedBucket {
        SteppedBucket { capacity, rate, periods_to_fill: u64::from(capacity).div_ceil(rate.count()) }
    }

    /// Maximum number of tokens that the bucket holds.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The refill rate.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// The time from empty to full.
    pub fn window(&self) -> Duration {
        self.wait(self.periods_to_fill, 0)
    }

    /// The longest time that a state counts: it may have been written under a higher capacity, up to one window ahead
    /// of the clock.
    pub(crate) fn missing_max(&self) -> Duration {
        self.wait(u64::from(u32::MAX).div_ceil(self.rate.count()) + self.periods_to_fill, 0)
    }

    /// `periods` periods and `offset_ns` nanoseconds. 2^32 periods of 366 days are more nanoseconds than 64 bits
    /// hold.
    fn wait(&self, periods: u64, offset_ns: u64) -> Duration {
        crate::math::nanos(u128::from(periods) * u128::from(self.rate.period_ns()) + u128::from(offset_ns))
    }

    /// The state as of `now`: adds the tokens of past periods and corrects for a clock that stepped back.
    fn settled(&self, state: SteppedBucketState, now: Time) -> SteppedBucketState {
        let now = now.as_nanos();
        let SteppedBucketState { period_start, used } = state;
        if used == 0 {
            return SteppedBucketState { period_start: now, used };
        }
        if now < period_start {
            let behind = Duration::from_nanos(period_start - now);
            return SteppedBucketState {
                period_start: if behind <= self.window() { period_start } else { now },
                used,
            };
        }
        let periods = (now - period_start) / self.rate.period_ns();
        let arrived = periods.saturating_mul(self.rate.count());
        match u64::from(used).checked_sub(arrived) {
            // Below `used`, so it fits.
            Some(left) if left > 0 => SteppedBucketState {
                period_start: period_start + periods * self.rate.period_ns(),
                used: left as u32,
            },
            _ => SteppedBucketState { period_start: now, used: 0 },
        }
    }

    /// See [`Limit::migrate_state`](crate::Limit::migrate_state).
    pub(crate) fn migrate_state(
        &self,
        from: &SteppedBucket,
        state: SteppedBucketState,
        at: Time,
    ) -> SteppedBucketState {
        let SteppedBucketState { period_start, used } = from.settled(state, at);
        SteppedBucketState {
            period_start: match self.rate.period_ns() == from.rate.period_ns() {
                true => period_start,
                false => period_start.max(at.as_nanos().saturating_sub(self.rate.period_ns())),
            },
            used,
        }
    }

    /// Time from `now` until at most `used_max` tokens are missing.
    fn until(&self, settled: SteppedBucketState, now: Time, used_max: u32) -> Duration {
        if settled.used <= used_max {
            return Duration::ZERO;
        }
        let periods = u64::from(settled.used - used_max).div_ceil(self.rate.count());
        let now = now.as_nanos();
        if now <= settled.period_start {
            self.wait(periods, settled.period_start - now)
        } else {
            self.wait(periods, 0) - Duration::from_nanos(now - settled.period_start)
        }
    }

    fn answer(&self, settled: SteppedBucketState, now: Time, cost: u32) -> Decision {
        // `used` exceeds the capacity after the limit was lowered.
        let left = self.capacity.saturating_sub(settled.used);
        let allowed = cost <= left;
        Decision {
            allowed,
            limit: self.capacity,
            remaining: left,
            retry_after: RetryAfter::of(allowed, cost, self.capacity, || {
                self.until(settled, now, self.capacity - cost)
            }),
            reset_after: self.until(settled, now, 0),
            delay: Duration::ZERO,
        }
    }
}

impl Algorithm for SteppedBucket {
    type State = SteppedBucketState;

    fn fresh(&self) -> SteppedBucketState {
        SteppedBucketState::default()
    }

    fn is_fresh(&self, state: &SteppedBucketState, now: Time) -> bool {
        self.settled(*state, now).used == 0
    }

    fn decide(&self, state: &mut SteppedBucketState, now: Time, cost: u32) -> Decision {
        let settled = self.settled(*state, now);
        let mut decision = self.answer(settled, now, cost);
        let mut after = settled;
        if decision.allowed && cost > 0 {
            after.used += cost;
            decision.remaining = self.capacity - after.used;
            decision.reset_after = self.until(after, now, 0);
        }
        if after.used > 0 {
            *state = after;
        }
        decision
    }

    /// Within the period of the charge no token has arrived, so the cost is still missing. The period keeps its
    /// start, even if the refunded charge started it.
    fn refund(&self, state: &mut SteppedBucketState, now: Time, cost: u32, at: Option<Time>) {
        let behind = Duration::from_nanos(state.period_start.saturating_sub(now.as_nanos()));
        let settled = self.settled(*state, now);
        let is_past = at.is_some_and(|at| at.as_nanos() < settled.period_start);
        if settled.used == 0 || behind > self.window() || is_past {
            return;
        }
        let used = settled.used.saturating_sub(cost);
        *state = if used == 0 { self.fresh() } else { SteppedBucketState { used, ..settled } };
    }

    fn window(&self) -> Duration {
        SteppedBucket::window(self)
    }

    fn peek(&self, state: &SteppedBucketState, now: Time, cost: u32) -> Decision {
        self.answer(self.settled(*state, now), now, cost)
    }
}
