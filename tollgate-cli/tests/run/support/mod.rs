//! What the tests have in common: a process by a file, an upstream, and clients.

mod client;
mod process;
mod upstream;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::timeout;

pub(crate) use client::{Answer, Client, Load, Tally, get};
pub(crate) use process::{Process, tollgate};
pub(crate) use upstream::Upstream;

/// Long enough on the busiest machine: only a test that has failed waits for so long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Until something is so.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(timeout(PATIENCE, waiting).await.is_ok(), "it never came to this: {what}");
}

/// A folder for one test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    /// Writes a file whole: whoever reads it sees the old one or the new one.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let (new, path) = (self.0.join(format!("{name}.new")), self.0.join(name));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, &path).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file with one route to an upstream; more about everything `above`, and about the gateway.
pub(crate) fn one_route(upstream: &Upstream, above: &str, gateway: &str) -> String {
    let at = upstream.address();
    format!(
        "{above}\nadmin: 127.0.0.1:0\ngateway:\n  listen: 127.0.0.1:0\n  access_log: false\n{gateway}\n  \
         routes:\n    - {{ id: all, upstream: http://{at} }}\n"
    )
}
