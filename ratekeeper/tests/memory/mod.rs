//! The memory store's promises: the same decisions as the algorithms, exact under contention, bounded under a flood.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bounds;
mod contention;
mod equivalence;
mod operations;
mod reload;
mod several_limits;

use ratekeeper::{Limit, Limiter, LimiterBuilder, ManualClock, Memory, Time};

pub(crate) type Tested = Limiter<Memory<ManualClock>>;

pub(crate) const START: Time = Time::from_secs(1_700_000_040);

/// A limiter with its own clock, which shows [`START`].
pub(crate) fn limiter(
    limit: Limit,
    settings: impl FnOnce(LimiterBuilder<ManualClock>) -> LimiterBuilder<ManualClock>,
) -> (Tested, ManualClock) {
    let clock = ManualClock::new(START);
    let limiter = settings(Limiter::builder(limit).clock(clock.clone())).build().unwrap();
    (limiter, clock)
}
