//! Reads the domains of a file.

use std::collections::HashMap;

use ratekeeper_rules::rule::Rule;

use crate::error::quoted;
use crate::limit::{self, ALGORITHM_FIELDS, ALGORITHM_NAMES};
use crate::reader::{Entry, Fields, Reader};
use crate::rule::SHADOW;
use crate::table::{
    AnyMapping, Constraint, Field, Flag, ListOf, Mapping, Or, SECTION, Section, TextValue, WORD, Words,
};
use crate::tree::{Node, NodeValue};
use crate::words;

use super::metadata::{self, Metadata};
use super::name::Path;
use super::{
    DEPTH_MAX, DESCRIPTORS_MAX, Descriptor, DescriptorLimit, Descriptors, Domain, Unit, Value, Wildcard,
    shown_names,
};

const EXAMPLE: &str =
    "write as in `domains: { edge: [{ key: remote_address, fixed_window: { limit: 100, window: 1m } }] }`";

/// The descriptors of one level. An exact value matches first, then patterns in file order, then a key without a value.
pub(crate) const fn descriptors() -> ListOf<Mapping> {
    ListOf { item: Mapping(&DESCRIPTOR), from: 0, to: DESCRIPTORS_MAX }
}

static DESCRIPTOR: Section = Section {
    name: "descriptor",
    meaning: "Descriptor: limits the entries that match its key and value. An exact value matches first, then patterns in file order, then a key without a value.",
    example: "write as in `{ key: remote_address, fixed_window: { limit: 100, window: 1m } }`",
    fields: &[
        &[
            &Field::new("key", "Key of the entry.", NAME).required(),
            &Field::new(
                "value",
                "Value of the entry. `*` matches any characters, or none.",
                WORD.named("value or pattern").filled(),
            )
            .otherwise("any value"),
            &UNLIMITED,
            &BLOCKED,
            &UNIT,
            &Field::new("name", "Name of the limit in responses to Envoy.", NAME),
            &Field::new(
                "replaces",
                "Names of limits that do not apply to a request that matches this descriptor.",
                ListOf::any(NAME),
            ),
            &SHADOW,
            &QUOTA,
            &SHARE,
            &Field::new("metadata", "Metadata to include in responses to Envoy.", AnyMapping),
            &Field::new("descriptors", "Descriptors for the next entry of the request.", descriptors()),
        ],
        &ALGORITHM_FIELDS,
    ],
    constraints: &[Constraint::AtMostOne(&[&ALGORITHM_NAMES])],
    ..SECTION
};
const NAME: TextValue = WORD.filled();
const UNLIMITED: Field<Or<Flag>> = Field::new("unlimited", "Allows all requests.", Flag).or(false);
const BLOCKED: Field<Or<Flag>> = Field::new("blocked", "Denies all requests.", Flag).or(false);
const UNIT: Field<Words<Unit>> = Field::new(
    "unit",
    "Unit of a blocked limit in responses to Envoy, which then also have the time until the unit ends.",
    Words(&words::UNITS),
);
const QUOTA: Field<Or<Flag>> =
    Field::new("quota", "Denies a request only if all quota limits of the request deny it.", Flag).or(false);
const SHARE: Field<Or<Flag>> =
    Field::new("share", "Whether all values that match the pattern share one budget.", Flag).or(false);

/// Reads the domains and the rules of their descriptors. The first rule has the index `first_rule`.
pub(crate) fn domains(
    reader: &mut Reader,
    node: Option<&Node>,
    first_rule: usize,
) -> (Vec<Domain>, Vec<Rule>) {
    let fields = node.and_then(|node| reader.named(node, "`domains`", EXAMPLE));
    let Some(fields) = fields else { return (Vec::new(), Vec::new()) };
    let (mut domains, mut rules, mut count) = (Vec::new(), Vec::new(), 0);
    for Entry { name, position, node } in fields.iter() {
        if name.is_empty() {
            reader.error(position, "the name of the domain is empty", "write the name that Envoy sends");
        }
        if matches!(node.value, NodeValue::Nothing) {
            let message = format!("the domain {} has no value", quoted(name));
            reader.error(position, message, EXAMPLE);
        }
        let mut reading = Reading { rules, first_rule, count };
        let descriptors = reading.level(reader, node, &Path::of(name), 0);
        domains.push(Domain { name: name.to_owned(), descriptors });
        (rules, count) = (reading.rules, reading.count);
    }
    (domains, rules)
}

