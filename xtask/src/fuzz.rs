//! `cargo xtask fuzz`: searches for inputs that break a property, for a bounded time.
//!
//! The properties and the initial inputs are in the folder `fuzz`. An ordinary test runs the properties on these
//! inputs; fuzzing searches beyond them.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, command};

/// The targets: the files of `fuzz/fuzz_targets`.
pub(crate) const TARGETS: &[&str] = &["check", "client", "config", "key", "path", "resp"];

/// Default duration of each target.
pub(crate) const SECONDS: u32 = 60;

/// What to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FuzzPlan {
    targets: Vec<&'static str>,
    /// Duration of each target.
    seconds: u32,
}

impl FuzzPlan {
    /// Parses `[TARGET] [--seconds N]`; without a target, selects all.
    pub(crate) fn read(arguments: &[&str]) -> Result<FuzzPlan, String> {
        let mut plan = FuzzPlan { targets: Vec::new(), seconds: SECONDS };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            if *argument == "--seconds" {
                let seconds = rest.next().and_then(|typed| typed.parse().ok()).filter(|seconds| *seconds > 0);
                plan.seconds = seconds.ok_or("--seconds needs a whole number from 1 on")?;
                continue;
            }
            let target = TARGETS.iter().find(|target| *target == argument);
            plan.targets.push(target.ok_or_else(|| {
                format!("there is no fuzz target `{argument}`; the targets are {}", TARGETS.join(", "))
            })?);
        }
        if plan.targets.is_empty() {
            plan.targets = TARGETS.to_vec();
        }
        Ok(plan)
    }
}

/// Runs the targets one after the other; fails if any of them found an input.
pub(crate) fn run(plan: &FuzzPlan) -> Result<()> {
    let workspace = Workspace::load()?;
    if !succeeds(&workspace, &["cargo", "--version"]) {
        bail!(
            "fuzzing needs a nightly toolchain of Rust, and there is none; install it with \
             `rustup toolchain install nightly`"
        );
    }
    if !succeeds(&workspace, &["cargo", "fuzz", "--version"]) {
        workspace.cargo("install --locked cargo-fuzz").run()?;
    }
    let mut failed = Vec::new();
    for target in &plan.targets {
        println!("{target}: for {} s", plan.seconds);
        let before = artifacts(&workspace.root, target);
        if !fuzz(&workspace, target, plan.seconds)? {
            let found: Vec<PathBuf> =
                artifacts(&workspace.root, target).difference(&before).cloned().collect();
            failed.push(report(target, &found));
        }
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    println!("nothing was found");
    Ok(())
}

fn nightly(workspace: &Workspace, arguments: &[&str]) -> std::process::Command {
    // `cargo +nightly` works only with rustup's cargo proxy, which is not used below `cargo run`.
    let mut nightly = command("rustup", &workspace.root);
    nightly.args(["run", "nightly"]).args(arguments);
    nightly
}

fn succeeds(workspace: &Workspace, arguments: &[&str]) -> bool {
    let status = nightly(workspace, arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Returns true if a target ran for its whole time. New inputs are kept apart from the committed ones.
fn fuzz(workspace: &Workspace, target: &str, seconds: u32) -> Result<bool> {
    let folder = workspace.root.join("fuzz");
    let (grown, corpus) = (folder.join("grown").join(target), folder.join("corpus").join(target));
    fs::create_dir_all(&grown).with_context(|| format!("making {}", grown.display()))?;
    let status = nightly(workspace, &["cargo", "fuzz", "run", "--fuzz-dir"])
        .arg(&folder)
        .arg("--target-dir")
        .arg(workspace.target.join("fuzz"))
        .args([OsStr::new(target), grown.as_os_str(), corpus.as_os_str()])
        .args(["--", &format!("-max_total_time={seconds}"), "-timeout=10", "-print_final_stats=1"])
        .status()
        .context("starting cargo-fuzz")?;
    Ok(status.success())
}

/// Returns the failing inputs of a target, relative to the root.
fn artifacts(root: &Path, target: &str) -> BTreeSet<PathBuf> {
    let folder = Path::new("fuzz/artifacts").join(target);
    let entries = fs::read_dir(root.join(&folder)).into_iter().flatten().flatten();
    entries.map(|entry| folder.join(entry.file_name())).collect()
}

/// Returns the message for a target that failed.
fn report(target: &str, found: &[PathBuf]) -> String {
    if found.is_empty() {
        return format!("{target}: the run stopped early; see its output above");
    }
    let mut text = format!("{target}: found an input that breaks the property");
    for input in found {
        let input = input.display();
        text.push_str(&format!(
            "\n  reproduce: cargo +nightly fuzz run {target} {input}\
             \n  minimize:  cargo +nightly fuzz tmin {target} {input}\
             \n  when fixed: move it to fuzz/corpus/{target}; every test run executes it"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_arguments_every_target_runs_for_a_minute() {
        assert_eq!(FuzzPlan::read(&[]), Ok(FuzzPlan { targets: TARGETS.to_vec(), seconds: 60 }));
    }

    #[test]
    fn target_and_duration_are_accepted_in_either_order() {
        let expected = Ok(FuzzPlan { targets: vec!["path"], seconds: 5 });
        assert_eq!(FuzzPlan::read(&["path", "--seconds", "5"]), expected);
        assert_eq!(FuzzPlan::read(&["--seconds", "5", "path"]), expected);
    }

    #[test]
    fn unknown_target_or_invalid_duration_is_rejected() {
        assert!(
            FuzzPlan::read(&["paths"]).is_err_and(|message| message.contains("client, config, key, path"))
        );
        for wrong in [&["--seconds"][..], &["--seconds", "0"], &["--seconds", "-1"], &["--seconds", "x"]] {
            assert!(
                FuzzPlan::read(wrong).is_err_and(|message| message.contains("whole number")),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn list_of_targets_matches_the_folders() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
        let names = |folder: &str| -> BTreeSet<String> {
            let entries = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
            entries.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect()
        };
        let listed: BTreeSet<String> = TARGETS.iter().map(ToString::to_string).collect();
        assert_eq!(names("fuzz_targets"), listed);
        assert_eq!(names("corpus"), listed);
    }

    #[test]
    fn finding_is_reported_with_the_command_that_reproduces_it() {
        let text = report("key", &[PathBuf::from("fuzz/artifacts/key/crash-1")]);
        assert!(text.contains("cargo +nightly fuzz run key fuzz/artifacts/key/crash-1\n"), "{text}");
        assert!(report("key", &[]).contains("the run stopped early"));
    }
}
