use std::fmt;

use unicode_width::UnicodeWidthChar;

use crate::reader::HiddenWord;
use crate::{ERRORS_MAX, mask};

/// A mistake or a risk in a configuration text: what is wrong, where, and what to write instead.
///
/// Displayed as several lines: severity and message, the position, the source line with a marker below, and the help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    severity: Severity,
    file: Option<String>,
    line: usize,
    column: usize,
    message: String,
    /// For a duplicate, the line of the first definition.
    first: Option<Box<Snippet>>,
    snippet: Box<Snippet>,
    help: String,
}

/// Whether a configuration with this diagnostic can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The configuration is invalid.
    Error,
    /// The configuration is valid, but probably not what was intended.
    Warning,
}

impl Severity {
    /// `error` or `warning`.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        }
    }
}

/// A source line, and the marker printed below it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Snippet {
    line: usize,
    text: String,
    marker: String,
}

/// A position in a text. Lines and columns start at 1; columns are counted in characters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
    pub(crate) chars: usize,
    /// The same position as a byte offset, from 0.
    pub(crate) byte: usize,
}

/// A diagnostic that is not yet attached to its source text.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) position: Position,
    pub(crate) message: String,
    pub(crate) help: String,
    /// For a duplicate, the position of the first definition.
    pub(crate) first: Option<Position>,
    /// Whether problems with the same message have one cause and are reported once.
    pub(crate) has_one_cause: bool,
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
    pub(crate) fn new(position: Position, message: impl Into<String>, help: impl Into<String>) -> Problem {
        Problem { position, message: message.into(), help: help.into(), first: None, has_one_cause: false }
    }

    /// The name at `position` is a duplicate of the one at `first`.
    pub(crate) fn duplicate(position: Position, first: Position, message: impl Into<String>) -> Problem {
        // A default has no position in the text.
        let first = (first.line > 0).then_some(first);
        Problem { first, ..Problem::new(position, message, "remove one of the two") }
    }

    pub(crate) fn unknown() -> Problem {
        Problem::new(
            Position::default(),
            "the text is not a valid configuration",
            "compare it with an example",
        )
    }

    /// Attaches the problem to its text. `secrets` are the words to mask. Messages may quote untrusted input, so
    /// control characters are replaced here for all of them.
    pub(crate) fn in_text(self, severity: Severity, text: &str, secrets: &[HiddenWord]) -> Diagnostic {
        let (line, column) = (self.position.line.max(1), self.position.column.max(1));
        Diagnostic {
            severity,
            file: None,
            line,
            column,
            message: printable_text(&self.message),
            first: self.first.map(|first| Box::new(snippet(text, first, secrets))),
            snippet: Box::new(snippet(text, self.position, secrets)),
            help: printable_text(&self.help),
        }
    }
}

/// The line at a position, with the position marked.
fn snippet(text: &str, position: Position, secrets: &[HiddenWord]) -> Snippet {
    let byte = boundary_before(text, position.byte);
    let (text, marker) = marked(text, byte, position.chars, secrets);
    Snippet { line: position.line.max(1), text, marker }
}

