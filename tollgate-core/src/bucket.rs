use std::time::Duration;

use crate::math::{Ticks, gcd, nanos};
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

    /// Ticks are so fine that both a nanosecond and a unit are whole numbers of them: how many a nanosecond is.
    pub fn ticks_per_ns(&self) -> u64 {
        self.ticks_per_ns
    }

    /// How many ticks a unit takes to refill or leak.
    pub fn ticks_per_unit(&self) -> u64 {
        self.ticks_per_unit
    }

    /// Whether this is a leaky bucket.
    pub fn is_leaky(&self) -> bool {
        self.mode().is_some()
    }

    /// What a leaky bucket does with those that it lets in.
    pub fn mode(&self) -> Option<Mode> {
        match self.kind {
            Kind::Token => None,
            Kind::Leaky(mode) => Some(mode),
        }
    }

    /// The time from empty to full.
    pub fn window(&self) -> Duration {
        self.wait(self.ticks_to_fill)
    }

    /// The bucket with states of one word, if they fit one whatever the time: so for every rate whose units are
    /// whole nanoseconds apart, unless it takes more than a century to fill.
    pub fn narrow(&self) -> Option<NarrowBucket> {
        let latest = u128::product(Time::MAX.as_nanos(), self.ticks_per_ns);
        u64::try_from(latest + 2 * self.ticks_to_fill).is_ok().then(|| NarrowBucket(self.clone()))
    }

    /// Ticks until the bucket is full. A state more than two fill times ahead comes from a clock that was wrong:
    /// such a bucket counts as emptied just now.
    #[inline(always)]
    fn missing<T: Ticks>(&self, full_at: T, now: T) -> T {
        let (missing, to_fill) = (full_at.saturating_sub(now), T::narrow(self.ticks_to_fill));
        if missing > to_fill + to_fill { to_fill } else { missing }
    }

    /// See [`Limit::carried`](crate::Limit::carried).
    pub(crate) fn carried(&self, from: &Bucket, full_at: u128, at: Time) -> u128 {
        let (units, part) = from.missing(full_at, from.ticks_at(at)).div_rem(from.ticks_per_unit);
        let (part, _) = u128::product(part, self.ticks_per_unit).div_rem(from.ticks_per_unit);
        // At most twice what 32 bits hold, so the product is below 2^88.
        let missing = units * u128::from(self.ticks_per_unit) + part;
        self.ticks_at::<u128>(at) + missing.min(2 * self.ticks_to_fill)
    }

    #[inline(always)]
    fn ticks_at<T: Ticks>(&self, now: Time) -> T {
        T::product(now.as_nanos(), self.ticks_per_ns)
    }

    /// Whether `missing` leaves room for `cost`, and how much would then be missing.
    #[inline(always)]
    fn with_cost<T: Ticks>(&self, missing: T, cost: u32) -> Option<T> {
        // Compared in whole units first: the cost of a request that can never pass need not fit.
        let room = T::narrow(self.ticks_to_fill).saturating_sub(missing);
        (cost <= self.capacity)
            .then(|| T::product(u64::from(cost), self.ticks_per_unit))
            .filter(|&wanted| wanted <= room)
            .map(|wanted| missing + wanted)
    }

    #[inline(always)]
    fn answer<T: Ticks>(&self, missing: T, cost: u32) -> Decision {
        let to_fill = T::narrow(self.ticks_to_fill);
        let allowed = self.with_cost(missing, cost).is_some();
        Decision {
            allowed,
            limit: self.capacity,
            remaining: self.remaining(missing),
            retry_after: if allowed {
                RetryAfter::Now
            } else if cost > self.capacity {
                RetryAfter::Never
            } else {
                let wanted = T::product(u64::from(cost), self.ticks_per_unit);
                RetryAfter::After(self.wait(missing + wanted - to_fill))
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

    /// Whole units that are there: at most the capacity, so they fit.
    #[inline(always)]
    fn remaining<T: Ticks>(&self, missing: T) -> u32 {
        let room = T::narrow(self.ticks_to_fill).saturating_sub(missing);
        room.div_rem(self.ticks_per_unit).0.wide() as u32
    }

    #[inline(always)]
    fn wait<T: Ticks>(&self, ticks: T) -> Duration {
        nanos(ticks.div_up(self.ticks_per_ns))
    }

    #[inline(always)]
    fn decide_in<T: Ticks>(&self, full_at: &mut T, now: Time, cost: u32) -> Decision {
        let now = self.ticks_at(now);
        let mut missing = self.missing(*full_at, now);
        let mut decision = self.answer(missing, cost);
        if let Some(after) = self.with_cost(missing, cost) {
            missing = after;
            decision.remaining = self.remaining(missing);
            decision.reset_after = self.wait(missing);
        }
        // A full bucket keeps its old instant: nothing to write for a look at a fresh key.
        if missing > T::from(0) {
            *full_at = now + missing;
        }
        decision
    }
}

impl Bucket {
    /// A bucket with the charge lacks more than the same one without it would, at first by the cost. That comes down only
    /// while the other is full, and then by a nanosecond in a nanosecond: the cost less the time since is still there.
    fn give_back_in<T: Ticks>(&self, full_at: &mut T, now: Time, cost: u32, at: Option<Time>) {
        let since = at.map_or(0, |at| now.as_nanos().saturating_sub(at.as_nanos()));
        let charged = T::product(u64::from(cost.min(self.capacity)), self.ticks_per_unit);
        let left = charged.saturating_sub(T::product(since, self.ticks_per_ns));
        let (now, to_fill) = (self.ticks_at::<T>(now), T::narrow(self.ticks_to_fill));
        let missing = full_at.saturating_sub(now);
        if left == T::from(0) {
            return;
        }
        if missing <= left {
            *full_at = T::from(0);
        } else if missing <= to_fill + to_fill {
            *full_at = now + (missing - left);
        }
    }
}

/// A [`Bucket`] whose states are known to fit one word.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NarrowBucket(Bucket);

impl Algorithm for NarrowBucket {
    /// The tick at which the bucket is full (or drained) again.
    type State = u64;

    #[inline]
    fn fresh(&self) -> u64 {
        0
    }

    #[inline]
    fn is_fresh(&self, full_at: &u64, now: Time) -> bool {
        *full_at <= self.0.ticks_at(now)
    }

    #[inline(always)]
    fn decide(&self, full_at: &mut u64, now: Time, cost: u32) -> Decision {
        self.0.decide_in(full_at, now, cost)
    }

    fn give_back(&self, full_at: &mut u64, now: Time, cost: u32, at: Option<Time>) {
        self.0.give_back_in(full_at, now, cost, at);
    }

    fn window(&self) -> Duration {
        self.0.window()
    }

    #[inline]
    fn look(&self, full_at: &u64, now: Time, cost: u32) -> Decision {
        self.0.answer(self.0.missing(*full_at, self.0.ticks_at(now)), cost)
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

    #[inline(always)]
    fn decide(&self, full_at: &mut u128, now: Time, cost: u32) -> Decision {
        self.decide_in(full_at, now, cost)
    }

    fn give_back(&self, full_at: &mut u128, now: Time, cost: u32, at: Option<Time>) {
        self.give_back_in(full_at, now, cost, at);
    }

    fn window(&self) -> Duration {
        Bucket::window(self)
    }

    #[inline]
    fn look(&self, full_at: &u128, now: Time, cost: u32) -> Decision {
        self.answer(self.missing(*full_at, self.ticks_at(now)), cost)
    }
}