/// The state of reading domains.
struct Reading {
    /// The rules of all domains so far.
    rules: Vec<Rule>,
    first_rule: usize,
    /// The number of descriptors of all domains so far.
    count: usize,
}

/// The descriptor that is being read. An empty value stands for any.
struct DescriptorContext<'n> {
    key: &'n str,
    value: &'n str,
    path: Path,
    /// Its depth.
    deep: usize,
}

impl Reading {
    /// Reads the descriptors of one level at depth `deep`.
    fn level(&mut self, reader: &mut Reader, node: &Node, around: &Path, deep: usize) -> Descriptors {
        if deep == DEPTH_MAX {
            let message = format!("descriptors are nested more than {DEPTH_MAX} levels deep");
            reader.error(node.position, message, "use fewer entries in a descriptor of Envoy");
            return Descriptors::default();
        }
        let mut seen = HashMap::new();
        let mut all = Vec::new();
        for node in reader.list(node) {
            self.count += 1;
            if self.count > DESCRIPTORS_MAX {
                if self.count == DESCRIPTORS_MAX + 1 {
                    let message = format!("there are more than {DESCRIPTORS_MAX} descriptors");
                    let help =
                        "join values with a pattern, as in `value: api/*`, or omit `value` for any value";
                    reader.error(node.position, message, help);
                }
                break;
            }
            let Some(fields) = reader.fields(node, "a descriptor", &DESCRIPTOR) else { continue };
            reader.require(&fields);
            let key = fields.get("key").and_then(|node| reader.name(node, DESCRIPTOR.example));
            let value = fields.get("value").and_then(|node| value(reader, node));
            if let Some(key) = key {
                let message = |_: &_| match value {
                    Some(value) => {
                        format!("duplicate descriptor with key {} and value {}", quoted(key), quoted(value))
                    }
                    None => format!("duplicate descriptor with key {} and no value", quoted(key)),
                };
                reader.is_new(&mut seen, (key, value), node.position, message);
            }
            let (key, value) = (key.unwrap_or_default(), value.unwrap_or_default());
            let here = DescriptorContext { key, value, path: around.with(key, value), deep: deep + 1 };
            all.extend(self.descriptor(reader, &fields, &here));
        }
        Descriptors::new(all)
    }

    fn descriptor(
        &mut self,
        reader: &mut Reader,
        fields: &Fields<'_>,
        here: &DescriptorContext<'_>,
    ) -> Option<Descriptor> {
        let value = match (here.value, Wildcard::new(here.value)) {
            ("", _) => Value::Any,
            (_, Some(pattern)) => Value::Pattern(pattern),
            (value, None) => Value::Exact(value.to_owned()),
        };
        let (is_shadow, is_quota) = (SHADOW.read(reader, fields), QUOTA.read(reader, fields));
        let shares = SHARE.read(reader, fields);
        let limit = self.limit(reader, fields, here, is_shadow);
        if let (true, Some(entry)) = (shares && !matches!(value, Value::Pattern(_)), fields.entry("share")) {
            let message = "`share` needs a value with `*`";
            reader.error(entry.position, message, "write a pattern, as in `value: api/*`, or remove `share`");
        }
        if matches!(limit, Some(DescriptorLimit::None)) {
            for name in ["name", "replaces", "shadow", "quota"] {
                if let Some(entry) = fields.entry(name) {
                    let message = format!("`{name}` needs a limit, and the descriptor has none");
                    let help = format!("write a limit as in `fixed_window: {{}}`, or remove `{name}`");
                    reader.error(entry.position, message, help);
                }
            }
        }
        let name = fields.get("name").and_then(|node| reader.name(node, "write as in `name: per-user`"));
        let replaces = fields.get("replaces").map_or(Vec::new(), |node| replaces(reader, node, name));
        let metadata = fields.get("metadata").and_then(|node| metadata(reader, node));
        let inner = fields.get("descriptors");
        let inner = inner.map(|node| self.level(reader, node, &here.path, here.deep)).unwrap_or_default();
        let blocked_unit = UNIT.optional(reader, fields);
        if let (Some(entry), false) = (fields.entry("unit"), matches!(limit, Some(DescriptorLimit::Blocked)))
        {
            let help = "write `blocked: true`, or remove `unit`: other limits have the unit of their window";
            reader.error(entry.position, "`unit` needs `blocked`", help);
        }
        let (unit, requests_per_unit) = match limit? {
            DescriptorLimit::Rule(number) => shown_names(&self.rules.get(number - self.first_rule)?.limit),
            _ => (blocked_unit, 0),
        };
        Some(Descriptor {
            key: here.key.to_owned(),
            value,
            limit: limit?,
            name: name.map(str::to_owned),
            replaces,
            unit,
            requests_per_unit,
            is_shadow,
            is_quota,
            shares,
            metadata,
            descriptors: inner,
        })
    }

