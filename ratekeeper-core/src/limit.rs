use std::fmt;
use std::time::Duration;

use crate::{Bucket, Counter, Decision, FixedWindow, Log, Rate, SteppedBucket, Time};

/// The shortest window or refill period.
pub const WINDOW_MIN: Duration = Duration::from_millis(1);
/// The longest window or refill period: 366 days.
pub const WINDOW_MAX: Duration = Duration::from_secs(366 * 86_400);
/// Maximum number of buckets of a sliding window counter.
pub const BUCKETS_MAX: u32 = 1024;

/// How a token bucket refills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RefillStyle {
    /// Tokens grow continuously with elapsed time.
    #[default]
    Smooth,
    /// A period's tokens arrive together at its end, counted from the first request of a fresh key.
    Stepped,
}

/// What a leaky bucket does with a request that it allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LeakyMode {
    /// The request proceeds immediately.
    #[default]
    Police,
    /// The request is delayed so that the outflow never exceeds the leak rate.
    Shape,
}

/// Where fixed windows begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WindowAlign {
    /// At whole multiples of the window since the Unix epoch.
    #[default]
    Clock,
    /// At the first request of a fresh key.
    FirstRequest,
}

/// Which requests a sliding window log counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LogPolicy {
    /// Allowed requests only.
    #[default]
    Admitted,
    /// All requests: a client that keeps retrying stays denied.
    All,
}

/// How a sliding window counter counts the bucket at the window's edge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EdgePolicy {
    /// Counts the share of the bucket that is still inside the window.
    #[default]
    Weigh,
    /// Does not count the bucket.
    Drop,
    /// Counts the whole bucket: no true window ever exceeds the limit.
    Keep,
}

/// A validated limit. Every value of this type is within the ranges in which the arithmetic is exact:
///
/// | | from | to |
/// |---|---|---|
/// | limit, capacity | 1 | 2^32 - 1 |
/// | window, refill or leak period | 1 ms | 366 days |
/// | rate | 1 per 366 days | 10 million per second, any ratio |
/// | cost of a request | 0 | 2^32 - 1 |
/// | time | 1970 | 2262, in any order |
/// | buckets of a counter | 1 | 1024 |
///
/// The variants are the implementations that a store runs. Create them with the functions, which are named as in a
/// configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// A smooth token bucket, or a leaky bucket: the same arithmetic.
    Bucket(Bucket),
    /// A stepped token bucket.
    SteppedBucket(SteppedBucket),
    /// A fixed window.
    FixedWindow(FixedWindow),
    /// A sliding window log.
    Log(Log),
    /// A sliding window counter.
    Counter(Counter),
}

/// `size` minus `by`, if the result is positive.
fn less(size: u32, by: u128) -> Option<u32> {
    size.checked_sub(u32::try_from(by).ok()?).filter(|left| *left > 0)
}

impl Limit {
    /// Tokens are added at `refill` up to `capacity`; a request takes its cost. For bursty traffic.
    ///
    /// # Errors
    /// If `capacity` is zero.
    pub fn token_bucket(capacity: u32, refill: Rate, style: RefillStyle) -> Result<Limit, LimitError> {
        let capacity = at_least_one(capacity, "capacity")?;
        Ok(match style {
            RefillStyle::Smooth => Limit::Bucket(Bucket::token(capacity, refill)),
            RefillStyle::Stepped => Limit::SteppedBucket(SteppedBucket::new(capacity, refill)),
        })
    }

    /// A request adds its cost to the level, which falls at `leak`; a request that would overflow is denied. For
    /// steady output.
    ///
    /// # Errors
    /// If `capacity` is zero.
    pub fn leaky_bucket(capacity: u32, leak: Rate, mode: LeakyMode) -> Result<Limit, LimitError> {
        Ok(Limit::Bucket(Bucket::leaky(at_least_one(capacity, "capacity")?, leak, mode)))
    }

    /// At most `limit` in each window. The simplest algorithm; up to twice the limit is allowed around a window's
    /// edge.
    ///
    /// # Errors
    /// If `limit` is zero or the window lies outside 1 ms to 366 days.
    pub fn fixed_window(limit: u32, window: Duration, align: WindowAlign) -> Result<Limit, LimitError> {
        Ok(Limit::FixedWindow(FixedWindow::new(at_least_one(limit, "limit")?, in_range(window)?, align)))
    }

