use std::time::Duration;

use crate::{Algorithm, Decision, Rate, RetryAfter, Time};

/// A token bucket whose tokens arrive together at the end of each period.
///
/// Periods are counted from the first request of a fresh key. When the bucket becomes full at the end of a period
/// the key is fresh again, and its next request starts a new count.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Steps {
    capacity: u32,
    rate: Rate,
    /// Periods from empty to full.
    periods_to_fill: u64,
}

/// What a stepped bucket remembers of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StepsState {
    /// Where the running period began, in nanoseconds since the epoch.
    pub period_start: u64,
    /// Tokens that are missing; zero is a fresh key.
    pub used: u32,
}

impl Steps {
    pub(crate) fn new(capacity: u32, rate: Rate) -> Steps {
        Steps { capacity, rate, periods_to_fill: u64::from(capacity).div_ceil(rate.count()) }
    }

    /// The most that the bucket holds.
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

    /// So many periods and nanoseconds. 2^32 periods of 366 days are more nanoseconds than 64 bits count.
    fn wait(&self, periods: u64, offset_ns: u64) -> Duration {
        crate::math::nanos(u128::from(periods) * u128::from(self.rate.period_ns()) + u128::from(offset_ns))
    }

    /// The state as it stands at `now`: past periods paid in, a clock that stepped back made good.
    fn settled(&self, state: StepsState, now: Time) -> StepsState {
        let now = now.as_nanos();
        let StepsState { period_start, used } = state;
        if used == 0 {
            return StepsState { period_start: now, used };
        }
        if now < period_start {
            let behind = Duration::from_nanos(period_start - now);
            return StepsState {
                period_start: if behind <= self.window() { period_start } else { now },
                used,
            };
        }
        let periods = (now - period_start) / self.rate.period_ns();
        let arrived = periods.saturating_mul(self.rate.count());
        match u64::from(used).checked_sub(arrived) {
            // Below `used`, so it fits.
            Some(left) if left > 0 => {
                StepsState { period_start: period_start + periods * self.rate.period_ns(), used: left as u32 }
            }
            _ => StepsState { period_start: now, used: 0 },
        }
    }

    /// See [`Limit::carried`](crate::Limit::carried).
    pub(crate) fn carried(&self, from: &Steps, state: StepsState, at: Time) -> StepsState {
        let StepsState { period_start, used } = from.settled(state, at);
        StepsState {
            period_start: match self.rate.period_ns() == from.rate.period_ns() {
                true => period_start,
                false => period_start.max(at.as_nanos().saturating_sub(self.rate.period_ns())),
            },
            used: used.min(self.capacity.saturating_mul(2)),
        }
    }

    /// Time from `now` until at most `used_max` tokens are missing.
    fn until(&self, settled: StepsState, now: Time, used_max: u32) -> Duration {
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

    fn answer(&self, settled: StepsState, now: Time, cost: u32) -> Decision {
        // More than all may be taken if the limit has been lowered.
        let left = self.capacity.saturating_sub(settled.used);
        let allowed = cost <= left;
        Decision {
            allowed,
            limit: self.capacity,
            remaining: left,
            retry_after: if allowed {
                RetryAfter::Now
            } else if cost > self.capacity {
                RetryAfter::Never
            } else {
                RetryAfter::After(self.until(settled, now, self.capacity - cost))
            },
            reset_after: self.until(settled, now, 0),
            delay: Duration::ZERO,
        }
    }
}

impl Algorithm for Steps {
    type State = StepsState;

    fn fresh(&self) -> StepsState {
        StepsState::default()
    }

    fn is_fresh(&self, state: &StepsState, now: Time) -> bool {
        self.settled(*state, now).used == 0
    }

    fn decide(&self, state: &mut StepsState, now: Time, cost: u32) -> Decision {
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

    /// Within the period of the charge no token has arrived, so the cost is still missing. The period stays where it
    /// began, even if it was that charge that began it.
    fn give_back(&self, state: &mut StepsState, now: Time, cost: u32, at: Option<Time>) {
        let behind = Duration::from_nanos(state.period_start.saturating_sub(now.as_nanos()));
        let settled = self.settled(*state, now);
        let is_past = at.is_some_and(|at| at.as_nanos() < settled.period_start);
        if settled.used == 0 || behind > self.window() || is_past {
            return;
        }
        let used = settled.used.saturating_sub(cost);
        *state = if used == 0 { self.fresh() } else { StepsState { used, ..settled } };
    }

    fn window(&self) -> Duration {
        Steps::window(self)
    }

    fn look(&self, state: &StepsState, now: Time, cost: u32) -> Decision {
        self.answer(self.settled(*state, now), now, cost)
    }
}
