//! Retired names, and their replacements.
//!
//! This rule applies to names in Rust and Lua code, and to the product's old name anywhere. Prose is left to review.

use super::rust_code::code_only;
use super::{File, Finding};

/// The product's name before its first release; concatenated, because this file would otherwise break its own rule.
const OLD_NAME: &str = concat!("toll", "gate");

/// The only page that may mention the old name, in one line: the entry about the new name.
const CHANGELOG: &str = "CHANGELOG.md";

/// A replaced name.
struct Retired {
    name: &'static str,
    instead: &'static str,
}

const RETIRED: &[Retired] = &[
    Retired { name: "About", instead: "RequestContext" },
    Retired { name: "Answered", instead: "CheckOutcome" },
    Retired { name: "Behind", instead: "ServiceContext" },
    Retired { name: "Chosen", instead: "RuleSet" },
    Retired { name: "Demand", instead: "Check" },
    Retired { name: "NotNamed", instead: "KeyError" },
    Retired { name: "Observed", instead: "DecisionEvent" },
    Retired { name: "Otherwise", instead: "KeyFallback" },
    Retired { name: "Outside", instead: "Environment" },
    Retired { name: "Ruled", instead: "RuleOutcome" },
    Retired { name: "Spelling", instead: "PathNormalization" },
    Retired { name: "Stored", instead: "Backend" },
    Retired { name: "Unasked", instead: "CheckError" },
    Retired { name: "Unreached", instead: "StoreUnavailable" },
    Retired { name: "Which", instead: "LimitRef" },
    Retired { name: "Whose", instead: "OverrideScope" },
    Retired { name: "carried", instead: "migrate_state" },
    Retired { name: "give_back", instead: "refund" },
];

/// Words that are not part of any name, in any case: `told` also stands for `was_told` and `ToldOff`.
const RETIRED_WORDS: &[Retired] = &[
    Retired { name: "asked", instead: "request" },
    Retired { name: "brought", instead: "inline" },
    Retired { name: "desk", instead: "listener" },
    Retired { name: "door", instead: "api" },
    Retired { name: "doors", instead: "apis" },
    Retired { name: "errand", instead: "request_context" },
    Retired { name: "heard", instead: "received" },
    Retired { name: "passage", instead: "connection" },
    Retired { name: "patience", instead: "timeout" },
    Retired { name: "said", instead: "outcome" },
    Retired { name: "sick", instead: "unhealthy" },
    Retired { name: "told", instead: "decision" },
    Retired { name: "whose", instead: "key" },
];

/// The words of a name: `is_told` and `IsTold` both consist of `is` and `told`.
fn words_of(name: &str) -> impl Iterator<Item = String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for character in name.chars() {
        if character == '_' || character.is_uppercase() && was_lower {
            words.push(String::new());
        }
        was_lower = character.is_lowercase() || character.is_numeric();
        if let (true, Some(word)) = (character != '_', words.last_mut()) {
            word.extend(character.to_lowercase());
        }
    }
    words.into_iter()
}

fn retired_in(name: &str) -> Option<&'static Retired> {
    let word = |word: String| RETIRED_WORDS.iter().find(|retired| retired.name == word);
    RETIRED.iter().find(|retired| retired.name == name).or_else(|| words_of(name).find_map(word))
}

pub(super) fn check(file: &File) -> Vec<Finding> {
    let File { path, text } = file;
    let mut findings = Vec::new();
    if path.to_lowercase().contains(OLD_NAME) {
        findings.push(Finding::in_file(path, "the old name of the product; it is called Ratekeeper"));
    }
    let lines_allowed = usize::from(path == CHANGELOG);
    let lines = text.lines().enumerate().filter(|(_, line)| line.to_lowercase().contains(OLD_NAME));
    for (index, _) in lines.skip(lines_allowed) {
        let message = "the old name of the product; it is called Ratekeeper";
        findings.push(Finding::in_line(path, index + 1, message));
    }
    let code = match path.rsplit_once('.') {
        Some((_, "rs")) => code_only(text),
        Some((_, "lua")) => lua_code_only(text),
        _ => return findings,
    };
    for (index, line) in code.lines().enumerate() {
        let names = line.split(|character: char| !character.is_alphanumeric() && character != '_');
        for (name, retired) in names.filter_map(|name| Some((name, retired_in(name)?))) {
            let message = format!("`{name}`: write `{}` or a more exact word", retired.instead);
            findings.push(Finding::in_line(path, index + 1, message));
        }
    }
    findings
}

/// Lua code without strings and comments, line by line. Long strings and long comments (`[[`) count as code.
fn lua_code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    for line in text.lines() {
        let mut quote = None;
        let mut characters = line.chars().peekable();
        while let Some(character) = characters.next() {
            match (quote, character) {
                (Some(_), '\\') => {
                    characters.next();
                }
                (Some(open), _) if character == open => quote = None,
                (Some(_), _) => {}
                (None, '\'' | '"') => {
                    quote = Some(character);
                    // Otherwise the names on both sides of a string would be one.
                    code.push(' ');
                }
                (None, '-') if characters.peek() == Some(&'-') => break,
                (None, _) => code.push(character),
            }
        }
        code.push('\n');
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, text: &str) -> Vec<String> {
        let file = File { path: path.to_string(), text: text.to_string() };
        super::check(&file).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn old_name_is_found_in_any_case_inside_words_and_in_paths() {
        for text in
            [OLD_NAME.to_uppercase(), format!("{OLD_NAME}_requests_total"), format!("use {OLD_NAME};")]
        {
            assert_eq!(check("a.md", &text).len(), 1, "{text}");
        }
        assert_eq!(check(&format!("{OLD_NAME}/a.md"), "").len(), 1);
        assert!(check("CHANGELOG.md", OLD_NAME).is_empty());
        assert_eq!(check("CHANGELOG.md", &format!("{OLD_NAME}\n\n{OLD_NAME}\n{OLD_NAME}\n")).len(), 2);
    }

    #[test]
    fn retired_names_are_found_in_code_only() {
        assert_eq!(
            check("a.rs", "struct Whose;\n"),
            ["a.rs:1: `Whose`: write `OverrideScope` or a more exact word"]
        );
        for name in ["told", "was_told", "ToldOff", "IsTold", "TOLD", "PATIENCE_MAX"] {
            assert_eq!(check("a.rs", &format!("let {name} = 1;\n")).len(), 1, "{name}");
        }
        assert!(check("a.rs", "let stolde = indoors + unsaid;\n").is_empty());
        assert!(check("a.rs", "// Whose it is.\nlet a = \"Which\"; struct Whosever;\n").is_empty());
        assert!(check("a.md", "Which one?\n").is_empty());
    }

    #[test]
    fn retired_names_are_found_in_lua_code() {
        assert_eq!(
            check("a.lua", "local a = 1\nlocal function give_back(key)\n"),
            ["a.lua:2: `give_back`: write `refund` or a more exact word"]
        );
        let comments = "-- give_back\nlocal a = 'told' .. \"it's told\" .. '\\'told' -- told\n";
        assert!(check("a.lua", comments).is_empty());
        assert_eq!(check("a.lua", "local a = '--' .. told\n").len(), 1);
    }
}
