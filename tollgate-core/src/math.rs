//! The few arithmetic helpers that several algorithms share.

use std::time::Duration;

/// `(a / b, a % b)`, by the 64-bit instruction whenever `a` fits it: 128-bit division is a slow library call.
#[inline]
pub(crate) fn div_rem(a: u128, b: u64) -> (u128, u64) {
    match u64::try_from(a) {
        Ok(a) => (u128::from(a / b), a % b),
        // The remainder is below `b`, so it fits.
        Err(_) => (a / u128::from(b), (a % u128::from(b)) as u64),
    }
}

/// `a / b`, rounded up.
#[inline]
pub(crate) fn div_ceil(a: u128, b: u64) -> u128 {
    if b == 1 {
        return a;
    }
    let (quotient, rest) = div_rem(a, b);
    quotient + u128::from(rest != 0)
}

/// A wait of so many nanoseconds. Every wait that a limit can name is far below what a `Duration` holds.
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
