//! Patterns: what they are, and how they are read and printed.

use std::fmt::{self, Write};

use super::matching::{Needle, Outcome, Parts, Segment, run};
use super::pieces::Pieces;
use super::{Ambiguity, Ambiguous, Spelling};

/// A set of paths, written as a path with wildcards.
///
/// | in a pattern | stands for |
/// |---|---|
/// | `/users` | itself |
/// | `*` | any characters of one segment: `/files/*.png`, `/v*/users`; alone, one whole segment that is not empty |
/// | `{name}` | one whole segment that is not empty, to be asked for by name |
/// | `**` | any number of segments, or none: `/api/**` matches `/api`, `/api/` and `/api/x/y`; `/a/**/z` matches `/a/z` |
///
/// It is brought into the normal form of a path when it is read: `/%61pi//v1/../**` is `/api/**`. A character that
/// means something here is written as an escape: `%2A`, `%7B`, `%7D`. A slash at the end counts, as in paths, unless
/// [`Spelling::ignore_trailing_slash`] says that it does not.
///
/// Matching allocates nothing, and takes at most `3 * (segments of the pattern + 1) * (bytes of the path + 1)` steps, so
/// that no path is expensive. Where several ways to match differ in what they capture, each `**` takes as few segments
/// as it can, the first one first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    segments: Vec<Segment>,
}

impl Pattern {
    /// The longest pattern, in bytes: what one costs to match grows with it.
    pub const BYTES_MAX: usize = 1024;

    /// Reads a pattern for paths of the default [`Spelling`].
    ///
    /// # Errors
    ///
    /// [`PatternError`] says what is wrong, where, and what to write instead.
    pub fn parse(typed: &str) -> Result<Pattern, PatternError> {
        Pattern::parse_with(typed, Spelling::default())
    }

    /// Reads a pattern for paths that are brought into their normal form with the same [`Spelling`].
    ///
    /// # Errors
    ///
    /// [`PatternError`] says what is wrong, where, and what to write instead.
    pub fn parse_with(typed: &str, spelling: Spelling) -> Result<Pattern, PatternError> {
        check_whole(typed)?;
        Pattern::read(typed, spelling)
    }

    fn read(typed: &str, spelling: Spelling) -> Result<Pattern, PatternError> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = 1;
        let mut ends_with_slash = true;
        for text in typed.strip_prefix('/').unwrap_or(typed).split('/') {
            let segment = read_segment(text, at, spelling)?;
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
                // Two of them are any number of segments too.
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
        if segments.is_empty() || (ends_with_slash && !spelling.ignore_trailing_slash) {
            segments.push(Segment::Literal("".into()));
        }
        Ok(Pattern { segments })
    }

    /// The same pattern for paths of this [`Spelling`], whichever it was read for.
    ///
    /// # Errors
    ///
    /// [`PatternError`], if it has what such paths never have.
    pub fn spelt(&self, spelling: Spelling) -> Result<Pattern, PatternError> {
        // With its escapes it may be longer than anybody may type.
        Pattern::read(&self.to_string(), spelling)
    }

    /// Whether the path matches. It must be in its normal form, by [`normalise`](super::normalise).
    pub fn matches(&self, normalised: &str) -> bool {
        run(&self.segments, normalised, None).matched
    }

