//! Text from outside in log lines.

use std::fmt::{self, Write as _};

/// Whether a character could begin a line, control a terminal or reorder the text of a line: control characters, line
/// separators and marks of direction.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text with unprintable characters escaped as `\u001b`: one line of a log stays one line. JSON stays the same JSON,
/// because JSON contains such characters only inside of strings.
#[derive(Clone, Copy, Debug)]
pub struct Printable<'a>(pub &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            true => f.pad(self.0),
            false => self.0.chars().try_for_each(|c| write_printable(f, c)),
        }
    }
}

/// Text escaped for the inside of a JSON string, with unprintable characters escaped as well.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JsonText<'a>(pub(crate) &'a str);

impl fmt::Display for JsonText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
        if self.0.bytes().all(is_plain) {
            return f.write_str(self.0);
        }
        self.0.chars().try_for_each(|c| match c {
            '"' | '\\' => write!(f, "\\{c}"),
            c => write_printable(f, c),
        })
    }
}

fn write_printable(f: &mut fmt::Formatter<'_>, c: char) -> fmt::Result {
    // All unprintable characters have four hex digits.
    if is_unprintable(c) { write!(f, "\\u{:04x}", u32::from(c)) } else { f.write_char(c) }
}
