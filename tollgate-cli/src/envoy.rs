//! The files of Envoy's reference rate limit service.

use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::input::config_text;
use crate::outside::Files;

/// The most files of a folder. Each is a domain.
const FILES_MAX: usize = 1_000;
/// The most bytes of all files together.
const BYTES_MAX: usize = 10_000_000;

/// All `*.yaml` and `*.yml` of a folder, by name, each with its path and its text. Files whose names begin with a dot are
/// those of editors.
pub(crate) fn files(folder: &Path, read: &mut Files) -> Result<Vec<(String, String)>, Failure> {
    // One that comes or goes changes the folder.
    read.note(folder.to_owned());
    let shown = folder.display();
    let cannot = |error: std::io::Error| Failure::Input(format!("cannot read {shown}: {error}"));
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if is_hidden || !path.extension().is_some_and(|end| end == "yaml" || end == "yml") || path.is_dir() {
            continue;
        }
        if paths.len() == FILES_MAX {
            return Err(Failure::Typed(format!("there are more than {FILES_MAX} files in {shown}")));
        }
        paths.push(path);
    }
    if paths.is_empty() {
        let what = format!("there is no file in {shown} whose name ends with .yaml or .yml");
        return Err(Failure::Typed(what));
    }
    paths.sort();
    let (mut files, mut bytes) = (Vec::new(), 0);
    for path in paths {
        read.note(path.clone());
        let text = config_text(&path)?;
        bytes += text.len();
        if bytes > BYTES_MAX {
            return Err(Failure::Typed(format!("the files in {shown} have more than {BYTES_MAX} bytes")));
        }
        files.push((path.display().to_string(), text));
    }
    Ok(files)
}
