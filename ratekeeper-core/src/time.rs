use std::time::Duration;

/// An instant: whole nanoseconds since the Unix epoch, from 1970 to the year 2262.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// 1970-01-01T00:00:00Z.
    pub const EPOCH: Time = Time(0);
    /// The last instant: 2^63 - 1 nanoseconds, in April 2262.
    pub const MAX: Time = Time(i64::MAX as u64);

    /// The instant `nanos` nanoseconds after the epoch, or [`Time::MAX`] if that is later.
    #[inline]
    pub const fn from_nanos(nanos: u64) -> Time {
        if nanos > Time::MAX.0 { Time::MAX } else { Time(nanos) }
    }

    /// The instant `secs` seconds after the epoch, or [`Time::MAX`] if that is later.
    pub const fn from_secs(secs: u64) -> Time {
        Time::from_nanos(secs.saturating_mul(1_000_000_000))
    }

    /// Nanoseconds since the epoch.
    #[inline]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The instant `wait` later, or [`Time::MAX`] if that is later.
    #[must_use]
    pub fn saturating_add(self, wait: Duration) -> Time {
        let nanos = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        Time::from_nanos(self.0.saturating_add(nanos))
    }

    /// The instant `wait` earlier, or the epoch if that is earlier.
    #[must_use]
    pub fn saturating_sub(self, wait: Duration) -> Time {
        Time(self.0.saturating_sub(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Time from `earlier` to this instant; zero if `earlier` is later.
    pub fn saturating_since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
