//! Tollgate's configuration language.
//!
//! YAML text -> what was typed ([serde types](https://serde.rs), every value still text with its place) -> what it
//! means ([`tollgate_core::Limit`], checked). Each arrow is one file, and every way to go wrong ends in an
//! [`Error`] that shows the place and says what to write instead.
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
//! | `typed` | the YAML as serde types |
//! | `read` | text -> typed, within a budget |
//! | `meaning` | typed -> limit |
//! | `quantity` | whole numbers, durations and rates, read and printed |
//! | `print` | limit -> YAML |
//! | `error`, `nearest` | what to tell the person who typed it |

mod error;
mod meaning;
mod nearest;
mod print;
mod quantity;
mod read;
mod typed;

pub use error::Error;
pub use nearest::nearest;
pub use print::to_yaml;
pub use quantity::{duration_text, rate_text};

/// The largest text that is read: one megabyte.
pub const TEXT_BYTES_MAX: usize = 1_000_000;

/// Reads one limit: an algorithm's name and its parameters, each of which may be left out.
///
/// # Errors
/// If the text is not such a limit; the error shows where, why, and what to write instead.
pub fn parse_limit(yaml: &str) -> Result<tollgate_core::Limit, Error> {
    let typed = read::limit(yaml)?;
    meaning::limit(&typed).map_err(|problem| problem.in_text(yaml))
}
