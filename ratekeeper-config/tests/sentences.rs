//! Every message of the reader occurs in the expected messages of an invalid file, so no message is untested.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The source files of the reader, by their paths.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

/// Messages that no file produces.
const UNREACHABLE: [&str; 23] = [
    // Used if no other problem was recorded, which does not happen.
    "the text is not a valid configuration",
    "compare it with an example",
    // Used only if the core checks more of a limit than the reader does.
    "change the parameters",
    // Parts of messages of the YAML parser, and the expectation passed to it. They are never shown.
    " at line ",
    "budget breached",
    "recursion limit exceeded",
    "a mapping, a list or a word",
    "'-' indicator",
    "anchor or alias",
    "end of stream",
    "expected ',' or",
    "expected key",
    "mapping values are not allowed",
    "misplaced bracket",
    "mismatched bracket",
    "quoted scalar",
    "simple key expected",
    "trailing content",
    "unexpected character",
    "unknown anchor",
    "unclosed bracket",
    // A mark of encrypted keys, and what Envoy's files are called if they exceed a bound.
    "Proc-Type: 4,ENCRYPTED",
    "a file of descriptors",
];

/// The string literals of a Rust file, without comments and tests. Unescapes the escapes that occur.
fn literals(code: &str) -> Vec<String> {
    let code = code.split("#[cfg(test)]").next().unwrap();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    // A quotation mark in a character literal does not start a string.
    let code = lines.collect::<Vec<_>>().join("\n").replace("'\"'", "' '");
    let mut found = Vec::new();
    let mut chars = code.chars();
    while chars.by_ref().any(|c| c == '"') {
        let mut text = String::new();
        while let Some(c) = chars.next().filter(|c| *c != '"') {
            match c {
                '\\' => match chars.next().unwrap() {
                    // The string continues at the first character of the next line.
                    '\n' => text.push('\n'),
                    'n' => {}
                    escaped => text.push(escaped),
                },
                c => text.push(c),
            }
        }
        let mut lines = text.split('\n');
        let first = lines.next().unwrap().to_owned();
        found.push(lines.fold(first, |text, line| text + line.trim_start()));
    }
    found
}

/// Whether a line contains the fixed parts of a message, between its placeholders, in order.
fn contains(line: &str, message: &str) -> bool {
    let mut rest = line;
    message.split(['{', '}']).step_by(2).filter(|part| part.trim().len() > 1).all(|part| {
        match rest.split_once(part) {
            Some((_, after)) => {
                rest = after;
                true
            }
            None => false,
        }
    })
}

/// The lines of all expected messages.
fn expected_lines(folder: &Path) -> Vec<String> {
    let beside = fs::read_dir(folder.join("tests/envoy/bad")).unwrap().map(|entry| entry.unwrap().path());
    let beside = beside.filter(|path| path.extension().is_some_and(|end| end == "txt"));
    ["bad_files.txt", "bad_limits.txt", "warnings.txt", "hostile.rs", "envoy_files.rs"]
        .iter()
        .map(|name| folder.join("tests").join(name))
        .chain(beside)
        .flat_map(|name| fs::read_to_string(name).unwrap().lines().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// The messages in the sources, with their files.
fn messages(folder: &Path) -> BTreeSet<(String, String)> {
    let mut files = Vec::new();
    sources(&folder.join("src"), &mut files);
    assert!(files.len() > 20, "{files:?}");
    // The outputs of `validate --explain` and `schema` and the reference page are no error messages.
    files.retain(|path| !path.ends_with("src/explain.rs") && !path.parent().unwrap().ends_with("src/table"));
    let mut messages = BTreeSet::new();
    for path in files {
        let name = path.strip_prefix(folder).unwrap().display().to_string();
        let literals = literals(&fs::read_to_string(&path).unwrap()).into_iter();
        // Literals without a space are names.
        let is_message = |literal: &String| {
            literal.trim().contains(' ')
                && !literal.starts_with("-----BEGIN ")
                && !literal.starts_with("{name}: {{ ")
                // A pattern of the schema.
                && !literal.starts_with('^')
        };
        messages.extend(literals.filter(is_message).map(|literal| (name.clone(), literal)));
    }
    messages
}

#[test]
fn every_message_is_tested_by_an_invalid_file() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The meanings of fields are on the reference page.
    let page = ratekeeper_config::reference_page();
    let lines = expected_lines(folder);
    let is_produced =
        |message: &str| lines.iter().any(|line| contains(line, message)) || page.contains(message);
    let messages = messages(folder);
    let is_unused =
        |(_, message): &&(String, String)| !is_produced(message) && !UNREACHABLE.contains(&message.as_str());
    let unused: Vec<String> =
        messages.iter().filter(is_unused).map(|(name, message)| format!("{name}: {message}")).collect();
    assert!(unused.is_empty(), "no bad file has these messages:\n{}", unused.join("\n"));

    for listed in UNREACHABLE {
        assert!(messages.iter().any(|(_, message)| message == listed), "no source contains {listed:?}");
        assert!(!is_produced(listed), "a bad file has the message {listed:?}: remove it from the list");
    }
}
