//! Programs that take part, installed where that is possible.

use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use testbed::process::target_folder;

/// Where a program is, if it is installed.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian keeps servers where only root looks.
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// A program of a package of Debian, installed if it is missing and we may.
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
    // The lists may be there already, and reading them again takes long.
    let package_line = ["install", "--yes", "--no-install-recommends", package];
    if !install(&package_line) && install(&["update"]) {
        install(&package_line);
    }
    find(program).ok_or_else(|| format!("not installed; try `sudo apt-get install {package}`").into())
}

/// The program that packages contain: this one, or it is built, with this one's profile settings if the environment has any.
pub(crate) fn tollgate(built: Option<PathBuf>) -> Result<PathBuf, Box<dyn Error>> {
    if let Some(program) = built {
        return Ok(program);
    }
    let target = target_folder()?;
    eprintln!("building tollgate");
    let mut build = cargo();
    build
        .args(["build", "--quiet", "--profile", "dist", "--package", "tollgate-cli", "--target-dir"])
        .arg(&target)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    match succeeds(&mut build) {
        true => Ok(target.join("dist/tollgate")),
        false => Err("tollgate cannot be built".into()),
    }
}

/// The cargo that has built this.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Whether a command ends well.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    // What it says is for whoever waits; standard output is for the report.
    command.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}
