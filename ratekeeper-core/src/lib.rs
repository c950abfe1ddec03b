//! Rate limiting algorithms with exact integer arithmetic.
//!
//! Five algorithms, each a pure function: *state of a key* + *now* + *cost* -> [`Decision`] + new state. Nothing here
//! reads a clock, allocates for a bucket or window decision, performs I/O or uses floating-point numbers.
//!
//! | start here | what it is |
//! |---|---|
//! | [`Limit`] | a validated limit: one of the five algorithms with its parameters |
//! | [`Decision`] | the outcome of a check: allowed or denied, remaining budget, time to wait |
//! | [`Algorithm`] | the pure functions that a store calls |
//! | [`Bucket`], [`SteppedBucket`], [`FixedWindow`], [`Log`], [`Counter`] | the algorithms |
//! | [`Time`] | an instant, whole nanoseconds since the Unix epoch |
//! | [`Limit::migrate_state`] | carries the state of a key over to a changed limit |
//!
//! # Time in any order
//! An instant may lie before one that the key has already seen, because a clock stepped back or two threads raced. No
//! algorithm returns budget for that. The key waits longer by the size of the step, and by at most one
//! [`Limit::window`]: a state further ahead than that was written by a wrong clock, and is moved to now with its used
//! units still used.
//!
//! # A fresh key
//! A state that can no longer change a decision is equal to a fresh key ([`Algorithm::is_fresh`]), and a store may
//! evict it. `reset_after` is the exact time until then.
//!
//! ```
//! use std::time::Duration;
//! use ratekeeper_core::{Algorithm, Bucket, Limit, Rate, RetryAfter, RefillStyle, Time};
//!
//! let limit = Limit::token_bucket(2, Rate::new(3, Duration::from_secs(1))?, RefillStyle::Smooth)?;
//! let Limit::Bucket(bucket) = limit else { unreachable!() };
//! let (mut state, now) = (bucket.fresh(), Time::from_secs(1_700_000_000));
//!
//! assert!(bucket.decide(&mut state, now, 2).allowed);
//! // A third of a second, rounded up to the nanosecond: never too early.
//! let denied = bucket.decide(&mut state, now, 1);
//! assert_eq!(denied.retry_after, RetryAfter::After(Duration::from_nanos(333_333_334)));
//! # Ok::<(), ratekeeper_core::LimitError>(())
//! ```

mod algorithm;
mod bucket;
mod counter;
mod counts;
mod decision;
mod fixed_window;
mod limit;
mod log;
mod math;
mod migration;
mod rate;
mod sharing;
mod stepped_bucket;
mod time;

pub use algorithm::Algorithm;
pub use bucket::{Bucket, Gcra, GcraState, NarrowBucket};
pub use counter::{Counter, CounterState};
pub use counts::{CountRing, Counts};
pub use decision::{Decision, RetryAfter};
pub use fixed_window::{FixedWindow, FixedWindowState};
pub use limit::{
    BUCKETS_MAX, EdgePolicy, LeakyMode, Limit, LimitError, LogPolicy, RefillStyle, WINDOW_MAX, WINDOW_MIN,
    WindowAlign,
};
pub use log::{Log, LogState};
pub use migration::State;
pub use rate::Rate;
pub use sharing::{FailurePolicy, Lease};
pub use stepped_bucket::{SteppedBucket, SteppedBucketState};
pub use time::Time;
