//! Passes listening sockets between processes: from systemd or a predecessor to this process, and on to a successor.
//!
//! Both use systemd's protocol: the sockets are file descriptors from 3 on, and `LISTEN_FDS` is their number. A
//! successor starts with its predecessor's sockets and signals it to drain once it accepts requests. The sockets stay
//! open throughout, so no connection is refused.

use std::io;
use std::net::TcpListener;
use std::path::Path;

use command_fds::{CommandFdExt, FdMapping};
use listenfd::ListenFd;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ratekeeper_server::Sockets;
use tokio::process::{Child, Command};

use crate::error::CliError;

/// Environment variable with the id of the process to drain once this one is ready.
const PREDECESSOR: &str = "RATEKEEPER_PREDECESSOR";
/// The first descriptor after stdin, stdout and stderr.
const FIRST_DESCRIPTOR: i32 = 3;

/// Takes the inherited sockets. Call it before any thread starts, because it clears the environment variables.
pub(crate) fn inherited_sockets() -> Result<Vec<TcpListener>, CliError> {
    let mut inherited = ListenFd::from_env();
    let sockets: io::Result<Vec<_>> =
        (0..inherited.len()).filter_map(|number| inherited.take_tcp_listener(number).transpose()).collect();
    sockets.map_err(|error| CliError::Input(format!("cannot use an inherited socket: {error}")))
}

/// Starts the program now at this path with this process's arguments and all sockets in use.
pub(crate) fn start_successor(program: &Path, sockets: &Sockets) -> io::Result<Child> {
    let mut mappings = Vec::new();
    for (socket, child_fd) in sockets.used().iter().zip(FIRST_DESCRIPTOR..) {
        mappings.push(FdMapping { parent_fd: socket.try_clone()?.into(), child_fd });
    }
    let mut command = Command::new(program);
    command
        .args(std::env::args_os().skip(1))
        .env("LISTEN_FDS", mappings.len().to_string())
        // The child's process id is unknown until it runs.
        .env_remove("LISTEN_PID")
        .env_remove("LISTEN_FDNAMES")
        .env(PREDECESSOR, std::process::id().to_string())
        .fd_mappings(mappings)
        .map_err(io::Error::other)?;
    command.spawn()
}

/// Signals the predecessor, if there is one, to drain.
pub(crate) fn stop_predecessor() {
    let predecessor = std::env::var(PREDECESSOR).ok().and_then(|number| number.parse::<u32>().ok());
    // If the predecessor has exited, another process may have its id, but that process is not our parent.
    let Some(pid) = predecessor.filter(|pid| *pid == std::os::unix::process::parent_id()) else { return };
    let signalled = i32::try_from(pid)
        .map_err(io::Error::other)
        .and_then(|pid| kill(Pid::from_raw(pid), Signal::SIGTERM).map_err(io::Error::from));
    match signalled {
        Ok(()) => tracing::info!(pid, "took over from predecessor"),
        Err(error) => tracing::error!(pid, %error, "cannot signal the predecessor to stop"),
    }
}
