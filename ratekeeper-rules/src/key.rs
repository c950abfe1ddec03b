//! Keys: whose budget a request uses.
//!
//! A key is a list of parts. Each part is written with its origin, its kind and its length, so that different lists
//! of values never share a key: `("a", "bc")` is not `("ab", "c")`, a client named `anonymous` is not a client
//! without a name, and a text never equals an address with the same bytes.
//!
//! If servers treat several forms of a value as equal, they are one value here; otherwise a client could get a new
//! budget with each form. `::ffff:1.2.3.4` is `1.2.3.4`. Hosts, methods and the scheme of `Authorization` are
//! case-insensitive. A host has no port and no trailing dot. Escapes in a query or a cookie are decoded, and a
//! cookie's quotes are removed. Names of cookies and parameters that [servers merge](crate::spelling) are one name,
//! and values have no white space around them. If servers would choose between several values in different ways, the
//! request is rejected: a header, cookie or parameter that is present twice, in the same or another spelling, and a
//! [value](AmbiguousValue) of which some servers read only a part.

mod values;

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use crate::client::{Grouping, IpNet, canonical_network};
use crate::path::{PathNormalization, Pattern, PatternError, segment};
use crate::request::{Request, host_name};
use crate::spelling::trim;
use values::{cookie, header, header_value, parameter};

/// A part of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPart {
    /// The client's address, or the network that it is grouped into.
    Ip,
    /// A header, by its name in lower case. A request with two of them is rejected.
    Header(String),
    /// A cookie, by its name in any [spelling](crate::spelling). A request with two of them is rejected.
    Cookie(String),
    /// A query parameter, by its name in any [spelling](crate::spelling). A request with two of them is rejected.
    Query(String),
    /// A segment of the path, counted from 1.
    Segment(usize),
    /// The segments that a pattern's `{names}` capture in the path, combined. Missing if the path does not match.
    Path(Pattern),
    /// The method, in upper case.
    Method,
    /// The requested host, in lower case, without its port.
    Host,
    /// The route.
    Route,
    /// A claim of a verified token.
    Claim(String),
    /// A value that the service computes, by name.
    Custom(String),
}

impl KeyPart {
    /// A header. The name is case-insensitive.
    pub fn header(name: &str) -> KeyPart {
        KeyPart::Header(name.to_ascii_lowercase())
    }
}

/// What replaces a part that a request does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyFallback {
    /// Another part; requests that have neither share a budget.
    Part(KeyPart),
    /// A fixed name: all requests without the part share this budget.
    Literal(String),
    /// The request is denied.
    Deny,
    /// The limit does not apply to the request.
    Skip,
}

/// Whose budget a request uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Key {
    parts: Vec<(KeyPart, KeyFallback)>,
    grouping: Grouping,
}

impl Key {
    /// One budget for all requests.
    pub fn global() -> Key {
        Key::default()
    }

    /// One budget for each value of a part. A request without the part uses the client's address.
    pub fn of(part: KeyPart) -> Key {
        Key::global().and(part)
    }

    /// One budget for each combination of this part and the parts before it.
    #[must_use]
    pub fn and(mut self, part: KeyPart) -> Key {
        self.parts.push((part, KeyFallback::Part(KeyPart::Ip)));
        self
    }

    /// Sets what replaces the last part in a request that does not have it.
    #[must_use]
    pub fn fallback(mut self, fallback: KeyFallback) -> Key {
        if let Some((_, last)) = self.parts.last_mut() {
            *last = fallback;
        }
        self
    }

    /// Sets how addresses are grouped into networks.
    #[must_use]
    pub fn grouped(mut self, grouping: Grouping) -> Key {
        self.grouping = grouping;
        self
    }

    /// The parts in order, each with its fallback.
    pub fn parts_with_fallbacks(&self) -> impl ExactSizeIterator<Item = &(KeyPart, KeyFallback)> {
        self.parts.iter()
    }

    /// Every part that the key may read, including fallbacks.
    pub fn parts(&self) -> impl Iterator<Item = &KeyPart> {
        self.parts.iter().flat_map(|(part, fallback)| {
            let other = if let KeyFallback::Part(other) = fallback { Some(other) } else { None };
            std::iter::once(part).chain(other)
        })
    }

