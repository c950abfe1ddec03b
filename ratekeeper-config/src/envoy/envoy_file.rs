//! Configuration files of Envoy's reference rate limit service, with one domain each.
//!
//! Files that the reference rejects are rejected here, with a position and a remedy. The reference joins a key and a
//! value with `_`, so that different pairs may collide; here they do not.

use std::collections::HashMap;

use crate::error::{known_help, listed, quoted};
use crate::quantity::ValueError;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, NodeValue};

use super::metadata::{self, Data, Metadata};
use super::{DEPTH_MAX, DESCRIPTORS_MAX, Unit};

pub(super) const EXAMPLE: &str = "write a file as in `{ domain: edge, descriptors: [{ key: remote_address, rate_limit: \
                                  { unit: minute, requests_per_unit: 100 } }] }`";
const DESCRIPTOR_EXAMPLE: &str =
    "write as in `{ key: remote_address, rate_limit: { unit: minute, requests_per_unit: 100 } }`";
const LIMIT_EXAMPLE: &str = "write as in `rate_limit: { unit: minute, requests_per_unit: 100 }`, or `rate_limit: { unlimited: true }`";
const REPLACES_EXAMPLE: &str = "write the names of other limits, as in `replaces: [{ name: per-user }]`";

/// The known names of each mapping.
const FILE: &[&str] = &["domain", "descriptors"];
const DESCRIPTOR: &[&str] = &[
    "key",
    "value",
    "rate_limit",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
    "descriptors",
];
const LIMIT: &[&str] = &["unit", "requests_per_unit", "unlimited", "name", "replaces"];
const REPLACES: &[&str] = &["name"];

/// A file of the reference.
pub(super) struct EnvoyFile {
    pub(super) domain: String,
    pub(super) descriptors: Vec<EnvoyDescriptor>,
}

/// A descriptor.
#[derive(Debug)]
pub(super) struct EnvoyDescriptor {
    pub(super) key: String,
    /// Empty for any value.
    pub(super) value: String,
    pub(super) limit: Option<Limit>,
    pub(super) is_shadow: bool,
    pub(super) is_quota: bool,
    pub(super) shares: bool,
    /// Whether it requests metrics that Ratekeeper does not have.
    pub(super) wants_metrics: bool,
    pub(super) metadata: Option<Metadata>,
    pub(super) descriptors: Vec<EnvoyDescriptor>,
}

/// A limit.
#[derive(Debug)]
pub(super) struct Limit {
    /// Number and unit; `None` if unlimited.
    pub(super) amount: Option<(u32, Unit)>,
    pub(super) name: Option<String>,
    pub(super) replaces: Vec<String>,
}

/// Reads a file. `count` is the number of descriptors in the files before it.
pub(super) fn document(reader: &mut Reader, node: &Node, count: &mut usize) -> Option<EnvoyFile> {
    let fields = reader.known(node, "the file", FILE, EXAMPLE, None)?;
    let domain = text(reader, &fields, "domain");
    if domain.is_none_or(str::is_empty) && !reader.is_full() {
        let position = fields.entry("domain").map_or(node.position, |entry| entry.position);
        reader.error(position, "missing `domain`", EXAMPLE);
    }
    let descriptors = fields.get("descriptors").map(|node| level(reader, node, 0, count));
    Some(EnvoyFile { domain: domain?.to_owned(), descriptors: descriptors.unwrap_or_default() })
}

