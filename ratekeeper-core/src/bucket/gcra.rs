use std::time::Duration;

use super::Bucket;
use crate::math::Ticks;
use crate::{Algorithm, Decision, Limit, LimitError, Rate, RefillStyle, RetryAfter, Time};

/// A token bucket whose parameters may differ from request to request: a key keeps one instant, whatever they are, as
/// redis-cell and throttlecrab do (GCRA, the generic cell rate algorithm).
///
/// The units that a key has used count as time: what a slow rate has charged is still charged at a fast one, until
/// the same instant.
///
/// ```
/// use std::time::Duration;
/// use ratekeeper_core::{Algorithm, Gcra, Rate, Time};
///
/// let hourly = Rate::new(1, Duration::from_secs(3600))?;
/// let (four, five) = (Gcra::new(4, hourly)?, Gcra::new(5, hourly)?);
/// let mut state = four.fresh();
/// let allowed = (0..20).filter(|n| [&four, &five][n % 2].decide(&mut state, Time::EPOCH, 1).allowed);
/// assert_eq!(allowed.count(), 5, "not four and five");
/// # Ok::<(), ratekeeper_core::LimitError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gcra(Bucket);

/// The instant at which a key has its full budget again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcraState {
    /// The instant, in ticks.
    pub full_at: u128,
    /// Ticks per nanosecond: the scale of the bucket that was charged last.
    pub ticks_per_ns: u64,
    /// Seconds from empty to full of that bucket, rounded up: without a wrong clock, the instant is no further ahead.
    pub fill_secs: u32,
}

/// An upper bound of ticks to which others can be added: the fill time of any bucket is below 2^96 ticks.
const TICKS_MAX: u128 = 1 << 126;

/// A state more than this many fill times ahead was written by a wrong clock.
const FAR: u128 = 2;

const SECOND_NS: u128 = 1_000_000_000;

impl Gcra {
    /// At most `capacity` units at once, refilled continuously.
    ///
    /// # Errors
    /// If a parameter is out of range, as for [`Limit::token_bucket`].
    pub fn new(capacity: u32, refill: Rate) -> Result<Gcra, LimitError> {
        Limit::token_bucket(capacity, refill, RefillStyle::Smooth)
            .map(|_| Gcra(Bucket::token(capacity, refill)))
    }

    /// The bucket of these parameters.
    pub fn bucket(&self) -> &Bucket {
        &self.0
    }

    /// The same parameters as a limit.
    pub fn to_limit(&self) -> Limit {
        Limit::Bucket(self.0.clone())
    }

    /// The parameters of one of `instances` processes that enforce them together, as [`Limit::share`].
    pub fn share(&self, instances: u32) -> Option<Gcra> {
        match self.to_limit().share(instances)? {
            Limit::Bucket(bucket) => Some(Gcra(bucket)),
            _ => None,
        }
    }

    /// Seconds from empty to full, rounded up.
    fn fill_secs(&self) -> u32 {
        let nanos = self.0.ticks_to_fill.div_up(self.0.ticks_per_ns);
        u32::try_from(nanos.div_ceil(SECOND_NS)).unwrap_or(u32::MAX)
    }

    /// The instant in this bucket's ticks, rounded up.
    fn full_at(&self, state: &GcraState) -> u128 {
        let (from, to) = (state.ticks_per_ns.max(1), self.0.ticks_per_ns);
        if from == to {
            return state.full_at;
        }
        let (nanos, part) = state.full_at.div_rem(from);
        // Both factors of the part are 64 bits wide.
        let part = (u128::from(part) * u128::from(to)).div_ceil(u128::from(from));
        nanos.saturating_mul(u128::from(to)).saturating_add(part)
    }

    /// Ticks until the bucket is full, and whether a wrong clock wrote the state, which then counts as a bucket that
    /// was emptied just now.
    fn missing(&self, state: &GcraState, now: Time) -> (u128, bool) {
        let missing = self.full_at(state).saturating_sub(self.0.ticks_at(now)).min(TICKS_MAX);
        let far = FAR * u128::from(state.fill_secs) * SECOND_NS;
        match state.fill_secs < u32::MAX && missing.div_up(self.0.ticks_per_ns) > far {
            true => (self.0.ticks_to_fill, true),
            false => (missing, false),
        }
    }

