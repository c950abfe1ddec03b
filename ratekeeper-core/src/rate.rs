use std::time::Duration;

use crate::limit::{LimitError, WINDOW_MAX, WINDOW_MIN};

/// A number of units per period, kept as written: `4 per minute` and `1 per 15 s` are the same speed, but a stepped
/// bucket refills differently under the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    count: u64,
    period_ns: u64,
}

impl Rate {
    /// The fastest rate: ten million units a second.
    pub const MAX_PER_SECOND: u64 = 10_000_000;

    /// `count` units per `period`.
    ///
    /// # Errors
    /// If `count` is zero, the period lies outside 1 ms to 366 days, or the speed exceeds ten million a second.
    pub const fn new(count: u64, period: Duration) -> Result<Rate, LimitError> {
        if count == 0 {
            return Err(LimitError::RateZero);
        }
        let period_ns = period.as_nanos();
        if period_ns < WINDOW_MIN.as_nanos() || period_ns > WINDOW_MAX.as_nanos() {
            return Err(LimitError::PeriodOutOfRange(period));
        }
        if count as u128 * 1_000_000_000 > Rate::MAX_PER_SECOND as u128 * period_ns {
            return Err(LimitError::RateTooFast { count, period });
        }
        // In range, so it fits: 366 days are below 2^55 ns.
        Ok(Rate { count, period_ns: period_ns as u64 })
    }

    /// Units per [`period`](Rate::period).
    pub fn count(self) -> u64 {
        self.count
    }

    /// The period in which [`count`](Rate::count) units arrive.
    pub fn period(self) -> Duration {
        Duration::from_nanos(self.period_ns)
    }

    pub(crate) fn period_ns(self) -> u64 {
        self.period_ns
    }
}
