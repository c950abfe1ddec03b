//! Relative links of Markdown pages lead to a file or folder of the repository, and to a heading that exists.

use super::{File, Finding};
use crate::markdown;

/// `paths` are all files of the repository, also binary ones.
pub(super) fn check(files: &[File], paths: &[String]) -> Vec<Finding> {
    let pages = files.iter().filter(|file| file.path.ends_with(".md"));
    pages.flat_map(|page| check_page(page, files, paths)).collect()
}

fn check_page(page: &File, files: &[File], paths: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in prose(&page.text) {
        for target in targets(line).filter(|target| !is_external(target)) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let linked = if file.is_empty() { Some(page.path.clone()) } else { resolve(&page.path, file) };
            let Some(linked) = linked.filter(|linked| exists(linked, paths)) else {
                findings.push(Finding::in_line(&page.path, number, format!("`{target}` does not exist")));
                continue;
            };
            let has_anchor = |file: &File| prose(&file.text).any(|(_, line)| slug(line) == anchor);
            if !anchor.is_empty() && !files.iter().any(|file| file.path == linked && has_anchor(file)) {
                let message = format!("`{target}`: {linked} has no such heading");
                findings.push(Finding::in_line(&page.path, number, message));
            }
        }
    }
    findings
}

/// The lines outside of fenced blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    // An unclosed block is an error of its page, which the step that runs the pages reports.
    let blocks = markdown::parse(text).map(|page| page.blocks).unwrap_or_default();
    let is_fenced = move |number: usize| {
        blocks.iter().any(|block| (block.line..=block.line + block.lines.len() + 1).contains(&number))
    };
    text.lines().enumerate().map(|(index, line)| (index + 1, line)).filter(move |(line, _)| !is_fenced(*line))
}

/// The targets of the links and pictures of a line, `[text](target)`.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

fn is_external(target: &str) -> bool {
    target.contains("://") || target.starts_with("mailto:")
}

/// Returns the path from the root, or `None` if the target is outside of the repository.
fn resolve(page: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

fn exists(linked: &str, paths: &[String]) -> bool {
    let is_inside = |path: &str| path.strip_prefix(linked).is_some_and(|rest| rest.starts_with('/'));
    paths.iter().any(|path| path == linked || is_inside(path))
}

/// The anchor that GitHub gives a heading; empty for other lines.
fn slug(line: &str) -> String {
    let text = line.trim_start_matches('#');
    if text.len() == line.len() || !text.starts_with(' ') {
        return String::new();
    }
    let kept = text.trim().chars().filter(|it| it.is_alphanumeric() || matches!(it, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|it| if it == ' ' { '-' } else { it }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks `docs/a.md` in a repository with a few files.
    fn check(text: &str) -> Vec<String> {
        let file = |path: &str, text: &str| File { path: path.to_string(), text: text.to_string() };
        let files = [file("docs/a.md", text), file("README.md", "# Title\n\n## Which one, and why?\n")];
        let paths = ["docs/a.md", "README.md", "docs/b.png", "examples/x.yaml"].map(str::to_string);
        super::check(&files, &paths).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn files_folders_headings_and_external_links_are_accepted() {
        for link in [
            "[r](../README.md)",
            "![p](b.png)",
            "[f](../examples) and [x](../examples/x.yaml)",
            "[h](../README.md#which-one-and-why)",
            "# Here\n[own](#here)",
            "[web](https://example.com/a#b) [mail](mailto:a@example.com)",
            "```md\n[not a link](missing.md)\n```",
        ] {
            assert_eq!(check(link), [""; 0], "{link}");
        }
    }

    #[test]
    fn link_to_a_missing_file_is_found_with_its_line() {
        assert_eq!(check("a\n[x](b.md)\n"), ["docs/a.md:2: `b.md` does not exist"]);
        assert_eq!(check("[x](README.md)"), ["docs/a.md:1: `README.md` does not exist"]);
        assert_eq!(check("[x](../../README.md)").len(), 1, "outside of the repository");
        assert_eq!(check("[x](../exam)").len(), 1, "a part of a folder's name");
        assert_eq!(check("[![p](c.png)](d.md)").len(), 2, "a picture that is a link");
    }

    #[test]
    fn link_to_a_missing_heading_is_found() {
        assert_eq!(
            check("[x](../README.md#who)"),
            ["docs/a.md:1: `../README.md#who`: README.md has no such heading"]
        );
    }
}
