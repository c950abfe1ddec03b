//! What a configuration file refers to: the environment, and files beside it.

use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tollgate_config::Outside;

/// The largest file that is read: certificates and keys need far less.
const FILE_BYTES_MAX: usize = 1_000_000;

/// The environment of this process, and files by their paths from a folder.
pub(crate) struct Surroundings {
    folder: PathBuf,
    files: RefCell<Files>,
}

impl Surroundings {
    /// Of a configuration file, before which these were read.
    pub(crate) fn of(file: &Path, before: Files) -> Surroundings {
        let folder = file.parent().map(Path::to_owned).unwrap_or_default();
        Surroundings { folder, files: RefCell::new(before) }
    }

    /// Those, and every file that was asked for.
    pub(crate) fn into_files(self) -> Files {
        self.files.into_inner()
    }
}

/// Files that were read, and how they were then.
#[derive(Debug, Default)]
pub(crate) struct Files(Vec<(PathBuf, Option<Version>)>);

/// Changes whenever a file does: when that was, and its length.
type Version = (SystemTime, u64);

impl Files {
    /// To be called before a file is read: who changes it meanwhile has changed it.
    pub(crate) fn note(&mut self, path: PathBuf) {
        let version = version(&path);
        self.0.push((path, version));
    }

    /// Whether one of them is another by now. One that is gone is being replaced, or is no longer needed by a file that
    /// has changed itself.
    pub(crate) fn have_changed(&self) -> bool {
        self.0.iter().any(|(path, before)| version(path).is_some_and(|now| Some(now) != *before))
    }
}

fn version(path: &Path) -> Option<Version> {
    let about = std::fs::metadata(path).ok()?;
    Some((about.modified().ok()?, about.len()))
}

impl Outside for Surroundings {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn file(&self, path: &str) -> Result<String, String> {
        self.files.borrow_mut().note(self.path(path));
        let mut bytes = Vec::new();
        let file = File::open(self.path(path)).map_err(|error| error.to_string())?;
        // One byte more than is taken, so that a larger file is refused and not cut.
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