    /// At most `limit` in any window that ends now, because every request is recorded. The most exact algorithm.
    ///
    /// # Errors
    /// If `limit` is zero or the window lies outside 1 ms to 366 days.
    pub fn sliding_window_log(limit: u32, window: Duration, count: LogPolicy) -> Result<Limit, LimitError> {
        Ok(Limit::Log(Log::new(at_least_one(limit, "limit")?, in_range(window)?, count)))
    }

    /// Estimates the log from `buckets` + 1 counters. A good default.
    ///
    /// # Errors
    /// If `limit` is zero, the window lies outside 1 ms to 366 days, or `buckets` outside 1 to 1024.
    pub fn sliding_window_counter(
        limit: u32,
        window: Duration,
        buckets: u32,
        edge: EdgePolicy,
    ) -> Result<Limit, LimitError> {
        if buckets == 0 || buckets > BUCKETS_MAX {
            return Err(LimitError::BucketsOutOfRange(buckets));
        }
        let limit = at_least_one(limit, "limit")?;
        Ok(Limit::Counter(Counter::new(limit, in_range(window)?, buckets, edge)))
    }

    /// The algorithm's name, as in a configuration file.
    pub fn name(&self) -> &'static str {
        match self {
            Limit::Bucket(bucket) if bucket.is_leaky() => "leaky_bucket",
            Limit::Bucket(_) | Limit::SteppedBucket(_) => "token_bucket",
            Limit::FixedWindow(_) => "fixed_window",
            Limit::Log(_) => "sliding_window_log",
            Limit::Counter(_) => "sliding_window_counter",
        }
    }

    /// The limit or capacity: the most that a fresh key can be charged in one request.
    pub fn limit(&self) -> u32 {
        match self {
            Limit::Bucket(it) => it.capacity(),
            Limit::SteppedBucket(it) => it.capacity(),
            Limit::FixedWindow(it) => it.limit(),
            Limit::Log(it) => it.limit(),
            Limit::Counter(it) => it.limit(),
        }
    }

    /// One of `instances` equal shares of the limit; together they allow at most the whole. None if a share would be
    /// less than 1.
    pub fn share(&self, instances: u32) -> Option<Limit> {
        let instances = instances.max(1);
        let size = self.limit() / instances;
        let rate = |rate: Rate| {
            let longer =
                rate.period().checked_mul(instances).and_then(|period| Rate::new(rate.count(), period).ok());
            // If that exceeds the longest period, the share is rounded down.
            longer.or_else(|| Rate::new(rate.count() / u64::from(instances), rate.period()).ok())
        };
        match self {
            Limit::Bucket(it) => {
                let rate = rate(it.rate())?;
                match it.mode() {
                    Some(mode) => Limit::leaky_bucket(size, rate, mode),
                    None => Limit::token_bucket(size, rate, RefillStyle::Smooth),
                }
            }
            // A period's tokens arrive together, so a share must be a whole number of tokens.
            Limit::SteppedBucket(it) => {
                let rate = Rate::new(it.rate().count() / u64::from(instances), it.rate().period()).ok()?;
                Limit::token_bucket(size, rate, RefillStyle::Stepped)
            }
            Limit::FixedWindow(it) => Limit::fixed_window(size, it.window(), it.align()),
            Limit::Log(it) => Limit::sliding_window_log(size, it.window(), it.count()),
            Limit::Counter(it) => Limit::sliding_window_counter(size, it.window(), it.buckets(), it.edge()),
        }
        .ok()
    }

    /// The limit by which leases are charged so that this limit holds although leased units are spent up to `hold`
    /// later, and within [`spend_within`](Self::spend_within). None if nothing remains, or if every request must be
    /// checked individually: to compute its delay, or to count it although it is denied.
    pub fn lease_limit(&self, hold: Duration) -> Option<Limit> {
        match self {
            // Units spent in an interval were leased in it or in the `hold` before it. A bucket allows its capacity
            // plus the refill, so its capacity is reduced by the refill during `hold`.
            Limit::Bucket(it) => {
                let refill = u128::from(it.rate().count()) * hold.as_nanos();
                let size = less(it.capacity(), refill.div_ceil(it.rate().period().as_nanos()))?;
                match it.mode() {
                    Some(LeakyMode::Shape) => return None,
                    Some(LeakyMode::Police) => Limit::leaky_bucket(size, it.rate(), LeakyMode::Police),
                    None => Limit::token_bucket(size, it.rate(), RefillStyle::Smooth),
                }
            }
            Limit::SteppedBucket(it) => {
                let periods = hold.as_nanos().div_ceil(it.rate().period().as_nanos());
                let size = less(it.capacity(), periods * u128::from(it.rate().count()))?;
                Limit::token_bucket(size, it.rate(), RefillStyle::Stepped)
            }
            Limit::Log(it) if it.count() == LogPolicy::All => return None,
            Limit::Log(it) => {
                Limit::sliding_window_log(it.limit(), it.window().checked_add(hold)?, it.count())
            }
            // Leased units are spent in the window, or the bucket of it, in which they were charged.
            Limit::FixedWindow(_) | Limit::Counter(_) => return Some(self.clone()),
        }
        .ok()
    }

    /// How long after `at` units that were charged with this decision may be spent: for windows with fixed
    /// boundaries, until the end of the window, or of the bucket of it, in which they count.
    pub fn spend_within(&self, at: Time, decision: &Decision) -> Duration {
        match self {
            Limit::FixedWindow(_) => decision.reset_after,
            Limit::Counter(it) => {
                let (window, buckets) = (it.window().as_nanos(), u128::from(it.buckets()));
                let at = u128::from(at.as_nanos());
                let end = (at * buckets / window + 1) * window / buckets;
                // At most a window.
                Duration::from_nanos(u64::try_from(end.saturating_sub(at)).unwrap_or(0))
            }
            Limit::Bucket(_) | Limit::SteppedBucket(_) | Limit::Log(_) => Duration::MAX,
        }
    }

    /// The window, or the time in which an empty bucket becomes full. No ordinary wait is longer.
    pub fn window(&self) -> Duration {
        match self {
            Limit::Bucket(it) => it.window(),
            Limit::SteppedBucket(it) => it.window(),
            Limit::FixedWindow(it) => it.window(),
            Limit::Log(it) => it.window(),
            Limit::Counter(it) => it.window(),
        }
    }
}

