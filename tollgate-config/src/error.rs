use std::fmt::{self, Write};

use unicode_width::UnicodeWidthChar;

/// What is wrong with a text, where, and what to write instead.
///
/// It prints as several lines: the place and the fault, the line itself with the place marked, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    file: Option<String>,
    line: usize,
    column: usize,
    what: String,
    /// The line, and the marker that is printed below it.
    marked_line: Box<(String, String)>,
    instead: String,
}

/// A place in a text, as a person counts: from 1, in characters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) line: usize,
    pub(crate) column: usize,
    pub(crate) chars: usize,
}

/// A fault that does not know the whole text yet.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) place: Place,
    pub(crate) what: String,
    pub(crate) instead: String,
}

/// Characters of a line that are shown on either side of the marked place: a line may be a megabyte long.
const SHOWN_CHARS_AROUND: usize = 60;
/// The longest marker.
const MARKED_CHARS_MAX: usize = 40;
/// Characters of a typed value that a message repeats.
const QUOTED_CHARS_MAX: usize = 40;

impl Problem {
    pub(crate) fn in_text(self, text: &str) -> Error {
        let (line, column) = (self.place.line.max(1), self.place.column.max(1));
        Error {
            file: None,
            line,
            column,
            what: self.what,
            marked_line: Box::new(marked(text.lines().nth(line - 1).unwrap_or(""), column, self.place.chars)),
            instead: self.instead,
        }
    }
}

/// The line, and below it a marker under `chars` characters from `column` on; both cut to what fits a screen.
fn marked(line: &str, column: usize, chars: usize) -> (String, String) {
    let from = column.saturating_sub(SHOWN_CHARS_AROUND).max(1);
    let shown: String = line.chars().skip(from - 1).take(2 * SHOWN_CHARS_AROUND).map(printable).collect();
    let mut above = shown.chars();
    let mut marker = String::new();
    for _ in from..column {
        spread(&mut marker, " ", above.next());
    }
    let chars = chars.min(MARKED_CHARS_MAX).min(above.clone().count()).max(1);
    for _ in 0..chars {
        spread(&mut marker, "^", above.next());
    }
    (shown.trim_end().to_owned(), marker)
}

/// Repeats `mark` over the cells of the character above it: a wide character takes two, and the marker must still
/// stand below its word.
fn spread(marker: &mut String, mark: &str, above: Option<char>) {
    marker.push_str(&mark.repeat(above.map_or(1, |c| c.width().unwrap_or(1))));
}

impl Error {
    /// The same error, saying which file it is about: `limits.yaml:3:14: ...`.
    #[must_use]
    pub fn in_file(mut self, name: &str) -> Error {
        self.file = Some(name.to_owned());
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

    /// What is wrong, in a sentence.
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

/// Control characters would move the cursor or recolour the terminal.
fn printable(c: char) -> char {
    match c {
        '\t' => ' ',
        c if c.is_control() => '\u{fffd}',
        c => c,
    }
}

/// A typed value as a message repeats it.
pub(crate) fn quoted(typed: &str) -> String {
    let mut text: String = typed.chars().take(QUOTED_CHARS_MAX).map(printable).collect();
    if text.len() < typed.len() {
        text.push('…');
    }
    format!("`{text}`")
}

/// `a, b and c`.
pub(crate) fn listed(names: &[&str], conjunction: &str) -> String {
    match names {
        [rest @ .., before_last, last] => {
            let mut text: String = rest.iter().flat_map(|name| [*name, ", "]).collect();
            let _ = write!(text, "{before_last} {conjunction} {last}");
            text
        }
        _ => names.concat(),
    }
}

/// What to write for an unknown name: the nearest known one if there is one, and in any case the `choice`.
pub(crate) fn known_instead(typed: &str, known: &[&str], choice: &str) -> String {
    match crate::nearest(typed, known) {
        Some(name) => format!("write `{name}`; {choice}"),
        None => choice.to_owned(),
    }
}
