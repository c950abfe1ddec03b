//! No two types of one crate have the same name, so that a search for a name finds one declaration.

use std::collections::HashMap;

use super::rust_code::{code_only, is_word, tokens};
use super::{File, Finding};

pub(super) fn check(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    // The first declaration of each name, by crate.
    let mut first: HashMap<(&str, String), (&str, usize)> = HashMap::new();
    for file in files {
        let Some((package, source)) = file.path.split_once("/src/") else { continue };
        if !source.ends_with(".rs") || is_test(source) {
            continue;
        }
        for Declaration { name, line } in declarations(&file.text) {
            match first.get(&(package, name.clone())) {
                Some((path, other)) => {
                    let message =
                        format!("type `{name}` is also declared at {path}:{other}; rename one of them");
                    findings.push(Finding::in_line(&file.path, line, message));
                }
                None => {
                    first.insert((package, name), (&file.path, line));
                }
            }
        }
    }
    findings
}

/// Returns true for `tests.rs` and files below `tests/`: modules that are compiled for tests only.
fn is_test(source: &str) -> bool {
    source.split('/').any(|part| part == "tests" || part == "tests.rs")
}

#[derive(Debug, PartialEq, Eq)]
struct Declaration {
    name: String,
    /// Counted from 1.
    line: usize,
}

/// Returns the structs, enums, unions, traits and type aliases of a file, without associated types and without items
/// that are compiled for tests only.
fn declarations(text: &str) -> Vec<Declaration> {
    let code = code_only(text);
    let tokens = tokens(&code);
    let texts: Vec<&str> = tokens.iter().map(|token| token.text).collect();
    let mut found = Vec::new();
    // For each open block, whether it is the body of an impl or a trait.
    let mut blocks: Vec<bool> = Vec::new();
    let mut is_next_associated = false;
    let mut at = 0;
    while at < texts.len() {
        if texts[at..].starts_with(&["#", "[", "cfg", "(", "test", ")", "]"]) {
            at = end_of_item(&texts, at + 7);
            continue;
        }
        let starts_item = at == 0 || matches!(texts[at - 1], "{" | "}" | ";" | "]" | ")" | "pub" | "unsafe");
        let declared = texts.get(at + 1).copied().filter(|next| next.starts_with(is_word));
        match texts[at] {
            "{" => blocks.push(std::mem::take(&mut is_next_associated)),
            "}" => drop(blocks.pop()),
            ";" => is_next_associated = false,
            "impl" if starts_item => is_next_associated = true,
            keyword @ ("struct" | "enum" | "union" | "trait" | "type") if starts_item => {
                let is_associated = keyword == "type" && blocks.last() == Some(&true);
                if let Some(name) = declared.filter(|_| !is_associated) {
                    found.push(Declaration { name: name.to_owned(), line: tokens[at].line });
                }
                is_next_associated = keyword == "trait";
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Returns the position after an item: after its `;`, or after its block.
fn end_of_item(texts: &[&str], start: usize) -> usize {
    let mut depth = 0_usize;
    for (at, text) in texts.iter().enumerate().skip(start) {
        match *text {
            "{" | "(" | "[" => depth += 1,
            ")" | "]" => depth = depth.saturating_sub(1),
            "}" => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            ";" if depth == 0 => return at + 1,
            _ => {}
        }
    }
    texts.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        declarations(text).into_iter().map(|declaration| declaration.name).collect()
    }

    fn check(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<File> =
            files.iter().map(|(path, text)| File { path: (*path).into(), text: (*text).into() }).collect();
        super::check(&files).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_kind_of_type_is_found() {
        let text = "pub(crate) struct A;\nenum B { C }\n#[derive(Debug)]\npub union D { a: u8 }\n\
                    pub trait E: F<G> {}\ntype H<T> = Vec<T>;\nfn f() { struct I(u8); }\n";
        assert_eq!(names(text), ["A", "B", "D", "E", "H", "I"]);
    }

    #[test]
    fn associated_types_are_not_declarations() {
        let text = "impl<S> Service for A<S> where S: B {\n    type Error = ();\n    fn f() -> impl C { type D = u8; }\n\
                    }\ntrait E { type Item; fn g() {} }\nstruct F;\nimpl F {}\ntype G = u8;\n";
        assert_eq!(names(text), ["D", "E", "F", "G"]);
    }

    #[test]
    fn items_of_tests_are_ignored() {
        let text = "struct A;\n#[cfg(test)]\nmod tests {\n    struct A;\n}\n#[cfg(test)]\nuse b::{C, D};\nstruct B;\n";
        assert_eq!(names(text), ["A", "B"]);
        assert!(check(&[("x/src/a.rs", "struct A;"), ("x/src/a/tests.rs", "struct A;")]).is_empty());
        assert!(check(&[("x/src/a.rs", "struct A;"), ("x/tests/a.rs", "struct A;")]).is_empty());
    }

    #[test]
    fn comments_strings_and_variables_are_no_declarations() {
        assert!(
            names("// struct A;\nlet a = \"struct B\"; let union = union + b; macro!(struct $name);\n")
                .is_empty()
        );
    }

    #[test]
    fn second_type_of_a_name_is_reported_with_both_places() {
        assert_eq!(
            check(&[("x/src/a.rs", "struct A;\n"), ("x/src/b.rs", "\nenum A {}\n")]),
            ["x/src/b.rs:2: type `A` is also declared at x/src/a.rs:1; rename one of them"]
        );
    }

    #[test]
    fn crates_do_not_share_names() {
        assert!(check(&[("x/src/a.rs", "struct A;"), ("y/src/a.rs", "struct A;")]).is_empty());
    }
}
