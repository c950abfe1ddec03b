//! Text from outside in log lines.

use std::fmt::{self, Write as _};
use std::net::IpAddr;

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

/// A line of JSON under construction.
pub(crate) struct JsonLine<'a>(pub(crate) &'a mut String);

impl JsonLine<'_> {
    /// Appends text as it is.
    pub(crate) fn raw(&mut self, text: &str) {
        self.0.push_str(text);
    }

    pub(crate) fn number(&mut self, number: impl itoa::Integer) {
        self.0.push_str(itoa::Buffer::new().format(number));
    }

    /// Appends a number below 1000 with leading zeros.
    pub(crate) fn three_digits(&mut self, number: u32) {
        self.0.push_str(match number {
            0..10 => "00",
            10..100 => "0",
            _ => "",
        });
        self.number(number);
    }

    pub(crate) fn address(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(address) => {
                for (index, byte) in address.octets().into_iter().enumerate() {
                    self.raw(if index > 0 { "." } else { "" });
                    self.number(byte);
                }
            }
            // Writing into a string cannot fail.
            IpAddr::V6(address) => _ = write!(self.0, "{address}"),
        }
    }

    /// Appends a string, with unprintable characters escaped as well.
    pub(crate) fn text(&mut self, text: &str) {
        let is_plain = |byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
        self.0.push('"');
        match text.bytes().all(is_plain) {
            true => self.0.push_str(text),
            false => text.chars().for_each(|c| {
                if matches!(c, '"' | '\\') {
                    self.0.push('\\');
                }
                // Writing into a string cannot fail.
                let _ = write_printable(self.0, c);
            }),
        }
        self.0.push('"');
    }

    pub(crate) fn text_or_null(&mut self, text: Option<&str>) {
        match text {
            Some(text) => self.text(text),
            None => self.raw("null"),
        }
    }
}

/// A number as 16 hex digits.
pub(crate) fn hex(number: u64) -> [u8; 16] {
    std::array::from_fn(|at| b"0123456789abcdef"[(number >> (60 - 4 * at)) as usize & 0xf])
}

/// The digits as text.
pub(crate) fn hex_text(digits: &[u8; 16]) -> &str {
    std::str::from_utf8(digits).unwrap_or_default()
}

fn write_printable(out: &mut impl fmt::Write, c: char) -> fmt::Result {
    // All unprintable characters have four hex digits.
    if is_unprintable(c) { write!(out, "\\u{:04x}", u32::from(c)) } else { out.write_char(c) }
}
