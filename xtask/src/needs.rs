//! Programs that the steps call.
//!
//! As root on a system with apt-get, what is missing is installed. Anywhere else it is named, with the command that
//! installs it: a chore does not ask for a password.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// A program and the Debian package that brings it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Need {
    program: &'static str,
    package: &'static str,
}

/// What a test installs Envoy into. Debian has the command without what it needs, so that only trying tells.
const VENV: Need = Need { program: "python3 -m venv", package: "python3-venv" };

// A C linker is not in the list: without one, this program would not have been built.
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
    Need { program: "wrk", package: "wrk" },
];

/// What to do about the missing programs.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Nothing,
    Install(Vec<&'static str>),
    Tell(String),
}

/// Sees to it that every program in the list is there, or says what to install.
pub(crate) fn provide() -> Result<()> {
    let missing: Vec<Need> = NEEDS.iter().copied().filter(|need| !is_there(*need)).collect();
    match plan(&missing, is_root() && is_on_path("apt-get")) {
        Plan::Nothing => Ok(()),
        Plan::Install(packages) => install(&packages),
        Plan::Tell(message) => bail!(message),
    }
}

/// Asks whether a component of the toolchain is there, as `cargo NAME`.
pub(crate) fn component(workspace: &Workspace, name: &str, component: &str) -> Result<()> {
    if !workspace.cargo(&format!("{name} --version")).succeeds() {
        bail!("`cargo {name}` is missing; install it with `rustup component add {component}`");
    }
    Ok(())
}

fn plan(missing: &[Need], can_install: bool) -> Plan {
    let programs: Vec<_> = missing.iter().map(|need| need.program).collect();
    let packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    match (missing, can_install) {
        ([], _) => Plan::Nothing,
        (_, true) => Plan::Install(packages),
        (_, false) => Plan::Tell(format!(
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
    // Debian keeps servers where only root looks.
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
    fn nothing_is_done_when_nothing_is_missing() {
        assert_eq!(plan(&[], true), Plan::Nothing);
        assert_eq!(plan(&[], false), Plan::Nothing);
    }

    #[test]
    fn what_is_missing_is_installed_where_that_is_possible() {
        assert_eq!(plan(&[REDIS], true), Plan::Install(vec!["redis"]));
    }

    #[test]
    fn elsewhere_the_message_names_program_and_command() {
        let Plan::Tell(message) = plan(&[REDIS], false) else { panic!("nothing may be installed here") };
        assert!(message.contains("missing: redis-server;"), "{message}");
        assert!(message.contains("apt-get install redis"), "{message}");
    }
}
