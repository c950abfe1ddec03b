//! The paths and packages of the workspace, and cargo calls.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

/// The workspace as `cargo metadata` describes it.
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) packages: Vec<Package>,
    /// Whether tests run their long variants.
    pub(crate) long_tests: bool,
}

/// One crate of the workspace.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) manifest: PathBuf,
    /// Names of its dependencies, without dev-dependencies.
    pub(crate) uses: Vec<String>,
}

impl Workspace {
    pub(crate) fn load() -> Result<Workspace> {
        let own = std::env::var_os("CARGO_MANIFEST_DIR").context("start this as `cargo xtask`")?;
        let root = Path::new(&own).parent().context("xtask is not inside a workspace")?;
        Workspace::read(&metadata(root, &["--no-deps"])?)
    }

    fn read(metadata: &Value) -> Result<Workspace> {
        let packages = metadata["packages"].as_array().context("`cargo metadata` lists no packages")?;
        Ok(Workspace {
            root: text(metadata, "workspace_root")?.into(),
            target: text(metadata, "target_directory")?.into(),
            packages: packages.iter().map(Package::read).collect::<Result<_>>()?,
            long_tests: false,
        })
    }

    /// Returns a cargo command in this workspace; the arguments are separated by spaces.
    pub(crate) fn cargo(&self, arguments: &str) -> Cargo {
        let mut command = command("cargo", &self.root);
        command.args(arguments.split(' '));
        Cargo { shown: format!("cargo {arguments}"), command }
    }

    /// Returns the paths of files that are or could be committed, relative to the root.
    pub(crate) fn files(&self) -> Result<Vec<String>> {
        let output = command("git", &self.root)
            .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
            .stderr(Stdio::inherit())
            .output()
            .context("starting git")?;
        if !output.status.success() {
            bail!("`git ls-files` failed; this step works in a git clone only");
        }
        let listed = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
        let mut files: Vec<String> = listed.split_terminator('\0').map(String::from).collect();
        files.sort();
        files.dedup();
        // git still lists a deleted file until the deletion is committed.
        files.retain(|file| self.root.join(file).is_file());
        Ok(files)
    }
}

/// Returns what `cargo metadata` prints.
pub(crate) fn metadata(root: &Path, options: &[&str]) -> Result<Value> {
    let output = command("cargo", root)
        .args(["metadata", "--format-version", "1"])
        .args(options)
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo")?;
    if !output.status.success() {
        bail!("`cargo metadata` failed: {}", output.status);
    }
    serde_json::from_slice(&output.stdout).context("reading `cargo metadata`")
}

impl Package {
    fn read(package: &Value) -> Result<Package> {
        let dependencies = package["dependencies"].as_array().context("a package without dependencies")?;
        let used = dependencies.iter().filter(|dependency| dependency["kind"] != "dev");
        Ok(Package {
            name: text(package, "name")?,
            manifest: text(package, "manifest_path")?.into(),
            uses: used.map(|dependency| text(dependency, "name")).collect::<Result<_>>()?,
        })
    }
}

fn text(value: &Value, field: &str) -> Result<String> {
    let found = value[field].as_str().ok_or_else(|| anyhow!("`cargo metadata` has no `{field}`"))?;
    Ok(found.to_string())
}

/// Returns a command to run in `folder`, with the environment of a user's shell.
pub(crate) fn command(program: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder).stdin(Stdio::null());
    // `cargo run` sets these variables for the package xtask; child processes must not see them.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    command
}

/// A cargo command, with the line that a user would type for it.
pub(crate) struct Cargo {
    shown: String,
    command: Command,
}

impl Cargo {
    pub(crate) fn env(mut self, name: &str, value: &str) -> Cargo {
        let quote = if value.contains(' ') { "'" } else { "" };
        self.shown = format!("{name}={quote}{value}{quote} {}", self.shown);
        self.command.env(name, value);
        self
    }

    /// Sets a variable that a user need not set.
    pub(crate) fn quiet_env(mut self, name: &str, value: &str) -> Cargo {
        self.command.env(name, value);
        self
    }

    /// Adds compiler flags to those in the environment.
    pub(crate) fn flags(self, name: &str, more: &str) -> Cargo {
        let flags = match std::env::var(name) {
            Ok(present) if !present.trim().is_empty() => format!("{present} {more}"),
            _ => more.to_string(),
        };
        self.env(name, &flags)
    }

    /// Prints the command and runs it with inherited output.
    pub(crate) fn run(mut self) -> Result<()> {
        println!("      {}", self.shown);
        let status = self.command.status().context("starting cargo")?;
        if !status.success() {
            bail!("`{}` failed: {status}", self.shown);
        }
        Ok(())
    }

    /// Prints the command, runs it and returns its stdout; stderr is inherited.
    pub(crate) fn output(mut self) -> Result<String> {
        println!("      {}", self.shown);
        let output = self.command.stderr(Stdio::inherit()).output().context("starting cargo")?;
        if !output.status.success() {
            bail!("`{}` failed: {}", self.shown, output.status);
        }
        String::from_utf8(output.stdout).context("cargo prints what is not UTF-8")
    }

    /// Runs the command silently; returns true if it succeeds.
    pub(crate) fn succeeds(mut self) -> bool {
        let status = self.command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_without_dev_dependencies() {
        let metadata = serde_json::json!({
            "workspace_root": "/x", "target_directory": "/x/target",
            "packages": [{
                "name": "a", "manifest_path": "/x/a/Cargo.toml",
                "dependencies": [
                    { "name": "b", "kind": null },
                    { "name": "c", "kind": "build" },
                    { "name": "d", "kind": "dev" },
                ],
            }],
        });
        let workspace = Workspace::read(&metadata).unwrap();
        assert_eq!(workspace.packages[0].uses, ["b", "c"]);
    }

    #[test]
    fn shown_command_can_be_pasted_into_a_shell() {
        let workspace =
            Workspace { root: ".".into(), target: "target".into(), packages: Vec::new(), long_tests: false };
        let cargo = workspace.cargo("doc --no-deps").env("A", "-D warnings").env("B", "3");
        assert_eq!(cargo.shown, "B=3 A='-D warnings' cargo doc --no-deps");
    }
}
