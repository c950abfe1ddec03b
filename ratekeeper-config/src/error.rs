use std::fmt::{self, Write};

use unicode_width::UnicodeWidthChar;

use crate::{ERRORS_MAX, mask};

/// An error in a configuration text: what is wrong, where, and what to write instead.
///
/// Displayed as several lines: position and message, the source line with a marker below, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    file: Option<String>,
    line: usize,
    column: usize,
    what: String,
    /// The source line, and the marker printed below it.
    marked_line: Box<(String, String)>,
    instead: String,
}

/// A position in a text. Lines and columns start at 1; columns are counted in characters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) line: usize,
    pub(crate) column: usize,
    pub(crate) chars: usize,
    /// The same position as a byte offset, from 0.
    pub(crate) byte: usize,
}

/// An error that is not yet attached to its source text.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) place: Place,
    pub(crate) what: String,
    pub(crate) instead: String,
}

/// Characters of a line shown on each side of the marked position. A line may be a megabyte long.
const SHOWN_CHARS_AROUND: usize = 60;
/// Maximum length of the marker, in characters.
const MARKED_CHARS_MAX: usize = 40;
/// Maximum number of characters of a value that a message quotes.
const QUOTED_CHARS_MAX: usize = 40;

/// Bytes of a line examined on each side of the marked position. Secrets that start further away are not masked.
const SEEN_BYTES_AROUND: usize = 4_096;

impl Problem {
    pub(crate) fn unknown() -> Problem {
        let (what, instead) = ("this is not understood".to_owned(), "write it in another way".to_owned());
        Problem { place: Place::default(), what, instead }
    }

    /// Attaches the problem to its text. `secrets` are the positions to mask. Messages may quote untrusted input, so
    /// control characters are replaced here for all of them.
    pub(crate) fn in_text(self, text: &str, secrets: &[Place]) -> Error {
        let (line, column) = (self.place.line.max(1), self.place.column.max(1));
        let byte = boundary_before(text, self.place.byte);
        Error {
            file: None,
            line,
            column,
            what: printable_text(&self.what),
            marked_line: Box::new(marked(text, byte, self.place.chars, secrets)),
            instead: printable_text(&self.instead),
        }
    }
}

/// The last character boundary at or before `byte`.
fn boundary_before(text: &str, byte: usize) -> usize {
    (0..=byte.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// The line that contains `byte`, and a marker below `chars` characters from there. Both are cut to the width of a
/// screen, and secrets are masked.
fn marked(text: &str, byte: usize, chars: usize, secrets: &[Place]) -> (String, String) {
    let is_break = |c: char| c == '\n' || c == '\r';
    // Searching for a single character is vectorised, and a line may be a megabyte long.
    let after = |from: usize, c: char| text[from..byte].rfind(c).map_or(from, |at| from + at + 1);
    let line_start = after(after(0, '\n'), '\r');
    let start = line_start.max(boundary_before(text, byte.saturating_sub(SEEN_BYTES_AROUND)));
    let end = boundary_before(text, byte + SEEN_BYTES_AROUND);
    let end = text[byte..end].find(is_break).map_or(end, |at| byte + at);
    // A secret that spans lines is masked by the name above it.
    let in_line = secrets.iter().filter(|secret| (start..end).contains(&secret.byte)).map(|secret| {
        let from = secret.byte - start;
        let chars = text[secret.byte..end].chars().take(secret.chars);
        from..from + chars.map(char::len_utf8).sum::<usize>()
    });
    let cells = mask::cells(&text[start..end], &text[..line_start], in_line);
    // The position may be inside a masked secret.
    let at = cells.iter().position(|cell| cell.bytes.end > byte - start).unwrap_or(cells.len());
    let last = cells.iter().skip(at).take(chars.clamp(1, MARKED_CHARS_MAX)).count();
    let from = at.saturating_sub(SHOWN_CHARS_AROUND - 1);
    let (mut shown, mut marker) = (String::new(), String::new());
    for (number, cell) in cells.iter().enumerate().skip(from).take(2 * SHOWN_CHARS_AROUND) {
        for character in cell.shown.chars().filter(|c| *c != BYTE_ORDER_MARK).map(printable) {
            shown.push(character);
            // A wide character takes two columns, and the marker must stay aligned.
            let width = character.width().unwrap_or(1);
            match number {
                number if number < at => marker.push_str(&" ".repeat(width)),
                number if number < at + last => marker.push_str(&"^".repeat(width)),
                _ => {}
            }
        }
    }
    if !marker.ends_with('^') {
        marker.push('^');
    }
    (shown.trim_end().to_owned(), marker)
}

impl Error {
    /// Returns the error with a file name: `limits.yaml:3:14: ...`.
    #[must_use]
    pub fn in_file(mut self, name: &str) -> Error {
        self.file = Some(printable_text(name));
        self
    }

    /// The line, from 1.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The column in characters, from 1.
    pub fn column(&self) -> usize {
        self.column
    }

    /// What is wrong, as a sentence.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What to write instead.
    pub fn instead(&self) -> &str {
        &self.instead
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Error { line, column, what, instead, .. } = self;
        let margin = line.to_string().len();
        match &self.file {
            Some(file) => writeln!(f, "{file}:{line}:{column}: {what}")?,
            None => writeln!(f, "line {line}, column {column}: {what}")?,
        }
        let (shown, marker) = &*self.marked_line;
        writeln!(f, "{:margin$} |", "")?;
        writeln!(f, "{line} |{}{shown}", if shown.is_empty() { "" } else { " " })?;
        writeln!(f, "{:margin$} | {marker}", "")?;
        write!(f, "{:margin$} = {instead}", "")
    }
}

impl std::error::Error for Error {}

/// All errors of a text, or the first [`ERRORS_MAX`] of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors {
    all: Vec<Error>,
    is_cut: bool,
}

impl Errors {
    pub(crate) fn new(mut problems: Vec<Problem>, text: &str, secrets: &[Place]) -> Errors {
        if problems.is_empty() {
            problems.push(Problem::unknown());
        }
        let is_cut = problems.len() >= ERRORS_MAX;
        problems.truncate(ERRORS_MAX);
        problems.sort_by_key(|problem| (problem.place.line, problem.place.column));
        let mut all: Vec<Error> =
            problems.into_iter().map(|problem| problem.in_text(text, secrets)).collect();
        // An alias may report the same mistake at the same position twice.
        all.dedup();
        Errors { all, is_cut }
    }

    /// Joins the errors of several texts in order. Returns `None` if there are none.
    pub(crate) fn joined(several: Vec<Errors>) -> Option<Errors> {
        let is_cut = several.iter().any(|errors| errors.is_cut);
        let mut all: Vec<Error> = several.into_iter().flat_map(|errors| errors.all).collect();
        let is_cut = is_cut || all.len() > ERRORS_MAX;
        all.truncate(ERRORS_MAX);
        (!all.is_empty()).then_some(Errors { all, is_cut })
    }

    /// Returns the errors with a file name.
    #[must_use]
    pub fn in_file(self, name: &str) -> Errors {
        Errors { all: self.all.into_iter().map(|error| error.in_file(name)).collect(), ..self }
    }

    /// The errors in line order. There is at least one.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Error> {
        self.all.iter()
    }

    /// Whether reading stopped at [`ERRORS_MAX`], so there may be more errors.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.all.iter().enumerate() {
            if index > 0 {
                f.write_str("\n\n")?;
            }
            write!(f, "{error}")?;
        }
        if self.is_cut {
            write!(f, "\n\nthere may be more: reading stopped after {ERRORS_MAX} mistakes")?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}