/// The last character boundary at or before `byte`.
pub(crate) fn boundary_before(text: &str, byte: usize) -> usize {
    (0..=byte.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// The line that contains `byte`, and a marker below `chars` characters from there. Both are cut to the width of a
/// screen, and secrets are masked.
fn marked(text: &str, byte: usize, chars: usize, secrets: &[HiddenWord]) -> (String, String) {
    let is_break = |c: char| c == '\n' || c == '\r';
    // Searching for a single character is vectorised, and a line may be a megabyte long.
    let after = |from: usize, c: char| text[from..byte].rfind(c).map_or(from, |at| from + at + 1);
    let line_start = after(after(0, '\n'), '\r');
    let start = line_start.max(boundary_before(text, byte.saturating_sub(SEEN_BYTES_AROUND)));
    let end = boundary_before(text, byte + SEEN_BYTES_AROUND);
    let end = text[byte..end].find(is_break).map_or(end, |at| byte + at);
    let in_line = secrets.iter().filter_map(|secret| {
        let Position { byte, chars, .. } = secret.position;
        // A secret may span lines. A character has at most four bytes.
        if byte >= end || byte.saturating_add(chars.saturating_mul(4)) <= start {
            return None;
        }
        let written = text.get(byte..end)?.chars().take(chars);
        let to = byte + written.map(char::len_utf8).sum::<usize>();
        let (from, to) = mask::behind_scheme(text, byte..to);
        (from.max(start) < to).then(|| from.max(start) - start..to - start)
    });
    let cells = mask::cells(&text[start..end], &text[..line_start], in_line);
    // The position may be inside a masked secret.
    let at = cells.iter().position(|cell| cell.bytes.end > byte - start).unwrap_or(cells.len());
    // The marker of a masked secret must not show its length.
    let is_masked = cells.get(at).is_some_and(|cell| cell.shown.chars().count() > 1);
    let chars = if is_masked { 1 } else { chars.clamp(1, MARKED_CHARS_MAX) };
    // A mask is one cell, so the marker ends where the position does, whatever the length of the secret.
    let end = start + cells.get(at).map_or(0, |cell| cell.bytes.start);
    let end = end + text[end..].chars().take(chars).map(char::len_utf8).sum::<usize>() - start;
    let last = cells.iter().skip(at).take_while(|cell| cell.bytes.start < end).count().max(1);
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

impl Diagnostic {
    /// Returns the diagnostic with a file name.
    #[must_use]
    pub fn in_file(mut self, name: &str) -> Diagnostic {
        self.file = Some(printable_text(name));
        self
    }

    /// Whether this is an error or a warning.
    pub fn severity(&self) -> Severity {
        self.severity
    }

    /// The line, from 1.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The column in characters, from 1.
    pub fn column(&self) -> usize {
        self.column
    }

    /// What is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to write instead.
    pub fn help(&self) -> &str {
        &self.help
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diagnostic { line, column, message, help, snippet, .. } = self;
        let digits = line.to_string().len();
        writeln!(f, "{}: {message}", self.severity.name())?;
        match &self.file {
            Some(file) => writeln!(f, " {:digits$}--> {file}:{line}:{column}", "")?,
            None => writeln!(f, " {:digits$}--> line {line}, column {column}", "")?,
        }
        writeln!(f, " {:digits$} |", "")?;
        if let Some(first) = &self.first {
            first.write(f, digits, '-')?;
            writeln!(f, " first here")?;
            if first.line + 1 < *line {
                writeln!(f, " {:digits$} ...", "")?;
            }
        }
        snippet.write(f, digits, '^')?;
        write!(f, "\n {:digits$} = help: {help}", "")
    }
}

impl Snippet {
    /// Writes the line and its marker, without a line break at the end.
    fn write(&self, f: &mut fmt::Formatter<'_>, digits: usize, mark: char) -> fmt::Result {
        let Snippet { line, text, marker } = self;
        writeln!(f, " {line:digits$} |{}{text}", if text.is_empty() { "" } else { " " })?;
        write!(f, " {:digits$} | {}", "", marker.replace('^', mark.encode_utf8(&mut [0; 4])))
    }
}

// By hand: `thiserror` writes messages of one format string, and these have none. No other error is their cause.
impl std::error::Error for Diagnostic {}

/// All errors of a text, or the first [`ERRORS_MAX`] of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors {
    all: Vec<Diagnostic>,
    is_cut: bool,
}

impl Errors {
    pub(crate) fn new(mut problems: Vec<Problem>, text: &str, secrets: &[HiddenWord]) -> Errors {
        if problems.is_empty() {
            problems.push(Problem::unknown());
        }
        let is_cut = problems.len() >= ERRORS_MAX;
        problems.truncate(ERRORS_MAX);
        problems.sort_by_key(|problem| (problem.position.line, problem.position.column));
        let mut all: Vec<Diagnostic> =
            joined(problems).into_iter().map(|it| it.in_text(Severity::Error, text, secrets)).collect();
        // An alias may report the same mistake at the same position twice.
        all.dedup();
        Errors { all, is_cut }
    }

    /// Joins the errors of several texts in order. Returns `None` if there are none.
    pub(crate) fn joined(several: Vec<Errors>) -> Option<Errors> {
        let is_cut = several.iter().any(|errors| errors.is_cut);
        let mut all: Vec<Diagnostic> = several.into_iter().flat_map(|errors| errors.all).collect();
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
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Diagnostic> {
        self.all.iter()
    }

    /// Whether reading stopped at [`ERRORS_MAX`], so there may be more errors.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }
}

/// Joins sorted problems that have one cause: the first lists the lines of the others.
fn joined(problems: Vec<Problem>) -> Vec<Problem> {
    let mut joined: Vec<(Problem, Vec<String>)> = Vec::new();
    for problem in problems {
        let same = joined.iter_mut().find(|(it, _)| it.has_one_cause && it.message == problem.message);
        match same {
            Some((first, lines)) => {
                let line = problem.position.line.to_string();
                if problem.position.line != first.position.line && !lines.contains(&line) {
                    lines.push(line);
                }
            }
            None => joined.push((problem, Vec::new())),
        }
    }
    let with_lines = joined.into_iter().map(|(problem, lines)| {
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let more = match lines.len() {
            0 => return problem,
            1 => format!("line {}", listed(&lines)),
            _ => format!("lines {}", listed(&lines)),
        };
        Problem { help: format!("{}; also used in {more}", problem.help), ..problem }
    });
    with_lines.collect()
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
            write!(f, "\n\nthere may be more errors: reading stopped after {ERRORS_MAX}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}

/// Some editors write it at the start of a file, and it is invisible.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Replaces control characters, which could move the cursor or recolor the terminal, and bidirectional controls,
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

/// What a message is about: the name of a field is quoted, a description such as `the cost` is not.
pub(crate) fn subject(name: &str) -> String {
    if name.contains(' ') { name.to_owned() } else { format!("`{name}`") }
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

/// `a, b, c`.
pub(crate) fn listed(names: &[&str]) -> String {
    let shown: Vec<String> = names.iter().take(LISTED_MAX).map(|name| cut(name)).collect();
    let more = match names.len().saturating_sub(LISTED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", shown.join(", "))
}

/// The help for an unknown name: the nearest known name if there is one, and the `choice`.
pub(crate) fn known_help(typed: &str, known: &[&str], choice: &str) -> String {
    match crate::nearest(typed, known) {
        // A suggestion makes the example redundant.
        Some(name) if choice.starts_with("write ") => format!("did you mean `{name}`?"),
        Some(name) => format!("did you mean `{name}`? {choice}"),
        None => choice.to_owned(),
    }
}
