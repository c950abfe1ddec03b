//! Keys: two requests have the same key if and only if the same values were found in the same way. A request of which
//! servers read different values has no key.
//!
//! A second, simple implementation of the promises of `ratekeeper_rules::key` computes the expected values.

use std::net::{IpAddr, Ipv6Addr};

use ratekeeper_rules::client::{Grouping, IpNet};
use ratekeeper_rules::key::{AmbiguousValue, Key, KeyFallback, KeyPart, NoKey};
use ratekeeper_rules::path::{PathNormalization, Pattern, normalize};

use super::input::Input;
use super::synthetic_request::SyntheticRequest;

const HEADERS: [&str; 3] = ["x-a", "x-b", "cookie"];
const NAMES: [&str; 3] = ["a", "b", "a b"];
const HOSTS: [&str; 8] = ["", "a.test", "A.TEST", "a.test.", "a.test:80", "A.test.:80", "[::1]:80", "[::1]"];
const METHODS: [&str; 4] = ["GET", "get", "POST", ""];
const PATTERNS: [&str; 4] = ["/users/{id}/**", "/{a}/{b}", "/api/**", "/{a}/x/{b}"];

fn request(input: &mut Input<'_>) -> SyntheticRequest {
    let typed = input.text(24);
    let path = normalize(&typed, PathNormalization::default()).unwrap_or("/a/b".into()).into_owned();
    let headers =
        (0..input.below(5)).map(|_| (input.one_of(&HEADERS).to_owned(), input.bytes(24).to_vec())).collect();
    SyntheticRequest {
        method: input.one_of(&METHODS).to_owned(),
        host: input.one_of(&HOSTS).to_owned(),
        path,
        query: input.text(32),
        headers,
        client: input.address(),
        route: input.text(3),
        claims: input.flag().then(|| ("sub".to_owned(), input.text(4))).into_iter().collect(),
        customs: input.flag().then(|| ("tenant".to_owned(), input.text(4))).into_iter().collect(),
    }
}

