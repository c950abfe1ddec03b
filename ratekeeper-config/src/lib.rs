//! Configuration files of Ratekeeper.
//!
//! A file is read in two steps: YAML text to a tree of nodes with their positions, then to checked values
//! ([`ratekeeper_core::Limit`] and [`ratekeeper_rules`]). Each mistake becomes a [`Diagnostic`] that shows its position
//! and what to write instead. All mistakes of a file are reported together.
//!
//! ```
//! let limit = ratekeeper_config::parse_limit("token_bucket: { capacity: 4, refill: 4/min, style: stepped }")?;
//! assert_eq!(limit.limit(), 4);
//! assert_eq!(
//!     ratekeeper_config::to_yaml(&limit),
//!     "token_bucket: { capacity: 4, refill: 4/min, style: stepped }"
//! );
//!
//! let wrong = ratekeeper_config::parse_limit("token_bucket: { capcity: 4 }").unwrap_err();
//! assert_eq!(
//!     wrong.to_string(),
//!     "error: unknown field `capcity` in `token_bucket`
//!   --> line 1, column 17
//!    |
//!  1 | token_bucket: { capcity: 4 }
//!    |                 ^^^^^^^
//!    = help: did you mean `capacity`? Fields: capacity, refill, style"
//! );
//! # Ok::<(), ratekeeper_config::Diagnostic>(())
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | `tree` | YAML text to a tree of nodes, within a budget |
//! | `syntax` | syntax errors: what was probably meant |
//! | `reader` | nodes to values, collecting errors |
//! | `limit` | a limit: algorithm and parameters |
//! | `rule` | a named limit with its key, conditions and responses |
//! | `key` | the key of a limit |
//! | `when` | the conditions of a limit or route |
//! | `file` | a whole file |
//! | `store` | the store |
//! | `concurrency` | a concurrency limit |
//! | `envoy` | domains and descriptors of the Envoy API |
//! | `gateway` | listeners, routes and upstreams |
//! | `environment` | environment variables and referenced files |
//! | `table` | the field table: names, meanings, ranges and defaults; the JSON Schema and the reference page |
//! | `words` | enumeration values |
//! | `quantity` | numbers, durations and rates: parsing and printing |
//! | `seconds` | waits as decimal seconds |
//! | `print` | a limit to YAML |
//! | `error`, `nearest` | error messages and suggestions |
//! | `warnings` | risks in a valid file |
//! | `explain` | what a configuration means, as tables |
//! | `secrets` | the words of a file that may be secrets |
//! | `mask` | secrets hidden in error messages |

mod apis;
mod concurrency;
mod environment;
pub mod envoy;
mod error;
mod explain;
mod file;
mod gateway;
mod key;
mod limit;
mod mask;
mod nearest;
mod print;
mod quantity;
mod reader;
mod rule;
mod seconds;
mod secrets;
mod store;
mod syntax;
mod table;
mod tree;
mod warnings;
mod when;
mod words;

use std::time::Duration;

pub use apis::{Api, Apis, Authorize, EnvoyApi, EnvoyHeaderNames, HttpApi, RespApi};
pub use concurrency::ConcurrencyLimit;
pub use environment::{EmptyEnvironment, Environment, RedisAddressError, Secret};
pub use error::{Diagnostic, Errors, Severity};
pub use explain::{Table, TableCell, explain};
pub use file::{Config, Jwt, LogKeys, Responses};
pub use gateway::{
    Address, Balance, Gateway, HeaderEdits, Health, Listener, OutlierEjection, PathEdit, Protocol, Route,
    Timeouts, Tls, Upstream, UpstreamTimeouts, is_link_local,
};
pub use nearest::nearest;
pub use print::to_yaml;
pub use quantity::{duration_text, rate_text};
pub use seconds::{push_retry_after, push_seconds};
pub use store::{Redis, Store, WhenFull};
pub use table::{reference_page, schema};

/// Maximum size of a file: one megabyte.
pub const TEXT_BYTES_MAX: usize = 1_000_000;

/// Maximum number of limits in a file. A request may be checked against each of them.
pub const LIMITS_MAX: usize = 1_000;

/// Maximum number of overrides of a limit.
pub const OVERRIDES_MAX: usize = 1_000;

/// Maximum value of a concurrency limit, and of `max_in_flight` of a route.
pub const IN_FLIGHT_MAX: u32 = 1_000_000;

/// Maximum number of routes of a gateway.
pub const ROUTES_MAX: usize = 1_000;

/// Maximum number of addresses that a gateway listens on.
pub const LISTENERS_MAX: usize = 64;

/// Maximum number of named upstreams.
pub const UPSTREAMS_MAX: usize = 1_000;

/// Maximum number of addresses of an upstream.
pub const ADDRESSES_MAX: usize = 1_000;

/// Maximum number of header edits of a route in one direction.
pub const HEADER_EDITS_MAX: usize = 64;

/// Maximum number of errors reported for a file.
pub const ERRORS_MAX: usize = 100;

/// Parses one limit: the name of an algorithm and its parameters, all of which are optional.
///
/// # Errors
/// Returns an error with its position, the reason and what to write instead if the text is not a valid limit.
pub fn parse_limit(yaml: &str) -> Result<ratekeeper_core::Limit, Diagnostic> {
    let (node, problems) = tree::read(yaml, "a limit", limit::EXAMPLE, tree::Size::Limit)
        .map_err(|it| it.in_text(Severity::Error, yaml, &[]))?;
    let mut reader = reader::Reader { problems, ..reader::Reader::default() };
    let limit = limit::document(&mut reader, &node);
    match (limit, reader.problems.into_iter().next()) {
        (_, Some(problem)) => Err(problem.in_text(Severity::Error, yaml, &[])),
        (Some(limit), None) => Ok(limit),
        // A reader that returns no limit has recorded a problem.
        (None, None) => Err(error::Problem::unknown().in_text(Severity::Error, yaml, &[])),
    }
}

/// Parses a duration: `500ms`, `60s`, `15m`, `1h`, `1d`, `1w`.
///
/// # Errors
/// Returns what is wrong and what to write instead.
pub fn parse_duration(typed: &str) -> Result<Duration, String> {
    quantity::duration(typed).map_err(|quantity::ValueError { message, help }| format!("{message}; {help}"))
}

/// Parses a configuration file.
///
/// # Errors
/// Returns all errors of the file, in line order.
pub fn parse(yaml: &str, environment: &dyn Environment) -> Result<Config, Errors> {
    let (node, problems) = tree::read(yaml, "a configuration", file::EXAMPLE, tree::Size::File)
        .map_err(|problem| Errors::new(vec![*problem], yaml, &[]))?;
    let mut reader = reader::Reader { problems, ..reader::Reader::default() };
    secrets::mark(&mut reader, &node);
    match file::document(&mut reader, &node, environment) {
        Some(config) if reader.problems.is_empty() => {
            reader.warnings.sort_by_key(|warning| (warning.position.line, warning.position.column));
            let warnings = reader.warnings.into_iter();
            let warnings = warnings.map(|it| it.in_text(Severity::Warning, yaml, &reader.secrets)).collect();
            Ok(Config { warnings, ..config })
        }
        _ => Err(Errors::new(reader.problems, yaml, &reader.secrets)),
    }
}
