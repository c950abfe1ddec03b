//! Error messages of invalid files, and the errors that the JSON Schema finds.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeSet;
use std::fmt::Write as _;

use jsonschema::Validator;
use serde_json::Value;

use crate::common::{examples, read};

/// An invalid file.
struct Case {
    yaml: String,
    /// The kind of error: `shape` if the schema finds it, `value` if only the reader does, `yaml` for a syntax error.
    kind: String,
    /// The expected messages.
    message: String,
}

const CASES: &str = "tests/bad_files.txt";

/// Each case is a file, a line of dashes with its kind, and the expected messages.
fn cases() -> Vec<Case> {
    let path = format!("{}/{CASES}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let cases = text.split_terminator("\n====\n").map(|case| {
        let (yaml, rest) = case.split_once("\n---- ").expect("a line of dashes in each case");
        let (kind, message) = rest.split_once('\n').unwrap_or((rest, ""));
        Case { yaml: yaml.to_owned(), kind: kind.to_owned(), message: message.to_owned() }
    });
    cases.collect()
}

/// Expands placeholders for characters that editors hide or remove, and repeated lines with a number for `<N>`.
fn typed(yaml: &str) -> String {
    let lines =
        yaml.split('\n').map(|line| match line.strip_prefix("<TIMES ").and_then(|it| it.split_once('>')) {
            Some((times, line)) => {
                let all: Vec<_> =
                    (0..times.parse().unwrap()).map(|n: u32| line.replace("<N>", &n.to_string())).collect();
                all.join("\n")
            }
            None => line.to_owned(),
        });
    let yaml = lines.collect::<Vec<_>>().join("\n");
    yaml.replace("<TAB>", "\t").replace("<CR>", "\r").replace("<BOM>", "\u{feff}").replace("<SPACE>", " ")
}

fn message(yaml: &str) -> String {
    match read(&typed(yaml)) {
        Ok(config) => format!("this was understood: {config:?}"),
        Err(errors) => errors.to_string(),
    }
}

/// To update the expected messages, run the tests with `RATEKEEPER_WRITE_GOLDEN=1` and review the difference.
#[test]
fn invalid_files_have_the_expected_messages() {
    if std::env::var_os("RATEKEEPER_WRITE_GOLDEN").is_some() {
        let mut text = String::new();
        for case in cases() {
            write!(text, "{}\n---- {}\n{}\n====\n", case.yaml, case.kind, message(&case.yaml)).unwrap();
        }
        std::fs::write(format!("{}/{CASES}", env!("CARGO_MANIFEST_DIR")), text).unwrap();
    }
    for case in cases() {
        assert_eq!(message(&case.yaml), case.message, "{}", case.yaml);
    }
}

fn schema() -> Validator {
    jsonschema::validator_for(&serde_json::from_str(&ratekeeper_config::schema()).unwrap()).unwrap()
}

fn as_json(yaml: &str) -> Option<Value> {
    serde_saphyr::from_str(yaml).ok()
}

#[test]
fn schema_finds_exactly_the_errors_of_shape() {
    let schema = schema();
    let mut wrong = Vec::new();
    for Case { yaml, kind, .. } in cases() {
        let found = match as_json(&typed(&yaml)) {
            None => "yaml",
            Some(value) if schema.is_valid(&value) => "value",
            Some(_) => "shape",
        };
        if found != kind {
            wrong.push(format!("{found}, not {kind}:\n{yaml}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn examples_are_valid_by_the_schema() {
    let schema = schema();
    for (name, yaml) in examples() {
        let value = as_json(&yaml).unwrap();
        let wrong: Vec<String> =
            schema.iter_errors(&value).map(|it| format!("{}: {it}", it.instance_path())).collect();
        assert!(wrong.is_empty(), "{name}: {wrong:?}");
    }
}

/// Messages contain neither a password of the file nor the value of an environment variable.
#[test]
fn messages_contain_no_secrets() {
    let mut count = 0;
    for case in cases() {
        count += usize::from(case.yaml.contains("hunter2"));
        let message = message(&case.yaml);
        assert!(!message.contains("hunter2"), "{message}");
        let errors = read(&typed(&case.yaml)).unwrap_err();
        assert!(!format!("{errors:?}").contains("hunter2"), "{errors:?}");
    }
    assert!(count >= 10, "{count} cases have a secret");
}

/// A setting: settings of one name and definition are the same, wherever they occur.
fn setting(schema: &Value, name: &str) -> String {
    format!("{name}: {}", schema["properties"][name])
}

/// Collects the settings of a schema.
fn settings(schema: &Value, found: &mut BTreeSet<String>) {
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
    if let (true, Some(properties)) = (is_closed, schema.get("properties").and_then(Value::as_object)) {
        found.extend(properties.keys().map(|name| setting(schema, name)));
    }
    match schema {
        Value::Object(map) => map.values().for_each(|part| settings(part, found)),
        Value::Array(list) => list.iter().for_each(|part| settings(part, found)),
        _ => {}
    }
}

/// Collects the settings that a value uses.
fn used(root: &Value, at: &str, value: &Value, found: &mut BTreeSet<String>) {
    let schema = root.pointer(at).unwrap();
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        used(root, reference.trim_start_matches('#'), value, found);
    }
    for alternatives in ["oneOf", "anyOf"] {
        let schemas = schema.get(alternatives).and_then(Value::as_array).into_iter().flatten();
        for (number, _) in schemas.enumerate() {
            used(root, &format!("{at}/{alternatives}/{number}"), value, found);
        }
    }
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if schema.pointer(&format!("/properties/{name}")).is_some() {
                    found.insert(setting(schema, name));
                    used(root, &format!("{at}/properties/{name}"), value, found);
                } else if schema.get("additionalProperties").is_some_and(Value::is_object) {
                    used(root, &format!("{at}/additionalProperties"), value, found);
                }
            }
        }
        Value::Array(items) if schema.get("items").is_some() => {
            for item in items {
                used(root, &format!("{at}/items"), item, found);
            }
        }
        _ => {}
    }
}

/// `everything.yaml` has every setting. Alternatives that exclude each other follow `#or ` in comments.
#[test]
fn everything_example_has_every_setting() {
    let root: Value = serde_json::from_str(&ratekeeper_config::schema()).unwrap();
    let (_, yaml) = examples().into_iter().find(|(name, _)| name.ends_with("everything.yaml")).unwrap();
    let mut found = BTreeSet::new();
    used(&root, "", &as_json(&yaml).unwrap(), &mut found);
    let alternatives: Vec<&str> = yaml.lines().filter_map(|line| line.trim().strip_prefix("#or ")).collect();
    for alternative in &alternatives {
        let value = as_json(alternative).unwrap();
        assert!(schema().is_valid(&value), "{alternative}");
        read(alternative).unwrap_or_else(|errors| panic!("{alternative}: {errors}"));
        used(&root, "", &value, &mut found);
    }
    let mut all = BTreeSet::new();
    settings(&root, &mut all);
    let missing: Vec<&String> = all.difference(&found).collect();
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(all.len() > 100 && !alternatives.is_empty(), "{} settings", all.len());
}
