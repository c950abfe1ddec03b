//! The command as a user sees it: output, messages and exit codes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

mod compare;
mod decisions;
mod memory;
mod migrate;
mod mistakes;
mod picture;
mod pipes;
mod store;
mod table;
mod validate;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../traces/demo.csv");
const UPLOADS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../traces/uploads.csv");

/// Output and exit code of a command.
#[derive(Debug, PartialEq, Eq)]
struct Ended {
    code: i32,
    stdout: String,
    stderr: String,
}

fn ratekeeper(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ratekeeper"));
    // Remove the tester's terminal settings, because they must not affect the result.
    command.args(args).env_remove("COLUMNS").env_remove("NO_COLOR").current_dir(env!("CARGO_TARGET_TMPDIR"));
    command
}

fn run(args: &[&str], stdin: &str) -> Ended {
    let mut command = ratekeeper(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let stdin = stdin.to_owned();
    // Write from a separate thread, because a command may print before it has read all input, or never read it.
    let writer = std::thread::spawn(move || drop(input.write_all(stdin.as_bytes())));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Ended {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn simulate(limit: &str, options: &[&str], trace: &str) -> Ended {
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
