//! Worker processes of a test: this program is started again with one test that acts as the worker.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Environment variable with the worker's task. A worker test does nothing if it is not set.
const VARIABLE: &str = "RATEKEEPER_TEST_WORKER";
/// Prefix of each line that a worker prints, because the test harness prints lines, too.
const MARK: &str = "worker: ";

/// A worker process, killed on drop.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts the test with this name as a worker.
    pub(crate) fn start(test: &str, task: &str) -> Worker {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact"])
            .env(VARIABLE, task)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Worker { child, lines }
    }

    /// Lets the worker continue with its next step.
    pub(crate) fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    /// Waits for the worker's next message.
    pub(crate) fn read_line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "a worker has ended before its time");
            if let Some((_, text)) = line.split_once(MARK) {
                return text.trim_end().to_owned();
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The task, if this process is a worker.
pub(crate) fn task() -> Option<String> {
    std::env::var(VARIABLE).ok()
}

/// Sends a message from a worker to the test. Not with `println!`, which the harness captures until the test ends.
pub(crate) fn say(what: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{MARK}{what}").unwrap();
    out.flush().unwrap();
}

/// Blocks a worker until the test lets it continue.
pub(crate) fn wait() {
    let mut line = String::new();
    assert!(std::io::stdin().read_line(&mut line).unwrap() > 0, "the test has ended");
}
