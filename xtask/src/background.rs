//! Background commands: servers that later commands connect to.

use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::markdown::Block;

/// How often the port is tried.
const TRY_EVERY: Duration = Duration::from_millis(100);

/// How long a terminated command may take to exit.
const EXIT_TIME_MAX: Duration = Duration::from_secs(10);

/// A background command; terminated when dropped. The drop waits until all its processes have exited, because what
/// follows may use the same ports, or read what they write last.
#[derive(Debug)]
pub(crate) struct Background {
    group: String,
}

/// Returns the port of a block with the info string `sh background 8080`.
pub(crate) fn port(block: &Block) -> Option<u16> {
    block.info.strip_prefix("sh background ")?.trim().parse().ok()
}

/// Starts a command and waits until its port is open.
pub(crate) fn start(mut command: Command, port: u16, limit: Duration) -> Result<Background> {
    let answers = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok();
    if answers() {
        bail!("something listens on port {port} already; stop it and try again");
    }
    // A separate process group, so that children of a shell are killed with it.
    let mut child = command.process_group(0).stdin(Stdio::null()).spawn().context("starting a server")?;
    let background = Background { group: format!("-{}", child.id()) };
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(child.wait()));
    for _ in 0..limit.as_millis() / TRY_EVERY.as_millis() {
        if answers() {
            return Ok(background);
        }
        match receiver.recv_timeout(TRY_EVERY) {
            Err(RecvTimeoutError::Timeout) => {}
            ended => bail!("the server has ended before it listened on port {port}: {ended:?}"),
        }
    }
    bail!("nothing listens on port {port} after {} s", limit.as_secs())
}

impl Drop for Background {
    fn drop(&mut self) {
        let signal = |arguments: &[&str]| {
            let status = Command::new("kill").args(arguments).arg(&self.group).stderr(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        };
        // Nothing is sent on this channel: receiving from it waits.
        let (_sender, receiver) = mpsc::channel::<()>();
        let mut tries = EXIT_TIME_MAX.as_millis() / TRY_EVERY.as_millis();
        let mut is_running = signal(&["--"]);
        while is_running && tries > 0 {
            let _ = receiver.recv_timeout(TRY_EVERY);
            is_running = signal(&["-0", "--"]);
            tries -= 1;
        }
    }
}
