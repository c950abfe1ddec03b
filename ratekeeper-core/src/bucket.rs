mod gcra;

use std::time::Duration;

use crate::math::{Ticks, gcd, nanos};
use crate::{Algorithm, Decision, LeakyMode, Rate, RetryAfter, Time};

pub use gcra::{Gcra, GcraState};

/// A bucket that fills or drains continuously: the smooth token bucket and both leaky buckets.
///
/// Both are the same arithmetic: the missing tokens are the level. The state is the instant at which the bucket is
/// full of tokens (or drained) again, counted in *ticks*. A nanosecond and a unit are both whole numbers of ticks, so
/// nothing is rounded, whatever the rate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    capacity: u32,
    rate: Rate,
    kind: Kind,
    ticks_per_ns: u64,
    ticks_per_unit: u64,
    /// Ticks from empty to full.
    ticks_to_fill: u128,
    /// The most ticks that can be missing: a state further ahead was written by a wrong clock.
    ticks_missing_max: u128,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Token,
    Leaky(LeakyMode),
}

impl Bucket {
    pub(crate) fn token(capacity: u32, refill: Rate) -> Bucket {
        Bucket::new(capacity, refill, Kind::Token)
    }

    pub(crate) fn leaky(capacity: u32, leak: Rate, mode: LeakyMode) -> Bucket {
        Bucket::new(capacity, leak, Kind::Leaky(mode))
    }

    fn new(capacity: u32, rate: Rate, kind: Kind) -> Bucket {
        // `count` units per `period` ns, in lowest terms: a unit lasts period / count ns.
        let common = gcd(rate.count(), rate.period_ns());
        let ticks_per_unit = rate.period_ns() / common;
        let ticks_to_fill = u128::from(capacity) * u128::from(ticks_per_unit);
        Bucket {
            capacity,
            rate,
            kind,
            ticks_per_ns: rate.count() / common,
            ticks_per_unit,
            ticks_to_fill,
            ticks_missing_max: 2 * ticks_to_fill,
        }
    }

    /// See [`Limit::following`](crate::Limit::following).
    pub(crate) fn following(&self, from: &Bucket) -> Bucket {
        // At most twice a 32-bit number of units, so the product is below 2^88.
        let units = from.ticks_missing_max.div_ceil(u128::from(from.ticks_per_unit));
        let missing = units * u128::from(self.ticks_per_unit);
        Bucket { ticks_missing_max: missing.max(2 * self.ticks_to_fill), ..self.clone() }
    }

    /// See [`Limit::following_both`](crate::Limit::following_both).
    pub(crate) fn following_both(&self, from: &Bucket) -> Bucket {
        let Bucket { ticks_missing_max, .. } = self.following(from);
        Bucket { ticks_missing_max: ticks_missing_max.max(self.ticks_missing_max), ..self.clone() }
    }

    /// Maximum number of units that the bucket holds.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The refill or leak rate.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Ticks per nanosecond. A tick is fine enough that a nanosecond and a unit are both whole numbers of ticks.
    pub fn ticks_per_ns(&self) -> u64 {
        self.ticks_per_ns
    }

    /// Ticks that a unit takes to refill or leak.
    pub fn ticks_per_unit(&self) -> u64 {
        self.ticks_per_unit
    }

    /// Whether this is a leaky bucket.
    pub fn is_leaky(&self) -> bool {
        self.mode().is_some()
    }

    /// Whether a leaky bucket delays the requests that it allows; `None` for a token bucket.
    pub fn mode(&self) -> Option<LeakyMode> {
        match self.kind {
            Kind::Token => None,
            Kind::Leaky(mode) => Some(mode),
        }
    }

    /// The time from empty to full.
    pub fn window(&self) -> Duration {
        self.wait(self.ticks_to_fill)
    }

    /// The bucket with 64-bit states, if these fit at any time: true for every rate whose units are whole nanoseconds
    /// apart, unless the bucket takes more than a century to fill.
    pub fn narrow(&self) -> Option<NarrowBucket> {
        let latest = u128::product(Time::MAX.as_nanos(), self.ticks_per_ns);
        u64::try_from(latest + self.ticks_missing_max).is_ok().then(|| NarrowBucket(self.clone()))
    }