/// A key part, as this implementation looks it up.
#[derive(Clone, Copy, Debug)]
enum PartModel {
    Ip,
    Header(&'static str),
    Cookie(&'static str),
    Query(&'static str),
    Segment(usize),
    Path(usize),
    Method,
    Host,
    Route,
    Claim,
    Custom,
}

#[derive(Clone, Debug)]
enum FallbackModel {
    Part(PartModel),
    Literal(String),
    Deny,
    Skip,
}

fn part_model(input: &mut Input<'_>) -> PartModel {
    match input.below(11) {
        0 => PartModel::Ip,
        1 => PartModel::Header(input.one_of(&HEADERS[..2])),
        2 => PartModel::Cookie(input.one_of(&NAMES)),
        3 => PartModel::Query(input.one_of(&NAMES)),
        4 => PartModel::Segment(usize::from(input.below(4))),
        5 => PartModel::Path(usize::from(input.below(4))),
        6 => PartModel::Method,
        7 => PartModel::Host,
        8 => PartModel::Route,
        9 => PartModel::Claim,
        _ => PartModel::Custom,
    }
}

fn part(part_model: PartModel) -> KeyPart {
    match part_model {
        PartModel::Ip => KeyPart::Ip,
        PartModel::Header(name) => KeyPart::header(name),
        PartModel::Cookie(name) => KeyPart::Cookie(name.to_owned()),
        PartModel::Query(name) => KeyPart::Query(name.to_owned()),
        PartModel::Segment(number) => KeyPart::Segment(number),
        PartModel::Path(number) => KeyPart::Path(Pattern::parse(PATTERNS[number]).expect("a pattern")),
        PartModel::Method => KeyPart::Method,
        PartModel::Host => KeyPart::Host,
        PartModel::Route => KeyPart::Route,
        PartModel::Claim => KeyPart::Claim("sub".to_owned()),
        PartModel::Custom => KeyPart::Custom("tenant".to_owned()),
    }
}

type Parts = Vec<(PartModel, FallbackModel)>;

fn parts(input: &mut Input<'_>) -> Parts {
    let count = input.below(4);
    (0..count)
        .map(|_| {
            let part = part_model(input);
            let or = match input.below(5) {
                0 | 1 => FallbackModel::Part(part_model(input)),
                2 => FallbackModel::Literal(input.text(17)),
                3 => FallbackModel::Deny,
                _ => FallbackModel::Skip,
            };
            (part, or)
        })
        .collect()
}

fn key(parts: &Parts, ipv6_prefix: u8) -> Key {
    let grouping = Grouping::by_ipv6_prefix(ipv6_prefix).expect("a prefix");
    let start = Key::global().grouped(grouping);
    parts.iter().fold(start, |key, (part_model, or)| {
        key.and(part(*part_model)).fallback(match or {
            FallbackModel::Part(part_model) => KeyFallback::Part(part(*part_model)),
            FallbackModel::Literal(literal) => KeyFallback::Literal(literal.clone()),
            FallbackModel::Deny => KeyFallback::Deny,
            FallbackModel::Skip => KeyFallback::Skip,
        })
    })
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Text(Vec<u8>),
    /// Whether it is IPv6, the bits of a network, and its prefix length.
    Network(bool, u128, u8),
    Segments(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    There(Value),
    Instead(Value),
    Literal(String),
    Missing,
}

fn values(parts: &Parts, ipv6_prefix: u8, request: &SyntheticRequest) -> Result<Vec<Found>, NoKey> {
    let mut all = Vec::new();
    for (part, or) in parts {
        all.push(match (value(*part, ipv6_prefix, request)?, or) {
            (Some(value), _) => Found::There(value),
            (None, FallbackModel::Part(part)) => {
                value(*part, ipv6_prefix, request)?.map_or(Found::Missing, Found::Instead)
            }
            (None, FallbackModel::Literal(literal)) => Found::Literal(literal.clone()),
            (None, FallbackModel::Deny) => return Err(NoKey::Denied),
            (None, FallbackModel::Skip) => return Err(NoKey::Skipped),
        });
    }
    Ok(all)
}

fn value(part_model: PartModel, ipv6_prefix: u8, request: &SyntheticRequest) -> Result<Option<Value>, NoKey> {
    let texts: Vec<Vec<u8>> = match part_model {
        PartModel::Ip => return Ok(Some(network(request.client, ipv6_prefix))),
        PartModel::Path(number) => return Ok(captured(number, &request.path).map(Value::Segments)),
        PartModel::Header(name) => request.lines(name).map(trimmed).collect(),
        PartModel::Cookie(name) => {
            return Ok(cookie(name, request)?.filter(|text| !text.is_empty()).map(Value::Text));
        }
        PartModel::Query(name) => {
            return Ok(parameter(name, &request.query)?.filter(|text| !text.is_empty()).map(Value::Text));
        }
        PartModel::Segment(number) => {
            // Segment 0 is the empty text before the first slash.
            request
                .path
                .split('/')
                .nth(number)
                .map(|segment| segment.as_bytes().to_vec())
                .into_iter()
                .collect()
        }
        PartModel::Method => vec![request.method.to_uppercase().into_bytes()],
        PartModel::Host => vec![host(&request.host).into()],
        PartModel::Route => vec![request.route.clone().into_bytes()],
        PartModel::Claim => request.claims.iter().map(|(_, claim)| claim.clone().into_bytes()).collect(),
        PartModel::Custom => request.customs.iter().map(|(_, custom)| custom.clone().into_bytes()).collect(),
    };
    match (part_model, texts.as_slice()) {
        (PartModel::Header(name), [_, _, ..]) => Err(NoKey::Twice(format!("header {name}"))),
        (_, [text, ..]) if !text.is_empty() => Ok(Some(Value::Text(text.clone()))),
        _ => Ok(None),
    }
}

fn network(client: IpAddr, ipv6_prefix: u8) -> Value {
    let bits = match client {
        IpAddr::V4(address) => return Value::Network(false, u32::from(address).into(), 32),
        IpAddr::V6(address) => u128::from(address),
    };
    let (mapped, translated) = (0xffff_u128 << 32, 0x0064_ff9b_u128 << 96);
    if bits >> 32 == mapped >> 32 || bits >> 32 == translated >> 32 {
        return Value::Network(false, bits & 0xffff_ffff, 32);
    }
    let outside = u128::MAX.checked_shr(ipv6_prefix.into()).unwrap_or(0);
    Value::Network(true, bits & !outside, ipv6_prefix)
}

/// Whether some servers separate cookies at this byte.
fn is_separator(byte: u8) -> bool {
    b" ,\t\n\r\x0c".contains(&byte)
}

fn cookie(name: &str, request: &SyntheticRequest) -> Result<Option<Vec<u8>>, NoKey> {
    let what = format!("cookie {name}");
    let mut found = Vec::new();
    let mut is_hidden = false;
    for line in request.lines("cookie") {
        for pair in line.split(|byte| *byte == b';') {
            let pair = pair.trim_ascii();
            let mut sides = pair.splitn(2, |byte| *byte == b'=');
            let mut searched = pair;
            if let (Some(its), Some(value)) = (sides.next(), sides.next())
                && is_name(&without_escapes(its.trim_ascii()), name)
            {
                found.push(trimmed(value));
                searched = value;
            }
            is_hidden |= pair.iter().any(|byte| is_separator(*byte)) && hides(searched, name);
        }
    }
    match found.as_slice() {
        [_, _, ..] => Err(NoKey::Twice(what)),
        _ if is_hidden => Err(NoKey::Ambiguous(what, AmbiguousValue::Hidden)),
        [] => Ok(None),
        [value] => match plain_cookie(value) {
            Ok(plain) if plain.contains(&0) => Err(NoKey::Ambiguous(what, AmbiguousValue::Nul)),
            Ok(plain) => Ok(Some(trimmed(&plain))),
            Err(why) => Err(NoKey::Ambiguous(what, why)),
        },
    }
}

/// Whether an equals sign follows the name, as the whole text between separators or as its end.
fn hides(text: &[u8], name: &str) -> bool {
    let equals = text.iter().enumerate().filter(|(_, byte)| **byte == b'=').map(|(at, _)| at);
    equals.into_iter().any(|at| {
        let end = text[..at].iter().rposition(|byte| !is_separator(*byte)).map_or(0, |last| last + 1);
        let start = text[..end].iter().rposition(|byte| is_separator(*byte)).map_or(0, |last| last + 1);
        end > start && is_name(&without_escapes(&text[start..end]), name)
    })
}

/// Removes quotes, resolving backslashes within them as Python does, then percent-decodes.
fn plain_cookie(value: &[u8]) -> Result<Vec<u8>, AmbiguousValue> {
    let is_quoted = value.starts_with(b"\"");
    if !is_quoted && value.iter().any(|byte| is_separator(*byte)) {
        return Err(AmbiguousValue::Separator);
    }
    let mut end = 1;
    while end < value.len() && value[end] != b'"' {
        end += if value[end] == b'\\' { 2 } else { 1 };
    }
    if is_quoted && end + 1 != value.len() {
        return Err(AmbiguousValue::Quote);
    }
    let inner = if is_quoted { &value[1..value.len() - 1] } else { value };
    let mut plain: Vec<u8> = Vec::new();
    let mut at = 0;
    while at < inner.len() {
        let octal = inner.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        let octal = octal.filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if is_quoted && inner[at] == b'\\' => {
                plain.push(byte);
                at += 4;
            }
            _ if is_quoted && inner[at] == b'\\' && at + 1 < inner.len() => {
                plain.push(inner[at + 1]);
                at += 2;
            }
            _ => {
                plain.push(inner[at]);
                at += 1;
            }
        }
    }
    Ok(without_escapes(&plain))
}

fn without_escapes(bytes: &[u8]) -> Vec<u8> {
    match bytes {
        [] => Vec::new(),
        [b'%', high, low, rest @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
            let digits = [*high, *low];
            let byte = u8::from_str_radix(std::str::from_utf8(&digits).expect("two digits"), 16);
            [vec![byte.expect("two digits")], without_escapes(rest)].concat()
        }
        [byte, rest @ ..] => [vec![*byte], without_escapes(rest)].concat(),
    }
}

fn parameter(name: &str, query: &str) -> Result<Option<Vec<u8>>, NoKey> {
    let query = query.replace(';', "&");
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let found: Vec<_> = pairs.filter(|(its, _)| is_name(&decoded(its), name)).collect();
    let what = format!("parameter {name}");
    match found.as_slice() {
        [] => Ok(None),
        [(_, value)] if decoded(value).contains(&0) => Err(NoKey::Ambiguous(what, AmbiguousValue::Nul)),
        [(_, value)] => Ok(Some(trimmed(&decoded(value)))),
        _ => Err(NoKey::Twice(what)),
    }
}

/// Whether a decoded name is `name` to some server.
fn is_name(sent: &[u8], name: &str) -> bool {
    let plain = |text: &[u8]| -> Vec<u8> {
        let plain = |byte: &u8| if b" .-[_".contains(byte) { b'_' } else { byte.to_ascii_lowercase() };
        text.iter().map(plain).collect()
    };
    let end = sent.iter().position(|byte| *byte == 0).unwrap_or(sent.len());
    let sent = trimmed(&sent[..end]);
    let is_it = |sent: &[u8]| {
        let bracket = sent.len() > name.len() && b"[]".contains(&sent[name.len()]);
        let sent = if bracket { &sent[..name.len()] } else { sent };
        plain(sent) == plain(name.as_bytes())
    };
    // Brackets before a name do not count.
    let inner: Vec<u8> = sent.iter().copied().skip_while(|byte| b"[]".contains(byte)).collect();
    is_it(&sent) || is_it(&inner)
}

/// Removes the white space around a value: of text in UTF-8 by characters, of other bytes by those of Latin-1.
fn trimmed(value: &[u8]) -> Vec<u8> {
    let is_latin1 = std::str::from_utf8(value).is_err();
    let mut text: Vec<char> = match is_latin1 {
        true => value.iter().map(|byte| char::from(*byte)).collect(),
        false => String::from_utf8_lossy(value).chars().collect(),
    };
    let is_white = |it: &char| *it < '!' || it.is_whitespace() || "\u{180e}\u{200b}\u{feff}".contains(*it);
    while text.last().is_some_and(is_white) {
        text.pop();
    }
    while text.first().is_some_and(is_white) {
        text.remove(0);
    }
    match is_latin1 {
        true => text.into_iter().map(|it| it as u8).collect(),
        false => text.into_iter().collect::<String>().into_bytes(),
    }
}

fn decoded(text: &str) -> Vec<u8> {
    match text.as_bytes() {
        [] => Vec::new(),
        [b'%', high, low, ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
            let byte = u8::from_str_radix(&text[1..3], 16).expect("two digits");
            [vec![byte], decoded(&text[3..])].concat()
        }
        _ => {
            let first = text.chars().next().expect("not empty");
            let rest = decoded(&text[first.len_utf8()..]);
            let own = if first == '+' { " ".to_owned() } else { first.to_string() };
            [own.into_bytes(), rest].concat()
        }
    }
}

/// Normalizes one of [`HOSTS`].
fn host(typed: &str) -> &'static str {
    match typed {
        "" => "",
        "[::1]" | "[::1]:80" => "[::1]",
        _ => "a.test",
    }
}

/// Returns the captures of one of [`PATTERNS`].
fn captured(pattern: usize, path: &str) -> Option<Vec<String>> {
    let segments: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
    let found: Vec<&str> = match (pattern, segments.as_slice()) {
        (0, ["users", id, ..]) => vec![id],
        (1, [a, b]) => vec![a, b],
        (2, ["api", ..]) => vec![],
        (3, [a, "x", b]) => vec![a, b],
        _ => return None,
    };
    found.iter().all(|it| !it.is_empty()).then(|| found.into_iter().map(str::to_owned).collect())
}

/// Checks two keys of two requests chosen by the bytes.
pub(crate) fn check(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let first_parts = parts(&mut input);
    // Usually both requests have the same parts, because keys are compared within one limit.
    let second_parts = if input.below(4) == 0 { parts(&mut input) } else { first_parts.clone() };
    let prefixes = [input.one_of(&[64, 48, 128, 32]), input.one_of(&[64, 64, 64, 56])];
    let requests = [request(&mut input), request(&mut input)];
    let mut written = Vec::new();
    for ((parts, prefix), request) in [&first_parts, &second_parts].into_iter().zip(prefixes).zip(&requests) {
        let key = key(parts, prefix);
        let mut text = b"before".to_vec();
        let result = key.write(request, &mut text);
        let expected = values(parts, prefix, request);
        assert_eq!(result.as_ref().err(), expected.as_ref().err(), "{parts:?} of {request:?}");
        let behind = text.strip_prefix(b"before").expect("what was there stays");
        match expected {
            Ok(values) => {
                check_names(&key, parts, &values, behind);
                written.push((values, behind.to_vec()));
            }
            Err(_) => assert!(behind.is_empty(), "what has no key leaves nothing behind"),
        }
    }
    if let [(one, one_key), (other, other_key)] = written.as_slice() {
        assert_eq!(one == other, one_key == other_key, "{one:?} and {other:?}");
    }
}

/// Checks that the text of a key with one part names it, and that no text names any other key.
fn check_names(key: &Key, parts: &Parts, values: &[Found], written: &[u8]) {
    let ([(part, _)], [found]) = (parts.as_slice(), values) else {
        for text in ["", "a", "1.2.3.4", "::/0"] {
            assert!(!key.is(written, text), "{text:?} names a key of several parts or none");
        }
        return;
    };
    let name = match found {
        Found::There(Value::Text(text)) => String::from_utf8(text.clone()).ok(),
        Found::There(Value::Segments(segments)) => Some(segments.join("/")),
        Found::There(Value::Network(is_ipv6, bits, prefix)) => {
            let address = match is_ipv6 {
                true => Ipv6Addr::from(*bits).into(),
                false => IpAddr::from((*bits as u32).to_be_bytes()),
            };
            let network = IpNet::new(address, *prefix).expect("a network");
            assert!(key.is(written, &network.to_string()), "{network}");
            Some(address.to_string())
        }
        Found::Literal(literal) => Some(literal.clone()),
        Found::Instead(_) | Found::Missing => {
            assert!(!key.is(written, "") && !key.is(written, "::/0") && !key.is(written, "0.0.0.0/0"));
            return;
        }
    };
    if let Some(name) = name {
        assert!(key.is(written, &name), "{name:?} of {part:?}");
        assert!(!key.is(written, &format!("{name}x")), "{name:?}x of {part:?}");
    }
}
