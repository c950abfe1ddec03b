//! Path normalization and path patterns.
//!
//! `/login`, `//login`, `/x/../login`, `/%6Cogin` and `/login;a=b` reach the same handler in one server or another. A
//! limit that compares raw text is bypassed by a different form of the path, so a path is normalized before it is
//! compared or becomes part of a key:
//!
//! ```
//! use ratekeeper_rules::path::{Pattern, PathNormalization, normalize};
//!
//! let normalization = PathNormalization::default();
//! let pattern = Pattern::parse("/users/{id}/**").unwrap();
//! let path = normalize("//x/../users/%37;a=b/posts", normalization).unwrap();
//! assert_eq!(path, "/users/7/posts");
//! assert!(pattern.matches(&path));
//! assert_eq!(pattern.capture(&path, "id"), Some("7"));
//! assert!(normalize("/users%2F7", normalization).is_err());
//! ```
//!
//! **Forward what was matched.** The upstream may read a path in another way, and then a request is charged as one
//! path and served as another. If the normalized path differs from the received one, forward the normalized path or
//! reject the request. The exceptions are `OPTIONS *`, which has no path and is forwarded unchanged, and parameters and
//! empty segments ([`with_parameters`]) if all rules apply alike however they are read ([`is_read_alike`]).
//!
//! # The normal form
//!
//! A normalized path begins with `/`, is plain ASCII, and normalizes to itself. The steps, from left to right:
//!
//! 1. Escapes (`%41`) of letters, digits and `- . _ ~` are decoded, once: `%2561` remains. Every other escape stays,
//!    in upper case.
//! 2. Characters that a path may not contain literally (spaces, quotes, `<>[]^{|}`, everything outside ASCII) are
//!    escaped: `/é` and `/%C3%A9` are the same.
//! 3. Parameters, from `;` to the end of a segment, are dropped. `%3B` is text, but servers that decode first end a
//!    segment there; `..%3B` is rejected, and [`hides_match`] finds the other paths for which that matters.
//! 4. Empty segments and `.` are dropped, and `..` is dropped with the segment before it; above the root is the root.
//!    Empty segments are dropped first: `/a//../b` is `/b`. One trailing slash remains, also after a dot segment:
//!    `/a/b/..` is `/a/`.
//!
//! The empty path and `*` (of `OPTIONS *`) are `/`, so that a limit on all paths applies to them, too. The empty path
//! is also what remains of an authority (`CONNECT host:443`) that was split off. Any other text without a leading
//! slash is not a path and is always rejected: an authority, `http://host/path`, `a/b`.

mod matching;
mod normal;
mod pattern;
mod reading;
mod scanner;
mod template;

use std::fmt;
use std::ops::Range;

#[cfg(debug_assertions)]
#[doc(hidden)]
pub use normal::normalized_count;
pub use normal::{RequestPath, normalize};
pub use pattern::{Pattern, PatternError};
pub use reading::{hides_match, is_read_alike, with_parameters};
pub use template::Template;

/// Which forms of a path are equal, beyond those that always are. Patterns and the paths they match need the same
/// normalization.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PathNormalization {
    /// What to do with a path that servers read in different ways.
    pub ambiguous: AmbiguousPathPolicy,
    /// `/Login` is `/login`, for case-insensitive servers. Uses Unicode lower case for each character, escaped or
    /// not.
    pub ignore_case: bool,
    /// `/a/` is `/a`.
    pub ignore_trailing_slash: bool,
    /// `/%40me` is `/@me`: escapes of the delimiters that a path may contain literally, `! $ & ' ( ) * + , = : @`,
    /// are decoded, too. RFC 3986 allows them to differ, but most servers do not distinguish them; there, a limit on
    /// `/users/@me` or a key with a captured address needs this.
    pub decode_delimiters: bool,
}

/// What to do with a path that servers read in different ways; [`Ambiguity`] lists these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AmbiguousPathPolicy {
    /// [`normalize`] fails, and the request is rejected with 400.
    #[default]
    Reject,
    /// Ambiguous characters are text, never separators: escapes stay, other characters are escaped, and `%` without
    /// two hex digits becomes `%25`.
    ///
    /// For upstreams that do the same, for example those that read `group%2Fproject` as one name. In front of an
    /// upstream that decodes `%2F` to a slash, this lets requests bypass their limits.
    Keep,
}

/// Why a path is rejected, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
// Contains nothing of the path itself, because this may end up in a response or a log.
#[error("the path has {what} at byte {at}")]
pub struct AmbiguousPath {
    /// Byte offset from the start of the path.
    pub at: usize,
    /// What was found there.
    pub what: Ambiguity,
}

/// What servers interpret in different ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ambiguity {
    /// `%2F`, which separates segments for servers that decode before they split.
    EncodedSlash,
    /// `%5C`, which the same servers decode to a backslash.
    EncodedBackslash,
    /// `%00`, at which servers written in C end the path.
    EncodedNul,
    /// `\`, which browsers and Windows treat as a slash.
    Backslash,
    /// A raw ASCII control character, which some servers drop and at which others stop.
    Control,
    /// `%` without two hex digits after it, which is text for some servers and an error for others.
    BadEscape,
    /// Escapes that are not UTF-8 when decoded, for example `%C0%AF`, an overlong slash.
    NotUtf8,
    /// `.` or `..` with `%3B` or encoded white space behind it, a dot segment for servers that decode before they cut.
    EncodedDotSegment,
    /// A raw `?` or `#`: a query that was not cut off, or a fragment, at which some servers cut.
    QueryOrFragment,
    /// No leading slash: not a path, and rejected even under [`AmbiguousPathPolicy::Keep`].
    NoLeadingSlash,
}

impl fmt::Display for Ambiguity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ambiguity::EncodedSlash => "an encoded slash",
            Ambiguity::EncodedBackslash => "an encoded backslash",
            Ambiguity::EncodedNul => "an encoded NUL",
            Ambiguity::Backslash => "a backslash",
            Ambiguity::Control => "a control character",
            Ambiguity::BadEscape => "a percent sign without two hex digits",
            Ambiguity::NotUtf8 => "escapes that are not UTF-8",
            Ambiguity::EncodedDotSegment => "dots before an encoded semicolon or white space",
            Ambiguity::QueryOrFragment => "a query or a fragment",
            Ambiguity::NoLeadingSlash => "no slash in front",
        })
    }
}

/// A segment of a normalized path, counted from 0: number 1 of `/users/7` is `7`. The empty text after a trailing
/// slash is not a segment.
pub fn segment(normalized: &str, index: usize) -> Option<&str> {
    let segments = normalized.strip_prefix('/')?;
    segments.split('/').nth(index).filter(|segment| !segment.is_empty())
}

/// The byte range of `count` segments of a path, from segment `first`, with their leading slashes; it is shorter if
/// the path has fewer segments.
///
/// Paths that normalize to each other segment by segment have the same segments at the same numbers, so a part found in
/// one of them can be cut out of the other.
pub fn segment_range(path: &str, first: usize, count: usize) -> Range<usize> {
    let mut slashes = path.bytes().enumerate().filter(|(_, byte)| *byte == b'/').map(|(at, _)| at);
    let start = slashes.nth(first).unwrap_or(path.len());
    let end = match count {
        0 => start,
        count => slashes.nth(count - 1).unwrap_or(path.len()),
    };
    start..end
}
