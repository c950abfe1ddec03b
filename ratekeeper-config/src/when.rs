//! The conditions of limits, overrides and routes.

use ratekeeper_rules::client::{IpNet, parse_cidr};
use ratekeeper_rules::path::Pattern;
use ratekeeper_rules::when::{ValueCondition, When};

use crate::error::quoted;
use crate::quantity::ValueError;
use crate::reader::{Entry, Fields, Reader};
use crate::table::{Field, ListOf, Named, Row, SECTION, Section, TextValue, WORD, network, string};
use crate::tree::{Node, NodeValue};

pub(crate) static WHEN: Section = Section {
    name: "when",
    meaning: "Requests to which it applies. A request must match all conditions.",
    example: "write as in `when: { method: POST, path: /api/** }`",
    fields: &[&CONDITIONS],
    ..SECTION
};

/// The conditions of a limit, an override or a route.
pub(crate) static CONDITIONS: [Row; 6] = [
    &Field::new("method", "HTTP methods.", ListOf::some(string("method"))),
    &Field::new(
        "path",
        "Path patterns: `/api/**` for a prefix, `*` within a segment, `{name}` for a named segment.",
        ListOf::some(string("path pattern")),
    ),
    &Field::new("host", "Host names. `*.example.com` matches every subdomain.", ListOf::some(string("host"))),
    &Field::new(
        "header",
        "Header names and values. `present` matches any value, `absent` matches a missing header.",
        wanted_values(string("header name")),
    ),
    &Field::new(
        "claim",
        "Claims of a verified token, with their values.",
        wanted_values(WORD.named("claim")),
    ),
    &Field::new("client", "IP addresses and networks of clients.", ListOf::some(network())),
];

const fn wanted_values(names: TextValue) -> Named<TextValue, ListOf<TextValue>> {
    Named { names, value: ListOf::some(WORD.named("value")), from: 1, to: usize::MAX, may_be_empty: false }
}

const METHOD_EXAMPLE: &str = "write as in `GET` or `[POST, PUT]`";
const PATH_EXAMPLE: &str = "write as in `/api/**` or `[/login, /users/{id}]`";
const HOST_EXAMPLE: &str = "write a host without a port, as in `api.example.com` or `*.example.com`";
const CLIENT_EXAMPLE: &str = "write as in `10.0.0.0/8` or `[10.0.0.0/8, 2001:db8::/32]`";

/// Reads conditions from a mapping that contains nothing else.
pub(crate) fn when(reader: &mut Reader, node: &Node) -> Option<When> {
    let fields = reader.fields(node, "`when`", &WHEN)?;
    Some(when_of(reader, &fields))
}

/// Reads conditions from the fields of a mapping that has other fields as well.
pub(crate) fn when_of(reader: &mut Reader, fields: &Fields<'_>) -> When {
    let mut when = When::default();
    if let Some(node) = fields.get("method") {
        for node in reader.some(node, METHOD_EXAMPLE) {
            when.methods.extend(reader.parsed(node, method));
        }
    }
    if let Some(node) = fields.get("path") {
        for node in reader.some(node, PATH_EXAMPLE) {
            when.paths.extend(pattern(reader, node));
        }
    }
    if let Some(node) = fields.get("host") {
        for node in reader.some(node, HOST_EXAMPLE) {
            when.hosts.extend(reader.parsed(node, host));
        }
    }
    if let Some(node) = fields.get("header") {
        when.headers = wanted(reader, node, "header", header_name);
    }
    if let Some(node) = fields.get("claim") {
        verified(reader, node);
        when.claims = wanted(reader, node, "claim", |name| Ok(name.to_owned()));
    }
    if let Some(node) = fields.get("client") {
        for node in reader.some(node, CLIENT_EXAMPLE) {
            when.clients.extend(reader.parsed(node, cidr));
        }
    }
    when
}

/// Claims are valid only in verified tokens, so `jwt` is required.
pub(crate) fn verified(reader: &mut Reader, node: &Node) {
    if !reader.has_tokens {
        let help = "configure verification at the top level, as in `jwt: { keys: { file: jwks.json } }`";
        reader.error(node.position, "a claim needs a verified token, and `jwt` is not configured", help);
    }
}

/// A valid header name, in lower case.
pub(crate) fn header_name(word: &str) -> Result<String, ValueError> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_token) {
        true => Ok(word.to_ascii_lowercase()),
        false => Err(ValueError {
            message: format!("invalid header name {}", quoted(word)),
            help: "write letters, digits and dashes, as in `X-User-Id`".to_owned(),
        }),
    }
}

pub(crate) fn pattern(reader: &mut Reader, node: &Node) -> Option<Pattern> {
    let paths = reader.paths;
    reader.parsed(node, |word| {
        Pattern::parse_with(word, paths).map_err(|error| ValueError {
            message: error.what().to_owned(),
            help: error.instead().to_owned(),
        })
    })
}

pub(crate) fn cidr(word: &str) -> Result<IpNet, ValueError> {
    parse_cidr(word)
        .map_err(|error| ValueError { message: error.what().to_owned(), help: error.instead().to_owned() })
}

fn method(word: &str) -> Result<String, ValueError> {
    match !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-') {
        true => Ok(word.to_ascii_uppercase()),
        false => Err(ValueError {
            message: format!("invalid method {}", quoted(word)),
            help: METHOD_EXAMPLE.to_owned(),
        }),
    }
}

/// Whether the text can be a host: a name or an IP address, IPv6 in brackets.
pub(crate) fn is_host(name: &str) -> bool {
    let in_a_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    match name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !name.is_empty() && name.bytes().all(in_a_name),
    }
}

fn host(word: &str) -> Result<String, ValueError> {
    match is_host(word.strip_prefix("*.").unwrap_or(word)) {
        true => Ok(word.to_ascii_lowercase()),
        false => Err(ValueError {
            message: format!("invalid host {}", quoted(word)),
            help: HOST_EXAMPLE.to_owned(),
        }),
    }
}

fn wanted(
    reader: &mut Reader,
    node: &Node,
    message: &str,
    name_of: impl Fn(&str) -> Result<String, ValueError>,
) -> Vec<(String, ValueCondition)> {
    let example =
        format!("write as in `{message}: {{ name: value }}`, or `present` or `absent` as the value");
    let Some(fields) = reader.named(node, &quoted(message), &example) else { return Vec::new() };
    if fields.iter().len() == 0 {
        // An empty mapping would match everything.
        reader.error(node.position, format!("`{message}` is empty"), &*example);
    }
    let mut all = Vec::new();
    for Entry { name, position, node } in fields.iter() {
        let name = match name_of(name) {
            Ok(name) => name,
            Err(value_error) => {
                reader.error(position, value_error.message, value_error.help);
                continue;
            }
        };
        let wanted = match &node.value {
            NodeValue::Word(word) if word == "present" => ValueCondition::Present,
            NodeValue::Word(word) if word == "absent" => ValueCondition::Absent,
            _ => {
                let values = reader.some(node, &example);
                let words = values.into_iter().filter_map(|node| reader.word(node));
                ValueCondition::OneOf(words.map(str::to_owned).collect())
            }
        };
        all.push((name, wanted));
    }
    all
}
