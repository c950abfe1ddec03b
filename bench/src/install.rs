//! Builds or installs the programs of a benchmark where possible.

use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use testbed::process::target_folder;

/// Returns the path of an installed program.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian installs servers in /usr/sbin, which is often only in root's PATH.
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Returns a program of a Debian package, which is installed if missing and permitted.
pub(crate) fn debian(program: &str, package: &str) -> Result<PathBuf, Box<dyn Error>> {
    if let Some(found) = find(program) {
        return Ok(found);
    }
    eprintln!("installing {package}");
    let install = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(arguments);
        succeeds(&mut command)
    };
    // Try without `apt-get update` first: the lists may be present, and updating them is slow.
    let package_line = ["install", "--yes", "--no-install-recommends", package];
    if !install(&package_line) && install(&["update"]) {
        install(&package_line);
    }
    find(program).ok_or_else(|| format!("not installed; try `sudo apt-get install {package}`").into())
}

/// Returns the given binary, or builds it with the profile of the packages and any profile settings in the
/// environment.
pub(crate) fn ratekeeper(built: Option<PathBuf>) -> Result<PathBuf, Box<dyn Error>> {
    if let Some(program) = built {
        return Ok(program);
    }
    let target = target_folder()?;
    eprintln!("building ratekeeper");
    let mut build = cargo();
    build
        .args(["build", "--quiet", "--profile", "dist", "--package", "ratekeeper-cli", "--target-dir"])
        .arg(&target)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    match succeeds(&mut build) {
        true => Ok(target.join("dist/ratekeeper")),
        false => Err("ratekeeper cannot be built".into()),
    }
}

/// Returns the cargo that built this program.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a command; returns true if it succeeds.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    // Discard its stdout, which is reserved for the report; stderr still shows progress.
    command.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}
