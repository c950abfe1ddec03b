//! The values of headers, cookies and query parameters, as servers read them.

use std::borrow::Cow;

use super::NoKey;
use crate::request::Request;
use crate::spelling::{is_same_name, trim};

/// The only value; an error if there are two.
pub(super) fn only<T>(
    what: &str,
    name: &str,
    mut values: impl Iterator<Item = T>,
) -> Result<Option<T>, NoKey> {
    let first = values.next();
    match values.next() {
        Some(_) => Err(NoKey::Twice(format!("{what} {name}"))),
        None => Ok(first),
    }
}

/// The values of all cookies of this name.
pub(super) fn cookies<'a>(request: &'a impl Request, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    let pairs = request.header("cookie").flat_map(|line| line.split(|byte| *byte == b';'));
    pairs.filter_map(move |pair| {
        let at = pair.iter().position(|byte| *byte == b'=')?;
        // A plus sign in the name of a cookie is a plus sign.
        is_same_name(&unescaped(pair[..at].trim_ascii(), b'+'), name.as_bytes())
            .then(|| trim(&pair[at + 1..]))
    })
}

/// The scheme of credentials is case-insensitive, and any number of spaces follows it: `bearer  k` is `Bearer k`.
pub(super) fn header_value<'a>(name: &str, value: &'a [u8]) -> Cow<'a, [u8]> {
    let is_credentials = matches!(name, "authorization" | "proxy-authorization");
    match value.iter().position(u8::is_ascii_whitespace).filter(|_| is_credentials) {
        Some(end) => {
            let scheme = value[..end].to_ascii_lowercase();
            [&scheme, b" ".as_slice(), trim(&value[end..])].concat().into()
        }
        None => value.into(),
    }
}

/// The value as servers decode it: without its quotes and the backslashes between them, and without escapes. A plus
/// sign stays a plus sign.
pub(super) fn cookie_value(value: &[u8]) -> Cow<'_, [u8]> {
    match value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")) {
        Some(quoted) if quoted.contains(&b'\\') => {
            unescaped(&without_backslashes(quoted), b'+').into_owned().into()
        }
        Some(quoted) => unescaped(quoted, b'+'),
        None => unescaped(value, b'+'),
    }
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
pub(super) fn parameters<'a>(query: &'a str, name: &'a str) -> impl Iterator<Item = Cow<'a, [u8]>> {
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
