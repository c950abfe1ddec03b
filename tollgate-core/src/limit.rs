use std::fmt;
use std::time::Duration;

use crate::{Bucket, Counter, Decision, FixedWindow, Log, Rate, Steps, Time};

/// The shortest window or refill period.
pub const WINDOW_MIN: Duration = Duration::from_millis(1);
/// The longest window or refill period: 366 days.
pub const WINDOW_MAX: Duration = Duration::from_secs(366 * 86_400);
/// The most buckets that a sliding window counter can be cut into.
pub const BUCKETS_MAX: u32 = 1024;

/// How a token bucket refills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Style {
    /// Tokens grow continuously with elapsed time.
    #[default]
    Smooth,
    /// A period's tokens arrive together at its end, counted from the first request of a fresh key.
    Stepped,
}

/// What a leaky bucket does with a request that it admits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It passes at once.
    #[default]
    Police,
    /// It waits in line, so that the outflow is never faster than the leak rate.
    Shape,
}

/// Where fixed windows begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Align {
    /// At whole multiples of the window since the Unix epoch.
    #[default]
    Clock,
    /// At the first request of a fresh key.
    FirstRequest,
}

/// Which requests a sliding window log counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Count {
    /// Only those that were admitted.
    #[default]
    Admitted,
    /// All: a client that keeps knocking stays out.
    All,
}

/// What a sliding window counter makes of the bucket that the window's edge cuts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Edge {
    /// Counts the share of it that is still inside the window.
    #[default]
    Weigh,
    /// Leaves it out.
    Drop,
    /// Counts all of it: never more than the limit in any true window.
    Keep,
}

/// A checked limit. Every value of this type is within the ranges in which the arithmetic is exact:
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
/// The variants are the machines that a store runs; make them with the functions, which are named as in a
/// configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// A smooth token bucket, or a leaky bucket: the same arithmetic.
    Bucket(Bucket),
    /// A stepped token bucket.
    Steps(Steps),
    /// A fixed window.
    FixedWindow(FixedWindow),
    /// A sliding window log.
    Log(Log),
    /// A sliding window counter.
    Counter(Counter),
}

/// What is left of a size, if anything.
fn less(size: u32, by: u128) -> Option<u32> {
    size.checked_sub(u32::try_from(by).ok()?).filter(|left| *left > 0)
}

impl Limit {
    /// Tokens grow at `refill` up to `capacity`; a request takes its cost. For traffic that comes in bursts.
    ///
    /// # Errors
    /// If `capacity` is zero.
    pub fn token_bucket(capacity: u32, refill: Rate, style: Style) -> Result<Limit, LimitError> {
        let capacity = at_least_one(capacity, "capacity")?;
        Ok(match style {
            Style::Smooth => Limit::Bucket(Bucket::token(capacity, refill)),
            Style::Stepped => Limit::Steps(Steps::new(capacity, refill)),
        })
    }

    /// A request pours its cost in, the level falls at `leak`, and what would overflow is denied. For steady output.
    ///
    /// # Errors
    /// If `capacity` is zero.
    pub fn leaky_bucket(capacity: u32, leak: Rate, mode: Mode) -> Result<Limit, LimitError> {
        Ok(Limit::Bucket(Bucket::leaky(at_least_one(capacity, "capacity")?, leak, mode)))
    }

    /// At most `limit` in each window. The simplest; up to twice the limit may pass around a window's edge.
    ///
    /// # Errors
    /// If `limit` is zero or the window lies outside 1 ms to 366 days.
    pub fn fixed_window(limit: u32, window: Duration, align: Align) -> Result<Limit, LimitError> {
        Ok(Limit::FixedWindow(FixedWindow::new(at_least_one(limit, "limit")?, in_range(window)?, align)))
    }

    /// At most `limit` in any window that ends now: every request is remembered. The most exact.
    ///
    /// # Errors
    /// If `limit` is zero or the window lies outside 1 ms to 366 days.
    pub fn sliding_window_log(limit: u32, window: Duration, count: Count) -> Result<Limit, LimitError> {
        Ok(Limit::Log(Log::new(at_least_one(limit, "limit")?, in_range(window)?, count)))
    }