/// Reads the descriptors of one level at depth `deep`.
fn level(reader: &mut Reader, node: &Node, deep: usize, count: &mut usize) -> Vec<EnvoyDescriptor> {
    if deep == DEPTH_MAX {
        let message = format!("descriptors are nested more than {DEPTH_MAX} levels deep");
        reader.error(node.position, message, "use fewer entries in a descriptor of Envoy");
        return Vec::new();
    }
    let mut seen = HashMap::new();
    let mut all = Vec::new();
    for node in list(reader, node, "descriptors", DESCRIPTOR_EXAMPLE) {
        *count += 1;
        if *count > DESCRIPTORS_MAX {
            if *count == DESCRIPTORS_MAX + 1 {
                let message = format!("there are more than {DESCRIPTORS_MAX} descriptors in all files");
                let help = "join values with a pattern, as in `value: api/*`, or omit `value` for any value";
                reader.error(node.position, message, help);
            }
            break;
        }
        let fields = reader.known(node, "a descriptor", DESCRIPTOR, DESCRIPTOR_EXAMPLE, None);
        let Some(fields) = fields else { continue };
        let descriptor = descriptor(reader, &fields, deep, count);
        // The reference identifies descriptors by this text.
        let joined = match descriptor.value.as_str() {
            "" => descriptor.key.clone(),
            value => format!("{}_{value}", descriptor.key),
        };
        if !descriptor.key.is_empty() {
            let message =
                |joined: &String| format!("duplicate descriptor {}, key and value joined", quoted(joined));
            reader.is_new(&mut seen, joined, node.position, message);
        }
        all.push(descriptor);
    }
    all
}

fn descriptor(reader: &mut Reader, fields: &Fields<'_>, deep: usize, count: &mut usize) -> EnvoyDescriptor {
    let key = text(reader, fields, "key").unwrap_or_default();
    match fields.entry("key") {
        _ if reader.is_full() => {}
        Some(entry) if key.contains('*') => {
            let message = format!("the key {} contains `*`, but only values can be patterns", quoted(key));
            reader.error(entry.node.position, message, "write the exact key, and the pattern as its `value`");
        }
        // A key that is not a word has been reported.
        Some(entry)
            if key.is_empty() && matches!(entry.node.value, NodeValue::List(_) | NodeValue::Map(_)) => {}
        _ if key.is_empty() => {
            reader.error(fields.position, "missing `key` in the descriptor", DESCRIPTOR_EXAMPLE);
        }
        _ => {}
    }
    let value = text(reader, fields, "value").unwrap_or_default();
    let limit = fields.get("rate_limit").and_then(|node| limit(reader, node));
    let mut is = |name| reader.or(fields.get(name), false, |reader, node| yes_or_no(reader, node, name));
    let (is_shadow, is_quota, shares) = (is("shadow_mode"), is("quota_mode"), is("share_threshold"));
    let (detailed, valued) = (is("detailed_metric"), is("value_to_metric"));
    if let (true, Some(entry)) = (shares && !value.contains('*'), fields.entry("share_threshold")) {
        let message = "`share_threshold` needs a value with `*`";
        let help = "write a pattern, as in `value: api/*`, or remove `share_threshold`";
        reader.error(entry.position, message, help);
    }
    let metadata = fields.get("metadata").and_then(|node| metadata(reader, node));
    let inner = fields.get("descriptors").map(|node| level(reader, node, deep + 1, count));
    EnvoyDescriptor {
        key: key.to_owned(),
        value: value.to_owned(),
        limit,
        is_shadow,
        is_quota,
        shares,
        wants_metrics: detailed || valued,
        metadata,
        descriptors: inner.unwrap_or_default(),
    }
}

fn limit(reader: &mut Reader, node: &Node) -> Option<Limit> {
    let fields = reader.known(node, "`rate_limit`", LIMIT, LIMIT_EXAMPLE, None)?;
    let is_unlimited =
        reader.or(fields.get("unlimited"), false, |reader, node| yes_or_no(reader, node, "unlimited"));
    let name = text(reader, &fields, "name").filter(|name| !name.is_empty()).map(str::to_owned);
    let replaces = fields.get("replaces").map(|node| replaces(reader, node, name.as_deref()));
    let replaces = replaces.unwrap_or_default();
    // The reference takes a missing number as 0, which denies all requests.
    let count = reader.or(fields.get("requests_per_unit"), 0, |reader, node| reader.parsed(node, whole));
    let unit = fields.get("unit").and_then(|node| reader.parsed(node, unit));
    match (is_unlimited, fields.entry("unit")) {
        (true, Some(entry)) if !matches!(entry.node.value, NodeValue::Nothing) => {
            let message = "the limit has `unlimited` and a unit";
            reader.error(entry.position, message, "remove `unlimited` or `unit`");
        }
        (false, None) if fields.lacks("unit") && fields.lacks("unlimited") => {
            reader.error(node.position, "missing `unit` in the limit", LIMIT_EXAMPLE);
        }
        (false, Some(entry)) if matches!(entry.node.value, NodeValue::Nothing) => {
            reader.error(entry.position, "missing `unit` in the limit", LIMIT_EXAMPLE);
        }
        _ => {}
    }
    if is_unlimited {
        return Some(Limit { amount: None, name, replaces });
    }
    Some(Limit { amount: Some((count, unit?)), name, replaces })
}