/// Some editors write it at the start of a file, and it is invisible.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Replaces control characters, which could move the cursor or recolour the terminal, and bidirectional controls,
/// which could display a different line.
fn printable(c: char) -> char {
    match c {
        '\t' => ' ',
        c if c.is_control() => '\u{fffd}',
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{061c}' => {
            '\u{fffd}'
        }
        c => c,
    }
}

fn printable_text(text: &str) -> String {
    text.chars().map(printable).collect()
}

/// A value as quoted in messages.
pub(crate) fn quoted(typed: &str) -> String {
    // The first line identifies the value. Passwords are masked.
    let line = typed.lines().next().unwrap_or_default();
    let typed = if line.len() < SEEN_BYTES_AROUND { &*mask::masked(line) } else { line };
    format!("`{}`", cut(typed))
}

/// A value, cut to the maximum quoted length.
fn cut(typed: &str) -> String {
    let mut text: String = typed.chars().take(QUOTED_CHARS_MAX).map(printable).collect();
    if text.len() < typed.len() {
        text.push('…');
    }
    text
}

/// Maximum number of names listed in a message.
const LISTED_MAX: usize = 20;

/// `a, b and c`.
pub(crate) fn listed(names: &[&str], conjunction: &str) -> String {
    let shown: Vec<String> = names.iter().take(LISTED_MAX).map(|name| cut(name)).collect();
    if names.len() > LISTED_MAX {
        return format!("{} {conjunction} {} more", shown.join(", "), names.len() - LISTED_MAX);
    }
    match shown.as_slice() {
        [rest @ .., before_last, last] => {
            let mut text: String = rest.iter().flat_map(|name| [name.as_str(), ", "]).collect();
            let _ = write!(text, "{before_last} {conjunction} {last}");
            text
        }
        _ => shown.concat(),
    }
}

/// What to write for an unknown name: the nearest known name if there is one, and the `choice`.
pub(crate) fn known_instead(typed: &str, known: &[&str], choice: &str) -> String {
    match crate::nearest(typed, known) {
        // A suggestion makes the example redundant.
        Some(name) if choice.starts_with("write ") => format!("write `{name}`"),
        Some(name) => format!("write `{name}`; {choice}"),
        None => choice.to_owned(),
    }
}