fn at_least_one(value: u32, name: &'static str) -> Result<u32, LimitError> {
    if value == 0 { Err(LimitError::Zero(name)) } else { Ok(value) }
}

/// The window in nanoseconds: 366 days are below 2^55.
fn in_range(window: Duration) -> Result<u64, LimitError> {
    if window < WINDOW_MIN || window > WINDOW_MAX {
        return Err(LimitError::WindowOutOfRange(window));
    }
    Ok(window.as_nanos() as u64)
}

/// A parameter outside its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitError {
    /// The named parameter is zero.
    Zero(&'static str),
    /// A window outside 1 ms to 366 days.
    WindowOutOfRange(Duration),
    /// A rate of zero units.
    RateZero,
    /// A rate's period outside 1 ms to 366 days.
    PeriodOutOfRange(Duration),
    /// A rate above ten million units a second.
    RateTooFast {
        /// Units per period, as given.
        count: u64,
        /// The period, as given.
        period: Duration,
    },
    /// A number of buckets outside 1 to 1024.
    BucketsOutOfRange(u32),
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            LimitError::Zero(name) => {
                write!(
                    f,
                    "{name} is 0; it must be 1 to 4294967295 (to block everything, deny the key instead)"
                )
            }
            LimitError::WindowOutOfRange(window) => {
                write!(f, "a window of {window:?} is out of range; it must be 1 ms to 366 days")
            }
            LimitError::RateZero => {
                write!(f, "a rate of 0 never refills; it must be at least 1 per 366 days")
            }
            LimitError::PeriodOutOfRange(period) => {
                write!(f, "a rate per {period:?} is out of range; the period must be 1 ms to 366 days")
            }
            LimitError::RateTooFast { count, period } => {
                write!(f, "{count} per {period:?} is too fast; a rate must be at most 10000000 per second")
            }
            LimitError::BucketsOutOfRange(buckets) => {
                write!(f, "{buckets} buckets are out of range; a window has 1 to {BUCKETS_MAX}")
            }
        }
    }
}

impl std::error::Error for LimitError {}
