//! The key of a limit: whose budget a request uses.

use ratekeeper_rules::key::{Key, KeyFallback, KeyPart};
use ratekeeper_rules::path::{PathNormalization, normalize};

use crate::error::{known_help, quoted};
use crate::nearest;
use crate::quantity::ValueError;
use crate::reader::{Entry, Fields, Reader};
use crate::table::{
    Constraint, Field, HeaderName, ListOf, OneOf, Parsed, Row, SECTION, Section, Short, TextValue, WORD,
    Whole, Words, string,
};
use crate::tree::{Node, NodeValue};
use crate::when::{header_name, pattern, verified};
use crate::words::PLAIN_PARTS;

/// A key: one attribute of a request, several, or `global`.
pub(crate) const KEY_VALUE: OneOf = OneOf(&[&Words(&[("global", ())]), &ListOf::some(PART)]);
const PART: Short<Words<KeyPart>> = Short(Words(&PLAIN_PARTS), &KEY);

static KEY: Section = Section {
    name: "key",
    meaning: "Attribute of the request, with a fallback if it is missing.",
    example: EXAMPLE,
    fields: &[&ATTRIBUTES, &[&Field::new(FALLBACK.name, FALLBACK.meaning, Short(LITERAL, &FALLBACK))]],
    constraints: &[Constraint::ExactlyOne(&[&NAMED_PARTS])],
    ..SECTION
};
static FALLBACK: Section = Section {
    name: "fallback",
    meaning: "Replaces a missing attribute: another attribute, a literal that forms one shared budget, `deny` to deny the request, or `skip` to skip the limit.",
    example: "write `deny`, `skip`, `ip`, a literal that these requests share, or another attribute",
    fields: &[
        &ATTRIBUTES,
        &[&Field::new("literal", "Literal that forms one shared budget, even if it equals a keyword.", WORD)],
    ],
    constraints: &[Constraint::ExactlyOne(&[&NAMED_PARTS, &["literal"]])],
    ..SECTION
};
const LITERAL: TextValue =
    WORD.named("`ip`, `method`, `host`, `route`, `deny`, `skip` or a literal").filled().except(&NAMED_PARTS);

/// Attributes that need a name, such as the header of `header`.
const ATTRIBUTES: [Row; 5] = [
    &Field::new("header", "Name of a header.", HeaderName),
    &Field::new("cookie", "Name of a cookie.", string("name").filled()),
    &Field::new("query", "Name of a query parameter.", string("name").filled()),
    &Field::new(
        "path",
        "Number of a path segment, from 1, or a pattern whose `{names}` form the key.",
        OneOf(&[&SEGMENT, &string("path pattern").pattern("^/")]),
    ),
    &Field::new("claim", "Name of a claim of a verified token.", string("name").filled()),
];
const NAMED_PARTS: [&str; ATTRIBUTES.len()] = {
    let mut names = [""; ATTRIBUTES.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = ATTRIBUTES[at].name;
        at += 1;
    }
    names
};
const SEGMENT: Whole = Whole { from: 1, to: 64 };
const EXAMPLE: &str = "write `ip`, `global`, or as in `{ header: X-User-Id, fallback: anonymous }`";

/// The values of a key, for fields that list some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    /// One budget for all requests, without values.
    None,
    /// IP addresses, which are listed as clients.
    Addresses,
    /// A text.
    Texts,
    /// Path segments, which are normalized before they are compared.
    Segments,
    /// Several attributes, whose values cannot be listed.
    Several,
}

impl Values {
    fn of(part: &KeyPart) -> Values {
        match part {
            KeyPart::Ip => Values::Addresses,
            KeyPart::Segment(_) | KeyPart::Path(_) => Values::Segments,
            _ => Values::Texts,
        }
    }

