use std::time::Duration;

use crate::{Algorithm, Decision, RetryAfter, Time, WindowAlign};

/// A counter per window.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FixedWindow {
    limit: u32,
    window_ns: u64,
    align: WindowAlign,
}

/// The state of one key of a fixed window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FixedWindowState {
    /// The window: its number since the epoch ([`WindowAlign::Clock`]), or the nanosecond at which it began.
    pub window: u64,
    /// Units charged in the window; zero is a fresh key.
    pub count: u32,
}

impl FixedWindow {
    pub(crate) fn new(limit: u32, window_ns: u64, align: WindowAlign) -> FixedWindow {
        FixedWindow { limit, window_ns, align }
    }

    /// Maximum units that one window allows.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// The window's length.
    pub fn window(&self) -> Duration {
        Duration::from_nanos(self.window_ns)
    }

    /// Where windows begin.
    pub fn align(&self) -> WindowAlign {
        self.align
    }

    /// The largest window number that a state can hold, from which a store derives how many bits to keep.
    pub fn window_max(&self) -> u64 {
        match self.align {
            WindowAlign::Clock => Time::MAX.as_nanos() / self.window_ns,
            WindowAlign::FirstRequest => Time::MAX.as_nanos(),
        }
    }

    /// The state of a window of `from` when this one replaces it at `at`. The start of a window does not depend on its
    /// length; but a longer window must not revive a count that no longer mattered.
    pub(crate) fn migrate_state(
        &self,
        from: &FixedWindow,
        state: FixedWindowState,
        at: Time,
    ) -> FixedWindowState {
        if self.window_ns != from.window_ns && from.is_fresh(&state, at) { self.fresh() } else { state }
    }

    /// The state as of `now`. A window that begins more than one window ahead was written by a wrong clock, so its
    /// count is moved to now.
    #[inline]
    fn settled(&self, state: FixedWindowState, now: Time) -> FixedWindowState {
        let FixedWindowState { window, count } = state;
        let now = now.as_nanos();
        // The window of a request at `now` without a state, and how far ahead of it the state may be.
        let (current, ended, too_far_ahead) = match self.align {
            WindowAlign::Clock => {
                let current = now / self.window_ns;
                (current, window < current, window > current + 1)
            }
            WindowAlign::FirstRequest => {
                (now, window + self.window_ns <= now, window > now.saturating_add(self.window_ns))
            }
        };
        if count == 0 || ended {
            FixedWindowState { window: current, count: 0 }
        } else if too_far_ahead {
            FixedWindowState { window: current, count }
        } else {
            state
        }
    }

    /// The nanosecond at which a state's window began.
    #[inline]
    fn start(&self, state: FixedWindowState) -> u64 {
        match self.align {
            WindowAlign::Clock => state.window * self.window_ns,
            WindowAlign::FirstRequest => state.window,
        }
    }

    /// Whether an instant lies in the window of a state.
    fn holds(&self, state: FixedWindowState, at: Time) -> bool {
        let start = self.start(state);
        (start..start + self.window_ns).contains(&at.as_nanos())
    }

    /// Time until the settled state's window is over.
    #[inline]
    fn rest(&self, settled: FixedWindowState, now: Time) -> Duration {
        // Both below 2^63 + 2^55.
        Duration::from_nanos(self.start(settled) + self.window_ns - now.as_nanos())
    }

    #[inline(always)]
    fn answer(&self, settled: FixedWindowState, now: Time, cost: u32) -> Decision {
        // The count exceeds the limit after the limit was lowered.
        let left = self.limit.saturating_sub(settled.count);
        let allowed = cost <= left;
        Decision {
            allowed,
            limit: self.limit,
            remaining: left,
            retry_after: RetryAfter::of(allowed, cost, self.limit, || self.rest(settled, now)),
            reset_after: if settled.count == 0 { Duration::ZERO } else { self.rest(settled, now) },
            delay: Duration::ZERO,
        }
    }
}

impl Algorithm for FixedWindow {
    type State = FixedWindowState;

    #[inline]
    fn fresh(&self) -> FixedWindowState {
        FixedWindowState::default()
    }

    #[inline]
    fn is_fresh(&self, state: &FixedWindowState, now: Time) -> bool {
        self.settled(*state, now).count == 0
    }

    #[inline(always)]
    fn decide(&self, state: &mut FixedWindowState, now: Time, cost: u32) -> Decision {
        let settled = self.settled(*state, now);
        let mut decision = self.answer(settled, now, cost);
        let mut after = settled;
        if decision.allowed && cost > 0 {
            after.count += cost;
            decision.remaining = self.limit - after.count;
            decision.reset_after = self.rest(after, now);
        }
        if after.count > 0 {
            *state = after;
        }
        decision
    }

    /// The cost is part of the count only within the window that was charged. The window keeps its start, even if the
    /// refunded charge started it.
    fn refund(&self, state: &mut FixedWindowState, now: Time, cost: u32, at: Option<Time>) {
        let settled = self.settled(*state, now);
        // A window that has ended, or was moved here from a wrong clock, is not the one that was charged.
        if settled != *state || at.is_some_and(|at| !self.holds(*state, at)) {
            return;
        }
        state.count = state.count.saturating_sub(cost);
        if state.count == 0 {
            *state = self.fresh();
        }
    }

    fn window(&self) -> Duration {
        FixedWindow::window(self)
    }

    #[inline]
    fn peek(&self, state: &FixedWindowState, now: Time, cost: u32) -> Decision {
        self.answer(self.settled(*state, now), now, cost)
    }
}
