//! Coarse time, for idle connections, slow clients and ejected upstreams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// An instant, in milliseconds since the gateway started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticks(u64);

impl Ticks {
    pub(crate) fn as_millis(self) -> u64 {
        self.0
    }

    pub(crate) fn from_millis(millis: u64) -> Ticks {
        Ticks(millis)
    }

    pub(crate) fn after(self, wait: Duration) -> Ticks {
        Ticks(self.0.saturating_add(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)))
    }

    pub(crate) fn since(self, earlier: Ticks) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// A clock that is read from memory: a request reads it several times, which must cost nothing.
#[derive(Debug)]
pub(crate) struct Ticker {
    begin: Instant,
    now: AtomicU64,
}

impl Ticker {
    /// Resolution of the clock.
    pub(crate) const STEP: Duration = Duration::from_millis(50);

    pub(crate) fn new() -> Ticker {
        Ticker { begin: Instant::now(), now: AtomicU64::new(0) }
    }

    pub(crate) fn now(&self) -> Ticks {
        Ticks(self.now.load(Ordering::Relaxed))
    }

    /// Updates the clock from the system clock.
    pub(crate) fn tick(&self) -> Ticks {
        let now = u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.now.store(now, Ordering::Relaxed);
        Ticks(now)
    }
}
