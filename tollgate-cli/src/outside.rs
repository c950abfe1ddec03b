//! What a configuration file refers to: the environment, and files beside it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use tollgate_config::Outside;

/// The largest file that is read: certificates and keys need far less.
const FILE_BYTES_MAX: usize = 1_000_000;

/// The environment of this process, and files by their paths from a folder.
pub(crate) struct Surroundings {
    folder: PathBuf,
}

impl Surroundings {
    /// Of a configuration file.
    pub(crate) fn of(file: &Path) -> Surroundings {
        Surroundings { folder: file.parent().map(Path::to_owned).unwrap_or_default() }
    }
}

impl Outside for Surroundings {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn file(&self, path: &str) -> Result<String, String> {
        let mut bytes = Vec::new();
        let file = File::open(self.folder.join(path)).map_err(|error| error.to_string())?;
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
