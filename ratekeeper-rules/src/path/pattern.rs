//! Patterns: definition, parsing and printing.

use std::fmt::{self, Write};

use super::matching::{Needle, Outcome, Parts, Segment, run};
use super::scanner::PathScanner;
use super::{Ambiguity, AmbiguousPath, PathNormalization};

/// A set of paths, written as a path with wildcards.
///
/// | in a pattern | matches |
/// |---|---|
/// | `/users` | itself |
/// | `*` | any characters of one segment: `/files/*.png`, `/v*/users`; alone, one non-empty segment |
/// | `{name}` | one non-empty segment, which can be captured by name |
/// | `**` | any number of segments, or none: `/api/**` matches `/api`, `/api/`, `/api/x/y` |
///
/// `**` also matches in the middle: `/a/**/z` matches `/a/z`.
///
/// A pattern is normalized like a path when it is parsed: `/%61pi//v1/../**` is `/api/**`. Special characters are
/// written as escapes: `%2A`, `%7B`, `%7D`. A trailing slash is significant, as in paths, unless
/// [`PathNormalization::ignore_trailing_slash`] is set.
///
/// Matching allocates nothing, and takes at most `3 * (segments of the pattern + 1) * (bytes of the path + 1)` steps,
/// so no path is expensive. If several ways to match capture different segments, each `**` takes as few segments as
/// possible, the first `**` first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    segments: Vec<Segment>,
}

impl Pattern {
    /// Maximum length of a pattern, in bytes: the cost of matching grows with it.
    pub const BYTES_MAX: usize = 1024;

    /// Parses a pattern for paths of the default [`PathNormalization`].
    ///
    /// # Errors
    ///
    /// [`PatternError`] contains what is wrong, where, and what to write instead.
    pub fn parse(typed: &str) -> Result<Pattern, PatternError> {
        Pattern::parse_with(typed, PathNormalization::default())
    }

    /// Parses a pattern for paths that are normalized with the same [`PathNormalization`].
    ///
    /// # Errors
    ///
    /// [`PatternError`] contains what is wrong, where, and what to write instead.
    pub fn parse_with(typed: &str, normalization: PathNormalization) -> Result<Pattern, PatternError> {
        check_whole(typed)?;
        Pattern::read(typed, normalization)
    }

