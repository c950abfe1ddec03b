//! Configuration files of Envoy's reference rate limit service, with one domain each.
//!
//! Files that the reference rejects are rejected here, with a position and a remedy. The reference joins a key and a
//! value with `_`, so that different pairs may collide; here they do not.

use std::collections::HashSet;

use crate::error::{known_instead, listed, quoted};
use crate::quantity::Fault;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};

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
pub(super) struct Classic {
    pub(super) domain: String,
    pub(super) descriptors: Vec<Descriptor>,
}

/// A descriptor.
#[derive(Debug)]
pub(super) struct Descriptor {
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
    pub(super) descriptors: Vec<Descriptor>,
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
pub(super) fn document(reader: &mut Reader, node: &Node, count: &mut usize) -> Option<Classic> {
    let fields = reader.parameters(node, "the file", FILE, EXAMPLE)?;
    let domain = text(reader, &fields, "domain");
    if domain.is_none_or(str::is_empty) && !reader.is_full() {
        let place = fields.entry("domain").map_or(node.place, |entry| entry.place);
        reader.wrong(place, "this file does not say which domain it is for", EXAMPLE);
    }
    let descriptors = fields.get("descriptors").map(|node| level(reader, node, 0, count));
    Some(Classic { domain: domain?.to_owned(), descriptors: descriptors.unwrap_or_default() })
}

/// Reads the descriptors of one level at depth `deep`.
fn level(reader: &mut Reader, node: &Node, deep: usize, count: &mut usize) -> Vec<Descriptor> {
    if deep == DEPTH_MAX {
        let what = format!("these descriptors are inside of {DEPTH_MAX} others, and that is the most");
        reader.wrong(node.place, what, "have fewer entries in a descriptor of Envoy");
        return Vec::new();
    }
    let mut seen = HashSet::new();
    let mut all = Vec::new();
    for node in list(reader, node, "descriptors", DESCRIPTOR_EXAMPLE) {
        *count += 1;
        if *count > DESCRIPTORS_MAX {
            if *count == DESCRIPTORS_MAX + 1 {
                let what =
                    format!("all files have at most {DESCRIPTORS_MAX} descriptors, and here is one more");
                let instead = "join values by a pattern, as in `value: api/*`, or leave `value` out for any";
                reader.wrong(node.place, what, instead);
            }
            break;
        }
        let fields = reader.parameters(node, "a descriptor", DESCRIPTOR, DESCRIPTOR_EXAMPLE);
        let Some(fields) = fields else { continue };
        let descriptor = descriptor(reader, &fields, deep, count);
        // The reference identifies descriptors by this text.
        let joined = match descriptor.value.as_str() {
            "" => descriptor.key.clone(),
            value => format!("{}_{value}", descriptor.key),
        };
        if !descriptor.key.is_empty() && !seen.insert(joined.clone()) {
            let what = format!("a second descriptor is {}, key and value together", quoted(&joined));
            reader.wrong(node.place, what, "remove one of the two, or join what is in them");
        }
        all.push(descriptor);
    }
    all
}

fn descriptor(reader: &mut Reader, fields: &Fields<'_>, deep: usize, count: &mut usize) -> Descriptor {
    let key = text(reader, fields, "key").unwrap_or_default();
    match fields.entry("key") {
        _ if reader.is_full() => {}
        Some(entry) if key.contains('*') => {
            let what = format!("there is a `*` in the key {}, and only values have patterns", quoted(key));
            reader.wrong(entry.node.place, what, "write the whole key, and the pattern as its `value`");
        }
        // A key that is not a word has been reported.
        Some(entry) if key.is_empty() && matches!(entry.node.typed, Typed::List(_) | Typed::Map(_)) => {}
        _ if key.is_empty() => reader.wrong(fields.place, "this descriptor has no key", DESCRIPTOR_EXAMPLE),
        _ => {}
    }
    let value = text(reader, fields, "value").unwrap_or_default();
    let limit = fields.get("rate_limit").and_then(|node| limit(reader, node));
    let mut is = |name| reader.or(fields.get(name), false, |reader, node| yes_or_no(reader, node, name));
    let (is_shadow, is_quota, shares) = (is("shadow_mode"), is("quota_mode"), is("share_threshold"));
    let (detailed, valued) = (is("detailed_metric"), is("value_to_metric"));
    if let (true, Some(entry)) = (shares && !value.contains('*'), fields.entry("share_threshold")) {
        let what = "there is no `*` in the value, so there is no threshold to share";
        let instead = "write a pattern, as in `value: api/*`, or remove `share_threshold`";
        reader.wrong(entry.place, what, instead);
    }
    let metadata = fields.get("metadata").and_then(|node| metadata(reader, node));
    let inner = fields.get("descriptors").map(|node| level(reader, node, deep + 1, count));
    Descriptor {
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
    let fields = reader.parameters(node, "rate_limit", LIMIT, LIMIT_EXAMPLE)?;
    let is_unlimited =
        reader.or(fields.get("unlimited"), false, |reader, node| yes_or_no(reader, node, "unlimited"));
    let name = text(reader, &fields, "name").filter(|name| !name.is_empty()).map(str::to_owned);
    let replaces = fields.get("replaces").map(|node| replaces(reader, node, name.as_deref()));
    let replaces = replaces.unwrap_or_default();
    // The reference takes a missing number as 0, which denies all requests.
    let count = reader.or(fields.get("requests_per_unit"), 0, |reader, node| reader.parsed(node, whole));
    let unit = fields.get("unit").and_then(|node| reader.parsed(node, unit));
    match (is_unlimited, fields.entry("unit")) {
        (true, Some(entry)) if !matches!(entry.node.typed, Typed::Nothing) => {
            let what = "this limit is unlimited, and then it has a unit";
            reader.wrong(entry.place, what, "remove `unlimited` or `unit`");
        }
        (false, None) if fields.lacks("unit") && fields.lacks("unlimited") => {
            reader.wrong(node.place, "this limit has no unit", LIMIT_EXAMPLE);
        }
        (false, Some(entry)) if matches!(entry.node.typed, Typed::Nothing) => {
            reader.wrong(entry.place, "this limit has no unit", LIMIT_EXAMPLE);
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
        let fields = reader.parameters(node, "an entry of replaces", REPLACES, REPLACES_EXAMPLE);
        let Some(fields) = fields else { continue };
        match text(reader, &fields, "name") {
            _ if reader.is_full() => {}
            None | Some("") => {
                reader.wrong(node.place, "this does not say what is replaced", REPLACES_EXAMPLE);
            }
            Some(name) if own == Some(name) => {
                let what = format!("{} is the name of this limit itself", quoted(name));
                reader.wrong(node.place, what, REPLACES_EXAMPLE);
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
            let place = other.err().unwrap_or(node.place);
            let what = "metadata must be a mapping with words for names";
            reader.wrong(place, what, "write names and values, as in `metadata: { team: payments }`");
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
    if matches!(node.typed, Typed::Word(_) | Typed::Map(_)) {
        reader.wrong(node.place, format!("{name} must be a list of mappings"), example);
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
fn whole(word: &str) -> Result<u32, Fault> {
    let digits = word.replace('_', "");
    let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_plain
        && (digits == "0" || !digits.starts_with('0'))
        && let Ok(number) = digits.parse()
    {
        return Ok(number);
    }
    Err(Fault {
        what: format!("requests_per_unit is {}, which is no whole number that fits", quoted(word)),
        instead: format!("write plain digits, 0 to {}", u32::MAX),
    })
}

fn unit(word: &str) -> Result<Unit, Fault> {
    Unit::named(word).ok_or_else(|| {
        let names = Unit::ALL.map(|unit| unit.name().to_ascii_lowercase());
        let known: Vec<&str> = names.iter().map(String::as_str).collect();
        let choice = format!("the units are {}", listed(&known, "and"));
        Fault {
            what: format!("{} is not a unit", quoted(word)),
            instead: known_instead(&word.to_ascii_lowercase(), &known, &choice),
        }
    })
}