    /// Ticks until the bucket is full. A state more than two fill times ahead was written by a wrong clock, and
    /// counts as a bucket that was emptied just now.
    #[inline(always)]
    fn missing<T: Ticks>(&self, full_at: T, now: T) -> T {
        let missing = full_at.saturating_sub(now);
        if missing > T::narrow(self.ticks_missing_max) { T::narrow(self.ticks_to_fill) } else { missing }
    }

    /// The longest time that a state counts: two fill times, or more after the capacity was
    /// [lowered](crate::Limit::following).
    pub fn missing_max(&self) -> Duration {
        self.wait(self.ticks_missing_max)
    }

    /// See [`Limit::migrate_state`](crate::Limit::migrate_state).
    pub(crate) fn migrate_state(&self, from: &Bucket, full_at: u128, at: Time) -> u128 {
        let (units, part) = from.missing(full_at, from.ticks_at(at)).div_rem(from.ticks_per_unit);
        let (part, _) = u128::product(part, self.ticks_per_unit).div_rem(from.ticks_per_unit);
        // `units` is at most twice a 32-bit number, so the product is below 2^88.
        let missing = units * u128::from(self.ticks_per_unit) + part;
        self.ticks_at::<u128>(at) + missing.min(self.ticks_missing_max)
    }

    #[inline(always)]
    fn ticks_at<T: Ticks>(&self, now: Time) -> T {
        T::product(now.as_nanos(), self.ticks_per_ns)
    }

    /// The missing ticks after a charge of `cost`, if `missing` leaves enough for it.
    #[inline(always)]
    fn with_cost<T: Ticks>(&self, missing: T, cost: u32) -> Option<T> {
        // Whole units are compared first: a cost above the capacity need not fit in ticks.
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
            retry_after: RetryAfter::of(allowed, cost, self.capacity, || {
                let wanted = T::product(u64::from(cost), self.ticks_per_unit);
                self.wait(missing + wanted - to_fill)
            }),
            reset_after: self.wait(missing),
            // An allowed request waits until the level before it has drained.
            delay: if allowed && self.kind == Kind::Leaky(LeakyMode::Shape) {
                self.wait(missing)
            } else {
                Duration::ZERO
            },
        }
    }

    /// Whole units available: at most the capacity, so they fit.
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
        // A full bucket keeps its old instant: peeking at a fresh key writes nothing.
        if missing > T::from(0) {
            *full_at = now + missing;
        }
        decision
    }
}

impl Bucket {
    /// Compared with the same bucket without the charge, this one lacks more, at first by the cost. The difference
    /// shrinks only while the other bucket is full, by one nanosecond per nanosecond: at least the cost minus the
    /// elapsed time remains, and is refunded.
    fn refund_in<T: Ticks>(&self, full_at: &mut T, now: Time, cost: u32, at: Option<Time>) {
        let since = at.map_or(0, |at| now.as_nanos().saturating_sub(at.as_nanos()));
        let charged = T::product(u64::from(cost.min(self.capacity)), self.ticks_per_unit);
        let left = charged.saturating_sub(T::product(since, self.ticks_per_ns));
        let now = self.ticks_at::<T>(now);
        let missing = full_at.saturating_sub(now);
        if left == T::from(0) {
            return;
        }
        if missing <= left {
            *full_at = T::from(0);
        } else if missing <= T::narrow(self.ticks_missing_max) {
            *full_at = now + (missing - left);
        }
    }
}

/// A [`Bucket`] whose states fit in 64 bits.
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

    fn refund(&self, full_at: &mut u64, now: Time, cost: u32, at: Option<Time>) {
        self.0.refund_in(full_at, now, cost, at);
    }

    fn window(&self) -> Duration {
        self.0.window()
    }

    #[inline]
    fn peek(&self, full_at: &u64, now: Time, cost: u32) -> Decision {
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

    fn refund(&self, full_at: &mut u128, now: Time, cost: u32, at: Option<Time>) {
        self.refund_in(full_at, now, cost, at);
    }

    fn window(&self) -> Duration {
        Bucket::window(self)
    }

    #[inline]
    fn peek(&self, full_at: &u128, now: Time, cost: u32) -> Decision {
        self.answer(self.missing(*full_at, self.ticks_at(now)), cost)
    }
}