fn replaces(reader: &mut Reader, node: &Node, own: Option<&str>) -> Vec<String> {
    let mut all = Vec::new();
    for node in list(reader, node, "replaces", REPLACES_EXAMPLE) {
        let fields = reader.known(node, "an entry of `replaces`", REPLACES, REPLACES_EXAMPLE, None);
        let Some(fields) = fields else { continue };
        match text(reader, &fields, "name") {
            _ if reader.is_full() => {}
            None | Some("") => {
                reader.error(node.position, "missing `name` of the replaced limit", REPLACES_EXAMPLE);
            }
            Some(name) if own == Some(name) => {
                let message = format!("the limit {} replaces itself", quoted(name));
                reader.error(node.position, message, REPLACES_EXAMPLE);
            }
            Some(name) => all.push(name.to_owned()),
        }
    }
    all
}

fn metadata(reader: &mut Reader, node: &Node) -> Option<Metadata> {
    match metadata::of(node) {
        Ok(Data::Map(metadata)) => Some(metadata),
        other => {
            let position = other.err().unwrap_or(node.position);
            let message = "`metadata` must be a mapping";
            reader.error(position, message, "write names and values, as in `metadata: { team: payments }`");
            None
        }
    }
}

/// A word, or nothing.
fn text<'n>(reader: &mut Reader, fields: &Fields<'n>, name: &str) -> Option<&'n str> {
    fields.get(name).and_then(|node| reader.word(node))
}

/// A list. A single value is not accepted as a list of one here.
fn list<'n>(reader: &mut Reader, node: &'n Node, name: &str, example: &str) -> Vec<&'n Node> {
    if matches!(node.value, NodeValue::Word(_) | NodeValue::Map(_)) {
        reader.error(node.position, format!("`{name}` must be a list of mappings"), example);
        return Vec::new();
    }
    reader.list(node)
}

/// A boolean, in all forms of YAML 1.1.
fn yes_or_no(reader: &mut Reader, node: &Node, name: &str) -> Option<bool> {
    match reader.word(node)?.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" => Some(true),
        "false" | "no" | "off" | "n" => Some(false),
        // Reports the accepted values.
        _ => reader.yes_or_no(node, name),
    }
}

/// A number of requests. Leading zeros are rejected because the reference would read an octal number.
fn whole(word: &str) -> Result<u32, ValueError> {
    let digits = word.replace('_', "");
    let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_plain
        && (digits == "0" || !digits.starts_with('0'))
        && let Ok(number) = digits.parse()
    {
        return Ok(number);
    }
    Err(ValueError {
        message: format!("invalid requests_per_unit {}", quoted(word)),
        help: format!("write a whole number from 0 to {}", u32::MAX),
    })
}

fn unit(word: &str) -> Result<Unit, ValueError> {
    Unit::named(word).ok_or_else(|| {
        let names = Unit::ALL.map(|unit| unit.name().to_ascii_lowercase());
        let known: Vec<&str> = names.iter().map(String::as_str).collect();
        let choice = format!("Units: {}", listed(&known));
        ValueError {
            message: format!("unknown unit {}", quoted(word)),
            help: known_help(&word.to_ascii_lowercase(), &known, &choice),
        }
    })
}
