//! Processes of a test's own: this program once more, running one test of it that acts as the worker.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Tells a worker what it is to do. A test that is a worker does nothing without it.
const VARIABLE: &str = "TOLLGATE_TEST_WORKER";
/// Before each line that a worker says: what runs the tests prints lines of its own.
const MARK: &str = "worker says: ";

/// A worker, as the test sees it. Gone when dropped.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts the test of this name as a worker.
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

    /// Lets it go on with the next thing.
    pub(crate) fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    /// Waits for the next thing that it says.
    pub(crate) fn says(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "a worker has ended before its time");
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim_end().to_owned();
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

/// A worker says something to the test. Not with `println!`, which is kept back until the end.
pub(crate) fn say(what: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{MARK}{what}").unwrap();
    out.flush().unwrap();
}

/// A worker waits until it may go on.
pub(crate) fn wait() {
    let mut line = String::new();
    assert!(std::io::stdin().read_line(&mut line).unwrap() > 0, "the test has ended");
}
