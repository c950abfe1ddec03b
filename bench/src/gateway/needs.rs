//! The programs that take part, installed where that is possible.

use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use testbed::Envoy;

/// What there is.
pub(super) struct Programs {
    pub(super) haproxy: Option<PathBuf>,
    pub(super) envoy: Option<PathBuf>,
    /// Who does not take part, and why.
    pub(super) left_out: Vec<String>,
}

impl Programs {
    /// Installs what is missing, if we may. Without nginx and wrk there is nothing to compare and nobody who asks.
    pub(super) fn provide() -> Result<Programs, Box<dyn Error>> {
        for program in ["nginx", "wrk"] {
            debian(program)?;
        }
        let mut left_out = Vec::new();
        let mut or_without = |name: &str, found: Result<PathBuf, Box<dyn Error>>| {
            found.map_err(|why| left_out.push(format!("{name}: {why}"))).ok()
        };
        let haproxy = or_without("HAProxy", debian("haproxy"));
        let envoy = or_without("Envoy", Envoy::program().map_err(Into::into));
        Ok(Programs { haproxy, envoy, left_out })
    }
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian keeps servers where only root looks.
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

fn debian(package: &str) -> Result<PathBuf, Box<dyn Error>> {
    if let Some(found) = find(package) {
        return Ok(found);
    }
    eprintln!("installing {package}");
    let install = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(arguments);
        succeeds(&mut command)
    };
    // The lists may be there already, and reading them again takes long.
    let package_line = ["install", "--yes", "--no-install-recommends", package];
    if !install(&package_line) && install(&["update"]) {
        install(&package_line);
    }
    find(package).ok_or_else(|| format!("not installed; try `sudo apt-get install {package}`").into())
}

fn succeeds(command: &mut Command) -> bool {
    // What it says is for whoever waits; standard output is for the report.
    command.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}