    /// The decision without a charge. An instant beyond this bucket's capacity, by a charge with other parameters,
    /// denies a cost of 0, too.
    fn answer(&self, missing: u128, cost: u32) -> Decision {
        let decision = self.0.answer(missing, cost);
        match missing.checked_sub(self.0.ticks_to_fill) {
            Some(above @ 1..) if cost == 0 => {
                Decision { allowed: false, retry_after: RetryAfter::After(self.0.wait(above)), ..decision }
            }
            _ => decision,
        }
    }

    fn state_at(&self, full_at: u128) -> GcraState {
        GcraState { full_at, ticks_per_ns: self.0.ticks_per_ns, fill_secs: self.fill_secs() }
    }
}

impl Algorithm for Gcra {
    type State = GcraState;

    fn fresh(&self) -> GcraState {
        GcraState { full_at: 0, ticks_per_ns: 1, fill_secs: 0 }
    }

    fn is_fresh(&self, state: &GcraState, now: Time) -> bool {
        self.full_at(state) <= self.0.ticks_at(now)
    }

    fn decide(&self, state: &mut GcraState, now: Time, cost: u32) -> Decision {
        let bucket = &self.0;
        let (missing, is_wrong) = self.missing(state, now);
        let mut decision = self.answer(missing, cost);
        let after = bucket.with_cost(missing, cost).unwrap_or(missing);
        if after > missing {
            decision.remaining = bucket.remaining(after);
            decision.reset_after = bucket.wait(after);
        }
        if after > missing || is_wrong {
            *state = self.state_at(bucket.ticks_at::<u128>(now) + after);
        }
        decision
    }

    fn peek(&self, state: &GcraState, now: Time, cost: u32) -> Decision {
        self.answer(self.missing(state, now).0, cost)
    }

    fn refund(&self, state: &mut GcraState, now: Time, cost: u32, at: Option<Time>) {
        let mut full_at = self.full_at(state);
        self.0.refund_in(&mut full_at, now, cost, at);
        *state = GcraState { full_at, ticks_per_ns: self.0.ticks_per_ns, ..*state };
    }

    fn window(&self) -> Duration {
        self.0.window()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// With the same parameters each time, also if the clock is wrong for a while.
    #[test]
    fn unchanged_parameters_decide_like_a_token_bucket() {
        let rate = Rate::new(7, HOUR).unwrap();
        let gcra = Gcra::new(7, rate).unwrap();
        let (mut instant, mut full_at) = (gcra.fresh(), gcra.bucket().fresh());
        let mut random = 1_u64;
        for step in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let now = Time::from_nanos((random >> 20) % (6 * 3_600_000_000_000));
            let cost = (random >> 61) as u32 + 1;
            let wanted = gcra.bucket().decide(&mut full_at, now, cost);
            assert_eq!(gcra.peek(&instant, now, cost).allowed, wanted.allowed, "step {step}");
            assert_eq!(gcra.decide(&mut instant, now, cost), wanted, "step {step}");
        }
    }

    #[test]
    fn slowest_bucket_is_readable_at_the_finest_scale() {
        let slow = Gcra::new(u32::MAX, Rate::new(1, Duration::from_secs(366 * 86_400)).unwrap()).unwrap();
        let fine = Gcra::new(1, Rate::new(9_999_991, Duration::from_secs(1)).unwrap()).unwrap();
        let mut state = slow.fresh();
        assert!(slow.decide(&mut state, Time::MAX, u32::MAX).allowed);
        let denial = fine.decide(&mut state, Time::MAX, 1);
        assert!(!denial.allowed && denial.remaining == 0);
        assert!(!fine.peek(&state, Time::MAX, 0).allowed);
    }
}
