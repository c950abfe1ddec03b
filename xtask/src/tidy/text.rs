//! Forbidden patterns, white space and file sizes.

use super::rust_code::code_only;
use super::{File, Finding};

/// Maximum lines of a source file; a longer one lacks a single purpose.
const RUST_LINES_MAX: usize = 600;

/// Paths that may be longer, each with the reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// A forbidden pattern, and what to do instead.
struct Rule {
    pattern: &'static str,
    seen: Seen,
    instead: &'static str,
}

/// Where a rule applies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// Every text file, including comments and strings.
    Anywhere,
    /// Rust code only: comments and strings may mention the pattern.
    RustCode,
}

// The patterns of `Anywhere` are concatenated from halves, because this file would otherwise break its own rules.
const RULES: &[Rule] = &[
    Rule { pattern: concat!("TO", "DO"), seen: Seen::Anywhere, instead: "finish it, or open an issue" },
    Rule { pattern: concat!("FIX", "ME"), seen: Seen::Anywhere, instead: "mend it, or open an issue" },
    Rule { pattern: concat!("XX", "X"), seen: Seen::Anywhere, instead: "say in a sentence what is odd here" },
    Rule {
        pattern: concat!("/wo", "rk/"),
        seen: Seen::Anywhere,
        instead: "paths are relative to the repository",
    },
    Rule {
        pattern: concat!("/ro", "ot/"),
        seen: Seen::Anywhere,
        instead: "paths are relative to the repository",
    },
    Rule {
        pattern: concat!("/ho", "me/"),
        seen: Seen::Anywhere,
        instead: "paths are relative to the repository",
    },
    Rule {
        pattern: concat!("../sha", "red"),
        seen: Seen::Anywhere,
        instead: "nothing outside the repository is mentioned",
    },
    Rule { pattern: "dbg!", seen: Seen::RustCode, instead: "remove it" },
    Rule { pattern: "#[ignore", seen: Seen::RustCode, instead: "a test runs, or it goes" },
    Rule { pattern: "thread::sleep", seen: Seen::RustCode, instead: "set a ManualClock" },
    Rule { pattern: "unsafe", seen: Seen::RustCode, instead: "nothing here needs raw memory" },
];

pub(super) fn check(file: &File) -> Vec<Finding> {
    let File { path, text } = file;
    let is_rust = path.ends_with(".rs");
    let mut findings = Vec::new();

    for (number, line) in numbered(text) {
        if line.ends_with([' ', '\t', '\r']) {
            findings.push(Finding::in_line(path, number, "white space at the end of the line"));
        }
        if is_rust && line.contains('\t') {
            findings.push(Finding::in_line(path, number, "a tab; indent with spaces"));
        }
    }

    search(path, text, Seen::Anywhere, &mut findings);
    if is_rust {
        search(path, &code_only(text), Seen::RustCode, &mut findings);
        let lines = text.lines().count();
        if lines > RUST_LINES_MAX && LONG_FILES.iter().all(|(allowed, _)| allowed != path) {
            let message =
                format!("{lines} lines; split it by what its parts do, at {RUST_LINES_MAX} at most");
            findings.push(Finding::in_file(path, message));
        }
    }
    findings
}

fn search(path: &str, text: &str, seen: Seen, findings: &mut Vec<Finding>) {
    for rule in RULES.iter().filter(|rule| rule.seen == seen) {
        for (number, _) in numbered(text).filter(|(_, line)| holds(line, rule.pattern)) {
            let message = format!("`{}`: {}", rule.pattern, rule.instead);
            findings.push(Finding::in_line(path, number, message));
        }
    }
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split('\n').enumerate().map(|(index, line)| (index + 1, line))
}

/// Returns true if the line contains the pattern as a whole word, or an absolute path as the start of a path.
fn holds(line: &str, pattern: &str) -> bool {
    line.match_indices(pattern).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + pattern.len()..].chars().next();
        starts_anew(before, pattern) && ends_there(pattern, after)
    })
}

fn starts_anew(before: Option<char>, pattern: &str) -> bool {
    match before {
        Some(before) if pattern.starts_with(is_word) => !is_word(before),
        // `docs` or `..` before the slash make it a relative path, `example.com` a URL.
        Some(before) if pattern.starts_with('/') => !is_word(before) && !matches!(before, '.' | '~' | '-'),
        _ => true,
    }
}

fn ends_there(pattern: &str, after: Option<char>) -> bool {
    !(pattern.ends_with(is_word) && after.is_some_and(is_word))
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the findings of a file as printed.
    fn check(path: &str, text: &str) -> Vec<String> {
        let file = File { path: path.to_string(), text: text.to_string() };
        super::check(&file).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn clean_files_have_no_findings() {
        assert!(check("a.rs", "fn main() {}\n").is_empty());
        assert!(check("Makefile", "all:\n\tcargo build\n").is_empty());
    }

    #[test]
    fn white_space_is_reported_with_its_line() {
        assert_eq!(check("a.md", "a\nb \n"), ["a.md:2: white space at the end of the line"]);
        assert_eq!(check("a.md", "a\r\n"), ["a.md:1: white space at the end of the line"]);
        assert_eq!(check("a.rs", "\tf();\n"), ["a.rs:1: a tab; indent with spaces"]);
    }

    #[test]
    fn notes_to_self_are_found_in_any_file() {
        for word in [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")] {
            assert_eq!(check("a.rs", &format!("// {word}: later\n")).len(), 1, "{word}");
            assert_eq!(check("a.yml", &format!("# {word}\n")).len(), 1, "{word}");
            assert!(check("a.sh", &format!("mktemp {word}{word}\n")).is_empty(), "{word} inside a word");
        }
    }

    #[test]
    fn machine_specific_paths_are_found() {
        for folder in [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")] {
            assert_eq!(check("a.md", &format!("see {folder}x\n")).len(), 1, "{folder}");
            assert_eq!(check("a.rs", &format!("let p = \"{folder}x\";\n")).len(), 1, "{folder}");
            assert!(check("a.md", &format!("docs{folder}x, ..{folder}x\n")).is_empty(), "{folder}");
            assert!(check("a.md", &format!("https://example.com{folder}x\n")).is_empty(), "{folder}");
        }
    }

    #[test]
    fn code_patterns_are_found_in_code_only() {
        for code in ["unsafe {}", "dbg!(x)", "std::thread::sleep(d)", "#[ignore]", "#[ignore = \"slow\"]"] {
            assert_eq!(check("a.rs", &format!("{code}\n")).len(), 1, "{code}");
            assert!(check("a.rs", &format!("// {code}\n")).is_empty(), "{code} in a comment");
            assert!(check("a.md", &format!("{code}\n")).is_empty(), "{code} in prose");
        }
        assert!(check("a.rs", "#![forbid(unsafe_code)]\n").is_empty());
    }

    #[test]
    fn long_source_file_is_found() {
        assert!(check("a.rs", &"f();\n".repeat(RUST_LINES_MAX)).is_empty());
        assert_eq!(check("a.rs", &"f();\n".repeat(RUST_LINES_MAX + 1)).len(), 1);
        assert!(check("a.jsonl", &"{}\n".repeat(RUST_LINES_MAX + 1)).is_empty());
    }
}