    /// Reads values of the key. Returns none, and records an error, if the key has no text values.
    pub(crate) fn read(self, reader: &mut Reader, node: &Node) -> Vec<String> {
        let (message, help) = match self {
            Values::Texts | Values::Segments => {
                let mut texts = Vec::new();
                for node in reader.some(node, "write a key, or several as in `[acme, umbrella]`") {
                    let Some(word) = reader.word(node) else { continue };
                    if self == Values::Segments {
                        texts.extend(normal_segments(reader, node).filter(|normal| normal != word));
                    }
                    // The text as written may equal a literal of `fallback`.
                    texts.push(word.to_owned());
                }
                return texts;
            }
            Values::None => (
                "`key: global` is one budget, so there are no keys to select",
                "remove this, or set a `key` for the limit",
            ),
            Values::Addresses => (
                "the keys of the limit are addresses",
                "write `client: 203.0.113.7`, in an override `when: { client: 203.0.113.7 }`",
            ),
            Values::Several => (
                "the keys of the limit have several attributes, so a single text cannot match",
                "select requests with `when`, as in `when: { header: { X-User-Id: acme } }`",
            ),
        };
        reader.error(node.position, message, help);
        Vec::new()
    }
}

/// Normalizes segments, because keys are formed from the normalized path.
fn normal_segments(reader: &mut Reader, node: &Node) -> Option<String> {
    let paths = PathNormalization { ignore_trailing_slash: true, ..reader.paths };
    reader.parsed(node, |word| {
        let path = format!("/{word}");
        let normal =
            normalize(&path, paths).ok().and_then(|normal| Some(normal.strip_prefix('/')?.to_owned()));
        normal.filter(|normal| !normal.is_empty()).ok_or_else(|| ValueError {
            message: format!("{} cannot occur in a path, so no key matches it", quoted(word)),
            help: "write a segment such as `acme`, or several separated by slashes".to_owned(),
        })
    })
}

/// Reads a key, and returns the kind of its values.
pub(crate) fn key(reader: &mut Reader, node: &Node) -> (Key, Values) {
    if matches!(&node.value, NodeValue::Word(word) if word == "global") {
        return (Key::global(), Values::None);
    }
    let mut key = Key::global();
    let mut values = Values::None;
    for node in reader.some(node, EXAMPLE) {
        let (part, missing) = match &node.value {
            NodeValue::Map(_) => {
                let Some(fields) = reader.fields(node, "a key", &KEY) else { continue };
                let missing = fields.get("fallback").and_then(|node| fallback(reader, node));
                (named_part(reader, node, &fields), missing)
            }
            _ => (plain_part(reader, node), None),
        };
        values = match (values, &part) {
            (Values::None, Some(part)) => Values::of(part),
            // An invalid attribute could have any kind of values.
            _ => Values::Several,
        };
        if let Some(part) = part {
            key = key.and(part);
        }
        if let Some(missing) = missing {
            key = key.fallback(missing);
        }
    }
    (key, values)
}

/// The attribute of a key that any client can choose, as it is written: ``the header `X-Plan` ``.
pub(crate) fn forgeable(node: &Node) -> Option<String> {
    node.entries().find_map(|(name, node)| {
        let kind = match name {
            "header" | "cookie" => name,
            "query" => "query parameter",
            "fallback" => return forgeable(node),
            _ => return None,
        };
        let NodeValue::Word(word) = &node.value else { return None };
        Some(format!("the {kind} {}", quoted(word)))
    })
}

fn plain_part(reader: &mut Reader, node: &Node) -> Option<KeyPart> {
    reader.parsed(node, |word| {
        let part = PLAIN_PARTS.into_iter().find(|(name, _)| *name == word);
        part.map(|(_, part)| part).ok_or_else(|| ValueError {
            message: format!("unknown key {}", quoted(word)),
            help: match word {
                "global" => {
                    "`global` is one budget for all requests and cannot be combined: write `key: global`"
                        .to_owned()
                }
                word if NAMED_PARTS.contains(&word) => name_help(word),
                word => {
                    let known: Vec<&str> =
                        PLAIN_PARTS.iter().map(|(name, _)| *name).chain(["global"]).collect();
                    let is_header = word.contains('-') && header_name(word).is_ok();
                    match (nearest(word, &known), is_header) {
                        (None, true) => format!("write `{{ header: {word} }}` for a header"),
                        _ => known_help(word, &known, EXAMPLE),
                    }
                }
            },
        })
    })
}

fn name_help(part: &str) -> String {
    let example = match part {
        "header" => "X-User-Id",
        "cookie" => "session",
        "query" => "api_key",
        "path" => "/users/{id}/**",
        _ => "sub",
    };
    format!("write its name, as in `{{ {part}: {example} }}`")
}

