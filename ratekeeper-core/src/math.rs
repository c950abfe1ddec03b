//! Arithmetic helpers shared by the algorithms.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A number of ticks: 128 bits wide, or 64 where that suffices.
pub(crate) trait Ticks: Copy + Ord + From<u64> + Add<Output = Self> + Sub<Output = Self> {
    /// `wide` as this type; the caller ensures that it fits.
    fn narrow(wide: u128) -> Self;
    /// `a` times `b`; the caller ensures that it fits.
    fn product(a: u64, b: u64) -> Self;
    fn saturating_sub(self, other: Self) -> Self;
    /// `(self / b, self % b)`.
    fn div_rem(self, b: u64) -> (Self, u64);
    fn wide(self) -> u128;

    /// `self / b`, rounded up.
    #[inline]
    fn div_up(self, b: u64) -> u128 {
        if b == 1 {
            return self.wide();
        }
        let (quotient, rest) = self.div_rem(b);
        quotient.wide() + u128::from(rest != 0)
    }
}

impl Ticks for u64 {
    #[inline]
    fn narrow(wide: u128) -> u64 {
        wide as u64
    }

    #[inline]
    fn product(a: u64, b: u64) -> u64 {
        a * b
    }

    #[inline]
    fn saturating_sub(self, other: u64) -> u64 {
        self.saturating_sub(other)
    }

    #[inline]
    fn div_rem(self, b: u64) -> (u64, u64) {
        (self / b, self % b)
    }

    #[inline]
    fn wide(self) -> u128 {
        u128::from(self)
    }
}

impl Ticks for u128 {
    #[inline]
    fn narrow(wide: u128) -> u128 {
        wide
    }

    #[inline]
    fn product(a: u64, b: u64) -> u128 {
        u128::from(a) * u128::from(b)
    }

    #[inline]
    fn saturating_sub(self, other: u128) -> u128 {
        self.saturating_sub(other)
    }

    /// Uses the 64-bit instruction whenever the number fits: 128-bit division is a slow library call.
    #[inline]
    fn div_rem(self, b: u64) -> (u128, u64) {
        match u64::try_from(self) {
            Ok(a) => (u128::from(a / b), a % b),
            // The remainder is below `b`, so it fits.
            Err(_) => (self / u128::from(b), (self % u128::from(b)) as u64),
        }
    }

    #[inline]
    fn wide(self) -> u128 {
        self
    }
}

/// A wait of `wait` nanoseconds. Every wait of a limit is far below the maximum of a `Duration`.
#[inline]
pub(crate) fn nanos(wait: u128) -> Duration {
    match u64::try_from(wait) {
        Ok(wait) => Duration::from_nanos(wait),
        Err(_) => Duration::new((wait / 1_000_000_000) as u64, (wait % 1_000_000_000) as u32),
    }
}

pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
