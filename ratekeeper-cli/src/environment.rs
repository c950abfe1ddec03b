//! What a configuration file refers to: environment variables, and files relative to its folder.

use std::cell::RefCell;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ratekeeper_config::{Environment, RedisAddressError};

use crate::error::reason;
use crate::input::open_regular;

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

/// Identifies a version of a file. The length and the modification time alone would miss a link that is moved to another
/// file, and a file that is written in place with its old time.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds of the modification, then of the change of the inode.
    times: [i64; 4],
}

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
    Some(Version {
        device: metadata.dev(),
        inode: metadata.ino(),
        bytes: metadata.len(),
        times: [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()],
    })
}

impl Environment for FileEnvironment {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn file(&self, path: &str) -> Result<String, String> {
        self.files.borrow_mut().record(self.path(path));
        let mut bytes = Vec::new();
        let file = open_regular(&self.path(path)).map_err(|error| reason(&error))?;
        // Read one byte more than the maximum, so that a larger file is rejected instead of truncated.
        file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|error| reason(&error))?;
        if bytes.len() > FILE_BYTES_MAX {
            return Err(format!("it has more than {FILE_BYTES_MAX} bytes"));
        }
        String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
    }

    fn check_redis_address(&self, address: &str) -> Result<(), RedisAddressError> {
        ratekeeper::redis::check_address(address).map_err(|error| RedisAddressError {
            reason: error.reason.to_owned(),
            example: error.example.to_owned(),
        })
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;
    use std::time::{Duration, SystemTime};

    use super::*;

    /// Writes a file of a fixed length and a fixed modification time.
    fn write(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }

    #[test]
    fn new_version_of_the_same_length_and_time_is_detected() {
        let folder = std::env::temp_dir().join(format!("ratekeeper-versions-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [first, second, link, new_link] =
            ["first", "second", "link", "new-link"].map(|it| folder.join(it));
        write(&first, "limit: 10");
        write(&second, "limit: 20");
        symlink(&first, &link).unwrap();
        let mut files = Files::default();
        files.record(link.clone());
        assert!(!files.have_changed());
        // As Kubernetes replaces a mounted configuration.
        symlink(&second, &new_link).unwrap();
        fs::rename(&new_link, &link).unwrap();
        assert!(files.have_changed());

        let mut files = Files::default();
        files.record(first.clone());
        assert!(!files.have_changed());
        write(&first, "limit: 30");
        assert!(files.have_changed());
        fs::remove_dir_all(&folder).unwrap();
    }
}