    fn read(typed: &str, normalization: PathNormalization) -> Result<Pattern, PatternError> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = 1;
        let mut ends_with_slash = true;
        for text in typed.strip_prefix('/').unwrap_or(typed).split('/') {
            let segment = read_segment(text, at, normalization)?;
            let dots = match &segment {
                Segment::Literal(literal) => Some(&**literal).filter(|text| matches!(*text, "" | "." | "..")),
                _ => None,
            };
            ends_with_slash = dots.is_some();
            match (dots, segments.last()) {
                (Some(".."), Some(Segment::Many)) => {
                    return PatternError::new(
                        at,
                        "`..` would go back over `**`, which is any number of segments",
                        "write the path without `..`",
                    );
                }
                (Some(".."), _) => drop(segments.pop()),
                (Some(_), _) => {}
                // Consecutive `**` are equal to one.
                (None, Some(Segment::Many)) if segment == Segment::Many => {}
                (None, _) => {
                    if let Segment::One(Some(name)) = &segment
                        && segments.contains(&segment)
                    {
                        return PatternError::new(
                            at,
                            format!("there is a `{{{name}}}` already"),
                            format!("write another name, as in `{{{name}2}}`, or `*` if none is needed"),
                        );
                    }
                    segments.push(segment);
                }
            }
            at += text.len() + 1;
        }
        if segments.is_empty() || (ends_with_slash && !normalization.ignore_trailing_slash) {
            segments.push(Segment::Literal("".into()));
        }
        Ok(Pattern { segments })
    }

    /// The same pattern for paths of this [`PathNormalization`], whichever it was parsed for.
    ///
    /// # Errors
    ///
    /// [`PatternError`], if it contains text that never occurs in paths normalized this way.
    pub fn with_normalization(&self, normalization: PathNormalization) -> Result<Pattern, PatternError> {
        // Not checked for length: with its escapes the text may exceed `BYTES_MAX`.
        Pattern::read(&self.to_string(), normalization)
    }

    /// Whether the path matches. It must be normalized by [`normalize`](super::normalize).
    pub fn matches(&self, normalized: &str) -> bool {
        run(&self.segments, normalized, None).matched
    }

    /// The segment that `{name}` captures in the path: `None` if the path does not match, or the name is not in the
    /// pattern.
    pub fn capture<'p>(&self, normalized: &'p str, name: &str) -> Option<&'p str> {
        let named = |segment: &Segment| matches!(segment, Segment::One(Some(own)) if **own == *name);
        let number = self.segments.iter().position(named)?;
        let Outcome { matched, captured, .. } = run(&self.segments, normalized, Some(number));
        captured.filter(|_| matched)
    }

    /// The part of the path that a trailing `**` matches, with its leading slash: for `/api/**`, it is `/x/y` in
    /// `/api/x/y`, `/` in `/api/`, and empty in `/api`. `None` if the path does not match, or the pattern does not
    /// end with `**`.
    pub fn rest<'p>(&self, normalized: &'p str) -> Option<&'p str> {
        run(&self.segments, normalized, None).rest
    }

    /// Whether it ends with `**`.
    pub(super) fn has_rest(&self) -> bool {
        self.segments.last() == Some(&Segment::Many)
    }

    /// Whether it certainly matches every path that `other` matches. Conservative: `false` may be wrong for patterns
    /// with `*` inside a segment, and for very long patterns with `**` in the middle.
    pub fn covers(&self, other: &Pattern) -> bool {
        const STEPS_MAX: usize = 4_096;
        let (mut wide, mut narrow) = (&*self.segments, &*other.segments);
        while let ([first, wide_rest @ ..], [one, narrow_rest @ ..]) = (wide, narrow)
            && *first != Segment::Many
        {
            if !first.covers(one) {
                return false;
            }
            (wide, narrow) = (wide_rest, narrow_rest);
        }
        if *wide == [Segment::Many] {
            return true;
        }
        if wide.len() * narrow.len() > STEPS_MAX {
            return false;
        }
        // covered[n]: whether the rest of `wide` covers the last n segments of `narrow`.
        let mut covered: Vec<bool> = (0..=narrow.len()).map(|left| left == 0).collect();
        for segment in wide.iter().rev() {
            let is_many = *segment == Segment::Many;
            let mut next = vec![is_many && covered[0]; narrow.len() + 1];
            for left in 1..=narrow.len() {
                let one = &narrow[narrow.len() - left];
                next[left] = match is_many {
                    true => covered[left] || next[left - 1],
                    false => covered[left - 1] && segment.covers(one),
                };
            }
            covered = next;
        }
        covered[narrow.len()]
    }

    /// The same pattern with its letters of ASCII in the other case: `/LOGIN/*` for `/login/*`. `None` if it has none
    /// outside of names and escapes.
    pub fn in_other_case(&self) -> Option<Pattern> {
        let mut segments = self.segments.clone();
        for segment in &mut segments {
            match segment {
                Segment::Literal(text) => *text = in_other_case(text),
                Segment::Parts(Parts { first, middle, last }) => {
                    (*first, *last) = (in_other_case(first), in_other_case(last));
                    middle.iter_mut().for_each(|needle| *needle = Needle::new(&in_other_case(&needle.text)));
                }
                Segment::One(_) | Segment::Many => {}
            }
        }
        (segments != self.segments).then_some(Pattern { segments })
    }

    /// The names that can be captured, from left to right.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.segments.iter().filter_map(|segment| match segment {
            Segment::One(name) => name.as_deref(),
            _ => None,
        })
    }

    #[cfg(test)]
    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

