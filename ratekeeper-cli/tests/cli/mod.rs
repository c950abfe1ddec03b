//! The command as a user sees it: output, messages and exit codes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

mod compare;
mod completions;
mod decisions;
mod errors;
mod init;
mod memory;
mod migrate;

mod picture;
mod pipes;
mod store;
mod table;
mod validate;

use crate::run::support;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../traces/demo.csv");
const UPLOADS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../traces/uploads.csv");

/// Output and exit code of a command.
#[derive(Debug, PartialEq, Eq)]
struct Output {
    code: i32,
    stdout: String,
    stderr: String,
}

impl From<std::process::Output> for Output {
    fn from(output: std::process::Output) -> Output {
        Output {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn ratekeeper(args: &[&str]) -> Command {
    let mut command = support::ratekeeper();
    command.args(args);
    command
}

fn run(args: &[&str], stdin: &str) -> Output {
    let mut command = ratekeeper(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let stdin = stdin.to_owned();
    // Write from a separate thread, because a command may print before it has read all input, or never read it.
    let writer = std::thread::spawn(move || drop(input.write_all(stdin.as_bytes())));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output.into()
}

fn simulate(limit: &str, options: &[&str], trace: &str) -> Output {
    run(&[&["simulate", "--limit", limit, "--trace", "-"], options].concat(), trace)
}

/// Writes a file for this test run.
fn file(name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, content).unwrap();
    path
}

/// Compares with a stored output. To update the stored outputs, run the tests with `RATEKEEPER_WRITE_GOLDEN=1`.
fn check_golden(name: &str, printed: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/golden").join(name);
    if std::env::var_os("RATEKEEPER_WRITE_GOLDEN").is_some() {
        fs::write(&path, printed).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap();
    assert!(printed == stored, "{name} differs; now it is\n{printed}");
}
