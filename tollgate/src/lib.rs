//! Rate limiting: may this request pass now?
//!
//! This page is a guide, from the first check to limits that many processes share. Each part builds on the ones before, and
//! you may stop where you have what you need.
//!
//! # The first check
//!
//! A [`Limit`] says how much may pass, a [`Limiter`] remembers who has used how much of it, and a key says who that is: a
//! user's name, an address, a pair of both, anything that can be hashed. Only a hash of it is kept.
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{Limit, Limiter, Rate, RetryAfter, Style};
//!
//! // Two at once, and one more each second.
//! let limiter = Limiter::new(Limit::token_bucket(2, Rate::new(1, Duration::from_secs(1))?, Style::Smooth)?);
//! assert!(limiter.check("alice").allowed);
//! assert!(limiter.check("alice").allowed);
//!
//! let denied = limiter.check("alice");
//! assert!(!denied.allowed);
//! assert!(matches!(denied.retry_after, RetryAfter::After(wait) if wait <= Duration::from_secs(1)));
//! assert!(limiter.check("bob").allowed, "each key has a budget of its own");
//! # Ok::<(), tollgate::LimitError>(())
//! ```
//!
//! A limiter is shared by reference among threads, and a check takes some tens of nanoseconds. The [`Decision`] says what is
//! left and how long to wait; a denied request takes nothing.
//!
//! # Choosing an algorithm
//!
//! | limit | what it is for |
//! |---|---|
//! | [`token_bucket`](Limit::token_bucket) | bursts are welcome: who was idle may spend a full bucket at once, and then gets the steady rate |
//! | [`leaky_bucket`](Limit::leaky_bucket) | what stands behind needs steady input; with [`Mode::Shape`] a request is told how long to [wait](Decision::delay) for its turn |
//! | [`fixed_window`](Limit::fixed_window) | it must be simple to explain: so many an hour. Around the edge of two windows twice as many may pass |
//! | [`sliding_window_log`](Limit::sliding_window_log) | the limit must hold in every window, wherever it begins; remembers each request, 8 bytes |
//! | [`sliding_window_counter`](Limit::sliding_window_counter) | you are not sure: two numbers a key, and close to the log; with [`Edge::Keep`] never above the limit |
//!
//! All are exact: no decision is made with a floating-point number.
//!
//! # Several limits at once
//!
//! A request passes if all limits allow it, and takes nothing from any if one denies it:
//!
//! ```
//! # use std::time::Duration;
//! use tollgate::{Align, Count, Limit, Limiter};
//!
//! let limiter = Limiter::builder(Limit::sliding_window_log(3, Duration::from_secs(1), Count::Admitted)?)
//!     .and(Limit::fixed_window(100, Duration::from_secs(3600), Align::FirstRequest)?)
//!     .build()?;
//! assert_eq!(limiter.check("alice").remaining, 2, "that of the limit that is nearer to its end");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where each limit has a key of its own, such as the user and the address, there is [`Limiter::charge`].
//!
//! # Costs
//!
//! A request need not cost 1. [`check_n`](Limiter::check_n) takes any cost, as a whole or not at all; a cost that can never
//! be met is [told so](RetryAfter::Never). [`peek`](Limiter::peek) says what would be decided, [`reset`](Limiter::reset)
//! makes a key as good as new, and [`check_many`](Limiter::check_many) decides about many keys several times as fast.
//!
//! ```
//! # use std::time::Duration;
//! # use tollgate::{Align, Limit, Limiter, RetryAfter};
//! let limiter = Limiter::new(Limit::fixed_window(10, Duration::from_secs(3600), Align::FirstRequest)?);
//! assert_eq!(limiter.check_n("alice", 7).remaining, 3);
//! assert!(!limiter.check_n("alice", 4).allowed);
//! assert_eq!(limiter.check_n("alice", 11).retry_after, RetryAfter::Never);
//! assert_eq!(limiter.peek_n("alice", 0).remaining, 3, "neither took anything");
//! # Ok::<(), tollgate::LimitError>(())
//! ```
//!
//! # Bounds of memory
//!
//! Whoever can make up keys must not be able to fill your memory. A limiter has room for a million keys in use and a
//! gigabyte unless you say otherwise; keys that are idle make room by themselves, and no key in use is ever dropped.
//! [`WhenFull`] says what happens to those that find no room.
//!
//! ```
//! # use std::time::Duration;
//! # use tollgate::{Align, Limit, Limiter};
//! use tollgate::WhenFull;
//!
//! let limit = Limit::fixed_window(100, Duration::from_secs(60), Align::Clock)?;
//! let limiter = Limiter::builder(limit)
//!     .max_keys(50_000)
//!     .max_bytes(4 << 20)
//!     .when_full(WhenFull::Deny)
//!     .build()?;
//! assert!(limiter.bytes() <= 4 << 20);
//! assert_eq!(limiter.overflowed(), 0, "how many found no room so far");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Time in tests
//!
//! No test need wait: a [`ManualClock`] is cranked by hand, and its clones show the same time.
//!
//! ```
//! # use std::time::Duration;
//! # use tollgate::{Align, Limit, Limiter};
//! use tollgate::ManualClock;
//!
//! let clock = ManualClock::default();
//! let limit = Limit::fixed_window(1, Duration::from_secs(3600), Align::FirstRequest)?;
//! let limiter = Limiter::builder(limit).clock(clock.clone()).build()?;
//! assert!(limiter.check("alice").allowed);
//! clock.advance(Duration::from_secs(3599));
//! assert!(!limiter.check("alice").allowed);
//! clock.advance(Duration::from_secs(1));
//! assert!(limiter.check("alice").allowed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The middleware
//!
//! With the feature `tower`, limits stand in front of any HTTP service: axum, tonic, hyper. A rule says whose budget a
//! request uses, by its address, headers, cookies, path or verified token; clients are told by `Retry-After` and
//! `RateLimit`. The module [`tower`] goes on from here.
//!
#![cfg_attr(feature = "tower", doc = "```")]
#![cfg_attr(not(feature = "tower"), doc = "```ignore")]
//! use std::time::Duration;
//! use tollgate::tower::RateLimitLayer;
//! use tollgate::tower::key::{Key, Part};
//! use tollgate::tower::rule::Rule;
//! use tollgate::{Align, Limit};
//!
//! let hour = Duration::from_secs(3600);
//! let per_user = Rule::new("per-user", Limit::fixed_window(1000, hour, Align::Clock)?);
//! let layer = RateLimitLayer::builder()
//!     .rule(per_user.key(Key::of(Part::header("X-User-Id"))))
//!     .per_client("per-client", Limit::fixed_window(5000, hour, Align::Clock)?)
//!     .build()?;
//! # let _ = layer;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Sharing limits through Redis
//!
//! With the feature `redis`, any number of processes enforce one limit together, as exactly as one process does: each check
//! is one call to a function inside of a Redis server, Sentinel or Cluster, by the server's clock. The methods are the same,
//! but one waits for them, and they give a [`Verdict`].
//!
#![cfg_attr(feature = "redis", doc = "```no_run")]
#![cfg_attr(not(feature = "redis"), doc = "```ignore")]
//! use std::time::Duration;
//! use tollgate::redis::Settings;
//! use tollgate::{Failure, Lease, Limit, Limiter, Rate, Style};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let settings = Settings::new("redis://127.0.0.1:6379")
//!     .secret(std::env::var("TOLLGATE_SECRET")?.as_bytes())
//!     .failure(Failure::Local { nodes: 3 })
//!     .lease(0, Lease::of(20));
//! let limit = Limit::token_bucket(1000, Rate::new(100, Duration::from_secs(1))?, Style::Smooth)?;
//! let limiter = Limiter::builder(limit).redis(&settings)?;
//!
//! let verdict = limiter.check("alice").await;
//! println!("allowed: {}, degraded: {}", verdict.allowed(), verdict.is_degraded());
//! limiter.release().await;
//! # Ok(())
//! # }
//! ```
//!
//! **When Redis is away**, a decision still comes in time, and the limit's [`Failure`] policy makes it: each process enforces
//! its share by itself, or everything passes, or nothing. The verdict [says so](Verdict::is_degraded).
//!
//! **A [`Lease`]** has a process take some of a busy key's budget ahead and spend it without asking. Never more passes than
//! the limit; a little less may, while a process holds what another could use. `Limiter::release` gives it back before a
//! process ends.
//!
//! The middleware has its limits in Redis with `.redis(&settings)` in place of `.build()`. A rule has a policy and a lease of
//! its own if it says so.
//!
//! # Where things are
//!
//! | | |
//! |---|---|
//! | [`Limiter`], [`Builder`] | decides about requests, by one limit or several; its settings |
//! | [`Limit`], [`Rate`] | a limit: one of five algorithms with its parameters |
//! | [`Style`], [`Mode`], [`Align`], [`Count`], [`Edge`] | the variants of an algorithm |
//! | [`Decision`], [`RetryAfter`], [`Verdict`] | the answer: allowed, remaining, how long to wait; that of several limits |
//! | [`Memory`], [`WhenFull`] | the store in this process, and what happens when it is full |
//! | [`Clock`], [`ManualClock`], [`SystemClock`], [`Time`] | where time comes from |
//! | [`Charge`], [`Key`] | what a request takes from one limit, and from whom |
//! | [`Failure`], [`Lease`] | how a limit is kept that processes share |
//! | [`Store`] | the seam for other stores |
//! | [`tower`] | the middleware, with the feature `tower`; with `jwt`, keys by verified tokens |
//! | [`redis`] | the store that processes share, with the feature `redis` |
//! | [`LimitError`], [`BuildError`], [`ChargeError`], [`Unreached`] | what can be wrong: a limit's numbers, a limiter's bounds, a charge, a store that is away |
//!
#![cfg_attr(feature = "tower", doc = "[`tower`]: crate::tower")]
#![cfg_attr(not(feature = "tower"), doc = "[`tower`]: #the-middleware")]
#![cfg_attr(feature = "redis", doc = "[`redis`]: crate::redis")]
#![cfg_attr(not(feature = "redis"), doc = "[`redis`]: #sharing-limits-through-redis")]

mod clock;
mod limiter;
mod memory;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "tower")]
mod slots;
mod store;
mod sync;
#[cfg(feature = "tower")]
pub mod tower;

pub use clock::{Clock, ManualClock, SystemClock};
pub use limiter::{BuildError, Builder, Limiter};
pub use memory::{Memory, WhenFull};
pub use store::{Charge, ChargeError, Key, Store, Unreached, Verdict};
pub use tollgate_core::{
    Align, Count, Decision, Edge, Failure, Lease, Limit, LimitError, Mode, Rate, RetryAfter, Style, Time,
};

/// The README's examples, as tests.
#[cfg(all(doctest, feature = "redis", feature = "tower"))]
#[doc = include_str!("../../README.md")]
struct Readme;