    /// Every header that the key may read, in lower case.
    pub fn header_names(&self) -> impl Iterator<Item = &str> {
        self.parts().filter_map(|part| match part {
            KeyPart::Header(name) => Some(name.as_str()),
            _ => None,
        })
    }

    /// Every path pattern that the key may read.
    pub fn patterns(&self) -> impl Iterator<Item = &Pattern> {
        self.parts().filter_map(|part| match part {
            KeyPart::Path(pattern) => Some(pattern),
            _ => None,
        })
    }

    /// The same key with its patterns read for this normalization.
    pub(crate) fn with_normalization(
        mut self,
        normalization: PathNormalization,
    ) -> Result<Key, PatternError> {
        for (part, fallback) in &mut self.parts {
            let instead = match fallback {
                KeyFallback::Part(part) => Some(part),
                _ => None,
            };
            for part in [Some(part), instead].into_iter().flatten() {
                if let KeyPart::Path(pattern) = part {
                    *pattern = pattern.with_normalization(normalization)?;
                }
            }
        }
        Ok(self)
    }

    /// Appends the key of a request to `text`.
    ///
    /// # Errors
    /// If the request has no key; `text` is then unchanged.
    pub fn write(&self, request: &impl Request, text: &mut Vec<u8>) -> Result<(), NoKey> {
        let before = text.len();
        let written = self.parts.iter().try_for_each(|(part, fallback)| {
            let start = text.len();
            // Reserved for origin, kind and length.
            text.extend([0; HEAD]);
            let how = self.write_part(part, fallback, request, text)?;
            write_head(text, start, how);
            Ok(())
        });
        if written.is_err() {
            text.truncate(before);
        }
        written
    }

    /// Writes a part or its fallback, and returns the origin and the kind of the value.
    fn write_part(
        &self,
        part: &KeyPart,
        fallback: &KeyFallback,
        request: &impl Request,
        text: &mut Vec<u8>,
    ) -> Result<u8, NoKey> {
        if let Some(kind) = part.write(request, self.grouping, text)? {
            return Ok(FOUND | kind);
        }
        match fallback {
            KeyFallback::Deny => Err(NoKey::Denied),
            KeyFallback::Skip => Err(NoKey::Skipped),
            KeyFallback::Literal(literal) => {
                text.extend(literal.as_bytes());
                Ok(LITERAL | TEXT)
            }
            KeyFallback::Part(part) => {
                Ok(part.write(request, self.grouping, text)?.map_or(MISSING, |kind| INSTEAD | kind))
            }
        }
    }

    /// Appends the key for `values`, one for each part, to `text`: the same key as that of a request with these
    /// values. For callers without a request.
    ///
    /// Hosts, methods, addresses and credentials may have any form that is valid in a request; several path segments
    /// are separated by slashes.
    ///
    /// # Errors
    /// If they are not values of this key; `text` is then unchanged.
    pub fn write_values(&self, values: &[&str], text: &mut Vec<u8>) -> Result<(), KeyValuesError> {
        if values.len() != self.parts.len() {
            return Err(KeyValuesError::Number { wanted: self.parts.len(), given: values.len() });
        }
        let before = text.len();
        let written = self.parts.iter().zip(values).try_for_each(|((part, _), value)| {
            let start = text.len();
            text.extend([0; HEAD]);
            let kind = part.write_value(value, self.grouping, text)?;
            if text.len() == start + HEAD {
                return Err(KeyValuesError::Empty);
            }
            write_head(text, start, FOUND | kind);
            Ok(())
        });
        if written.is_err() {
            text.truncate(before);
        }
        written
    }

    /// The written keys that `value` [names](Self::is), unless it is a network: of the only part, and of the literal
    /// that replaces it.
    pub(crate) fn named_by(&self, value: &str) -> Vec<Vec<u8>> {
        let mut keys = Vec::new();
        let mut found = Vec::new();
        if self.write_values(&[value], &mut found).is_ok() {
            keys.push(found);
        }
        if let [(_, KeyFallback::Literal(literal))] = self.parts.as_slice()
            && literal == value
        {
            let mut key = vec![0; HEAD];
            key.extend(value.as_bytes());
            write_head(&mut key, 0, LITERAL_TEXT);
            keys.push(key);
        }
        keys
    }

    /// Whether the only part is an address, which networks may name.
    pub(crate) fn is_address(&self) -> bool {
        matches!(self.parts.as_slice(), [(KeyPart::Ip, _)])
    }