    /// Reads the limit of a descriptor, and adds its rule.
    fn limit(
        &mut self,
        reader: &mut Reader,
        fields: &Fields<'_>,
        here: &DescriptorContext<'_>,
        is_shadow: bool,
    ) -> Option<DescriptorLimit> {
        let plain = [(UNLIMITED, DescriptorLimit::Unlimited), (BLOCKED, DescriptorLimit::Blocked)];
        let plain = plain.map(|(field, limit)| (field.name, field.read(reader, fields), limit));
        let mut attributes =
            plain.into_iter().filter(|(_, is_set, _)| *is_set).map(|(name, _, limit)| (name, limit));
        let plain = attributes.next();
        let algorithm = fields.iter().map(|entry| entry.name).find(|it| ALGORITHM_NAMES.contains(it));
        if let (Some((first, _)), Some(second)) =
            (plain, attributes.next().map(|(name, _)| name).or(algorithm))
        {
            let message = format!("the descriptor has both `{first}` and another limit");
            let position = fields.entry(second).map_or(fields.position, |entry| entry.position);
            reader.error(position, message, format!("remove `{first}` or `{second}`"));
            return None;
        }
        match (plain, algorithm) {
            (Some((_, limit)), _) => Some(limit),
            (None, None) => Some(DescriptorLimit::None),
            (None, Some(_)) => {
                let limit = limit::among(reader, fields)?;
                self.rules.push(Rule { is_shadow, ..Rule::new(&here.path.name(), limit) });
                Some(DescriptorLimit::Rule(self.first_rule + self.rules.len() - 1))
            }
        }
    }
}

/// Reads the value of a descriptor. An empty value is rejected: it is used for any value internally.
fn value<'n>(reader: &mut Reader, node: &'n Node) -> Option<&'n str> {
    let word = reader.word(node)?;
    if word.is_empty() {
        reader.error(node.position, "the value is empty", "write a value, or remove `value` to match any");
        return None;
    }
    Some(word)
}

fn replaces(reader: &mut Reader, node: &Node, own: Option<&str>) -> Vec<String> {
    let example = "write the names of other limits, as in `replaces: [per-user]`";
    let mut names = Vec::new();
    for node in reader.list(node) {
        let Some(name) = reader.name(node, example) else { continue };
        if own == Some(name) {
            let message = format!("the limit {} replaces itself", quoted(name));
            reader.error(node.position, message, example);
        }
        names.push(name.to_owned());
    }
    names
}

fn metadata(reader: &mut Reader, node: &Node) -> Option<Metadata> {
    let example = "write names and values, as in `metadata: { team: payments }`";
    match (&node.value, metadata::of(node)) {
        (NodeValue::Map(_), Ok(metadata::Data::Map(metadata))) => Some(metadata),
        (NodeValue::Map(_), Err(position)) => {
            reader.error(position, "a name in `metadata` must be a word", example);
            None
        }
        _ => {
            reader.error(node.position, "`metadata` must be a mapping", example);
            None
        }
    }
}