/// The normalized form, which parses to the same pattern.
impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for segment in &self.segments {
            f.write_char('/')?;
            match segment {
                Segment::Literal(text) => literal(f, text)?,
                Segment::One(None) => f.write_char('*')?,
                Segment::One(Some(name)) => write!(f, "{{{name}}}")?,
                Segment::Many => f.write_str("**")?,
                Segment::Parts(Parts { first, middle, last }) => {
                    literal(f, first)?;
                    for needle in middle {
                        f.write_char('*')?;
                        literal(f, &needle.text)?;
                    }
                    f.write_char('*')?;
                    literal(f, last)?;
                }
            }
        }
        Ok(())
    }
}

/// Escapes `*`: text from `%2A` with [`PathNormalization::decode_delimiters`] must not become a wildcard.
fn literal(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    for (index, part) in text.split('*').enumerate() {
        f.write_str(if index > 0 { "%2A" } else { "" })?;
        f.write_str(part)?;
    }
    Ok(())
}

/// What is wrong with a pattern, where, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at byte {at}: {what}; {instead}")]
pub struct PatternError {
    at: usize,
    what: String,
    instead: String,
}

impl PatternError {
    pub(super) fn new<T>(
        at: usize,
        what: impl Into<String>,
        instead: impl Into<String>,
    ) -> Result<T, PatternError> {
        Err(PatternError { at, what: what.into(), instead: instead.into() })
    }

    /// Byte offset from the start of the pattern.
    pub fn at(&self) -> usize {
        self.at
    }

    /// What is wrong, in a sentence.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What to write instead.
    pub fn instead(&self) -> &str {
        &self.instead
    }
}

impl From<AmbiguousPath> for PatternError {
    fn from(ambiguous: AmbiguousPath) -> PatternError {
        PatternError::of("the pattern", ambiguous)
    }
}

impl PatternError {
    /// An error about an ambiguous part of `text`.
    pub(super) fn of(text: &str, AmbiguousPath { at, what }: AmbiguousPath) -> PatternError {
        let instead = match what {
            Ambiguity::EncodedSlash | Ambiguity::EncodedBackslash | Ambiguity::Backslash => {
                "write `/` if a slash is meant; paths with any other are rejected"
            }
            Ambiguity::BadEscape => "write `%25` if a percent sign is meant",
            Ambiguity::NotUtf8 => "write the character itself, or its escapes in UTF-8",
            Ambiguity::EncodedNul
            | Ambiguity::Control
            | Ambiguity::QueryOrFragment
            | Ambiguity::EncodedDotSegment
            | Ambiguity::NoLeadingSlash => "leave it out; paths with it are rejected",
        };
        PatternError { at, what: format!("{text} has {what}"), instead: instead.to_owned() }
    }
}

/// A longer pattern is not repeated in the message.
const REPEATED_BYTES_MAX: usize = 60;

/// Checks that need no parsing.
fn check_whole(typed: &str) -> Result<(), PatternError> {
    if typed.is_empty() {
        return PatternError::new(0, "the pattern is empty", "write `/**` if every path is meant");
    }
    if typed.len() > Pattern::BYTES_MAX {
        let what = format!("the pattern is {} bytes long", typed.len());
        // The offset is always a character boundary, because callers slice the text there.
        let at = (0..=Pattern::BYTES_MAX).rev().find(|at| typed.is_char_boundary(*at)).unwrap_or(0);
        return PatternError::new(at, what, format!("write at most {}", Pattern::BYTES_MAX));
    }
    if !typed.starts_with('/') {
        let instead = if typed.contains("://") {
            "leave out the scheme and the host, as in `/api/**`".to_owned()
        } else if typed.len() > REPEATED_BYTES_MAX || typed.contains(char::is_control) {
            "write one in front of it, as in `/api/**`".to_owned()
        } else {
            format!("write `/{typed}`")
        };
        return PatternError::new(0, "the pattern does not begin with a slash", instead);
    }
    match typed.find(['?', '#']) {
        Some(at) if typed[at..].starts_with('?') => PatternError::new(
            at,
            "`?` begins a query, which is not part of a path",
            "leave it out, with what follows; `*` stands for any characters",
        ),
        Some(at) => PatternError::new(
            at,
            "`#` begins a fragment, which is not part of a path",
            "leave it out, with what follows",
        ),
        None => Ok(()),
    }
}