    /// Whether `value` names a written key: the value of its only part, or the literal that replaces it. A value from
    /// a fallback part never matches: a cookie `acme` is not the user `acme`.
    ///
    /// An address matches in any of its forms, or by a network that contains it; hosts and methods in any case;
    /// several path segments separated by slashes.
    pub fn is(&self, written: &[u8], value: &str) -> bool {
        let ([(part, _)], Some((head, found))) = (self.parts.as_slice(), written.split_at_checked(HEAD))
        else {
            return false;
        };
        match (head[0], part) {
            (LITERAL_TEXT, _) => found == value.as_bytes(),
            (how, _) if how & HOW != FOUND => false,
            (_, KeyPart::Ip) => network_in(found).is_some_and(|network| self.is_network(network, value)),
            (_, KeyPart::Header(name)) => found == &*header_value(name, value.as_bytes()),
            (_, KeyPart::Method) => found.eq_ignore_ascii_case(value.as_bytes()),
            (_, KeyPart::Host) => found.eq_ignore_ascii_case(host_name(value).as_bytes()),
            _ => found == value.as_bytes(),
        }
    }

    fn is_network(&self, network: IpNet, typed: &str) -> bool {
        match typed.parse::<IpAddr>() {
            Ok(address) => self.grouping.network(address) == network,
            Err(_) => typed.parse().is_ok_and(|typed: IpNet| canonical_network(typed).contains(&network)),
        }
    }
}

/// Bytes before each part: origin and kind in one byte, and the length in four.
const HEAD: usize = 5;

/// The bits for the origin of a part.
const HOW: u8 = 0b0000_1111;
const FOUND: u8 = 0;
const INSTEAD: u8 = 1;
const LITERAL: u8 = 2;
const MISSING: u8 = 3;

/// The bits for the kind of a value.
const TEXT: u8 = 0;
const ADDRESS: u8 = 0b0001_0000;
const SEGMENTS: u8 = 0b0010_0000;

const LITERAL_TEXT: u8 = LITERAL | TEXT;

/// Writes the head of a part into the bytes reserved for it.
fn write_head(text: &mut [u8], start: usize, how: u8) {
    // No part of a request reaches four gigabytes.
    let length = u32::try_from(text.len() - start - HEAD).unwrap_or(u32::MAX);
    text[start] = how;
    text[start + 1..start + HEAD].copy_from_slice(&length.to_le_bytes());
}

/// The values of a written key as text for people, separated by commas: `alice, /upload`. Text that is not UTF-8 is
/// replaced, control characters are escaped, and at most [`SHOWN_CHARS_MAX`] characters are shown.
pub fn shown(mut written: &[u8]) -> String {
    let mut text = String::new();
    while let Some((head, rest)) = written.split_first_chunk::<HEAD>() {
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let Some((value, rest)) = rest.split_at_checked(length) else { break };
        if !text.is_empty() {
            text.push_str(", ");
        }
        match (head[0] & !HOW == ADDRESS).then(|| network_in(value)).flatten() {
            Some(IpNet::V4(network)) => text.push_str(&network.addr().to_string()),
            Some(network) => text.push_str(&network.to_string()),
            None if value.is_empty() => text.push('-'),
            None => text.push_str(&String::from_utf8_lossy(value)),
        }
        written = rest;
    }
    let is_long = text.chars().nth(SHOWN_CHARS_MAX).is_some();
    let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).flat_map(escape_control).collect();
    if is_long {
        shown.push('…');
    }
    shown
}

/// Maximum characters of a key that [`shown`] returns.
pub const SHOWN_CHARS_MAX: usize = 64;

/// A control character would let a client write its own lines or colors into a terminal.
fn escape_control(character: char) -> impl Iterator<Item = char> {
    let is_control = character.is_control();
    let escaped = is_control.then(|| character.escape_default());
    escaped.into_iter().flatten().chain((!is_control).then_some(character))
}

/// Values that do not fit a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyValuesError {
    /// The number of values differs from the number of parts.
    #[error(fmt = wrong_number)]
    Number {
        /// Parts of the key.
        wanted: usize,
        /// Values given.
        given: usize,
    },
    /// A value is empty; an empty value counts as missing.
    #[error("a part of the key is empty; say whose budget it is")]
    Empty,
    /// A part is an address, and this value is not.
    #[error("{0:?} is not an IP address, and this limit goes by addresses")]
    NoAddress(String),
}

