//! Clocks. This is the only module that reads the system's clocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ratekeeper_core::Time;

/// A source of time.
pub trait Clock {
    /// The current instant.
    fn now(&self) -> Time;
}

/// The machine's time, read from the processor's counter in a few nanoseconds.
///
/// It is set from the wall clock once, when it is created, and never steps: later corrections of the wall clock do
/// not affect it. Once a second it is corrected by the system's monotonic clock, so that it does not drift.
#[derive(Debug)]
pub struct SystemClock {
    counter: quanta::Clock,
    counter_start: u64,
    /// The counter's speed, as nanoseconds in 2^32 of its ticks.
    ns_per_2_32_ticks: u64,
    monotonic_start: Instant,
    wall_start_ns: u64,
    /// Added to the counter's time since the start to get the time since the epoch. Wrapping, because it may be
    /// negative.
    offset_ns: AtomicU64,
    /// The counter's time at which it is next compared with the monotonic clock.
    next_comparison_ns: AtomicU64,
}

impl SystemClock {
    const COMPARE_EVERY_NS: u64 = 1_000_000_000;

    /// A clock that starts at the wall clock's time.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that reads the system's clocks")]
    pub fn new() -> SystemClock {
        let counter = quanta::Clock::new();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_start_ns = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
        SystemClock {
            counter_start: counter.raw(),
            ns_per_2_32_ticks: counter.delta_as_nanos(0, 1 << 32),
            counter,
            monotonic_start: Instant::now(),
            wall_start_ns,
            offset_ns: AtomicU64::new(wall_start_ns),
            next_comparison_ns: AtomicU64::new(SystemClock::COMPARE_EVERY_NS),
        }
    }

    #[cold]
    fn compare(&self, counted_ns: u64) {
        // Threads that compare concurrently write the same values, up to the time between their readings.
        let elapsed_ns = self.monotonic_start.elapsed().as_nanos() as u64;
        let offset_ns = self.wall_start_ns.wrapping_add(elapsed_ns).wrapping_sub(counted_ns);
        self.offset_ns.store(offset_ns, Ordering::Relaxed);
        self.next_comparison_ns
            .store(counted_ns.saturating_add(SystemClock::COMPARE_EVERY_NS), Ordering::Relaxed);
    }
}

impl Clone for SystemClock {
    /// The clone shows the same time: it has the same start and is corrected by the same monotonic clock.
    fn clone(&self) -> SystemClock {
        let SystemClock { counter_start, ns_per_2_32_ticks, monotonic_start, wall_start_ns, .. } = *self;
        let copied = |number: &AtomicU64| AtomicU64::new(number.load(Ordering::Relaxed));
        SystemClock {
            counter: self.counter.clone(),
            counter_start,
            ns_per_2_32_ticks,
            monotonic_start,
            wall_start_ns,
            offset_ns: copied(&self.offset_ns),
            next_comparison_ns: copied(&self.next_comparison_ns),
        }
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
        let ticks = self.counter.raw().wrapping_sub(self.counter_start);
        let counted_ns = ((u128::from(ticks) * u128::from(self.ns_per_2_32_ticks)) >> 32) as u64;
        if counted_ns >= self.next_comparison_ns.load(Ordering::Relaxed) {
            self.compare(counted_ns);
        }
        Time::from_nanos(counted_ns.wrapping_add(self.offset_ns.load(Ordering::Relaxed)))
    }
}

/// A clock chosen at run time. Clones show the same time.
#[cfg(feature = "redis")]
#[derive(Clone)]
pub(crate) struct SharedClock(Arc<dyn Clock + Send + Sync>);

#[cfg(feature = "redis")]
impl SharedClock {
    pub(crate) fn new(clock: impl Clock + Send + Sync + 'static) -> SharedClock {
        SharedClock(Arc::new(clock))
    }
}

#[cfg(feature = "redis")]
impl std::fmt::Debug for SharedClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedClock")
    }
}

#[cfg(feature = "redis")]
impl Clock for SharedClock {
    fn now(&self) -> Time {
        self.0.now()
    }
}

/// A clock that is advanced manually, for tests and simulations. Clones share one time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that shows `now` until it is changed.
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

    /// The counter is corrected by the monotonic clock, so the two do not drift apart, however long they run.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "compares the clock with the system's")]
    fn the_system_clock_follows_the_monotonic_clock() {
        let clock = SystemClock::new();
        let (start, monotonic) = (clock.now(), Instant::now());
        // Simulates a counter that is an hour ahead: the next comparison corrects it.
        clock.offset_ns.fetch_add(3_600_000_000_000, Ordering::Relaxed);
        clock.next_comparison_ns.store(0, Ordering::Relaxed);
        let gone = clock.now().saturating_since(start);
        assert!(gone <= monotonic.elapsed() + std::time::Duration::from_millis(1), "{gone:?}");
        assert!(clock.now().saturating_since(start) >= gone, "it went on from there");
    }
}
