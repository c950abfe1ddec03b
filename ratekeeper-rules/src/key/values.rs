//! The values of headers, cookies and query parameters, as servers read them.

use std::borrow::Cow;

use super::{AmbiguousValue, NoKey};
use crate::request::Request;
use crate::spelling::{is_same_name, trim};

/// The only value; an error if there are two.
fn only<T>(what: &str, name: &str, mut values: impl Iterator<Item = T>) -> Result<Option<T>, NoKey> {
    let first = values.next();
    match values.next() {
        Some(_) => Err(NoKey::Twice(format!("{what} {name}"))),
        None => Ok(first),
    }
}

/// The value of a header.
pub(super) fn header<'a>(request: &'a impl Request, name: &'a str) -> Result<Option<Cow<'a, [u8]>>, NoKey> {
    let Some(value) = only("header", name, request.header(name))?.map(trim) else { return Ok(None) };
    match is_credentials(name) && has_ambiguous_base64(value) {
        true => Err(AmbiguousValue::Base64.of("header", name)),
        false => Ok(Some(header_value(name, value))),
    }
}

/// The decoded value of a cookie.
pub(super) fn cookie<'a>(request: &'a impl Request, name: &'a str) -> Result<Option<Cow<'a, [u8]>>, NoKey> {
    let value = only("cookie", name, cookies(request, name))?;
    let ambiguous = |what: AmbiguousValue| what.of("cookie", name);
    if request.header("cookie").any(|line| hides_cookie(line, name)) {
        return Err(ambiguous(AmbiguousValue::Hidden));
    }
    let value = value.map(cookie_value).transpose().map_err(ambiguous)?;
    match value.as_deref().is_some_and(has_nul) {
        true => Err(ambiguous(AmbiguousValue::Nul)),
        false => Ok(value),
    }
}

/// The decoded value of a query parameter.
pub(super) fn parameter<'a>(query: &'a str, name: &'a str) -> Result<Option<Cow<'a, [u8]>>, NoKey> {
    let value = only("parameter", name, parameters(query, name))?;
    match value.as_deref().is_some_and(has_nul) {
        true => Err(AmbiguousValue::Nul.of("parameter", name)),
        false => Ok(value),
    }
}

fn has_nul(value: &[u8]) -> bool {
    value.contains(&0)
}

/// The values of all cookies of this name.
fn cookies<'a>(request: &'a impl Request, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    let pairs = request.header("cookie").flat_map(|line| line.split(|byte| *byte == b';'));
    pairs.filter_map(move |pair| {
        let at = pair.iter().position(|byte| *byte == b'=')?;
        // A plus sign in the name of a cookie is a plus sign.
        is_same_name(&unescaped(pair[..at].trim_ascii(), b'+'), name.as_bytes())
            .then(|| trim(&pair[at + 1..]))
    })
}

/// Whether the byte separates cookies for some servers, as a semicolon does for all.
fn is_separator(byte: &u8) -> bool {
    *byte == b',' || byte.is_ascii_whitespace()
}

/// Whether servers that split cookies at spaces or commas find a cookie of this name inside another, or inside its own
/// value. Linear in the length of the line.
fn hides_cookie(line: &[u8], name: &str) -> bool {
    line.split(|byte| *byte == b';').map(<[u8]>::trim_ascii).any(|pair| {
        // The fast path, for nearly all cookies.
        pair.iter().any(is_separator) && {
            let is_it = |sent: &[u8]| is_same_name(&unescaped(sent, b'+'), name.as_bytes());
            let at = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
            let is_own = at < pair.len() && is_it(pair[..at].trim_ascii());
            // The name of an ordinary pair is no hidden one, also with spaces around its equals sign.
            let searched = if is_own { &pair[at + 1..] } else { pair };
            let mut before: &[u8] = b"";
            searched.split(is_separator).filter(|piece| !piece.is_empty()).any(|piece| {
                let name = match piece.iter().position(|byte| *byte == b'=') {
                    Some(0) => Some(before),
                    Some(at) => Some(&piece[..at]),
                    None => None,
                };
                before = piece;
                name.is_some_and(is_it)
            })
        }
    })
}

fn is_credentials(name: &str) -> bool {
    matches!(name, "authorization" | "proxy-authorization")
}

