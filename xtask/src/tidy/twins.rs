//! A page and its Korean translation match: the same fenced blocks, byte for byte, and the same heading levels.

use super::{File, Finding};
use crate::markdown::{self, Block, Page};

const TRANSLATED: &str = "README.ko.md";

pub(super) fn check(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if files.iter().all(|file| file.path != TRANSLATED) {
        findings.push(Finding::in_file(TRANSLATED, "missing: README.md in Korean"));
    }
    for translation in files {
        let Some(stem) = translation.path.strip_suffix(".ko.md") else { continue };
        let original = format!("{stem}.md");
        match files.iter().find(|file| file.path == original) {
            Some(original) => findings.extend(compare(original, translation)),
            None => findings.push(Finding::in_file(&translation.path, format!("{original} is missing"))),
        }
    }
    findings
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
            (here, there) if here == there => format!("the levels of the headings differ from {source}"),
            (here, there) => format!("{here} headings, but {there} in {source}"),
        };
        findings.push(Finding::in_file(path, message));
    }
    if from.blocks.len() != to.blocks.len() {
        let message = format!("{} fenced blocks, but {} in {source}", to.blocks.len(), from.blocks.len());
        findings.push(Finding::in_file(path, message));
    }
    let is_other = |(from, to): &(&Block, &Block)| from.info != to.info || from.lines != to.lines;
    if let Some((from, to)) = from.blocks.iter().zip(&to.blocks).find(is_other) {
        let message = format!("this block differs from the one at {source}:{}", from.line);
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
    fn differing_block_is_reported_with_both_positions() {
        assert_eq!(
            check("```sh\nls\n```\n", "가\n```sh\nls -l\n```\n"),
            ["README.ko.md:2: this block differs from the one at README.md:1"]
        );
        assert_eq!(check("```sh\n```\n", "```console\n```\n").len(), 1);
    }

    #[test]
    fn missing_block_or_heading_is_counted() {
        assert_eq!(
            check("# A\n## B\n```\n```\n", "# 가\n"),
            [
                "README.ko.md: 1 headings, but 2 in README.md",
                "README.ko.md: 0 fenced blocks, but 1 in README.md"
            ]
        );
        assert_eq!(check("# A\n## B\n", "# 가\n# 나\n").len(), 1);
    }

    #[test]
    fn missing_page_is_found() {
        let file = |path: &str| File { path: path.to_string(), text: String::new() };
        assert_eq!(super::check(&[file("README.md")]).len(), 1);
        assert_eq!(super::check(&[file("README.ko.md")]).len(), 1);
    }
}
