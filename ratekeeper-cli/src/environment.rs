//! What a configuration file refers to: environment variables, and files relative to its folder.

use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ratekeeper_config::Environment;

/// The largest file that is read; certificates and keys are far smaller.
const FILE_BYTES_MAX: usize = 1_000_000;

/// The environment of this process, and files relative to a folder.
pub(crate) struct FileEnvironment {
    folder: PathBuf,
    files: RefCell<Files>,
}

impl FileEnvironment {
    /// Creates the environment of a configuration file; `before` lists the files already read.
    pub(crate) fn of(file: &Path, before: Files) -> FileEnvironment {
        let folder = file.parent().map(Path::to_owned).unwrap_or_default();
        FileEnvironment { folder, files: RefCell::new(before) }
    }

    /// Returns `before` and every file read since.
    pub(crate) fn into_files(self) -> Files {
        self.files.into_inner()
    }
}

/// Files that were read, with their versions at that time.
#[derive(Debug, Default)]
pub(crate) struct Files(Vec<(PathBuf, Option<Version>)>);

/// Identifies a version of a file: modification time and length.
type Version = (SystemTime, u64);

impl Files {
    /// Records a file's version. Call it before reading, so that a change during the read is detected.
    pub(crate) fn record(&mut self, path: PathBuf) {
        let version = version(&path);
        self.0.push((path, version));
    }

    /// Returns true if a file has a new version. A missing file does not count: it is being replaced, or the file
    /// that referred to it has changed too.
    pub(crate) fn have_changed(&self) -> bool {
        self.0.iter().any(|(path, before)| version(path).is_some_and(|now| Some(now) != *before))
    }
}

fn version(path: &Path) -> Option<Version> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

impl Environment for FileEnvironment {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn file(&self, path: &str) -> Result<String, String> {
        self.files.borrow_mut().record(self.path(path));
        let mut bytes = Vec::new();
        let file = File::open(self.path(path)).map_err(|error| error.to_string())?;
        // Read one byte more than the maximum, so that a larger file is rejected instead of truncated.
        file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        if bytes.len() > FILE_BYTES_MAX {
            return Err(format!("it has more than {FILE_BYTES_MAX} bytes"));
        }
        String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }
}