    /// The log's estimate from `buckets` + 1 counters. A good first choice when unsure.
    ///
    /// # Errors
    /// If `limit` is zero, the window lies outside 1 ms to 366 days, or `buckets` outside 1 to 1024.
    pub fn sliding_window_counter(
        limit: u32,
        window: Duration,
        buckets: u32,
        edge: Edge,
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
            Limit::Bucket(_) | Limit::Steps(_) => "token_bucket",
            Limit::FixedWindow(_) => "fixed_window",
            Limit::Log(_) => "sliding_window_log",
            Limit::Counter(_) => "sliding_window_counter",
        }
    }

    /// The limit or capacity: the most that a fresh key can take at once.
    pub fn limit(&self) -> u32 {
        match self {
            Limit::Bucket(it) => it.capacity(),
            Limit::Steps(it) => it.capacity(),
            Limit::FixedWindow(it) => it.limit(),
            Limit::Log(it) => it.limit(),
            Limit::Counter(it) => it.limit(),
        }
    }

    /// One of `nodes` equal shares of the limit: together they admit no more than the whole. None if there is not at
    /// least one for each.
    pub fn share(&self, nodes: u32) -> Option<Limit> {
        let nodes = nodes.max(1);
        let size = self.limit() / nodes;
        let rate = |rate: Rate| {
            let longer =
                rate.period().checked_mul(nodes).and_then(|period| Rate::new(rate.count(), period).ok());
            // Where that is longer than a period may be, the share is rounded down.
            longer.or_else(|| Rate::new(rate.count() / u64::from(nodes), rate.period()).ok())
        };
        match self {
            Limit::Bucket(it) => {
                let rate = rate(it.rate())?;
                match it.mode() {
                    Some(mode) => Limit::leaky_bucket(size, rate, mode),
                    None => Limit::token_bucket(size, rate, Style::Smooth),
                }
            }
            // So many tokens arrive together, and a share of them must be whole.
            Limit::Steps(it) => {
                let rate = Rate::new(it.rate().count() / u64::from(nodes), it.rate().period()).ok()?;
                Limit::token_bucket(size, rate, Style::Stepped)
            }
            Limit::FixedWindow(it) => Limit::fixed_window(size, it.window(), it.align()),
            Limit::Log(it) => Limit::sliding_window_log(size, it.window(), it.count()),
            Limit::Counter(it) => Limit::sliding_window_counter(size, it.window(), it.buckets(), it.edge()),
        }
        .ok()
    }

    /// The limit by which units must be taken so that this one holds although they are spent up to `hold` later, and
    /// within [`spend_within`](Self::spend_within). None if that leaves nothing, or if every single request must be
    /// asked about: to tell its delay, or to count it although it is denied.
    pub fn taken_ahead(&self, hold: Duration) -> Option<Limit> {
        match self {
            // Whatever is spent in some time was taken in that time and the hold before it. A bucket lets pass what it
            // holds and what refills: it must hold less by what refills during the hold.
            Limit::Bucket(it) => {
                let refill = u128::from(it.rate().count()) * hold.as_nanos();
                let size = less(it.capacity(), refill.div_ceil(it.rate().period().as_nanos()))?;
                match it.mode() {
                    Some(Mode::Shape) => return None,
                    Some(Mode::Police) => Limit::leaky_bucket(size, it.rate(), Mode::Police),
                    None => Limit::token_bucket(size, it.rate(), Style::Smooth),
                }
            }
            Limit::Steps(it) => {
                let periods = hold.as_nanos().div_ceil(it.rate().period().as_nanos());
                let size = less(it.capacity(), periods * u128::from(it.rate().count()))?;
                Limit::token_bucket(size, it.rate(), Style::Stepped)
            }
            Limit::Log(it) if it.count() == Count::All => return None,
            Limit::Log(it) => {
                Limit::sliding_window_log(it.limit(), it.window().checked_add(hold)?, it.count())
            }
            // Spent in the window, or its part, in which they were taken.
            Limit::FixedWindow(_) | Limit::Counter(_) => return Some(self.clone()),
        }
        .ok()
    }

    /// How long after `at` units may be spent that were taken then with this decision: where windows have fixed places,
    /// until the end of the window, or of its part, in which they count.
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
            Limit::Bucket(_) | Limit::Steps(_) | Limit::Log(_) => Duration::MAX,
        }
    }

    /// The window, or the time in which an empty bucket becomes full: no ordinary wait is longer.
    pub fn window(&self) -> Duration {
        match self {
            Limit::Bucket(it) => it.window(),
            Limit::Steps(it) => it.window(),
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
    /// A rate of nothing.
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
