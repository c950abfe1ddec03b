//! Rate limiting with five algorithms, exact arithmetic and bounded memory, in one process or shared through Redis.
//!
//! This page is a guide, from the first check to limits that many processes share. Each section builds on the
//! previous ones.
//!
//! # The first check
//!
//! A [`Limit`] is an algorithm with its parameters. A [`Limiter`] stores how much of it each key has used. A key
//! identifies whose budget a request uses: a user's name, an address, a pair of both, anything that implements
//! `Hash`. The limiter keeps only a hash of the key.
//!
//! ```
//! use std::time::Duration;
//! use ratekeeper::{Limit, Limiter, Rate, RetryAfter, RefillStyle};
//!
//! // Two at once, and one more each second.
//! let limiter = Limiter::new(Limit::token_bucket(2, Rate::new(1, Duration::from_secs(1))?, RefillStyle::Smooth)?);
//! assert!(limiter.check("alice").allowed);
//! assert!(limiter.check("alice").allowed);
//!
//! let denied = limiter.check("alice");
//! assert!(!denied.allowed);
//! assert!(matches!(denied.retry_after, RetryAfter::After(wait) if wait <= Duration::from_secs(1)));
//! assert!(limiter.check("bob").allowed, "each key has a budget of its own");
//! # Ok::<(), ratekeeper::LimitError>(())
//! ```
//!
//! Threads share a limiter by reference, and a check takes some tens of nanoseconds. The [`Decision`] contains the
//! remaining budget and the time to wait; a denied request is not charged.
//!
//! # Choosing an algorithm
//!
//! | limit | use it when |
//! |---|---|
//! | [`token_bucket`](Limit::token_bucket) | bursts are fine: an idle key may spend a full bucket, then the rate |
//! | [`leaky_bucket`](Limit::leaky_bucket) | the upstream needs steady input |
//! | [`fixed_window`](Limit::fixed_window) | it must be simple to explain; twice the limit can pass at an edge |
//! | [`sliding_window_log`](Limit::sliding_window_log) | the limit must hold in every window; 8 bytes per request |
//! | [`sliding_window_counter`](Limit::sliding_window_counter) | unsure: two counts per key, close to the log |
//!
//! A leaky bucket with [`LeakyMode::Shape`] queues requests: each waits for its [`Decision::delay`]. A fixed window
//! may allow twice the limit around the edge of two windows; a sliding window log holds the limit in every window,
//! wherever it begins; a sliding window counter with [`EdgePolicy::Keep`] never exceeds it. All algorithms are exact:
//! no decision uses floating-point arithmetic.
//!
//! # Several limits
//!
//! A request is allowed if all limits allow it; if any limit denies it, no limit is charged:
//!
//! ```
//! # use std::time::Duration;
//! use ratekeeper::{WindowAlign, LogPolicy, Limit, Limiter};
//!
//! let limiter = Limiter::builder(Limit::sliding_window_log(3, Duration::from_secs(1), LogPolicy::Admitted)?)
//!     .and(Limit::fixed_window(100, Duration::from_secs(3600), WindowAlign::FirstRequest)?)
//!     .build()?;
//! assert_eq!(limiter.check("alice").remaining, 2, "that of the limit that is nearer to its end");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! If each limit has a different key, for example the user and the address, use [`Limiter::charge`].
//!
//! # Costs
//!
//! [`check_n`](Limiter::check_n) charges any cost atomically; a cost that can never be met is denied with
//! [`RetryAfter::Never`]. [`peek`](Limiter::peek) decides without charging, [`reset`](Limiter::reset) restores a key
//! to its full budget, and [`check_many`](Limiter::check_many) checks many keys several times as fast as single
//! checks.
//!
//! ```
//! # use std::time::Duration;
//! # use ratekeeper::{WindowAlign, Limit, Limiter, RetryAfter};
//! let limiter = Limiter::new(Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?);
//! assert_eq!(limiter.check_n("alice", 7).remaining, 3);
//! assert!(!limiter.check_n("alice", 4).allowed);
//! assert_eq!(limiter.check_n("alice", 11).retry_after, RetryAfter::Never);
//! assert_eq!(limiter.peek_n("alice", 0).remaining, 3, "neither took anything");
//! # Ok::<(), ratekeeper::LimitError>(())
//! ```
//!
//! # Memory bounds
//!
//! A client that invents keys must not be able to fill your memory. By default a limiter holds at most a million keys
//! in use, in at most 1 GiB. New keys evict idle ones, and no key in use is ever evicted. [`WhenFull`] decides
//! requests whose key finds no free entry.
//!
//! ```
//! # use std::time::Duration;
//! # use ratekeeper::{WindowAlign, Limit, Limiter};
//! use ratekeeper::WhenFull;
//!
//! let limit = Limit::fixed_window(100, Duration::from_secs(60), WindowAlign::Clock)?;
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
//! Tests need not sleep: they advance a [`ManualClock`], whose clones share one time.
//!
//! ```
//! # use std::time::Duration;
//! # use ratekeeper::{WindowAlign, Limit, Limiter};
//! use ratekeeper::ManualClock;
//!
//! let clock = ManualClock::default();
//! let limit = Limit::fixed_window(1, Duration::from_secs(3600), WindowAlign::FirstRequest)?;
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
//! With the feature `tower`, limits apply to any HTTP service: axum, tonic, hyper. A rule derives the key from a
//! request's address, headers, cookies, path or verified token; responses carry `Retry-After` and `RateLimit`. The
//! module [`tower`] has its own guide.
//!
#![cfg_attr(feature = "tower", doc = "```")]
#![cfg_attr(not(feature = "tower"), doc = "```ignore")]
//! use std::time::Duration;
//! use ratekeeper::tower::RatekeeperLayer;
//! use ratekeeper::tower::key::{Key, KeyPart};
//! use ratekeeper::tower::rule::Rule;
//! use ratekeeper::{WindowAlign, Limit};
//!
//! let hour = Duration::from_secs(3600);
//! let per_user = Rule::new("per-user", Limit::fixed_window(1000, hour, WindowAlign::Clock)?);
//! let layer = RatekeeperLayer::builder()
//!     .rule(per_user.key(Key::of(KeyPart::header("X-User-Id"))))
//!     .per_client("per-client", Limit::fixed_window(5000, hour, WindowAlign::Clock)?)
//!     .build()?;
//! # let _ = layer;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Sharing limits through Redis
//!
//! With the feature `redis`, any number of processes enforce one limit together, as exactly as one process does: each
//! check is one call of a function in a Redis server, Sentinel or Cluster, by the server's clock. The methods are the
//! same, but they are `async` and return a [`Verdict`].
//!
#![cfg_attr(feature = "redis", doc = "```no_run")]
#![cfg_attr(not(feature = "redis"), doc = "```ignore")]
//! use std::time::Duration;
//! use ratekeeper::redis::Settings;
//! use ratekeeper::{FailurePolicy, Lease, Limit, Limiter, Rate, RefillStyle};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let settings = Settings::new("redis://127.0.0.1:6379")
//!     .secret(std::env::var("RATEKEEPER_SECRET")?.as_bytes())
//!     .on_store_failure(FailurePolicy::Local { instances: 3 })
//!     .lease(0, Lease::new(20));
//! let limit = Limit::token_bucket(1000, Rate::new(100, Duration::from_secs(1))?, RefillStyle::Smooth)?;
//! let limiter = Limiter::builder(limit).redis(&settings)?;
//!
//! let verdict = limiter.check("alice").await;
//! println!("allowed: {}, degraded: {}", verdict.allowed(), verdict.is_degraded());
//! limiter.release().await;
//! # Ok(())
//! # }
//! ```
//!
//! **If Redis is unavailable**, the limit's [`FailurePolicy`] decides, still in time: each process enforces its share
//! locally, allows everything, or denies everything. The verdict is then [degraded](Verdict::is_degraded).
//!
//! **A [`Lease`]** lets a process take part of a busy key's budget ahead of use and spend it without a call to Redis.
//! The limit is never exceeded; slightly less may be used, while one process holds budget that another could use.
//! `Limiter::release` refunds unused leases before a process ends.
//!
//! The middleware keeps its limits in Redis with `.redis(&settings)` in place of `.build()`. A rule may override the
//! failure policy and the lease.
//!
//! # Overview
//!
//! | | |
//! |---|---|
//! | [`Limiter`], [`LimiterBuilder`] | checks requests against one limit or several; its settings |
//! | [`Limit`], [`Rate`] | a limit: one of five algorithms with its parameters |
//! | [`RefillStyle`], [`LeakyMode`], [`WindowAlign`], [`LogPolicy`], [`EdgePolicy`] | the variants of an algorithm |
//! | [`Decision`], [`RetryAfter`], [`Verdict`] | the outcome of one limit, its wait, the outcome over all limits |
//! | [`Memory`], [`WhenFull`] | the store in this process, and what happens when it is full |
//! | [`Clock`], [`ManualClock`], [`SystemClock`], [`Time`] | where time comes from |
//! | [`Charge`], [`Key`] | the cost of a request for one limit, and the key that it is charged to |
//! | [`FailurePolicy`], [`Lease`] | options of a limit that processes share |
//! | [`Store`] | the interface of stores |
//! | [`tower`] | the middleware, with the feature `tower`; with `jwt`, keys by verified tokens |
//! | [`redis`] | the store that processes share, with the feature `redis` |
//! | [`LimitError`], [`BuildError`] | invalid parameters of a limit, invalid bounds of a limiter |
//! | [`ChargeError`], [`StoreUnavailable`] | an invalid charge, a store that does not answer |
//!
#![cfg_attr(feature = "tower", doc = "[`tower`]: crate::tower")]
#![cfg_attr(not(feature = "tower"), doc = "[`tower`]: #the-middleware")]
#![cfg_attr(feature = "redis", doc = "[`redis`]: crate::redis")]
#![cfg_attr(not(feature = "redis"), doc = "[`redis`]: #sharing-limits-through-redis")]

mod clock;
#[cfg(feature = "tower")]
mod concurrency;
mod limiter;
mod memory;
#[cfg(feature = "redis")]
pub mod redis;
mod store;
mod sync;
#[cfg(feature = "tower")]
pub mod tower;

pub use clock::{Clock, ManualClock, SystemClock};
pub use limiter::{BuildError, Limiter, LimiterBuilder};
pub use memory::{Memory, WhenFull};
pub use ratekeeper_core::{
    Decision, EdgePolicy, FailurePolicy, Gcra, LeakyMode, Lease, Limit, LimitError, LogPolicy, Rate,
    RefillStyle, RetryAfter, Time, WindowAlign,
};
pub use store::{Charge, ChargeError, InlineLimit, Key, Store, StoreUnavailable, Verdict};

/// The examples of README.md and docs/, as tests.
#[cfg(all(doctest, feature = "redis", feature = "tower"))]
mod pages {
    #[doc = include_str!("../../README.md")]
    struct ReadmePage;
    #[doc = include_str!("../../docs/library.md")]
    struct LibraryPage;
    #[doc = include_str!("../../docs/middleware.md")]
    struct MiddlewarePage;
    #[doc = include_str!("../../docs/redis.md")]
    struct RedisPage;
}
