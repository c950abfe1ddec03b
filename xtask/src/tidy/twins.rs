//! Every page has a Korean translation that matches it: the same fenced blocks, byte for byte, and the same heading
//! levels. The `readme` step runs the blocks of the originals only, so this rule makes it cover the translations.
//!
//! The reference is in English only: it is generated from the code.
//!
//! The two READMEs also have a maximum length.

use super::{File, Finding};
use crate::markdown::{self, Block, Page};

/// Maximum lines of a README; details belong in docs/.
const README_LINES_MAX: usize = 200;
/// Pages that are generated from the code.
const REFERENCE: &str = "docs/reference/";

pub(super) fn check(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_translated = |file: &&File| markdown::is_page(&file.path) && !file.path.starts_with(REFERENCE);
    for original in files.iter().filter(is_translated) {
        let translation = format!("{}.ko.md", original.path.trim_end_matches(".md"));
        if files.iter().all(|file| file.path != translation) {
            let message = format!("missing; translate {} with the same headings and blocks", original.path);
            findings.push(Finding::in_file(&translation, message));
        }
    }
    for translation in files {
        let Some(stem) = translation.path.strip_suffix(".ko.md") else { continue };
        let original = format!("{stem}.md");
        match files.iter().find(|file| file.path == original) {
            Some(original) => findings.extend(compare(original, translation)),
            None => {
                let message = format!("{original} is missing; write it, or delete its translation");
                findings.push(Finding::in_file(&translation.path, message));
            }
        }
    }
    findings.extend(files.iter().filter_map(length));
    findings
}

/// Returns a finding if the file is a README that is too long.
fn length(file: &File) -> Option<Finding> {
    let lines = file.text.lines().count();
    let is_long = matches!(file.path.as_str(), "README.md" | "README.ko.md") && lines > README_LINES_MAX;
    let message = format!("{lines} lines; move details to docs/, at most {README_LINES_MAX} stay");
    is_long.then(|| Finding::in_file(&file.path, message))
}

fn compare(original: &File, translation: &File) -> Vec<Finding> {
    let parse = |file: &File| {
        markdown::parse(&file.text).map_err(|error| vec![Finding::in_file(&file.path, error.to_string())])
    };
    match (parse(original), parse(translation)) {
        (Ok(from), Ok(to)) => differences(original, &from, translation, &to),
        (Err(findings), _) | (_, Err(findings)) => findings,
    }
}

fn differences(original: &File, from: &Page, translation: &File, to: &Page) -> Vec<Finding> {
    let (source, path) = (&original.path, &translation.path);
    let mut findings = Vec::new();
    if from.headings != to.headings {
        let counts = (to.headings.len(), from.headings.len());
        let message = match counts {
            (here, there) if here == there => {
                format!("the levels of the headings differ from {source}; use the same levels")
            }
            (here, there) => format!("{here} headings, but {there} in {source}; translate all of them"),
        };
        findings.push(Finding::in_file(path, message));
    }
    if from.blocks.len() != to.blocks.len() {
        let (here, there) = (to.blocks.len(), from.blocks.len());
        let message = format!("{here} fenced blocks, but {there} in {source}; copy all of them");
        findings.push(Finding::in_file(path, message));
    }
    let is_other = |(from, to): &(&Block, &Block)| from.info != to.info || from.lines != to.lines;
    if let Some((from, to)) = from.blocks.iter().zip(&to.blocks).find(is_other) {
        let message = format!("this block differs from the one at {source}:{}; copy it unchanged", from.line);
        findings.push(Finding::in_line(path, to.line, message));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(original: &str, translation: &str) -> Vec<String> {
        let file = |path: &str, text: &str| File { path: path.to_string(), text: text.to_string() };
        let files = [file("README.ko.md", translation), file("README.md", original)];
        super::check(&files).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn translation_may_differ_in_prose_only() {
        assert!(check("# A\nb\n```sh\nls\n```\n", "# 가\n나\n```sh\nls\n```\n다\n").is_empty());
    }

    #[test]
    fn reference_pages_need_no_translation() {
        let missing = |path: &str| {
            let files = [File { path: path.to_string(), text: "# A\n".to_string() }];
            super::check(&files).len()
        };
        assert_eq!((missing("docs/reference/metrics.md"), missing("docs/metrics.md")), (0, 1));
    }

    #[test]
    fn differing_block_is_reported_with_both_positions() {
        assert_eq!(
            check("```sh\nls\n```\n", "가\n```sh\nls -l\n```\n"),
            ["README.ko.md:2: this block differs from the one at README.md:1; copy it unchanged"]
        );
        assert_eq!(check("```sh\n```\n", "```console\n```\n").len(), 1);
    }

    #[test]
    fn missing_block_or_heading_is_counted() {
        assert_eq!(
            check("# A\n## B\n```\n```\n", "# 가\n"),
            [
                "README.ko.md: 1 headings, but 2 in README.md; translate all of them",
                "README.ko.md: 0 fenced blocks, but 1 in README.md; copy all of them"
            ]
        );
        assert_eq!(check("# A\n## B\n", "# 가\n# 나\n").len(), 1);
    }

    fn check_paths(paths: &[&str]) -> Vec<String> {
        let file = |path: &&str| File { path: path.to_string(), text: String::new() };
        let files: Vec<File> = paths.iter().map(file).collect();
        super::check(&files).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn page_without_a_translation_is_found() {
        assert_eq!(
            check_paths(&["README.md", "docs/redis.md"]),
            [
                "README.ko.md: missing; translate README.md with the same headings and blocks",
                "docs/redis.ko.md: missing; translate docs/redis.md with the same headings and blocks"
            ]
        );
        assert!(check_paths(&["README.md", "README.ko.md", "docs/redis.ko.md", "docs/redis.md"]).is_empty());
    }

    #[test]
    fn other_pages_need_no_translation() {
        assert!(check_paths(&["CHANGELOG.md", "vectors/README.md", "docs/pictures/overview.svg"]).is_empty());
    }

    #[test]
    fn translation_without_an_original_is_found() {
        assert_eq!(
            check_paths(&["docs/redis.ko.md"]),
            ["docs/redis.ko.md: docs/redis.md is missing; write it, or delete its translation"]
        );
    }

    #[test]
    fn pages_in_docs_are_compared() {
        let file = |path: &str, text: &str| File { path: path.to_string(), text: text.to_string() };
        let files = [file("docs/a.md", "```sh\nls\n```\n"), file("docs/a.ko.md", "```sh\nls -l\n```\n")];
        assert_eq!(
            super::check(&files).iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["docs/a.ko.md:1: this block differs from the one at docs/a.md:1; copy it unchanged"]
        );
    }

    #[test]
    fn long_readme_is_found() {
        let (short, long) = ("a\n".repeat(README_LINES_MAX), "a\n".repeat(README_LINES_MAX + 1));
        assert!(check(&short, &short).is_empty());
        assert_eq!(
            check(&long, &long),
            [
                "README.ko.md: 201 lines; move details to docs/, at most 200 stay",
                "README.md: 201 lines; move details to docs/, at most 200 stay"
            ]
        );
        let page = |path: &str| File { path: path.to_string(), text: long.clone() };
        assert!(super::check(&[page("docs/a.md"), page("docs/a.ko.md")]).is_empty());
    }
}
