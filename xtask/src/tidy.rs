//! Rules for the files themselves.
//!
//! Each rule has a module, and its findings state what to do instead. The rules apply to every file that is or could
//! be committed; ignored files, binary files and fuzz inputs are excluded.

mod crates;
mod links;
mod rust_code;
mod services;
mod text;
mod twins;
mod types;
mod words;

use std::fmt;
use std::fs;

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// One violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Relative to the root.
    path: String,
    /// Counted from 1; absent if the finding is about the whole file.
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

/// Fuzz inputs are malformed on purpose.
const INPUTS: &str = "fuzz/corpus/";

/// A larger file was probably built or downloaded.
const FILE_BYTES_MAX: u64 = 512 << 10;

/// A text file.
pub(crate) struct File {
    path: String,
    text: String,
}

pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let files = read(workspace)?;
    let mut findings: Vec<Finding> =
        files.iter().flat_map(|file| [text::check(file), words::check(file)].concat()).collect();
    findings.extend(large_files(workspace)?);
    findings.extend(crates::check(workspace)?);
    findings.extend(links::check(&files, &workspace.files()?));
    findings.extend(services::check(&files));
    findings.extend(twins::check(&files));
    findings.extend(types::check(&files));
    Ok(findings)
}

fn large_files(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for path in workspace.files()? {
        let bytes =
            fs::metadata(workspace.root.join(&path)).with_context(|| format!("reading {path}"))?.len();
        if bytes > FILE_BYTES_MAX {
            let message = format!(
                "{bytes} bytes, at most {FILE_BYTES_MAX}; built or downloaded files are not committed"
            );
            findings.push(Finding::in_file(&path, message));
        }
    }
    Ok(findings)
}

fn read(workspace: &Workspace) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for path in workspace.files()?.into_iter().filter(|path| !path.starts_with(INPUTS)) {
        let bytes = fs::read(workspace.root.join(&path)).with_context(|| format!("reading {path}"))?;
        // Files that are not UTF-8 are binary.
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(File { path, text });
        }
    }
    Ok(files)
}
