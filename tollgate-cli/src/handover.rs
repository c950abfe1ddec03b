//! Listening sockets that outlive a process: they come from systemd or a predecessor, and go to a successor.
//!
//! Both ways it is systemd's protocol: the sockets are file descriptors 3 and up, and `LISTEN_FDS` says how many. A
//! successor is started with the sockets of its predecessor, and tells it to drain once it takes requests itself. At no
//! time does nobody listen, so nobody is refused.

use std::io;
use std::net::TcpListener;
use std::path::Path;

use command_fds::{CommandFdExt, FdMapping};
use listenfd::ListenFd;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tollgate_server::Sockets;

use crate::failure::Failure;

/// Holds the number of the process that is to drain once we are ready.
const PREDECESSOR: &str = "TOLLGATE_PREDECESSOR";
/// Behind stdin, stdout and stderr.
const FIRST_DESCRIPTOR: i32 = 3;

/// The sockets that were handed to us. To be called before there are threads: it clears the variables that say so.
pub(crate) fn inherited() -> Result<Vec<TcpListener>, Failure> {
    let mut given = ListenFd::from_env();
    let sockets: io::Result<Vec<_>> =
        (0..given.len()).filter_map(|number| given.take_tcp_listener(number).transpose()).collect();
    sockets.map_err(|error| Failure::Input(format!("a socket that was handed over cannot be used: {error}")))
}

/// Starts what is at this path by now, as this process was started, with all sockets that are in use.
pub(crate) fn successor(program: &Path, sockets: &Sockets) -> io::Result<Child> {
    let mut mappings = Vec::new();
    for (socket, child_fd) in sockets.used().iter().zip(FIRST_DESCRIPTOR..) {
        mappings.push(FdMapping { parent_fd: socket.try_clone()?.into(), child_fd });
    }
    let mut command = Command::new(program);
    command
        .args(std::env::args_os().skip(1))
        .env("LISTEN_FDS", mappings.len().to_string())
        // Its number is not known before it runs.
        .env_remove("LISTEN_PID")
        .env_remove("LISTEN_FDNAMES")
        .env(PREDECESSOR, std::process::id().to_string())
        .fd_mappings(mappings)
        .map_err(io::Error::other)?;
    command.spawn()
}

/// If there is a predecessor, it can go now.
pub(crate) fn relieve_predecessor() {
    let predecessor = std::env::var(PREDECESSOR).ok().and_then(|number| number.parse::<u32>().ok());
    // If it has gone already, somebody else may have its number by now, but is not our parent.
    let Some(pid) = predecessor.filter(|pid| *pid == std::os::unix::process::parent_id()) else { return };
    let told = i32::try_from(pid).map_err(io::Error::other);
    let told = told.and_then(|pid| kill(Pid::from_raw(pid), Signal::SIGTERM).map_err(io::Error::from));
    match told {
        Ok(()) => tracing::info!(pid, "took over from its predecessor"),
        Err(error) => tracing::error!(pid, %error, "the predecessor cannot be told to end"),
    }
}
