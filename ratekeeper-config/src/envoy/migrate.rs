//! Converts configuration files of Envoy's reference rate limit service to Ratekeeper configuration.

use std::collections::HashMap;
use std::fmt::Write as _;

use crate::environment::EmptyEnvironment;
use crate::error::{Errors, Problem, quoted};
use crate::quantity::duration_text;
use crate::reader::Reader;
use crate::tree::{self, Node, NodeValue, Size};

use super::envoy_file::{self, EnvoyDescriptor, EnvoyFile};
use super::metadata::{Data, Metadata};

/// A comment for fields that have no equivalent.
const NO_METRICS: &str =
    "# detailed_metric and value_to_metric are omitted: metrics never contain values of entries.\n";

/// Converts configuration files of Envoy's reference rate limit service, each given by name and text, to an
/// equivalent `domains` section. Lookups have the same results in the same order.
///
/// The reference joins a key and a value with `_`, so that different pairs may collide. DescriptorContext they do not.
///
/// # Errors
/// Returns all errors of the files: what the reference rejects, and what has no equivalent.
pub fn migrate(files: &[(&str, &str)]) -> Result<String, Errors> {
    let mut wrong = Vec::new();
    let mut domains: Vec<EnvoyFile> = Vec::new();
    let mut from: HashMap<String, &str> = HashMap::new();
    let mut count = 0;
    for (name, yaml) in files {
        let mut reader = Reader::default();
        let read = tree::read(yaml, "a file of descriptors", envoy_file::EXAMPLE, Size::File);
        let read = read.map_err(|problem| reader.problems.push(*problem)).ok();
        let envoy_file = read.and_then(|(node, problems)| {
            reader.problems = problems;
            let envoy_file = envoy_file::document(&mut reader, &node, &mut count)?;
            if let Some(other) = from.insert(envoy_file.domain.clone(), name) {
                let message =
                    format!("duplicate domain {}, already defined in {other}", quoted(&envoy_file.domain));
                let help = "merge the two files, or rename one of the domains";
                reader.error(domain_node(&node).position, message, help);
            }
            Some(envoy_file)
        });
        if !reader.problems.is_empty() {
            wrong.push(Errors::new(reader.problems, yaml, &reader.secrets).in_file(name));
        }
        domains.extend(envoy_file);
    }
    if let Some(errors) = Errors::joined(wrong) {
        return Err(errors);
    }
    let text = printed(&domains);
    // All files together may exceed the bounds of one configuration file.
    if let (Err(_), Some((name, yaml))) = (crate::parse(&text, &EmptyEnvironment), files.first()) {
        let message = "all files together exceed the bounds of one configuration".to_owned();
        let help = "omit metadata, or run several servers with some of the domains each".to_owned();
        let problem = Problem { message, help, ..Problem::unknown() };
        return Err(Errors::new(vec![problem], yaml, &[]).in_file(name));
    }
    Ok(text)
}

/// The node that contains the name of the domain.
fn domain_node(file: &Node) -> &Node {
    let NodeValue::Map(entries) = &file.value else { return file };
    let is_domain = |name: &Node| matches!(&name.value, NodeValue::Word(word) if word == "domain");
    entries.iter().find(|(name, _)| is_domain(name)).map_or(file, |(_, node)| node)
}

fn printed(domains: &[EnvoyFile]) -> String {
    let mut text = String::new();
    if domains.iter().any(|domain| want_metrics(&domain.descriptors)) {
        text.push_str(NO_METRICS);
    }
    text.push_str(if domains.is_empty() { "domains: {}\n" } else { "domains:\n" });
    for domain in domains {
        let none = if domain.descriptors.is_empty() { " []" } else { "" };
        let _ = writeln!(text, "  {}:{none}", word(&domain.domain));
        push(&mut text, &domain.descriptors, 4);
    }
    text
}

fn want_metrics(descriptors: &[EnvoyDescriptor]) -> bool {
    descriptors.iter().any(|it| it.wants_metrics || want_metrics(&it.descriptors))
}

/// Prints the descriptors of one level, indented by `columns`.
fn push(text: &mut String, descriptors: &[EnvoyDescriptor], columns: usize) {
    for descriptor in descriptors {
        let _ = writeln!(text, "{:columns$}- key: {}", "", word(&descriptor.key));
        let columns = columns + 2;
        let mut line = |attributes: String| {
            let _ = writeln!(text, "{:columns$}{attributes}", "");
        };
        if !descriptor.value.is_empty() {
            line(format!("value: {}", word(&descriptor.value)));
        }
        if let Some(limit) = &descriptor.limit {
            line(match limit.amount {
                Some((0, _)) => "blocked: true".to_owned(),
                Some((count, unit)) => {
                    let window = duration_text(unit.length());
                    format!("fixed_window: {{ limit: {count}, window: {window}, align: clock }}")
                }
                None => "unlimited: true".to_owned(),
            });
            if let Some((0, unit)) = limit.amount {
                line(format!("unit: {}", unit.name().to_lowercase()));
            }
            if let Some(name) = &limit.name {
                line(format!("name: {}", word(name)));
            }
            if !limit.replaces.is_empty() {
                let names: Vec<String> = limit.replaces.iter().map(|name| word(name)).collect();
                line(format!("replaces: [{}]", names.join(", ")));
            }
            // Without a limit, these two have no effect in the reference and are not an error there.
            if descriptor.is_shadow {
                line("shadow: true".to_owned());
            }
            if descriptor.is_quota {
                line("quota: true".to_owned());
            }
        }
        if descriptor.shares {
            line("share: true".to_owned());
        }
        if let Some(metadata) = &descriptor.metadata {
            line(format!("metadata: {}", map(metadata)));
        }
        if !descriptor.descriptors.is_empty() {
            line("descriptors:".to_owned());
            push(text, &descriptor.descriptors, columns + 2);
        }
    }
}

fn data(it: &Data) -> String {
    match it {
        Data::Null => "null".to_owned(),
        Data::Bool(is) => is.to_string(),
        Data::Number(number) => number.to_string(),
        Data::Text(text) => word(text),
        Data::List(items) => format!("[{}]", items.iter().map(data).collect::<Vec<_>>().join(", ")),
        Data::Map(metadata) => map(metadata),
    }
}

fn map(metadata: &Metadata) -> String {
    let entries: Vec<String> =
        metadata.iter().map(|(name, item)| format!("{}: {}", word(name), data(item))).collect();
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

/// A YAML scalar: plain if it is unambiguous, quoted otherwise.
fn word(text: &str) -> String {
    let is_sign = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/' || c == '_');
    let taken = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"];
    if starts_well && text.chars().all(is_sign) && !taken.contains(&text.to_ascii_lowercase().as_str()) {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            ' '..='~' => quoted.push(c),
            c if c.is_alphanumeric() => quoted.push(c),
            c => {
                let _ = write!(quoted, "\\U{:08X}", u32::from(c));
            }
        }
    }
    quoted.push('"');
    quoted
}