fn wrong_number(wanted: &usize, given: &usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match wanted {
        0 => write!(f, "this limit is one for all, and has no key; leave the key out"),
        1 => write!(f, "the key of this limit has 1 part, and {given} were given"),
        _ => write!(f, "the key of this limit has {wanted} parts, and {given} were given"),
    }
}

/// Why a request has no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoKey {
    /// A part is missing, and the rule denies requests without it.
    #[error("the request does not say whose it is")]
    Denied,
    /// A part is missing, and the limit does not apply to requests without it.
    #[error("the limit does not concern the request")]
    Skipped,
    /// A part is present twice, so the key is ambiguous: `header x-user-id`.
    #[error("the {0} is there twice; send it once")]
    Twice(String),
    /// Servers read different values of a part: `cookie session`.
    #[error("the {0} {1}")]
    Ambiguous(String, AmbiguousValue),
}

/// Why servers read different values of a header, cookie or parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmbiguousValue {
    /// A space or a comma in a cookie that is not quoted: some servers end the value there.
    Separator,
    /// The cookie's name and an equals sign after a space or a comma: some servers find a cookie there.
    Hidden,
    /// A cookie that begins with a quotation mark, but is not one quoted string.
    Quote,
    /// A NUL: some servers end the value there.
    Nul,
    /// Basic credentials that are not in canonical base64: without padding, or with characters that servers ignore.
    Base64,
}

impl AmbiguousValue {
    fn of(self, what: &str, name: &str) -> NoKey {
        NoKey::Ambiguous(format!("{what} {name}"), self)
    }
}

impl fmt::Display for AmbiguousValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AmbiguousValue::Separator => "has a space or a comma, at which some servers end it; escape it",
            AmbiguousValue::Hidden => {
                "follows a space or a comma in another value, where some servers find it; \
                 separate cookies by semicolons"
            }
            AmbiguousValue::Quote => "has a quotation mark that some servers remove; remove it",
            AmbiguousValue::Nul => "has a NUL, at which some servers end it; remove it",
            AmbiguousValue::Base64 => {
                "is not in canonical base64, which servers decode differently; \
                 send canonical base64 with padding"
            }
        })
    }
}

impl KeyPart {
    /// Writes the part and returns the kind of its value. If the request does not have the part, writes nothing.
    fn write(
        &self,
        request: &impl Request,
        grouping: Grouping,
        text: &mut Vec<u8>,
    ) -> Result<Option<u8>, NoKey> {
        let found: Option<Cow<'_, [u8]>> = match self {
            KeyPart::Ip => {
                write_network(grouping.network(request.client()), text);
                return Ok(Some(ADDRESS));
            }
            KeyPart::Header(name) => header(request, name)?,
            KeyPart::Cookie(name) => cookie(request, name)?,
            KeyPart::Query(name) => parameter(request.query(), name)?,
            KeyPart::Segment(number) => {
                let found = number.checked_sub(1).and_then(|index| segment(request.path(), index));
                found.map(|segment| segment.as_bytes().into())
            }
            KeyPart::Path(pattern) => return Ok(write_segments(pattern, request.path(), text)),
            KeyPart::Method => Some(request.method().to_ascii_uppercase().into_bytes().into()),
            KeyPart::Host => Some(host_name(request.host()).to_ascii_lowercase().into_bytes().into()),
            KeyPart::Route => Some(request.route().as_bytes().into()),
            KeyPart::Claim(name) => request.claim(name).map(|claim| claim.as_bytes().into()),
            KeyPart::Custom(name) => request.custom(name).map(|custom| custom.into_bytes().into()),
        };
        let found =
            found.as_deref().map(|found| if self.is_typed_by_clients() { trim(found) } else { found });
        // An empty value counts as missing.
        let found = found.filter(|found| !found.is_empty());
        text.extend(found.unwrap_or_default());
        Ok(found.map(|_| TEXT))
    }

    /// Whether clients choose the text of the value freely, so that servers trim it.
    fn is_typed_by_clients(&self) -> bool {
        matches!(self, KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::Query(_))
    }
}

