//! What holds for the files themselves, whatever they do.
//!
//! Every rule has a file below and says, in its finding, what to do instead. The rules see each file that is
//! committed or could be; ignored files, files that are not text and a fuzzer's inputs are left alone.

mod crates;
mod rust_code;
mod text;
mod twins;

use std::fmt;
use std::fs;

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// One thing to tidy up.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Relative to the root.
    path: String,
    /// Counted from 1; absent when the finding is about the whole file.
    line: Option<usize>,
    message: String,
}

impl Finding {
    fn in_line(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_string(), line: Some(line), message: message.into() }
    }

    fn in_file(path: &str, message: impl Into<String>) -> Finding {
        Finding { path: path.to_string(), line: None, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(out, "{}:{line}: {}", self.path, self.message),
            None => write!(out, "{}: {}", self.path, self.message),
        }
    }
}

/// What is in these files is there because it is odd.
const INPUTS: &str = "fuzz/corpus/";

/// A text file.
pub(crate) struct File {
    path: String,
    text: String,
}

pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let files = read(workspace)?;
    let mut findings: Vec<Finding> = files.iter().flat_map(text::check).collect();
    findings.extend(crates::check(workspace)?);
    findings.extend(twins::check(&files));
    Ok(findings)
}

fn read(workspace: &Workspace) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for path in workspace.files()?.into_iter().filter(|path| !path.starts_with(INPUTS)) {
        let bytes = fs::read(workspace.root.join(&path)).with_context(|| format!("reading {path}"))?;
        // What is not UTF-8 is not text.
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(File { path, text });
        }
    }
    Ok(files)
}
