//! The reference page: a table of fields for each section, in reading order.

use serde_json::Value;

use super::{Constraint, Row, Section, as_code};
use crate::environment::FILE;
use crate::file::DOCUMENT;

const HEAD: &str = "\
# Configuration reference

This page lists every field of a configuration file. It is generated from the table that the parser reads
(`cargo xtask generate`). [Configuration](../configuration.md) explains how to write and validate a file;
[everything.yaml](../../examples/everything.yaml) is a file with every field.

`NAME` stands for a name that the file chooses. A field without a default is optional, unless it is marked as required.
Durations, rates, sizes and secrets are written as in [Values](../configuration.md#values).
";

/// The sections of a file, in reading order, each with its paths.
pub(crate) struct Page {
    sections: Vec<(Vec<String>, &'static Section)>,
}

impl Page {
    fn new() -> Page {
        let mut visited = Vec::new();
        visit("", &DOCUMENT, &mut Vec::new(), &mut visited);
        let paths = |section: &Section| {
            let all = visited.iter().filter(|(_, other)| other.name == section.name);
            let mut paths: Vec<String> = all.map(|(path, _)| path.clone()).collect();
            // A section at several paths is described at the shortest.
            paths.sort_by_key(|path| path.matches('.').count());
            paths
        };
        let sections = visited.iter().map(|(path, section)| (path, paths(section), *section));
        let sections = sections.filter(|(path, paths, _)| paths.first() == Some(path));
        let sections = sections.map(|(_, paths, section)| (paths, section));
        // Files stand in place of any secret.
        Page { sections: sections.chain([(vec![FILE.name.to_owned()], &FILE)]).collect() }
    }

    fn path(&self, section: &Section) -> &str {
        let found = self.sections.iter().find(|(_, other)| other.name == section.name);
        found.and_then(|(paths, _)| paths.first()).map_or("", String::as_str)
    }

    /// A link to the description of a section.
    pub(crate) fn link(&self, section: &Section) -> String {
        let path = self.path(section);
        let anchor: String = path.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect();
        format!("[{}](#{})", section.name.replace('_', " "), anchor.to_lowercase())
    }

    fn section(&self, paths: &[String], section: &'static Section) -> String {
        let mut text = match paths {
            [path, ..] if !path.is_empty() => format!("\n## {path}\n\n"),
            _ => "\n## The file\n\n".to_owned(),
        };
        text.push_str(section.meaning);
        if let [_, others @ ..] = paths
            && !others.is_empty()
        {
            text.push_str(&format!(" Also: {}.", as_code(others)));
        }
        for constraint in section.constraints {
            text.push(' ');
            text.push_str(&of_constraint(constraint));
        }
        text.push_str("\n\n| name | value | default | meaning |\n|---|---|---|---|\n");
        for row in section.rows() {
            let value = row.kind.text(self);
            text.push_str(&format!("| `{}` | {value} | {} | {} |\n", row.name, default(row), row.meaning));
        }
        text
    }
}

/// Visits a section and those below it. `around` are the names of the sections around it: a section may contain itself.
fn visit(
    path: &str,
    section: &'static Section,
    around: &mut Vec<&'static str>,
    visited: &mut Vec<(String, &'static Section)>,
) {
    visited.push((path.to_owned(), section));
    if around.contains(&section.name) {
        return;
    }
    around.push(section.name);
    for row in section.rows() {
        let path = if path.is_empty() { row.name.to_owned() } else { format!("{path}.{}", row.name) };
        row.kind.visit(&path, &mut |path, inner| visit(path, inner, around, visited));
    }
    around.pop();
}

fn default(row: Row) -> String {
    match row.kind.default() {
        Some(Value::String(word)) => format!("`{word}`"),
        Some(value) => format!("`{value}`"),
        None if row.is_required => "required".to_owned(),
        None => row.fallback.to_owned(),
    }
}

fn of_constraint(constraint: &Constraint) -> String {
    let list = |names: &[&str]| as_code(names);
    match constraint {
        Constraint::ExactlyOne(groups) => format!("Exactly one of {} is required.", list(&groups.concat())),
        Constraint::AtMostOne(groups) => format!("At most one of {} is allowed.", list(&groups.concat())),
        Constraint::AtLeastOne => "At least one field is required.".to_owned(),
        Constraint::Needs(name, other) => format!("`{name}` needs `{other}`."),
        Constraint::NeedsIf(name, value, other) => format!("`{name}: {value}` needs `{other}`."),
        Constraint::Excludes(name, others) => format!("`{name}` excludes {}.", list(others)),
    }
}

/// Returns the reference page of the configuration, in Markdown.
pub fn reference_page() -> String {
    let page = Page::new();
    let sections = page.sections.iter().map(|(paths, section)| page.section(paths, section));
    format!("{HEAD}{}", sections.collect::<String>())
}
