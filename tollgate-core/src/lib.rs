//! What a rate limit means.
//!
//! Five algorithms, each a pure function: *state of a key* + *now* + *cost* -> [`Decision`] + new state. Nothing
//! here reads a clock, allocates on a bucket or window decision, does I/O or uses a floating-point number.
//!
//! | start here | what it is |
//! |---|---|
//! | [`Limit`] | a checked limit: one of the five algorithms with its parameters |
//! | [`Decision`] | the answer: allowed, remaining, how long to wait |
//! | [`Algorithm`] | the pure functions that a store calls |
//! | [`Bucket`], [`Steps`], [`FixedWindow`], [`Log`], [`Counter`] | the algorithms |
//! | [`Time`] | an instant, whole nanoseconds since the Unix epoch |
//! | [`Limit::carried`] | what a key had used, when its limit changes |
//!
//! # Time in any order
//! An instant may lie before one that the key has already seen: a clock stepped back, or two threads raced. No
//! algorithm ever gives budget back for that. A key waits longer by the size of the step, and by one
//! [`Limit::window`] at most: a state that lies further ahead than that belongs to a clock that was wrong, and is
//! moved to now with everything it had used still used.
//!
//! # A fresh key
//! A state that can no longer change any answer *is* a fresh key ([`Algorithm::is_fresh`]), and a store may forget
//! it. `reset_after` is the exact time until then.
//!
//! ```
//! use std::time::Duration;
//! use tollgate_core::{Algorithm, Bucket, Limit, Rate, RetryAfter, Style, Time};
//!
//! let limit = Limit::token_bucket(2, Rate::new(3, Duration::from_secs(1))?, Style::Smooth)?;
//! let Limit::Bucket(bucket) = limit else { unreachable!() };
//! let (mut state, now) = (bucket.fresh(), Time::from_secs(1_700_000_000));
//!
//! assert!(bucket.decide(&mut state, now, 2).allowed);
//! // A third of a second, rounded up to the nanosecond: never too early.
//! let denied = bucket.decide(&mut state, now, 1);
//! assert_eq!(denied.retry_after, RetryAfter::After(Duration::from_nanos(333_333_334)));
//! # Ok::<(), tollgate_core::LimitError>(())
//! ```

mod algorithm;
mod bucket;
mod carry;
mod counter;
mod decision;
mod fixed_window;
mod limit;
mod log;
mod math;
mod rate;
mod sharing;
mod steps;
mod time;

pub use algorithm::Algorithm;
pub use bucket::{Bucket, NarrowBucket};
pub use carry::State;
pub use counter::{Counter, CounterState};
pub use decision::{Decision, RetryAfter};
pub use fixed_window::{FixedWindow, FixedWindowState};
pub use limit::{Align, BUCKETS_MAX, Count, Edge, Limit, LimitError, Mode, Style, WINDOW_MAX, WINDOW_MIN};
pub use log::{Log, LogState};
pub use rate::Rate;
pub use sharing::{Failure, Lease};
pub use steps::{Steps, StepsState};
pub use time::Time;