/// Whether the value is Basic credentials with another base64 form of the same bytes.
fn has_ambiguous_base64(value: &[u8]) -> bool {
    let Some(end) = value.iter().position(u8::is_ascii_whitespace) else { return false };
    value[..end].eq_ignore_ascii_case(b"basic") && !is_canonical_base64(trim(&value[end..]))
}

/// Whether it is base64 as RFC 4648 defines it: padded, with unused bits of zero, and without other characters.
fn is_canonical_base64(text: &[u8]) -> bool {
    let bits = |byte: &u8| match *byte {
        upper @ b'A'..=b'Z' => Some(upper - b'A'),
        lower @ b'a'..=b'z' => Some(lower - b'a' + 26),
        digit @ b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (digits, unused) = match text {
        [digits @ .., b'=', b'='] => (digits, 0b1111),
        [digits @ .., b'='] => (digits, 0b11),
        digits => (digits, 0),
    };
    let is_zero = digits.last().and_then(bits).is_some_and(|last| last & unused == 0);
    text.len().is_multiple_of(4) && is_zero && digits.iter().all(|byte| bits(byte).is_some())
}

/// The scheme of credentials is case-insensitive, and any number of spaces follows it: `bearer  k` is `Bearer k`.
pub(super) fn header_value<'a>(name: &str, value: &'a [u8]) -> Cow<'a, [u8]> {
    match value.iter().position(u8::is_ascii_whitespace).filter(|_| is_credentials(name)) {
        Some(end) => {
            let scheme = value[..end].to_ascii_lowercase();
            [&scheme, b" ".as_slice(), trim(&value[end..])].concat().into()
        }
        None => value.into(),
    }
}

/// The value as servers decode it: without its quotes and the backslashes between them, and without escapes. A plus
/// sign stays a plus sign.
fn cookie_value(value: &[u8]) -> Result<Cow<'_, [u8]>, AmbiguousValue> {
    let Some(rest) = value.strip_prefix(b"\"") else {
        return match value.iter().any(is_separator) {
            true => Err(AmbiguousValue::Separator),
            false => Ok(unescaped(value, b'+')),
        };
    };
    match quoted(rest).ok_or(AmbiguousValue::Quote)? {
        quoted if quoted.contains(&b'\\') => {
            Ok(unescaped(&without_backslashes(quoted), b'+').into_owned().into())
        }
        quoted => Ok(unescaped(quoted, b'+')),
    }
}

/// The text before the closing quotation mark, if that is the last byte.
fn quoted(rest: &[u8]) -> Option<&[u8]> {
    let mut is_escaped = false;
    let end = rest.iter().position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    })?;
    (end + 1 == rest.len()).then(|| &rest[..end])
}

/// `\101` is `A` and `\"` is a quote, as in Python.
fn without_backslashes(quoted: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(quoted.len());
    let mut rest = quoted;
    while let Some((first, behind)) = rest.split_first() {
        rest = match (first, behind) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', behind @ ..]) => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                behind
            }
            (b'\\', [byte, behind @ ..]) => {
                plain.push(*byte);
                behind
            }
            (byte, behind) => {
                plain.push(*byte);
                behind
            }
        };
    }
    plain
}

/// The decoded values of all parameters of this name: differently escaped values are equal. A semicolon separates
/// parameters as `&` does: to some servers, `a;b=c` is the value `a`.
fn parameters<'a>(query: &'a str, name: &'a str) -> impl Iterator<Item = Cow<'a, [u8]>> {
    query.split(['&', ';']).filter_map(move |pair| {
        let (its_name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let is_it = is_same_name(&unescaped(its_name.as_bytes(), b' '), name.as_bytes());
        is_it.then(|| unescaped(value.as_bytes(), b' '))
    })
}

/// Decodes percent escapes, and replaces each `+` by `plus`.
fn unescaped(bytes: &[u8], plus: u8) -> Cow<'_, [u8]> {
    if !bytes.iter().any(|byte| matches!(byte, b'%' | b'+')) {
        return bytes.into();
    }
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digit = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
        match (bytes[at], digit(bytes.get(at + 1)), digit(bytes.get(at + 2))) {
            // Two hexadecimal digits fit a byte.
            (b'%', Some(high), Some(low)) => {
                plain.push((high * 16 + low) as u8);
                at += 2;
            }
            (b'+', ..) => plain.push(plus),
            (byte, ..) => plain.push(byte),
        }
        at += 1;
    }
    plain.into()
}