impl KeyPart {
    /// Writes a value as `write` does for a request that has it, and returns its kind.
    fn write_value(&self, value: &str, grouping: Grouping, text: &mut Vec<u8>) -> Result<u8, KeyValuesError> {
        match self {
            KeyPart::Ip => {
                let address = value
                    .trim_ascii()
                    .parse()
                    .map_err(|_| KeyValuesError::NoAddress(value.chars().take(64).collect()))?;
                write_network(grouping.network(address), text);
                return Ok(ADDRESS);
            }
            KeyPart::Header(name) => text.extend(&*header_value(name, trim(value.as_bytes()))),
            KeyPart::Cookie(_) | KeyPart::Query(_) => text.extend(trim(value.as_bytes())),
            KeyPart::Method => text.extend(value.to_ascii_uppercase().as_bytes()),
            KeyPart::Host => text.extend(host_name(value).to_ascii_lowercase().as_bytes()),
            KeyPart::Path(_) => {
                text.extend(value.as_bytes());
                return Ok(SEGMENTS);
            }
            _ => text.extend(value.as_bytes()),
        }
        Ok(TEXT)
    }
}

/// An IPv4 address is four bytes; an IPv6 network is sixteen bytes and its prefix length.
fn write_network(network: IpNet, text: &mut Vec<u8>) {
    match network {
        IpNet::V4(network) => text.extend(network.addr().octets()),
        IpNet::V6(network) => {
            text.extend(network.addr().octets());
            text.push(network.prefix_len());
        }
    }
}

/// The network that [`write_network`] wrote.
fn network_in(written: &[u8]) -> Option<IpNet> {
    if let Some((address, [prefix])) = written.split_first_chunk::<16>() {
        return IpNet::new(IpAddr::from(*address), *prefix).ok();
    }
    <[u8; 4]>::try_from(written).ok().map(|address| IpAddr::from(address).into())
}

/// Writes the captured segments, separated by slashes. A segment contains no slash and is not empty, so this is
/// unambiguous.
fn write_segments(pattern: &Pattern, path: &str, text: &mut Vec<u8>) -> Option<u8> {
    if !pattern.matches(path) {
        return None;
    }
    let segments = pattern.names().filter_map(|name| pattern.capture(path, name));
    for (index, segment) in segments.enumerate() {
        text.extend((index > 0).then_some(b'/'));
        text.extend(segment.as_bytes());
    }
    Some(SEGMENTS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

    use super::*;

    #[test]
    fn key_is_shown_as_its_values() {
        let shown_values = |key: &Key, values: &[&str]| {
            let mut text = Vec::new();
            key.write_values(values, &mut text).unwrap();
            shown(&text)
        };
        let key = Key::of(KeyPart::header("x-user")).and(KeyPart::Ip);
        assert_eq!(shown_values(&key, &["alice", "192.0.2.1"]), "alice, 192.0.2.1");
        assert_eq!(shown_values(&key, &["alice", "2001:db8::1"]), "alice, 2001:db8::/64");
        assert_eq!(shown(&[]), "");
        let key = Key::of(KeyPart::header("x-user"));
        assert_eq!(shown_values(&key, &["a\x1b[31m\nb"]), "a\\u{1b}[31m\\nb");
        assert_eq!(shown_values(&key, &["x".repeat(65).as_str()]), format!("{}…", "x".repeat(64)));
    }

    /// Values are trimmed of all white space that any server trims: in UTF-8, or of bytes that are not, in Latin-1.
    #[test]
    fn values_are_trimmed_of_the_white_space_that_servers_trim() {
        let key = Key::of(KeyPart::header("x-user"));
        let written = |value: &str| {
            let mut text = Vec::new();
            key.write_values(&[value], &mut text).unwrap();
            text
        };
        for white in
            [" ", "\t", "\u{b}", "\u{1f}", "\0", "\u{85}", "\u{a0}", "\u{2003}", "\u{3000}", "\u{feff}"]
        {
            assert_eq!(written(&format!("{white}ann{white}")), written("ann"), "{white:?}");
            assert_ne!(written(&format!("an{white}n")), written("ann"), "{white:?}");
        }
        assert_eq!(trim(b"\xa0\x85ann\x85 "), b"ann");
        assert_eq!(
            trim("annà".as_bytes()),
            "annà".as_bytes(),
            "its last byte is a no-break space in Latin-1"
        );
        assert_eq!(trim(b"\xa0\xff"), b"\xff");
        assert!(trim(b"\xa0\xa0").is_empty());
    }
}
