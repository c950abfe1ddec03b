//! Splits the text between two slashes into pieces for normalization.

use super::{Ambiguity, AmbiguousPath, AmbiguousPathPolicy, PathNormalization};

/// A piece of text and its normalized form.
#[derive(Clone, Copy, Debug)]
pub(super) enum Piece<'a> {
    /// Unchanged.
    Plain(&'a str),
    /// One ASCII character that needs no escape.
    Decoded(u8),
    /// One byte that needs an escape.
    Escaped(u8),
    /// A character outside ASCII, written as the escapes of its bytes.
    Char(char),
}

/// The scanner of a text without slashes. Ends at the first ambiguous piece, unless these are kept.
pub(super) struct PathScanner<'a> {
    text: &'a str,
    /// Where `text` begins, in bytes from the start of the whole path.
    at: usize,
    normalization: PathNormalization,
}

impl<'a> PathScanner<'a> {
    pub(super) fn new(text: &'a str, at: usize, normalization: PathNormalization) -> PathScanner<'a> {
        PathScanner { text, at, normalization }
    }

    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, left) = self.text.split_at(bytes);
        self.text = left;
        self.at += bytes;
        taken
    }

    /// Handles `bytes` bytes of ambiguous text: an error, or `kept` escaped.
    fn ambiguous(&mut self, what: Ambiguity, bytes: usize, kept: u8) -> Result<Piece<'a>, AmbiguousPath> {
        match self.normalization.ambiguous {
            AmbiguousPathPolicy::Reject => Err(AmbiguousPath { at: self.at, what }),
            AmbiguousPathPolicy::Keep => {
                self.take(bytes);
                Ok(Piece::Escaped(kept))
            }
        }
    }

    fn escape(&mut self) -> Result<Piece<'a>, AmbiguousPath> {
        let Some(byte) = escaped_byte(self.text.as_bytes()) else {
            return self.ambiguous(Ambiguity::BadEscape, 1, b'%');
        };
        match byte {
            b'/' => return self.ambiguous(Ambiguity::EncodedSlash, ESCAPE_BYTES, byte),
            b'\\' => return self.ambiguous(Ambiguity::EncodedBackslash, ESCAPE_BYTES, byte),
            0 => return self.ambiguous(Ambiguity::EncodedNul, ESCAPE_BYTES, byte),
            0x80.. => {
                return match escaped_char(self.text.as_bytes()) {
                    Some(character) => {
                        self.take(character.len_utf8() * ESCAPE_BYTES);
                        Ok(Piece::Char(character))
                    }
                    None => self.ambiguous(Ambiguity::NotUtf8, ESCAPE_BYTES, byte),
                };
            }
            _ => {}
        }
        self.take(ESCAPE_BYTES);
        let decode = is_unreserved(byte) || (self.normalization.decode_delimiters && is_delimiter(byte));
        Ok(if decode { Piece::Decoded(self.folded(byte)) } else { Piece::Escaped(byte) })
    }

    fn folded(&self, byte: u8) -> u8 {
        if self.normalization.ignore_case { byte.to_ascii_lowercase() } else { byte }
    }
}

impl<'a> Iterator for PathScanner<'a> {
    type Item = Result<Piece<'a>, AmbiguousPath>;

    fn next(&mut self) -> Option<Self::Item> {
        let first = self.text.chars().next()?;
        let plain_bytes = self.text.bytes().take_while(|&byte| is_plain(byte, self.normalization)).count();
        if plain_bytes > 0 {
            return Some(Ok(Piece::Plain(self.take(plain_bytes))));
        }
        let Some(byte) = u8::try_from(first).ok().filter(u8::is_ascii) else {
            self.take(first.len_utf8());
            return Some(Ok(Piece::Char(first)));
        };
        Some(match byte {
            b'%' => self.escape(),
            b'\\' => self.ambiguous(Ambiguity::Backslash, 1, byte),
            b'?' | b'#' => self.ambiguous(Ambiguity::QueryOrFragment, 1, byte),
            _ if byte.is_ascii_control() => self.ambiguous(Ambiguity::Control, 1, byte),
            _ => {
                self.take(1);
                // An upper-case letter if case is ignored, or a character that a path may not contain.
                let letter = byte.is_ascii_alphabetic();
                Ok(if letter { Piece::Decoded(self.folded(byte)) } else { Piece::Escaped(byte) })
            }
        })
    }
}

impl Piece<'_> {
    /// Passes the normalized form to `push`, in parts.
    pub(super) fn write(self, normalization: PathNormalization, mut push: impl FnMut(&str)) {
        match self {
            Piece::Plain(text) => push(text),
            Piece::Decoded(byte) => push_ascii(byte, &mut push),
            Piece::Escaped(byte) => push_escape(byte, &mut push),
            Piece::Char(character) if normalization.ignore_case => {
                character.to_lowercase().for_each(|lower| push_char(lower, &mut push));
            }
            Piece::Char(character) => push_char(character, &mut push),
        }
    }
}

fn push_char(character: char, push: &mut impl FnMut(&str)) {
    if character.is_ascii() {
        // A few characters have an ASCII letter as their lower case: the Kelvin sign becomes `k`.
        return push(character.encode_utf8(&mut [0; 4]));
    }
    character.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| push_escape(byte, push));
}

fn push_escape(byte: u8, push: &mut impl FnMut(&str)) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    push("%");
    push_ascii(DIGITS[usize::from(byte >> 4)], push);
    push_ascii(DIGITS[usize::from(byte & 15)], push);
}

fn push_ascii(byte: u8, push: &mut impl FnMut(&str)) {
    push(char::from(byte).encode_utf8(&mut [0; 4]));
}

/// `%` and two hex digits.
const ESCAPE_BYTES: usize = 3;

/// The byte of the escape at the start of the text.
fn escaped_byte(text: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = text else { return None };
    let digit = |hex: &u8| char::from(*hex).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(high)? << 4 | digit(low)?)
}

/// The character outside ASCII whose bytes are the escapes at the start of the text.
fn escaped_char(text: &[u8]) -> Option<char> {
    let mut bytes = [0; 4];
    let mut filled = 0;
    for (target, escape) in bytes.iter_mut().zip(text.chunks(ESCAPE_BYTES)) {
        let Some(byte) = escaped_byte(escape) else { break };
        *target = byte;
        filled += 1;
    }
    // Later escapes may belong to the next character, so the shortest valid UTF-8 sequence is taken.
    (2..=filled).find_map(|length| std::str::from_utf8(&bytes[..length]).ok()?.chars().next())
}

/// Whether a byte of a segment is already normalized.
pub(super) fn is_plain(byte: u8, normalization: PathNormalization) -> bool {
    PLAIN[usize::from(byte)] && !(normalization.ignore_case && byte.is_ascii_uppercase())
}

/// For each byte, whether a segment may contain it literally. A table, because most bytes of most paths are checked
/// here.
const PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = 0_u8;
    while byte < 128 {
        plain[byte as usize] = is_unreserved(byte) || is_delimiter(byte);
        byte += 1;
    }
    plain
};

/// Unreserved characters of RFC 3986, which are equal with and without an escape.
const fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// The other characters that a segment may contain literally, except `;`.
const fn is_delimiter(byte: u8) -> bool {
    matches!(byte, b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b'=' | b':' | b'@')
}
