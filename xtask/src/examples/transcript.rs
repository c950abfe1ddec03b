//! Extracts the commands of a fenced block.

use anyhow::{Result, bail};

use crate::markdown::Block;

/// What to do with a part of a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item {
    Run(Example),
    Skip { line: usize, command: String, why: &'static str },
}

/// A command or script, and its expected output.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Example {
    /// The line of the page, counted from 1.
    pub(super) line: usize,
    pub(super) command: String,
    /// Empty if the page shows no output.
    pub(super) expected: Vec<String>,
}

impl Example {
    /// Returns the first line of the command, for a list.
    pub(super) fn title(&self) -> &str {
        let mut lines = self.command.lines().filter(|line| !line.starts_with("set -e"));
        lines.next().unwrap_or_default()
    }
}

/// Commands of a page that cannot be repeated inside the clone.
const SKIPPED: &[(&str, &str)] = &[
    ("cargo xtask test", "this is what is running"),
    ("git clone ", "this is the clone"),
    ("cargo install ", "the built program is on the PATH"),
    ("cd ", "every command starts at the root"),
];

fn reason_to_skip(command: &str) -> Option<&'static str> {
    // The trailing space makes a bare `cargo xtask test` match, but not `cargo xtask tests`.
    let command = format!("{} ", command.trim());
    SKIPPED
        .iter()
        .find(|(start, _)| command.starts_with(&format!("{} ", start.trim_end())))
        .map(|(_, why)| *why)
}

/// Returns the commands of a block; none if the block is not a transcript.
pub(super) fn items(block: &Block) -> Result<Vec<Item>> {
    match block.tag() {
        "console" => console(block),
        "sh" => Ok(script(block)),
        _ => Ok(Vec::new()),
    }
}

fn console(block: &Block) -> Result<Vec<Item>> {
    let mut examples: Vec<Example> = Vec::new();
    for (line, text) in numbered(block) {
        let goes_on = |example: &Example| example.expected.is_empty() && example.command.ends_with('\\');
        match (text.strip_prefix("$ "), examples.last_mut()) {
            (Some(command), _) => {
                examples.push(Example { line, command: command.to_string(), expected: Vec::new() });
            }
            (None, Some(example)) if goes_on(example) => {
                // A terminal shows `> ` before a continuation line; a page may omit it.
                let rest = text.strip_prefix("> ").unwrap_or(text);
                example.command.push('\n');
                example.command.push_str(rest);
            }
            (None, Some(example)) => example.expected.push(text.to_string()),
            (None, None) => bail!("a `console` block begins with a command, a line that starts with `$ `"),
        }
    }
    if examples.is_empty() {
        bail!("a `console` block without a command");
    }
    Ok(examples.into_iter().map(item).collect())
}

fn item(mut example: Example) -> Item {
    while example.expected.last().is_some_and(|line| line.trim().is_empty()) {
        example.expected.pop();
    }
    match reason_to_skip(&example.command) {
        Some(why) => Item::Skip { line: example.line, command: example.command, why },
        None => Item::Run(example),
    }
}

fn script(block: &Block) -> Vec<Item> {
    let mut items = Vec::new();
    let mut command = String::from("set -e\n");
    for (line, text) in numbered(block) {
        match reason_to_skip(text) {
            Some(why) => items.push(Item::Skip { line, command: text.to_string(), why }),
            None => command.push_str(&format!("{text}\n")),
        }
    }
    if command.lines().skip(1).any(|line| !line.trim().is_empty()) {
        items.push(Item::Run(Example { line: block.line, command, expected: Vec::new() }));
    }
    items
}

fn numbered(block: &Block) -> impl Iterator<Item = (usize, &str)> {
    block.lines.iter().enumerate().map(|(index, text)| (block.line + 1 + index, text.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::markdown;

    /// Returns the items of a page's only block.
    fn check(page: &str) -> Result<Vec<Item>> {
        items(&markdown::parse(page).unwrap().blocks[0])
    }

    fn run(line: usize, command: &str, expected: &[&str]) -> Item {
        let expected = expected.iter().map(ToString::to_string).collect();
        Item::Run(Example { line, command: command.to_string(), expected })
    }

    #[test]
    fn transcript_is_split_into_commands_and_outputs() {
        let page = "```console\n$ a --b\none\n  two\n$ c\n$ d\n...\n```\n";
        let expected = [run(2, "a --b", &["one", "  two"]), run(5, "c", &[]), run(6, "d", &["..."])];
        assert_eq!(check(page).unwrap(), expected);
    }

    #[test]
    fn blank_lines_between_examples_are_not_output() {
        let page = "```console\n$ a\none\n\ntwo\n\n$ b\n\n```\n";
        assert_eq!(check(page).unwrap(), [run(2, "a", &["one", "", "two"]), run(7, "b", &[])]);
    }

    #[test]
    fn command_continues_after_a_backslash() {
        for rest in ["    --b", "> --b"] {
            let page = format!("```console\n$ a \\\n{rest}\none\n```\n");
            let command = format!("a \\\n{}", rest.trim_start_matches("> "));
            assert_eq!(check(&page).unwrap(), [run(2, &command, &["one"])]);
        }
    }

    #[test]
    fn transcript_without_a_command_is_an_error() {
        assert!(check("```console\none\n$ a\n```\n").is_err());
        assert!(check("```console\n```\n").is_err());
    }

    #[test]
    fn script_runs_as_one_command() {
        let page = "```sh\ncat <<END\na\nEND\nb # why\n```\n";
        assert_eq!(check(page).unwrap(), [run(1, "set -e\ncat <<END\na\nEND\nb # why\n", &[])]);
    }

    #[test]
    fn unrepeatable_commands_are_skipped_with_a_reason() {
        let page = "```sh\ngit clone x && cd x\ncd x\ncargo xtask test    # everything\ncargo xtask test fmt\ncargo install x\n```\n";
        let items = check(page).unwrap();
        assert_eq!(items.len(), 5);
        assert!(items.iter().all(|item| matches!(item, Item::Skip { .. })), "{items:?}");

        let items = check("```console\n$ cargo xtask test\nall steps passed\n```\n").unwrap();
        assert!(matches!(items.as_slice(), [Item::Skip { line: 2, .. }]), "{items:?}");

        assert_eq!(check("```sh\ncdrecord\n```\n").unwrap(), [run(1, "set -e\ncdrecord\n", &[])]);
    }

    #[test]
    fn other_blocks_are_not_run() {
        assert!(check("```rust\n$ a\n```\n").unwrap().is_empty());
        assert!(check("```\n$ a\n```\n").unwrap().is_empty());
    }
}
