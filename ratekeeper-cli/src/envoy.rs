//! Reads the configuration files of Envoy's reference rate limit service.

use std::fs;
use std::path::{Path, PathBuf};

use crate::environment::Files;
use crate::error::CliError;
use crate::input::regular_file_text;

/// Maximum number of files in a folder. Each file is a domain.
const FILES_MAX: usize = 1_000;
/// Maximum total size of all files.
const BYTES_MAX: usize = 10_000_000;

/// Reads all `*.yaml` and `*.yml` files of a folder, sorted by name; returns the path and text of each. Skips names
/// that start with a dot: editors use them for temporary files.
pub(crate) fn files(folder: &Path, read: &mut Files) -> Result<Vec<(String, String)>, CliError> {
    // Adding or removing a file changes the folder.
    read.record(folder.to_owned());
    let shown = folder.display().to_string();
    let cannot = |error: std::io::Error| CliError::cannot_read(&shown, &error);
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if is_hidden || !path.extension().is_some_and(|end| end == "yaml" || end == "yml") || path.is_dir() {
            continue;
        }
        if paths.len() == FILES_MAX {
            return Err(CliError::Usage(format!("{shown} has more than {FILES_MAX} .yaml and .yml files")));
        }
        paths.push(path);
    }
    if paths.is_empty() {
        let message = format!("{shown} has no .yaml or .yml file");
        return Err(CliError::Usage(message));
    }
    paths.sort();
    let (mut files, mut bytes) = (Vec::new(), 0);
    for path in paths {
        read.record(path.clone());
        let text = regular_file_text(&path)?;
        bytes += text.len();
        if bytes > BYTES_MAX {
            return Err(CliError::Usage(format!("the files in {shown} have more than {BYTES_MAX} bytes")));
        }
        files.push((path.display().to_string(), text));
    }
    Ok(files)
}
