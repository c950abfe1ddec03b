//! The binary on a terminal.

use std::fs::File;
use std::future::Future;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use nix::pty::{Winsize, openpty};
use testbed::{wait_for, wait_until};

use super::Process;

/// Wide enough for every line of the tests.
const SIZE: Winsize = Winsize { ws_row: 50, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
/// What a terminal sends for Ctrl-C; the kernel turns it into SIGINT.
const CTRL_C: &str = "\x03";
/// What a terminal sends for Ctrl-D; at the start of a line, the kernel ends the input.
const CTRL_D: &str = "\x04";

/// A process whose stdin, stdout and stderr are a terminal.
pub(crate) struct Terminal {
    process: Process,
    keyboard: File,
    screen: Arc<Mutex<Vec<u8>>>,
    /// Finishes when all output has been read.
    reader: JoinHandle<()>,
    /// The length of the text at the last answer.
    answered_at: usize,
}

impl Terminal {
    pub(crate) fn start(command: &Command) -> Terminal {
        let pty = openpty(Some(&SIZE), None).unwrap();
        let stdio = || Stdio::from(pty.slave.try_clone().unwrap());
        // `setsid --ctty` makes the terminal the controlling terminal, so that Ctrl-C is a signal.
        let mut session = Command::new("setsid");
        session.arg("--ctty").arg(command.get_program()).args(command.get_args());
        session.current_dir(command.get_current_dir().unwrap());
        session.env("TERM", "xterm");
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => session.env(name, value),
                None => session.env_remove(name),
            };
        }
        let child = session.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        // The commands hold copies of the slave end, which must close for the output to end.
        drop((session, pty.slave));
        let (screen, keyboard) = (Arc::<Mutex<Vec<u8>>>::default(), File::from(pty.master));
        let (all, mut output) = (screen.clone(), keyboard.try_clone().unwrap());
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // When the process has ended, reading returns an error.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                all.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        Terminal { process: Process::new(child), keyboard, screen, reader, answered_at: 0 }
    }

    /// Returns everything shown so far.
    pub(crate) fn text(&self) -> String {
        // A terminal ends lines with CR LF.
        String::from_utf8_lossy(&self.screen.lock().unwrap()).replace('\r', "")
    }

    /// Waits until a text is shown after the last answer, and returns everything shown so far.
    #[track_caller]
    pub(crate) fn shows(&self, text: &str) -> impl Future<Output = String> {
        wait_for(async move || {
            // Checked before the text, so that it cannot arrive in between.
            let is_over = self.reader.is_finished();
            let shown = self.text();
            let is_there = shown[self.answered_at..].contains(text);
            assert!(is_there || !is_over, "it ended without `{text}`:\n{shown}");
            is_there.then_some(shown)
        })
    }

    /// Waits for a question, then types an answer and Enter.
    pub(crate) async fn answer(&mut self, question: &str, answer: &str) {
        self.shows(question).await;
        self.answered_at = self.text().len();
        self.type_keys(&format!("{answer}\n"));
    }

    pub(crate) fn press_ctrl_c(&mut self) {
        self.type_keys(CTRL_C);
    }

    pub(crate) fn press_ctrl_d(&mut self) {
        self.type_keys(CTRL_D);
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end of the process and returns its exit code.
    pub(crate) async fn ended(&mut self) -> i32 {
        let code = self.process.ended().await;
        wait_until(|| self.reader.is_finished()).await;
        code
    }
}
