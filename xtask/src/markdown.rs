//! The parts of a Markdown page that are checked: fenced blocks and headings.

use anyhow::{Result, bail};

/// A page, as far as it is parsed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) blocks: Vec<Block>,
    /// The level of each heading, in order: 1 for `#`, 2 for `##`.
    pub(crate) headings: Vec<usize>,
}

/// A fenced block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// The line of the opening fence, counted from 1.
    pub(crate) line: usize,
    /// The info string after the opening fence, as in `rust,no_run`.
    pub(crate) info: String,
    pub(crate) lines: Vec<String>,
}

impl Block {
    /// Returns the first word of the info string.
    pub(crate) fn tag(&self) -> &str {
        self.info.split([',', ' ']).next().unwrap_or_default()
    }
}

/// An opening fence.
struct Fence {
    mark: char,
    length: usize,
    indent: usize,
}

impl Fence {
    fn open(line: &str) -> Option<(Fence, &str)> {
        let unindented = line.trim_start();
        let mark = unindented.chars().next().filter(|mark| matches!(mark, '`' | '~'))?;
        let info = unindented.trim_start_matches(mark);
        let length = unindented.len() - info.len();
        // A code span may also start a line with three backticks, but it closes on the same line.
        if length < 3 || (mark == '`' && info.contains('`')) {
            return None;
        }
        Some((Fence { mark, length, indent: line.len() - unindented.len() }, info.trim()))
    }

    fn is_closed_by(&self, line: &str) -> bool {
        let line = line.trim();
        line.len() >= self.length && line.chars().all(|character| character == self.mark)
    }

    /// Removes the indent that a line shares with the fence, as in a block inside a list.
    fn unindent<'a>(&self, line: &'a str) -> &'a str {
        let spaces = line.len() - line.trim_start_matches(' ').len();
        &line[spaces.min(self.indent)..]
    }
}

/// Returns true for README.md and the pages of docs/: their blocks are run, and they have a Korean translation.
///
/// Translations are excluded: tidy checks that their blocks equal those of the original.
pub(crate) fn is_page(path: &str) -> bool {
    let is_original = path.ends_with(".md") && !path.ends_with(".ko.md");
    is_original && (path == "README.md" || path.starts_with("docs/"))
}

pub(crate) fn parse(text: &str) -> Result<Page> {
    let mut page = Page { blocks: Vec::new(), headings: Vec::new() };
    let mut open: Option<(Fence, Block)> = None;
    for (index, line) in text.lines().enumerate() {
        match open.take() {
            Some((fence, block)) if fence.is_closed_by(line) => page.blocks.push(block),
            Some((fence, mut block)) => {
                block.lines.push(fence.unindent(line).to_string());
                open = Some((fence, block));
            }
            None => match Fence::open(line) {
                Some((fence, info)) => {
                    open =
                        Some((fence, Block { line: index + 1, info: info.to_string(), lines: Vec::new() }));
                }
                None => page.headings.extend(heading(line)),
            },
        }
    }
    if let Some((_, block)) = open {
        bail!("the block that opens in line {} is never closed", block.line);
    }
    Ok(page)
}

fn heading(line: &str) -> Option<usize> {
    let level = line.len() - line.trim_start_matches('#').len();
    ((1..=6).contains(&level) && line[level..].starts_with(' ')).then_some(level)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_the_readme_and_docs_without_translations() {
        assert!(is_page("README.md") && is_page("docs/gateway.md"));
        for other in ["README.ko.md", "docs/gateway.ko.md", "CHANGELOG.md", "docs/pictures/overview.svg"] {
            assert!(!is_page(other), "{other}");
        }
    }

    #[test]
    fn blocks_and_headings_are_found() {
        let page = parse("# A\n\n```sh\n# no heading\nls\n```\n## B\n#tag\n").unwrap();
        assert_eq!(page.headings, [1, 2]);
        assert_eq!(page.blocks.len(), 1);
        assert_eq!(page.blocks[0].line, 3);
        assert_eq!(page.blocks[0].lines, ["# no heading", "ls"]);
    }

    #[test]
    fn tag_is_the_first_word_of_the_info_string() {
        for (fence, tag) in
            [("```rust,no_run", "rust"), ("```console", "console"), ("``` sh x", "sh"), ("```", "")]
        {
            let page = parse(&format!("{fence}\n```\n")).unwrap();
            assert_eq!(page.blocks[0].tag(), tag, "{fence}");
        }
    }

    #[test]
    fn longer_fence_contains_a_shorter_one() {
        let page = parse("````md\n```sh\n```\n````\n").unwrap();
        assert_eq!(page.blocks.len(), 1);
        assert_eq!(page.blocks[0].lines, ["```sh", "```"]);
    }

    #[test]
    fn block_in_a_list_loses_the_indent_of_the_list() {
        let page = parse("- x\n  ```console\n  $ a\n    b\n  ```\n").unwrap();
        assert_eq!(page.blocks[0].lines, ["$ a", "  b"]);
    }

    #[test]
    fn code_span_of_three_backticks_is_not_a_block() {
        assert!(parse("```ls``` lists\n").unwrap().blocks.is_empty());
    }

    #[test]
    fn unclosed_block_is_an_error_that_names_its_line() {
        let error = parse("a\n```sh\nls\n").unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
    }
}