    /// The segment that `{name}` stands for in the path: `None` if the path does not match, or there is no such name.
    pub fn capture<'p>(&self, normalised: &'p str, name: &str) -> Option<&'p str> {
        let named = |segment: &Segment| matches!(segment, Segment::One(Some(own)) if **own == *name);
        let number = self.segments.iter().position(named)?;
        let Outcome { matched, captured, .. } = run(&self.segments, normalised, Some(number));
        captured.filter(|_| matched)
    }

    /// What `**` at the end of the pattern stands for in the path, with the slash in front: by `/api/**`, it is `/x/y` of
    /// `/api/x/y`, `/` of `/api/`, and nothing of `/api`. `None` if the path does not match, or there is none at the end.
    pub fn rest<'p>(&self, normalised: &'p str) -> Option<&'p str> {
        run(&self.segments, normalised, None).rest
    }

    /// Whether it ends with `**`.
    pub(super) fn has_rest(&self) -> bool {
        self.segments.last() == Some(&Segment::Many)
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

/// The normal form, which reads as the same pattern.
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

/// Text that came from `%2A` with [`Spelling::decode_delimiters`] must not become a wildcard.
fn literal(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    for (index, part) in text.split('*').enumerate() {
        f.write_str(if index > 0 { "%2A" } else { "" })?;
        f.write_str(part)?;
    }
    Ok(())
}

/// What is wrong with a pattern, where, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
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

    /// The place, in bytes from the start of the pattern.
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

impl fmt::Display for PatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: {}; {}", self.at, self.what, self.instead)
    }
}

impl std::error::Error for PatternError {}

impl From<Ambiguous> for PatternError {
    fn from(ambiguous: Ambiguous) -> PatternError {
        PatternError::of("the pattern", ambiguous)
    }
}

impl PatternError {
    /// Of which text.
    pub(super) fn of(text: &str, Ambiguous { at, what }: Ambiguous) -> PatternError {
        let instead = match what {
            Ambiguity::EncodedSlash | Ambiguity::EncodedBackslash | Ambiguity::Backslash => {
                "write `/` if a slash is meant; paths with any other are refused"
            }
            Ambiguity::BadEscape => "write `%25` if a percent sign is meant",
            Ambiguity::NotUtf8 => "write the character itself, or its escapes in UTF-8",
            Ambiguity::EncodedNul
            | Ambiguity::Control
            | Ambiguity::QueryOrFragment
            | Ambiguity::NoLeadingSlash => "leave it out; paths with it are refused",
        };
        PatternError { at, what: format!("{text} has {what}"), instead: instead.to_owned() }
    }
}

/// A longer pattern is not repeated in what is told.
const REPEATED_BYTES_MAX: usize = 60;

/// What can be seen before the pattern is taken apart.
fn check_whole(typed: &str) -> Result<(), PatternError> {
    if typed.is_empty() {
        return PatternError::new(0, "the pattern is empty", "write `/**` if every path is meant");
    }
    if typed.len() > Pattern::BYTES_MAX {
        let what = format!("the pattern is {} bytes long", typed.len());
        // A place is never inside of a character: whoever shows it cuts the text there.
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

fn read_segment(text: &str, at: usize, spelling: Spelling) -> Result<Segment, PatternError> {
    let (name, parameters) = text.split_once(';').unwrap_or((text, ""));
    normal_text(parameters, at + name.len() + 1, spelling)?;
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
        return Ok(Segment::Literal(normal_text(name, at, spelling)?.into()));
    };
    let first = normal_text(first, at, spelling)?;
    let (middle, last) = others.rsplit_once('*').unwrap_or(("", others));
    let mut place = at + name.len() - others.len();
    let mut needles = Vec::new();
    for text in middle.split('*') {
        let text_at = place;
        place += text.len() + 1;
        let text = normal_text(text, text_at, spelling)?;
        if !text.is_empty() {
            needles.push(Needle::new(&text));
        }
    }
    let last = normal_text(last, at + name.len() - last.len(), spelling)?;
    Ok(Segment::Parts(Parts { first: first.into(), middle: needles.into(), last: last.into() }))
}

/// A segment with a brace in it.
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

/// The normal form of text without slashes and wildcards.
fn normal_text(text: &str, at: usize, spelling: Spelling) -> Result<String, PatternError> {
    let mut normal = String::with_capacity(text.len());
    for piece in Pieces::new(text, at, spelling) {
        piece?.write(spelling, |text| normal.push_str(text));
    }
    Ok(normal)
}
