//! Rate limiting: may this request pass now?
//!
//! | start here | what it is |
//! |---|---|
//! | [`Limiter`] | decides about requests, by one limit or several |
//! | [`Limit`] | a limit: one of five algorithms with its parameters |
//! | [`Decision`] | the answer: allowed, remaining, how long to wait |
//! | [`Memory`] | the store in this process; [`WhenFull`] says what happens when it is |
//! | [`Clock`], [`ManualClock`] | where time comes from, and one to crank by hand |
//! | [`Store`] | the seam for other stores; with the feature `redis`, the module of that name |
//!
//! The path of a check: key -> seeded hash -> the clock -> one cache line of the table -> the algorithm decides ->
//! one compare-and-swap. The key's text is never kept.

mod clock;
mod limiter;
mod memory;
#[cfg(feature = "redis")]
pub mod redis;
mod store;
mod sync;
#[cfg(feature = "tower")]
pub mod tower;

pub use clock::{Clock, ManualClock, SystemClock};
pub use limiter::{BuildError, Builder, Limiter};
pub use memory::{Memory, WhenFull};
pub use store::{Charge, ChargeError, Key, Store, Verdict};
pub use tollgate_core::{
    Align, Count, Decision, Edge, Failure, Lease, Limit, LimitError, Mode, Rate, RetryAfter, Style, Time,
};

/// The README's examples, as tests.
#[cfg(all(doctest, feature = "redis", feature = "tower"))]
#[doc = include_str!("../../README.md")]
struct Readme;
