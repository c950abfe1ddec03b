//! Shared test support: a process from a configuration file, an upstream, and clients.

mod client;
mod process;
mod terminal;
mod upstream;

use std::path::{Path, PathBuf};

pub(crate) use client::{Client, Load, Response, Tally, get};
pub(crate) use process::{Process, ratekeeper};
pub(crate) use terminal::Terminal;
pub(crate) use upstream::Upstream;

/// A folder for one test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    /// Returns the path of a file in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file atomically: a reader sees the old or the new content.
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

/// Returns a configuration with one route to an upstream, with additions at the top level (`above`) and in `gateway`.
pub(crate) fn one_route(upstream: &Upstream, above: &str, gateway: &str) -> String {
    let at = upstream.address();
    format!(
        "{above}\nadmin: 127.0.0.1:0\ngateway:\n  listen: 127.0.0.1:0\n  access_log: false\n{gateway}\n  \
         routes:\n    - {{ id: all, limits: all, upstream: http://{at} }}\n"
    )
}