fn read_segment(text: &str, at: usize, normalization: PathNormalization) -> Result<Segment, PatternError> {
    let (name, parameters) = text.split_once(';').unwrap_or((text, ""));
    normal_text(parameters, at + name.len() + 1, normalization)?;
    if name == "**" {
        return Ok(Segment::Many);
    }
    if let Some(glued) = name.find("**") {
        return PatternError::new(
            at + glued,
            "`**` has something else in its segment",
            "write `/**/` for any number of segments, or one `*` for any characters of one",
        );
    }
    if name.contains(['{', '}']) {
        return read_capture(name, at);
    }
    if name == "*" {
        return Ok(Segment::One(None));
    }
    let Some((first, others)) = name.split_once('*') else {
        return Ok(Segment::Literal(normal_text(name, at, normalization)?.into()));
    };
    let first = normal_text(first, at, normalization)?;
    let (middle, last) = others.rsplit_once('*').unwrap_or(("", others));
    let mut position = at + name.len() - others.len();
    let mut needles = Vec::new();
    for text in middle.split('*') {
        let text_at = position;
        position += text.len() + 1;
        let text = normal_text(text, text_at, normalization)?;
        if !text.is_empty() {
            needles.push(Needle::new(&text));
        }
    }
    let last = normal_text(last, at + name.len() - last.len(), normalization)?;
    Ok(Segment::Parts(Parts { first: first.into(), middle: needles.into(), last: last.into() }))
}

/// Parses a segment that contains a brace.
fn read_capture(text: &str, at: usize) -> Result<Segment, PatternError> {
    const BRACE_ITSELF: &str = "for a brace itself, write `%7B` or `%7D`";
    let Some(open) = text.find('{') else {
        let close = text.find('}').unwrap_or_default();
        return PatternError::new(
            at + close,
            "`}` closes a brace that was not opened",
            format!("write `{{name}}`; {BRACE_ITSELF}"),
        );
    };
    let Some(close) = text.find('}').filter(|close| *close > open) else {
        return PatternError::new(
            at + open,
            "`{` is not closed in its segment",
            format!("write `{{name}}`; {BRACE_ITSELF}"),
        );
    };
    if open > 0 || close + 1 < text.len() {
        return PatternError::new(
            at + open,
            "`{...}` has something else in its segment",
            "write `/{name}/` for a whole segment, or `*` for a part of one",
        );
    }
    let name = &text[open + 1..close];
    if name.is_empty() {
        return PatternError::new(at, "`{}` has no name", "write `{name}`, or `*` if none is needed");
    }
    if name.starts_with('*') {
        return PatternError::new(
            at + 1,
            "a name does not begin with `*`",
            "write `**` for any number of segments; they have no name",
        );
    }
    let is_good = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '-');
    match name.find(|character| !is_good(character)) {
        Some(bad) => PatternError::new(
            at + 1 + bad,
            "a name is made of letters of ASCII, digits, `_` and `-`",
            format!("write `{{name}}`; {BRACE_ITSELF}"),
        ),
        None => Ok(Segment::One(Some(name.into()))),
    }
}

/// Normalized text with its letters in the other case, except the digits of escapes.
fn in_other_case(text: &str) -> Box<str> {
    let mut escape_digits = 0_u8;
    let swapped = text.chars().map(|c| {
        let is_digit = escape_digits > 0;
        escape_digits = if c == '%' { 2 } else { escape_digits.saturating_sub(1) };
        match c {
            _ if is_digit => c,
            'a'..='z' => c.to_ascii_uppercase(),
            'A'..='Z' => c.to_ascii_lowercase(),
            c => c,
        }
    });
    swapped.collect::<String>().into()
}

/// Normalizes text without slashes and wildcards.
fn normal_text(text: &str, at: usize, normalization: PathNormalization) -> Result<String, PatternError> {
    let mut normal = String::with_capacity(text.len());
    for piece in PathScanner::new(text, at, normalization) {
        piece?.write(normalization, |text| normal.push_str(text));
    }
    Ok(normal)
}
