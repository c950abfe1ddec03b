//! Error messages of invalid files, and the errors that the JSON Schema finds.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::fmt::Write as _;

use jsonschema::Validator;
use ratekeeper_config::SCHEMA;
use serde_json::Value;

use crate::common::{examples, read};

/// An invalid file.
struct Case {
    yaml: String,
    /// The kind of error: `shape` if the schema finds it, `value` if only the reader does, `yaml` for a syntax error.
    kind: String,
    /// The expected messages.
    told: String,
}

const CASES: &str = "tests/bad_files.txt";

/// Each case is a file, a line of dashes with its kind, and the expected messages.
fn cases() -> Vec<Case> {
    let path = format!("{}/{CASES}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let cases = text.split_terminator("\n====\n").map(|case| {
        let (yaml, rest) = case.split_once("\n---- ").expect("a line of dashes in each case");
        let (kind, told) = rest.split_once('\n').unwrap_or((rest, ""));
        Case { yaml: yaml.to_owned(), kind: kind.to_owned(), told: told.to_owned() }
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

fn told(yaml: &str) -> String {
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
            write!(text, "{}\n---- {}\n{}\n====\n", case.yaml, case.kind, told(&case.yaml)).unwrap();
        }
        std::fs::write(format!("{}/{CASES}", env!("CARGO_MANIFEST_DIR")), text).unwrap();
    }
    for case in cases() {
        assert_eq!(told(&case.yaml), case.told, "{}", case.yaml);
    }
}

fn schema() -> Validator {
    jsonschema::validator_for(&serde_json::from_str(SCHEMA).unwrap()).unwrap()
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
    let with_secrets = cases().into_iter().filter(|case| case.yaml.contains("hunter2"));
    let mut count = 0;
    for case in with_secrets {
        count += 1;
        let told = told(&case.yaml);
        assert!(!told.contains("hunter2"), "{told}");
        let errors = read(&typed(&case.yaml)).unwrap_err();
        assert!(!format!("{errors:?}").contains("hunter2"), "{errors:?}");
    }
    assert!(count >= 10, "{count} cases have a secret");
}
