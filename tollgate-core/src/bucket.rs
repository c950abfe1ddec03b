use std::time::Duration;

use crate::math::{div_ceil, div_rem, gcd, nanos};
use crate::{Algorithm, Decision, Mode, Rate, RetryAfter, Time};

/// A bucket that fills or drains continuously: the smooth token bucket and both leaky buckets.
///
/// The two are one machine seen from two sides: the tokens that are missing are the level. The state is the one
/// instant at which the bucket is full of tokens (or drained) again. It is counted in *ticks*, so fine that both a
/// nanosecond and a unit are whole numbers of them: nothing is ever rounded, whatever the rate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    capacity: u32,
    rate: Rate,
    kind: Kind,
    ticks_per_ns: u64,
    ticks_per_unit: u64,
    /// Ticks from empty to full.
    ticks_to_fill: u128,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Token,
    Leaky(Mode),
}

impl Bucket {
    pub(crate) fn token(capacity: u32, refill: Rate) -> Bucket {
        Bucket::new(capacity, refill, Kind::Token)
    }

    pub(crate) fn leaky(capacity: u32, leak: Rate, mode: Mode) -> Bucket {
        Bucket::new(capacity, leak, Kind::Leaky(mode))
    }

    fn new(capacity: u32, rate: Rate, kind: Kind) -> Bucket {
        // `count` units per `period` ns, in lowest terms: a unit lasts period / count ns.
        let common = gcd(rate.count(), rate.period_ns());
        let ticks_per_unit = rate.period_ns() / common;
        Bucket {
            capacity,
            rate,
            kind,
            ticks_per_ns: rate.count() / common,
            ticks_per_unit,
            ticks_to_fill: u128::from(capacity) * u128::from(ticks_per_unit),
        }
    }

    /// The most that the bucket holds.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The refill or leak rate.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Whether this is a leaky bucket.
    pub fn is_leaky(&self) -> bool {
        matches!(self.kind, Kind::Leaky(_))
    }

    /// The time from empty to full.
    pub fn window(&self) -> Duration {
        nanos(div_ceil(self.ticks_to_fill, self.ticks_per_ns))
    }

    /// The largest state that a decision at any instant can leave behind; tells a store how many bits to keep.
    pub fn state_max(&self) -> u128 {
        self.ticks_at(Time::MAX) + self.ticks_to_fill
    }

    #[inline]
    fn ticks_at(&self, now: Time) -> u128 {
        u128::from(now.as_nanos()) * u128::from(self.ticks_per_ns)
    }

    /// Ticks until the bucket is full. A state more than two fill times ahead comes from a clock that was wrong:
    /// such a bucket counts as emptied just now.
    #[inline]
    fn missing(&self, full_at: u128, now: u128) -> u128 {
        let missing = full_at.saturating_sub(now);
        if missing > 2 * self.ticks_to_fill { self.ticks_to_fill } else { missing }
    }

    #[inline]
    fn answer(&self, missing: u128, cost: u32) -> Decision {
        let room = self.ticks_to_fill.saturating_sub(missing);
        let wanted = u128::from(cost) * u128::from(self.ticks_per_unit);
        let allowed = wanted <= room;
        Decision {
            allowed,
            limit: self.capacity,
            remaining: self.units(room),
            retry_after: if allowed {
                RetryAfter::Now
            } else if cost > self.capacity {
                RetryAfter::Never
            } else {
                RetryAfter::After(self.wait(missing + wanted - self.ticks_to_fill))
            },
            reset_after: self.wait(missing),
            // Whoever is admitted waits until what was there before has drained.
            delay: if allowed && self.kind == Kind::Leaky(Mode::Shape) {
                self.wait(missing)
            } else {
                Duration::ZERO
            },
        }
    }

    /// Whole units in `room`, which is at most a full bucket, so the result fits.
    #[inline]
    fn units(&self, room: u128) -> u32 {
        div_rem(room, self.ticks_per_unit).0 as u32
    }

    #[inline]
    fn wait(&self, ticks: u128) -> Duration {
        nanos(div_ceil(ticks, self.ticks_per_ns))
    }
}

impl Algorithm for Bucket {
    /// The tick at which the bucket is full (or drained) again.
    type State = u128;

    #[inline]
    fn fresh(&self) -> u128 {
        0
    }

    #[inline]
    fn is_fresh(&self, full_at: &u128, now: Time) -> bool {
        *full_at <= self.ticks_at(now)
    }

    #[inline]
    fn decide(&self, full_at: &mut u128, now: Time, cost: u32) -> Decision {
        let now = self.ticks_at(now);
        let mut missing = self.missing(*full_at, now);
        let mut decision = self.answer(missing, cost);
        if decision.allowed {
            missing += u128::from(cost) * u128::from(self.ticks_per_unit);
            decision.remaining = self.units(self.ticks_to_fill.saturating_sub(missing));
            decision.reset_after = self.wait(missing);
        }
        // A full bucket keeps its old instant: nothing to write for a look at a fresh key.
        if missing > 0 {
            *full_at = now + missing;
        }
        decision
    }

    #[inline]
    fn look(&self, full_at: &u128, now: Time, cost: u32) -> Decision {
        self.answer(self.missing(*full_at, self.ticks_at(now)), cost)
    }
}
