//! Where time comes from: the one module that reads the system's clocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tollgate_core::Time;

/// Tells the time.
pub trait Clock {
    /// The current instant.
    fn now(&self) -> Time;
}

/// The machine's time, read from the processor's counter in a few nanoseconds.
///
/// It is set by the wall clock once, when it is made, and never steps: a later correction of the wall clock does
/// not touch it. Once a second the counter is compared with the system's monotonic clock and put right, so that it
/// does not drift.
#[derive(Debug)]
pub struct SystemClock {
    counter: quanta::Clock,
    counter_start: u64,
    monotonic_start: Instant,
    wall_start_ns: u64,
    /// What to add to the counter's time to get the monotonic clock's.
    correction_ns: AtomicI64,
    /// The counter's time from which on it is to be compared again.
    next_comparison_ns: AtomicU64,
}

impl SystemClock {
    const COMPARE_EVERY_NS: u64 = 1_000_000_000;

    /// A clock that begins at the wall clock's time.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that reads the system's clocks")]
    pub fn new() -> SystemClock {
        let counter = quanta::Clock::new();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        SystemClock {
            counter_start: counter.raw(),
            counter,
            monotonic_start: Instant::now(),
            wall_start_ns: u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX),
            correction_ns: AtomicI64::new(0),
            next_comparison_ns: AtomicU64::new(SystemClock::COMPARE_EVERY_NS),
        }
    }

    #[cold]
    fn compare(&self, counted_ns: u64) {
        // Threads that come here together write the same values, give or take the moment between their readings.
        let elapsed_ns = i64::try_from(self.monotonic_start.elapsed().as_nanos()).unwrap_or(i64::MAX);
        self.correction_ns.store(elapsed_ns.saturating_sub_unsigned(counted_ns), Ordering::Relaxed);
        self.next_comparison_ns.store(counted_ns + SystemClock::COMPARE_EVERY_NS, Ordering::Relaxed);
    }
}

impl Default for SystemClock {
    fn default() -> SystemClock {
        SystemClock::new()
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Time {
        let counted_ns = self.counter.delta_as_nanos(self.counter_start, self.counter.raw());
        if counted_ns >= self.next_comparison_ns.load(Ordering::Relaxed) {
            self.compare(counted_ns);
        }
        let correction_ns = self.correction_ns.load(Ordering::Relaxed);
        Time::from_nanos((self.wall_start_ns + counted_ns).saturating_add_signed(correction_ns))
    }
}

/// A clock that is cranked by hand, for tests and simulations. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that stands at `now`.
    pub fn new(now: Time) -> ManualClock {
        ManualClock(Arc::new(AtomicU64::new(now.as_nanos())))
    }

    /// Sets the time, forward or back.
    #[inline]
    pub fn set(&self, now: Time) {
        self.0.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// Moves the time forward.
    pub fn advance(&self, by: std::time::Duration) {
        self.set(self.now().saturating_add(by));
    }
}

impl Clock for ManualClock {
    #[inline]
    fn now(&self) -> Time {
        Time::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counter is put right against the monotonic clock, so the two stay together however long they run.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "compares the clock with the system's")]
    fn the_system_clock_follows_the_monotonic_clock() {
        let clock = SystemClock::new();
        let (start, monotonic) = (clock.now(), Instant::now());
        // Pretend that the counter ran ahead by an hour: the next comparison takes it back.
        clock.correction_ns.store(3_600_000_000_000, Ordering::Relaxed);
        clock.next_comparison_ns.store(0, Ordering::Relaxed);
        let gone = clock.now().saturating_since(start);
        assert!(gone <= monotonic.elapsed() + std::time::Duration::from_millis(1), "{gone:?}");
        assert!(clock.now().saturating_since(start) >= gone, "it went on from there");
    }
}
