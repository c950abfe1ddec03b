//! Paths that servers read in several ways: with parameters and empty segments, and with ends of segments that some
//! servers ignore.

use super::scanner::PathScanner;
use super::{AmbiguousPathPolicy, PathNormalization, Pattern};

/// How a server reads empty segments, except the one after a trailing slash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EmptySegments {
    Drop,
    Keep,
    /// As a segment that is not empty, for servers whose `*` matches empty segments. No pattern contains this text.
    Text,
}

const EMPTY_TEXT: &str = ";";

/// The path with normalized escapes, but with its parameters, empty segments and trailing slash: `/a;v=1//%62/` is
/// `/a;v=1//b/`. It normalizes to the same path.
///
/// `None` if servers that keep parameters or empty segments may resolve the other segments differently, and only the
/// normalized path is safe to forward: dot segments (`/a/..;/b`, `/a//../b`), and an empty first segment, because `//x/y`
/// is the path `/y` of the host `x` to some parsers.
///
/// ```
/// use ratekeeper_rules::path::{PathNormalization, with_parameters};
///
/// let normalization = PathNormalization::default();
/// assert_eq!(with_parameters("/a;v=1//%62", normalization).as_deref(), Some("/a;v=1//b"));
/// assert_eq!(with_parameters("/a/..;/b", normalization), None);
/// assert_eq!(with_parameters("//x/y", normalization), None);
/// ```
pub fn with_parameters(path: &str, normalization: PathNormalization) -> Option<String> {
    let normalization = PathNormalization { ignore_trailing_slash: false, ..normalization };
    read(path, normalization, true, EmptySegments::Keep)
}

/// Whether each pattern matches either all readings of the path or none: with and without parameters, and with empty
/// segments merged, kept, or matched by `*`.
pub fn is_read_alike<'p>(
    path: &str,
    normalization: PathNormalization,
    mut patterns: impl Iterator<Item = &'p Pattern>,
) -> bool {
    use EmptySegments::{Drop, Keep, Text};
    let readings = [Drop, Keep, Text].into_iter().flat_map(|empty| [(false, empty), (true, empty)]);
    let readings = readings.map(|(parameters, empty)| read(path, normalization, parameters, empty));
    let Some(readings) = readings.collect::<Option<Vec<String>>>() else { return false };
    patterns.all(|pattern| {
        let is_match = pattern.matches(&readings[0]);
        readings[1..].iter().all(|reading| pattern.matches(reading) == is_match)
    })
}

/// Whether a pattern that does not match the path matches it for servers that ignore the ends of its segments: white
/// space and dots, as on Windows, and everything from `%3B` on, if they decode before they drop parameters. Forwarded to
/// one of them, the path would bypass the pattern's rule.
///
/// Never if [`PathNormalization::ambiguous`] keeps ambiguous paths. Allocates only if the path has an ignored end.
///
/// ```
/// use ratekeeper_rules::path::{PathNormalization, Pattern, hides_match};
///
/// let login = Pattern::parse("/login").unwrap();
/// let hides = |path| hides_match(path, PathNormalization::default(), [&login].into_iter());
/// assert!(hides("/login.") && hides("/login%20") && hides("/login%3Bx"));
/// assert!(!hides("/login") && !hides("/file.") && !hides("/login%20x"));
/// ```
pub fn hides_match<'p>(
    normalized: &str,
    normalization: PathNormalization,
    mut patterns: impl Iterator<Item = &'p Pattern>,
) -> bool {
    if normalization.ambiguous == AmbiguousPathPolicy::Keep || !has_ignored_end(normalized) {
        return false;
    }
    let other = without_ignored_ends(normalized, normalization);
    patterns.any(|pattern| !pattern.matches(normalized) && pattern.matches(&other))
}

fn has_ignored_end(normalized: &str) -> bool {
    // Every request pays for this line. It visits all bytes because a loop without an early exit is vectorized.
    let is_candidate =
        normalized.bytes().fold(false, |is_candidate, byte| is_candidate | (byte == b'.') | (byte == b'%'));
    let is_longer = |segment: &str| without_ignored_end(segment).len() < segment.len();
    is_candidate && normalized.split('/').any(is_longer)
}

fn without_ignored_ends(normalized: &str, normalization: PathNormalization) -> String {
    let mut text = String::with_capacity(normalized.len());
    let mut segments = normalized.split('/').map(without_ignored_end);
    for segment in segments.clone().filter(|segment| !segment.is_empty()) {
        text.push('/');
        text.push_str(segment);
    }
    let ends_with_slash = segments.next_back().is_none_or(str::is_empty);
    if text.is_empty() || (ends_with_slash && !normalization.ignore_trailing_slash) {
        text.push('/');
    }
    text
}

/// The segment up to `%3B`, without white space and dots at the end.
pub(super) fn without_ignored_end(segment: &str) -> &str {
    const WHITE_SPACE: [&str; 6] = ["%20", "%09", "%0A", "%0B", "%0C", "%0D"];
    let mut escapes = segment.match_indices('%').map(|(at, _)| at);
    let end = escapes.find(|at| segment[*at..].starts_with("%3B"));
    let mut rest = &segment[..end.unwrap_or(segment.len())];
    loop {
        let shorter = rest.trim_end_matches('.');
        let shorter = WHITE_SPACE.iter().find_map(|white| shorter.strip_suffix(white)).unwrap_or(shorter);
        if shorter.len() == rest.len() {
            return rest;
        }
        rest = shorter;
    }
}

fn read(
    path: &str,
    normalization: PathNormalization,
    keeps_parameters: bool,
    empty: EmptySegments,
) -> Option<String> {
    let segments = path.strip_prefix('/')?;
    let mut text = String::with_capacity(path.len());
    let mut rest = segments.split('/').peekable();
    while let Some(segment) = rest.next() {
        let start = text.len();
        text.push('/');
        for (number, part) in segment.split(';').enumerate() {
            if number > 0 && !keeps_parameters {
                break;
            }
            text.push_str(if number > 0 { ";" } else { "" });
            // The offset is used for errors only.
            for piece in PathScanner::new(part, 0, normalization) {
                piece.ok()?.write(normalization, |piece| text.push_str(piece));
            }
            let name = &text[start + 1..];
            let is_authority = name.is_empty() && start == 0 && rest.peek().is_some();
            if number == 0 && (matches!(name, "." | "..") || is_authority) {
                return None;
            }
        }
        if text.len() == start + 1 && rest.peek().is_some() {
            match empty {
                EmptySegments::Drop => text.truncate(start),
                EmptySegments::Keep => {}
                EmptySegments::Text => text.push_str(EMPTY_TEXT),
            }
        }
    }
    if normalization.ignore_trailing_slash && text.len() > 1 && text.ends_with('/') {
        text.pop();
    }
    Some(text)
}
