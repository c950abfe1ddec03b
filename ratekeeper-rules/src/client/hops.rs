//! The hops of a header, from right to left.
//!
//! A hop is separated from the next without reading anything to the left of it, quoted strings included. Read from
//! the left, an unclosed quote of the client would swallow what proxies append: in `for=6.6.6.6;x="` followed by `,
//! for=203.0.113.7`, the last hop would be the client's.
//!
//! The parser is strict about where hops and parameters end, because a client could exploit that, and lenient about
//! the form of an address, because that gains nothing: unquoted brackets and ports are accepted in `Forwarded`, too.

use std::borrow::Cow;
use std::net::IpAddr;

use super::{HOP_BYTES_MAX, HOPS_MAX, Source, address};

/// The address of each hop, the right-most of the last line first; `None` for a hop that is not an address.
///
/// After a `None` the remaining hops are meaningless, because they may be parts of the same garbage.
pub(super) fn from_right<'a>(
    lines: impl IntoIterator<Item = &'a [u8]>,
    source: Source,
) -> impl Iterator<Item = Option<IpAddr>> {
    // Each line has at least one hop (an empty line has an empty one), so earlier lines are never needed.
    let mut last_lines: [&[u8]; HOPS_MAX] = [&[]; HOPS_MAX];
    let mut count = 0_usize;
    for line in lines {
        last_lines[count % HOPS_MAX] = line;
        count += 1;
    }
    let first = count.saturating_sub(HOPS_MAX);
    (first..count)
        .rev()
        .flat_map(move |index| LineFromRight { rest: Some(last_lines[index % HOPS_MAX]), source })
}

struct LineFromRight<'a> {
    /// The text to the left of the last hop's comma; `None` if there was no comma.
    rest: Option<&'a [u8]>,
    source: Source,
}

impl Iterator for LineFromRight<'_> {
    type Item = Option<IpAddr>;

    fn next(&mut self) -> Option<Option<IpAddr>> {
        let line = self.rest.take()?;
        let Some(start) = last_hop_start(line) else { return Some(None) };
        self.rest = start.checked_sub(1).map(|comma| &line[..comma]);
        let hop = trimmed(&line[start..]);
        Some(match self.source {
            Source::XForwardedFor => address::parse(without_quotes(hop)),
            Source::Forwarded => forwarded_for(hop).and_then(|node| address::parse(&node)),
        })
    }
}

/// Where the last hop of a line begins: after the last comma outside quotes. `None` if the hop is too long.
///
/// An unpaired quote makes its hop garbage in either header, so it does not matter where that hop begins.
fn last_hop_start(line: &[u8]) -> Option<usize> {
    let furthest = line.len().saturating_sub(HOP_BYTES_MAX + 1);
    let mut in_quotes = false;
    for (index, byte) in line.iter().enumerate().skip(furthest).rev() {
        match byte {
            b',' if !in_quotes => return Some(index + 1),
            b'"' if !is_escaped(&line[furthest..index]) => in_quotes = !in_quotes,
            _ => {}
        }
    }
    (line.len() <= HOP_BYTES_MAX).then_some(0)
}

/// Whether an odd number of backslashes ends `before`, so that the byte after it is escaped.
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|b| **b == b'\\').count() % 2 == 1
}

/// The value of `for` in one hop of `Forwarded`, if the hop is well-formed and has exactly one.
fn forwarded_for(hop: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut found = None;
    let mut rest = hop;
    loop {
        // Empty parameters, as in `for=1.2.3.4;;proto=http;`, are valid, though rare.
        if !rest.is_empty() && rest[0] != b';' {
            let equals = rest.iter().position(|b| *b == b'=')?;
            let (name, value) = (&rest[..equals], &rest[equals + 1..]);
            if name.is_empty() || !name.iter().all(|b| is_token(*b)) {
                return None;
            }
            let (value, after) = parameter_value(value)?;
            if name.eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
                return None;
            }
            rest = trimmed(after);
        }
        match rest {
            [] => return found,
            [b';', after @ ..] => rest = trimmed(after),
            _ => return None,
        }
    }
}

/// A parameter's value without its quotes, and what follows it.
fn parameter_value(text: &[u8]) -> Option<(Cow<'_, [u8]>, &[u8])> {
    let Some(quoted) = text.strip_prefix(b"\"") else {
        let end = text.iter().position(|b| !is_unquoted(*b)).unwrap_or(text.len());
        return (end > 0).then(|| (Cow::Borrowed(&text[..end]), &text[end..]));
    };
    let mut value = Vec::new();
    let mut bytes = quoted.iter().copied().enumerate();
    while let Some((index, byte)) = bytes.next() {
        let byte = match byte {
            b'"' => return Some((Cow::Owned(value), &quoted[index + 1..])),
            b'\\' => bytes.next()?.1,
            byte => byte,
        };
        if byte.is_ascii_control() && byte != b'\t' {
            return None;
        }
        value.push(byte);
    }
    None
}

/// Whether a byte may be part of a parameter name.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Whether a byte may be part of an unquoted value: more than a token, see the module documentation.
fn is_unquoted(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"\",;\\".contains(&byte)
}

/// Removes surrounding spaces and tabs. Other white space is not valid in a header.
fn trimmed(text: &[u8]) -> &[u8] {
    let is_ink = |b: &u8| !matches!(b, b' ' | b'\t');
    let start = text.iter().position(is_ink).unwrap_or(text.len());
    let end = text.iter().rposition(is_ink).map_or(start, |last| last + 1);
    &text[start..end]
}

/// Some proxies quote addresses in `X-Forwarded-For` as well.
fn without_quotes(hop: &[u8]) -> &[u8] {
    hop.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(hop)
}
