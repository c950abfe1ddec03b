//! The JSON Schema of a configuration file.

use serde_json::{Map, Value, json};

use super::{Constraint, Row, Section};
use crate::file::DOCUMENT;

/// Returns the JSON Schema of configuration files, for completion and validation in editors.
pub fn schema() -> String {
    let mut definitions = Definitions::default();
    let mut schema =
        json!({ "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Ratekeeper" });
    merge(&mut schema, of_section(&DOCUMENT, &mut definitions));
    definitions.map.sort_keys();
    schema["$defs"] = Value::Object(definitions.map);
    format!("{schema:#}\n")
}

/// The definitions that a schema refers to.
#[derive(Default)]
pub(crate) struct Definitions {
    map: Map<String, Value>,
}

impl Definitions {
    /// Adds a definition, unless it is there, and returns the reference to it.
    fn add(&mut self, name: &str, value: Value) -> String {
        self.map.entry(name).or_insert(value);
        format!("#/$defs/{name}")
    }

    pub(crate) fn section(&mut self, section: &'static Section) -> String {
        if !self.map.contains_key(section.name) {
            // A section may contain itself.
            self.add(section.name, Value::Null);
            let value = of_section(section, self);
            self.map.insert(section.name.to_owned(), value);
        }
        format!("#/$defs/{}", section.name)
    }

    pub(crate) fn duration(&mut self) -> String {
        let description = "Whole number and unit, such as 500ms, 60s, 15m, 1h, 1d or 1w.";
        let value = json!({ "description": description, "type": "string", "pattern": "^[0-9]+ *[a-z]+$" });
        self.add("duration", value)
    }

    pub(crate) fn rate(&mut self) -> String {
        let description = "Count per unit or per duration, such as 1/s, 4/min, 100/1h or 5/week.";
        let pattern = "^[0-9]+ */ *[0-9]* *[a-z]+$";
        self.add("rate", json!({ "description": description, "type": "string", "pattern": pattern }))
    }

    pub(crate) fn secret(&mut self, mut value: Value) -> String {
        value["description"] = json!(
            "Text, in which ${NAME} is replaced by an environment variable, or { file: path } for the content of a file."
        );
        self.add("secret", value)
    }
}

fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

fn of_section(section: &'static Section, definitions: &mut Definitions) -> Value {
    let mut schema = json!({
        "description": section.meaning,
        "type": if section.may_be_empty { json!(["object", "null"]) } else { json!("object") },
        "additionalProperties": false,
    });
    let rows = section.rows().map(|row| (row.name.to_owned(), of_row(row, definitions)));
    schema["properties"] = Value::Object(rows.collect());
    let required: Vec<&str> = section.rows().filter(|row| row.is_required).map(|row| row.name).collect();
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    if !section.constraints.is_empty() {
        let constraints = section.constraints.iter().map(|constraint| of_constraint(constraint, section));
        schema["allOf"] = Value::Array(constraints.collect());
    }
    schema
}

fn of_row(row: Row, definitions: &mut Definitions) -> Value {
    let value = row.kind.schema(definitions);
    let mut description = row.meaning.to_owned();
    if let Some(more) = value.get("description").and_then(Value::as_str) {
        description = format!("{description} {more}");
    }
    if !row.fallback.is_empty() {
        description = format!("{description} Default: {}.", row.fallback);
    }
    let mut schema = json!({});
    merge(&mut schema, value);
    schema["description"] = json!(description);
    if let Some(default) = row.kind.default() {
        schema["default"] = default;
    }
    schema
}

fn of_constraint(constraint: &Constraint, section: &Section) -> Value {
    let present = |name: &str| {
        let is_flag = section.row(name).is_some_and(|row| row.kind.is_flag());
        match is_flag {
            true => json!({ "required": [name], "properties": { name: { "const": true } } }),
            false => json!({ "required": [name] }),
        }
    };
    let all = |groups: &[&[&str]]| -> Vec<Value> { groups.concat().into_iter().map(present).collect() };
    match constraint {
        Constraint::ExactlyOne(groups) => json!({ "oneOf": all(groups) }),
        Constraint::AtMostOne(groups) => {
            let mut alternatives = all(groups);
            alternatives.push(json!({ "not": { "anyOf": all(groups) } }));
            json!({ "oneOf": alternatives })
        }
        Constraint::AtLeastOne => json!({ "minProperties": 1 }),
        Constraint::Needs(name, other) => json!({ "dependentRequired": { *name: [other] } }),
        Constraint::NeedsIf(name, value, other) => json!({
            "if": { "required": [name], "properties": { *name: { "const": value } } },
            "then": { "required": [other] },
        }),
        Constraint::Excludes(name, others) => {
            let none = others.iter().map(|other| ((*other).to_owned(), json!(false)));
            json!({ "dependentSchemas": { *name: { "properties": Value::Object(none.collect()) } } })
        }
    }
}
