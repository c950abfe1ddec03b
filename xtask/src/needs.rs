//! Programs that the steps call.
//!
//! As root on a system with apt-get, missing programs are installed. Elsewhere the error names them and the command
//! that installs them, because a task must not ask for a password.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// A program and its Debian package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Need {
    program: &'static str,
    package: &'static str,
}

/// The module with which a test installs Envoy. Debian ships it without its dependencies, so it is tested by
/// importing it.
const VENV: Need = Need { program: "python3 -m venv", package: "python3-venv" };

// A C linker is not listed: without one, this program could not have been built.
const NEEDS: &[Need] = &[
    Need { program: "curl", package: "curl" },
    Need { program: "git", package: "git" },
    Need { program: "haproxy", package: "haproxy" },
    Need { program: "nginx", package: "nginx" },
    Need { program: "protoc", package: "protobuf-compiler" },
    Need { program: "python3", package: "python3" },
    VENV,
    Need { program: "redis-server", package: "redis-server" },
    Need { program: "redis-cli", package: "redis-tools" },
    Need { program: "taskset", package: "util-linux" },
    Need { program: "valgrind", package: "valgrind" },
    Need { program: "wrk", package: "wrk" },
];

/// What to do about missing programs.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    Install(Vec<&'static str>),
    Fail(String),
}

/// Installs the missing programs, or fails with the command that installs them.
pub(crate) fn provide() -> Result<()> {
    let missing: Vec<Need> = NEEDS.iter().copied().filter(|need| !is_there(*need)).collect();
    match plan(&missing, is_root() && is_on_path("apt-get")) {
        Action::Nothing => Ok(()),
        Action::Install(packages) => install(&packages),
        Action::Fail(message) => bail!(message),
    }
}

/// Checks that a component of the toolchain is installed, as `cargo NAME`.
pub(crate) fn component(workspace: &Workspace, name: &str, component: &str) -> Result<()> {
    if !workspace.cargo(&format!("{name} --version")).succeeds() {
        bail!("`cargo {name}` is missing; install it with `rustup component add {component}`");
    }
    Ok(())
}

fn plan(missing: &[Need], can_install: bool) -> Action {
    let programs: Vec<_> = missing.iter().map(|need| need.program).collect();
    let packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    match (missing, can_install) {
        ([], _) => Action::Nothing,
        (_, true) => Action::Install(packages),
        (_, false) => Action::Fail(format!(
            "missing: {}; install with the system's package manager, on Debian or Ubuntu `sudo apt-get install {}`",
            programs.join(", "),
            packages.join(" ")
        )),
    }
}

fn install(packages: &[&str]) -> Result<()> {
    println!("installing {}", packages.join(" "));
    let mut install = vec!["install", "--yes", "--no-install-recommends"];
    install.extend(packages);
    for arguments in [&["update"][..], &install] {
        let shown = arguments.join(" ");
        let status = Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(arguments)
            .status()
            .context("starting apt-get")?;
        if !status.success() {
            bail!("`apt-get {shown}` failed: {status}");
        }
    }
    Ok(())
}

fn is_there(need: Need) -> bool {
    if need == VENV {
        let imported = Command::new("python3").args(["-c", "import ensurepip, venv"]).output();
        return imported.is_ok_and(|output| output.status.success());
    }
    is_on_path(need.program)
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian installs servers in /usr/sbin, which is often only in root's PATH.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    folders.into_iter().any(|folder| folder.join(program).is_file())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDIS: Need = Need { program: "redis-server", package: "redis" };

    #[test]
    fn complete_system_needs_no_installation() {
        assert_eq!(plan(&[], true), Action::Nothing);
        assert_eq!(plan(&[], false), Action::Nothing);
    }

    #[test]
    fn missing_programs_are_installed_where_possible() {
        assert_eq!(plan(&[REDIS], true), Action::Install(vec!["redis"]));
    }

    #[test]
    fn elsewhere_the_error_names_program_and_command() {
        let Action::Fail(message) = plan(&[REDIS], false) else { panic!("nothing may be installed here") };
        assert!(message.contains("missing: redis-server;"), "{message}");
        assert!(message.contains("apt-get install redis"), "{message}");
    }
}
