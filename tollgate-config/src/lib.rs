//! Tollgate's configuration language.
//!
//! YAML text -> what was typed (a tree of words, every one with its place) -> what it means ([`tollgate_core::Limit`] and
//! [`tollgate_rules`], checked). Every way to go wrong ends in an [`Error`] that shows the place and says what to write
//! instead, and all of them are told at once.
//!
//! ```
//! let limit = tollgate_config::parse_limit("token_bucket: { capacity: 4, refill: 4/min, style: stepped }")?;
//! assert_eq!(limit.limit(), 4);
//! assert_eq!(
//!     tollgate_config::to_yaml(&limit),
//!     "token_bucket: { capacity: 4, refill: 4/min, style: stepped }"
//! );
//!
//! let wrong = tollgate_config::parse_limit("token_bucket: { capcity: 4 }").unwrap_err();
//! assert_eq!(
//!     wrong.to_string(),
//!     "line 1, column 17: `capcity` is not a parameter of token_bucket
//!   |
//! 1 | token_bucket: { capcity: 4 }
//!   |                 ^^^^^^^
//!   = write `capacity`; token_bucket has capacity, refill and style"
//! );
//! # Ok::<(), tollgate_config::Error>(())
//! ```
//!
//! | a file of this crate | its step |
//! |---|---|
//! | `tree` | text -> typed, within a budget |
//! | `reader` | typed -> meaning, one value at a time |
//! | `limit` | a limit |
//! | `rule` | a limit with a name, and all that is said of it |
//! | `key` | whose budget a request uses |
//! | `when` | which requests are meant |
//! | `file` | a whole file |
//! | `store` | where limits are kept |
//! | `slots` | a limit on requests under way |
//! | `envoy` | domains and their descriptors, for Envoy to ask about |
//! | `gateway` | where it listens, what goes where, and what becomes of it on the way |
//! | `outside` | variables of the environment and other files that it refers to |
//! | `names`, `words` | the names that may stand in it, and the words of which one is chosen |
//! | `quantity` | whole numbers, durations and rates, read and printed |
//! | `seconds` | waits as programs read them |
//! | `print` | limit -> YAML |
//! | `error`, `nearest` | what to tell the person who typed it |
//! | `mask` | what not to show of it |

mod doors;
pub mod envoy;
mod error;
mod file;
mod gateway;
mod key;
mod limit;
mod mask;
mod names;
mod nearest;
mod outside;
mod print;
mod quantity;
mod reader;
mod rule;
mod seconds;
mod slots;
mod store;
mod tree;
mod when;
mod words;

use std::time::Duration;

pub use doors::{Authorize, Door, Doors, GrpcDoor, HttpDoor, RespDoor};
pub use error::{Error, Errors};
pub use file::{Answers, Config, Jwt};
pub use gateway::{
    Address, Balance, Eject, Gateway, HeaderEdits, Health, Listener, PathEdit, Protocol, Route, Timeouts,
    Tls, Upstream, is_link_local,
};
pub use nearest::nearest;
pub use outside::{Outside, Secret};
pub use print::to_yaml;
pub use quantity::{duration_text, rate_text};
pub use seconds::push_seconds;
pub use slots::Slots;
pub use store::{Redis, Store, WhenFull};

/// What a file may hold, as a JSON Schema: editors complete and check by it.
pub const SCHEMA: &str = include_str!("../schema.json");

/// The largest text that is read: one megabyte.
pub const TEXT_BYTES_MAX: usize = 1_000_000;

/// The most limits of a file: a request is held against each of them.
pub const LIMITS_MAX: usize = 1_000;

/// The most overrides of a limit.
pub const OVERRIDES_MAX: usize = 1_000;

/// The most requests that a limit or a route lets be under way at once.
pub const IN_FLIGHT_MAX: u32 = 1_000_000;

/// The most routes of a gateway.
pub const ROUTES_MAX: usize = 1_000;

/// The most addresses that a gateway listens on.
pub const LISTENERS_MAX: usize = 64;

/// The most upstreams with a name.
pub const UPSTREAMS_MAX: usize = 1_000;

/// The most addresses of an upstream.
pub const ADDRESSES_MAX: usize = 1_000;

/// The most edits of a route's headers in one direction.
pub const HEADER_EDITS_MAX: usize = 64;

/// The most mistakes that are told at once.
pub const ERRORS_MAX: usize = 100;

/// Reads one limit: an algorithm's name and its parameters, each of which may be left out.
///
/// # Errors
/// If the text is not such a limit; the error shows where, why, and what to write instead.
pub fn parse_limit(yaml: &str) -> Result<tollgate_core::Limit, Error> {
    let (node, problems) =
        tree::read(yaml, "a limit", limit::EXAMPLE, tree::Size::Limit).map_err(|it| it.in_text(yaml, &[]))?;
    let mut reader = reader::Reader { problems, ..reader::Reader::default() };
    let limit = limit::document(&mut reader, &node);
    match (limit, reader.problems.into_iter().next()) {
        (_, Some(problem)) => Err(problem.in_text(yaml, &[])),
        (Some(limit), None) => Ok(limit),
        // Whoever gives no limit says why.
        (None, None) => Err(error::Problem::unknown().in_text(yaml, &[])),
    }
}

/// Reads a duration: `500ms`, `60s`, `15m`, `1h`, `1d`, `1w`.
///
/// # Errors
/// What is wrong with it, and what to write instead.
pub fn parse_duration(typed: &str) -> Result<Duration, String> {
    quantity::duration(typed).map_err(|quantity::Fault { what, instead }| format!("{what}; {instead}"))
}

/// Reads a whole file.
///
/// # Errors
/// Everything that is wrong with it, in the order of its lines.
pub fn parse(yaml: &str, outside: &dyn Outside) -> Result<Config, Errors> {
    let (node, problems) = tree::read(yaml, "a configuration", file::EXAMPLE, tree::Size::File)
        .map_err(|problem| Errors::new(vec![problem], yaml, &[]))?;
    let mut reader = reader::Reader { problems, ..reader::Reader::default() };
    match file::document(&mut reader, &node, outside) {
        Some(config) if reader.problems.is_empty() => Ok(config),
        _ => Err(Errors::new(reader.problems, yaml, &reader.secrets)),
    }
}
