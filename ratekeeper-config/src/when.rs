//! The conditions of limits, overrides and routes.

use ratekeeper_rules::client::{IpNet, parse_cidr};
use ratekeeper_rules::path::Pattern;
use ratekeeper_rules::when::{ValueCondition, When};

use crate::error::quoted;
use crate::names;
use crate::quantity::Fault;
use crate::reader::{Entry, Fields, Reader};
use crate::tree::{Node, Typed};

const EXAMPLE: &str = "write as in `when: { method: POST, path: /api/** }`";
const METHOD_EXAMPLE: &str = "write as in `GET` or `[POST, PUT]`";
const PATH_EXAMPLE: &str = "write as in `/api/**` or `[/login, /users/{id}]`";
const HOST_EXAMPLE: &str = "write a name without port, as in `api.example.com` or `*.example.com`";
const CLIENT_EXAMPLE: &str = "write as in `10.0.0.0/8` or `[10.0.0.0/8, 2001:db8::/32]`";

/// Reads conditions from a mapping that contains nothing else.
pub(crate) fn when(reader: &mut Reader, node: &Node) -> Option<When> {
    let fields = reader.fields(node, "when", names::WHEN, EXAMPLE)?;
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
        let instead =
            "say how tokens are verified, as in `jwt: { keys: { file: jwks.json } }` at the top of the file";
        reader.wrong(node.place, "anybody can write a token that claims this", instead);
    }
}

/// A valid header name, in lower case.
pub(crate) fn header_name(word: &str) -> Result<String, Fault> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_token) {
        true => Ok(word.to_ascii_lowercase()),
        false => Err(Fault {
            what: format!("{} is not the name of a header", quoted(word)),
            instead: "write letters, digits and dashes, as in `X-User-Id`".to_owned(),
        }),
    }
}

pub(crate) fn pattern(reader: &mut Reader, node: &Node) -> Option<Pattern> {
    let spelling = reader.spelling;
    reader.parsed(node, |word| {
        Pattern::parse_with(word, spelling)
            .map_err(|error| Fault { what: error.what().to_owned(), instead: error.instead().to_owned() })
    })
}

pub(crate) fn cidr(word: &str) -> Result<IpNet, Fault> {
    parse_cidr(word)
        .map_err(|error| Fault { what: error.what().to_owned(), instead: error.instead().to_owned() })
}

fn method(word: &str) -> Result<String, Fault> {
    match !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-') {
        true => Ok(word.to_ascii_uppercase()),
        false => Err(Fault {
            what: format!("{} is not a method", quoted(word)),
            instead: METHOD_EXAMPLE.to_owned(),
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

fn host(word: &str) -> Result<String, Fault> {
    match is_host(word.strip_prefix("*.").unwrap_or(word)) {
        true => Ok(word.to_ascii_lowercase()),
        false => {
            Err(Fault { what: format!("{} is not a host", quoted(word)), instead: HOST_EXAMPLE.to_owned() })
        }
    }
}

fn wanted(
    reader: &mut Reader,
    node: &Node,
    what: &str,
    name_of: impl Fn(&str) -> Result<String, Fault>,
) -> Vec<(String, ValueCondition)> {
    let example =
        format!("write as in `{what}: {{ name: value }}`; `present` and `absent` are any value and none");
    let Some(fields) = reader.named(node, what, &example) else { return Vec::new() };
    if fields.iter().len() == 0 {
        // An empty mapping would match everything.
        reader.wrong(node.place, format!("this names no {what}"), &*example);
    }
    let mut all = Vec::new();
    for Entry { name, place, node } in fields.iter() {
        let name = match name_of(name) {
            Ok(name) => name,
            Err(fault) => {
                reader.wrong(place, fault.what, fault.instead);
                continue;
            }
        };
        let wanted = match &node.typed {
            Typed::Word(word) if word == "present" => ValueCondition::Present,
            Typed::Word(word) if word == "absent" => ValueCondition::Absent,
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
