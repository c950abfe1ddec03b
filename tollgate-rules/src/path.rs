//! Whether two spellings of a path are the same, and whether a path matches a pattern.
//!
//! `/login`, `//login`, `/x/../login`, `/%6Cogin` and `/login;a=b` reach the same handler in one server or another. A
//! limit that is found by comparing raw text is passed by whoever spells the path differently, so a path is brought
//! into one normal form before it is compared or becomes part of a key:
//!
//! ```
//! use tollgate_rules::path::{Pattern, Spelling, normalise};
//!
//! let spelling = Spelling::default();
//! let pattern = Pattern::parse("/users/{id}/**").unwrap();
//! let path = normalise("//x/../users/%37;a=b/posts", spelling).unwrap();
//! assert_eq!(path, "/users/7/posts");
//! assert!(pattern.matches(&path));
//! assert_eq!(pattern.capture(&path, "id"), Some("7"));
//! assert!(normalise("/users%2F7", spelling).is_err());
//! ```
//!
//! **Forward what was matched.** The server behind may read a path in another way, and then a request is counted as
//! one thing and served as another. If the normal form is not the path that came, the normal form goes on, or the
//! request is refused. The one exception is `OPTIONS *`, which has no path and goes on as it is.
//!
//! # The normal form
//!
//! It begins with `/` and is plain ASCII, and its own normal form is itself. In this order, from left to right:
//!
//! 1. Escapes (`%41`) of letters, digits and `- . _ ~` are decoded, once: `%2561` remains. Every other escape stays,
//!    in upper case.
//! 2. What a path may not hold as it stands (spaces, quotes, `<>[]^{|}`, everything outside ASCII) is escaped: `/é` and
//!    `/%C3%A9` are the same.
//! 3. From `;` to the end of a segment are parameters: dropped. `%3B` is text.
//! 4. Empty segments are dropped, `.` too, and `..` with the segment before it; above the root is the root. Empty
//!    segments go first: `/a//../b` is `/b`. One slash at the end remains, also after a dot segment: `/a/b/..` is `/a/`.
//!
//! The empty path and `*` (of `OPTIONS *`) are `/`, so that a limit on everything holds for them too. The empty path
//! is also what is left of an authority (`CONNECT host:443`) that was taken apart. Any other text without a slash in
//! front is not a path, and always refused: an authority, `http://host/path`, `a/b`.

mod matching;
mod normal;
mod pattern;
mod pieces;
mod template;

use std::fmt;

pub use normal::normalise;
pub use pattern::{Pattern, PatternError};
pub use template::Template;

/// Which spellings of a path are the same, beyond those that always are. Patterns and the paths that they are to match
/// need the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Spelling {
    /// What to do with a path that servers read in different ways.
    pub ambiguous: WhenAmbiguous,
    /// `/Login` is `/login`: for servers that ignore case. Each character by the lower case that Unicode has for it,
    /// escaped or not.
    pub ignore_case: bool,
    /// `/a/` is `/a`.
    pub ignore_trailing_slash: bool,
    /// `/%40me` is `/@me`: escapes of the delimiters that a path may hold as they stand, `! $ & ' ( ) * + , = : @`, are
    /// decoded too. RFC 3986 lets them differ, but most servers do not: there, a limit on `/users/@me` or a key made
    /// of a captured address needs this.
    pub decode_delimiters: bool,
}

/// What to do with a path that servers read in different ways; [`Ambiguity`] lists these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WhenAmbiguous {
    /// [`normalise`] fails, and the request is answered with 400.
    #[default]
    Refuse,
    /// It is text, and never a separator: escapes stay, the rest is escaped, `%` without two hex digits becomes `%25`.
    ///
    /// For servers behind that do the same, such as those that take `group%2Fproject` as one name. In front of a
    /// server that decodes `%2F` to a slash, this lets requests pass by their limits.
    Keep,
}

/// Why a path is refused, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ambiguous {
    /// The place, in bytes from the start of the path.
    pub at: usize,
    /// What is there.
    pub what: Ambiguity,
}

/// What makes a path one thing to one server and another thing to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ambiguity {
    /// `%2F`, which separates segments for servers that decode before they split.
    EncodedSlash,
    /// `%5C`, which is a backslash for the same servers.
    EncodedBackslash,
    /// `%00`, where the path ends for what is written in C.
    EncodedNul,
    /// `\`, which browsers and Windows take for a slash.
    Backslash,
    /// A raw control character of ASCII, which some servers drop and at which others stop.
    Control,
    /// `%` without two hex digits behind it, which is text for some servers and an error for others.
    BadEscape,
    /// Escapes which are not UTF-8 when decoded, such as `%C0%AF`, an overlong slash.
    NotUtf8,
    /// A raw `?` or `#`: the query, if it was not cut off, or a fragment, at which some servers cut.
    QueryOrFragment,
    /// No slash in front: not a path at all, and refused also by [`WhenAmbiguous::Keep`].
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
            Ambiguity::QueryOrFragment => "a query or a fragment",
            Ambiguity::NoLeadingSlash => "no slash in front",
        })
    }
}

impl fmt::Display for Ambiguous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing of the path itself: this may end up in an answer or a log.
        write!(f, "the path has {} at byte {}", self.what, self.at)
    }
}

impl std::error::Error for Ambiguous {}

/// A segment of a normal path, counted from 0: number 1 of `/users/7` is `7`. What follows a slash at the end is none.
pub fn segment(normalised: &str, index: usize) -> Option<&str> {
    let segments = normalised.strip_prefix('/')?;
    segments.split('/').nth(index).filter(|segment| !segment.is_empty())
}
