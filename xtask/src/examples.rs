//! Runs the commands of README.md and docs/, by the kind of their fenced block:
//!
//! - `console`: each line that starts with `$ ` is run separately and must exit with 0. The lines below it are its
//!   expected stdout; a line `...` matches any number of lines. Without lines below, any output is accepted.
//! - `sh`: the block is run as one script that stops at the first failure; it must exit with 0.
//! - `sh background 8080`: the script runs until the end of the page; the next block waits until the port is open.
//! - any other: not run; `rust` blocks are doc tests of the library.
//!
//! Commands run at the root of the repository with the freshly built `ratekeeper` on the `PATH`. A console line that
//! ends with a backslash continues on the next line. Trailing blank lines of an output are ignored.

mod diff;
mod transcript;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::background;
use crate::markdown;
use crate::workspace::{self, Workspace};
use transcript::{Example, Item};

/// Time limit of a command; long enough for a build.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(600);

/// Maximum lines of output; a longer one should be piped through `head`.
const OUTPUT_LINES_MAX: usize = 10_000;

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut failures = 0_usize;
    for path in pages(workspace)? {
        let text =
            std::fs::read_to_string(workspace.root.join(&path)).with_context(|| format!("reading {path}"))?;
        let page = markdown::parse(&text).with_context(|| path.clone())?;
        let mut running = Vec::new();
        for block in &page.blocks {
            if let Some(port) = background::port(block) {
                let script = block.lines.join("\n");
                match background::start(shell(workspace, &script)?, port, COMMAND_TIME_MAX) {
                    Ok(started) => running.push(started),
                    Err(error) => {
                        println!("{path}:{}: {script}\n{error:#}", block.line);
                        failures += 1;
                    }
                }
                continue;
            }
            for item in transcript::items(block).with_context(|| format!("{path}:{}", block.line))? {
                failures += usize::from(!passes(workspace, &path, &item));
            }
        }
    }
    match failures {
        0 => Ok(()),
        1 => bail!("an example differs from its page; see above"),
        _ => bail!("{failures} examples differ from their page; see above"),
    }
}

fn pages(workspace: &Workspace) -> Result<Vec<String>> {
    let pages: Vec<String> = workspace.files()?.into_iter().filter(|file| markdown::is_page(file)).collect();
    if !pages.iter().any(|page| page == "README.md") {
        bail!("README.md is missing");
    }
    Ok(pages)
}

fn passes(workspace: &Workspace, path: &str, item: &Item) -> bool {
    match item {
        Item::Skip { line, command, why } => {
            println!("      {path}:{line}: skipped, {why}: {command}");
            true
        }
        Item::Run(example) => match check(workspace, example) {
            Ok(()) => {
                println!("      {path}:{}: ok: {}", example.line, example.title());
                true
            }
            Err(error) => {
                println!("{path}:{}: {}\n{error:#}", example.line, example.command);
                false
            }
        },
    }
}

fn check(workspace: &Workspace, example: &Example) -> Result<()> {
    let output = execute(shell(workspace, &example.command)?, COMMAND_TIME_MAX)?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let printed: Vec<&str> = printed.trim_end_matches('\n').lines().collect();
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!("{}\nstdout:\n{}\nstderr:\n{complaint}", output.status, printed.join("\n"));
    }
    if example.expected.is_empty() {
        return Ok(());
    }
    if printed.len() > OUTPUT_LINES_MAX {
        bail!("prints {} lines; pipe it through `head`", printed.len());
    }
    let expected: Vec<&str> = example.expected.iter().map(String::as_str).collect();
    match diff::diff(&expected, &printed) {
        None => Ok(()),
        Some(diff) => bail!("the output differs (- the page, + the command, | under the dots):\n{diff}"),
    }
}

fn shell(workspace: &Workspace, command: &str) -> Result<Command> {
    let built = workspace.target.join("release");
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    // Debian installs servers in /usr/sbin, which is often only in root's PATH.
    let servers = PathBuf::from("/usr/sbin");
    let folders: Vec<PathBuf> =
        [built].into_iter().chain(std::env::split_paths(&inherited)).chain([servers]).collect();
    let mut shell = workspace::command("sh", &workspace.root);
    shell.args(["-c", command]).env("PATH", std::env::join_paths(folders).context("setting PATH")?);
    Ok(shell)
}

/// Runs a command to its end, or kills it after `limit`.
fn execute(mut command: Command, limit: Duration) -> Result<Output> {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("starting sh")?;
    let id = child.id().to_string();
    let (sender, receiver) = mpsc::channel();
    // The wait runs in another thread, because `wait_with_output` has no timeout.
    thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(limit) {
        Ok(output) => output.context("waiting for the command"),
        Err(RecvTimeoutError::Timeout) => {
            Command::new("kill").arg(&id).status().context("starting kill")?;
            bail!("still running after {} s", limit.as_secs())
        }
        Err(RecvTimeoutError::Disconnected) => bail!("the thread that waits for the command is gone"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace() -> Workspace {
        Workspace { root: ".".into(), target: "target".into(), packages: Vec::new(), long_tests: false }
    }

    fn check(command: &str, expected: &[&str]) -> Result<(), String> {
        let expected = expected.iter().map(ToString::to_string).collect();
        let example = Example { line: 1, command: command.to_string(), expected };
        super::check(&workspace(), &example).map_err(|error| error.to_string())
    }

    #[test]
    fn example_with_the_expected_output_passes() {
        assert_eq!(check("echo a; echo b", &["a", "b"]), Ok(()));
        assert_eq!(check("echo a; echo b; echo c", &["a", "...", "c"]), Ok(()));
    }

    #[test]
    fn example_without_expected_lines_only_has_to_succeed() {
        assert_eq!(check("echo anything", &[]), Ok(()));
        assert!(check("exit 3", &[]).unwrap_err().contains('3'));
    }

    #[test]
    fn expected_output_with_a_failing_exit_code_fails() {
        assert!(check("echo a; echo why >&2; exit 1", &["a"]).unwrap_err().contains("why"));
    }

    #[test]
    fn unexpected_output_is_shown_as_a_diff() {
        assert!(check("echo b", &["a"]).unwrap_err().ends_with("- a\n+ b\n"));
    }

    #[test]
    fn command_over_its_time_limit_is_killed() {
        let endless = shell(&workspace(), "exec tail -f /dev/null").unwrap();
        let error = execute(endless, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("still running"), "{error}");
    }
}