fn named_part(reader: &mut Reader, node: &Node, fields: &Fields<'_>) -> Option<KeyPart> {
    let attributes: Vec<Entry<'_>> =
        fields.iter().filter(|entry| NAMED_PARTS.contains(&entry.name)).collect();
    let [Entry { name, node: value, .. }] = attributes.as_slice() else {
        match attributes.as_slice() {
            // An unknown attribute has been reported.
            [] if fields.iter().any(|entry| entry.name != "fallback") => {}
            [] => reader.error(node.position, "the key names no attribute of a request", EXAMPLE),
            [_, second, ..] => {
                let help = "write several attributes as a list, as in `[ip, { header: X-User-Id }]`";
                reader.error(second.position, "a key item has one attribute", help);
            }
            [_] => {}
        }
        return None;
    };
    // A missing value has been reported.
    if matches!(value.value, NodeValue::Nothing) {
        return None;
    }
    match *name {
        "header" => reader.parsed(value, header_name).map(KeyPart::Header),
        "cookie" => reader.name(value, &name_help("cookie")).map(|name| KeyPart::Cookie(name.to_owned())),
        "query" => reader.name(value, &name_help("query")).map(|name| KeyPart::Query(name.to_owned())),
        "claim" => {
            verified(reader, value);
            reader.name(value, &name_help("claim")).map(|name| KeyPart::Claim(name.to_owned()))
        }
        _ => path_part(reader, value),
    }
}

fn path_part(reader: &mut Reader, node: &Node) -> Option<KeyPart> {
    let word = reader.word(node)?;
    if word.starts_with('/') {
        let pattern = pattern(reader, node)?;
        if pattern.names().next().is_none() {
            let help = "write `{name}` for the segment that is the key, as in `/users/{id}/**`";
            reader.error(
                node.position,
                "the pattern has no `{name}`, so all requests would have the same key",
                help,
            );
        }
        return Some(KeyPart::Path(pattern));
    }
    if word.bytes().any(|byte| !byte.is_ascii_digit()) {
        let message = format!("{} is neither a path pattern nor a segment number", quoted(word));
        reader.error(node.position, message, "write `1` for the first segment, or as in `/users/{id}/**`");
        return None;
    }
    let number = SEGMENT.parse(reader, node, "the segment number")?;
    Some(KeyPart::Segment(number as usize))
}

fn fallback(reader: &mut Reader, node: &Node) -> Option<KeyFallback> {
    if let NodeValue::Map(_) = &node.value {
        let fields = reader.fields(node, "`fallback`", &FALLBACK)?;
        let known = fields.iter().filter(|entry| FALLBACK.row(entry.name).is_some());
        return match (fields.get("literal"), known.count()) {
            (Some(literal), 1) => reader.word(literal).map(|word| KeyFallback::Literal(word.to_owned())),
            (Some(_), _) => {
                reader.error(node.position, "`fallback` has more than one attribute", FALLBACK.example);
                None
            }
            (None, _) => named_part(reader, node, &fields).map(KeyFallback::Part),
        };
    }
    reader.parsed(node, |word| match word {
        "deny" => Ok(KeyFallback::Deny),
        "skip" => Ok(KeyFallback::Skip),
        word if NAMED_PARTS.contains(&word) => {
            Err(ValueError { message: format!("`{word}` needs a name"), help: name_help(word) })
        }
        word => match PLAIN_PARTS.into_iter().find(|(name, _)| *name == word) {
            Some((_, part)) => Ok(KeyFallback::Part(part)),
            None => literal(word),
        },
    })
}

/// A literal that forms one shared budget. A likely misspelling of `deny` or `skip` is rejected.
fn literal(word: &str) -> Result<KeyFallback, ValueError> {
    let meant = nearest(word, &["deny", "skip"]);
    match meant {
        Some(meant) => Err(ValueError {
            message: format!("{} looks like `{meant}`", quoted(word)),
            help: format!(
                "write `{meant}`, or `{{ literal: {} }}` for a literal that requests share",
                quoted(word).trim_matches('`')
            ),
        }),
        None if word.is_empty() => {
            Err(ValueError { message: "the name is empty".to_owned(), help: FALLBACK.example.to_owned() })
        }
        None => Ok(KeyFallback::Literal(word.to_owned())),
    }
}
