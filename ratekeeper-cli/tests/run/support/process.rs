//! The binary, run as a user runs it.

use std::future::Future;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use testbed::{wait_for, wait_until};

use super::get;

type Lines = Arc<Mutex<Vec<String>>>;

/// A `ratekeeper` process and its descendants. All are killed on drop.
pub(crate) struct Process {
    child: Child,
    pid: Pid,
    code: Option<i32>,
    /// A successor that it started may outlive it.
    has_successor: bool,
    stderr: Lines,
    /// Finishes when all output has been read.
    stderr_reader: JoinHandle<()>,
    stdout: Lines,
}

/// Returns the command without the tester's environment settings.
pub(crate) fn ratekeeper() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ratekeeper"));
    command
        .env_remove("COLUMNS")
        .env_remove("NO_COLOR")
        .env_remove("RATEKEEPER_LOG")
        .env_remove("RATEKEEPER_CONFIG")
        .env_remove("LISTEN_FDS")
        .current_dir(env!("CARGO_TARGET_TMPDIR"));
    command
}

impl Process {
    pub(crate) fn run(file: &Path) -> Process {
        Process::spawn(ratekeeper().args(["run", "--config"]).arg(file))
    }

    pub(crate) fn spawn(command: &mut Command) -> Process {
        // A separate process group, so that its descendants can be killed with it.
        let command = command.process_group(0).stdin(Stdio::null());
        Process::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Collects the child's output, as far as it is piped.
    pub(super) fn new(mut child: Child) -> Process {
        let (stdout, _) = collect(child.stdout.take());
        let (stderr, stderr_reader) = collect(child.stderr.take());
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        Process { child, pid, code: None, has_successor: false, stderr, stderr_reader, stdout }
    }

    /// Starts the gateway and waits until it accepts requests.
    pub(crate) async fn serving(file: &Path) -> (Process, SocketAddr) {
        let process = Process::run(file);
        let address = process.address().await;
        (process, address)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its stderr so far.
    pub(crate) fn stderr(&self) -> Vec<String> {
        self.stderr.lock().unwrap().clone()
    }

    pub(crate) fn stdout(&self) -> Vec<String> {
        self.stdout.lock().unwrap().clone()
    }

    /// Returns the number of stderr lines that contain a text.
    pub(crate) fn count_lines(&self, text: &str) -> usize {
        self.stderr.lock().unwrap().iter().filter(|line| line.contains(text)).count()
    }

    /// Waits for the first stderr line that contains a text.
    #[track_caller]
    pub(crate) fn line(&self, text: &str) -> impl Future<Output = String> {
        wait_for(async move || {
            // Checked before the lines, so that a line cannot arrive in between.
            let is_over = self.stderr_reader.is_finished();
            let found = self.stderr().into_iter().find(|line| line.contains(text));
            assert!(found.is_some() || !is_over, "it ended without the line `{text}`: {:#?}", self.stderr());
            found
        })
    }

    /// Returns the address of the gateway.
    pub(crate) async fn address(&self) -> SocketAddr {
        let gateway = r#""service":"gateway","url":"http://"#;
        after(&self.line(gateway).await, gateway)
    }

    pub(crate) async fn admin(&self) -> SocketAddr {
        let admin = r#""service":"admin","url":"http://"#;
        after(&self.line(admin).await, admin)
    }

    /// Returns a metric's value; 0 if it is missing.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let response = get(self.admin().await, "/metrics").await;
        let text = String::from_utf8(response.body).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0)
    }

    /// Waits until a metric has a value.
    #[track_caller]
    pub(crate) fn until_metric(&self, name: &str, value: u64) -> impl Future<Output = ()> {
        wait_for(async move || (self.metric(name).await == value).then_some(()))
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        self.has_successor |= signal == Signal::SIGUSR2;
        assert!(self.code().is_none(), "it has ended: {:#?}", self.stderr());
        kill(self.pid, signal).unwrap();
    }

    /// Returns its exit code if it has ended; -1 if a signal ended it.
    fn code(&mut self) -> Option<i32> {
        if self.code.is_none() {
            self.code = self.child.try_wait().unwrap().map(|status| status.code().unwrap_or(-1));
        }
        self.code
    }

    /// Waits for its end and returns its exit code.
    pub(crate) async fn ended(&mut self) -> i32 {
        wait_until(|| self.code().is_some()).await;
        self.code.unwrap()
    }

    /// Waits for the end of a process that cannot start; returns its exit code and its stderr.
    pub(crate) async fn failure(mut self) -> (i32, String) {
        let code = self.ended().await;
        wait_until(|| self.stderr_reader.is_finished()).await;
        (code, self.stderr().join("\n"))
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.code().is_some()
    }

    /// Returns its resident memory.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let pages = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).unwrap();
        pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.code().is_none() || self.has_successor {
            // Fails only if the process group is empty.
            let _ = killpg(self.pid, Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// Collects lines in a separate thread.
fn collect(output: Option<impl Read + Send + 'static>) -> (Lines, JoinHandle<()>) {
    let lines = Lines::default();
    let all = lines.clone();
    let reader = std::thread::spawn(move || {
        let lines =
            output.into_iter().flat_map(|output| BufReader::new(output).lines().map_while(Result::ok));
        lines.for_each(|line| all.lock().unwrap().push(line));
    });
    (lines, reader)
}

/// Returns the address after a text.
fn after(line: &str, text: &str) -> SocketAddr {
    let rest = line.split_once(text).unwrap().1;
    let end = rest.find(['"', '/']).unwrap_or(rest.len());
    rest[..end].parse().unwrap()
}
