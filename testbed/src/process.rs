//! Child processes that are killed when their value is dropped.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::wait::block_until;

/// How long a program may take until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Linux counts processor time in hundredths of a second, on every architecture.
const US_PER_TICK: u64 = 10_000;

/// Index of a process's group and times in `/proc/PID/stat`, counted from the field after the program's name.
const GROUP: usize = 2;
const USER_TIME: usize = 11;
const SYSTEM_TIME: usize = 12;

/// A free port: after it was bound and closed, the system does not assign it again for a while.
///
/// # Errors
/// If no port is free.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Waits until a loopback port accepts connections; returns false after a timeout.
pub fn listens(port: u16) -> bool {
    block_until(START_TIMEOUT, || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok())
}

/// The build directory.
///
/// # Errors
/// If this program is not in a build directory.
pub fn target_folder() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    // Test programs are one directory deeper than other programs.
    let mut folders = program.ancestors().skip(1).skip_while(|folder| folder.ends_with("deps"));
    let folder = folders.nth(1).ok_or_else(|| io::Error::other("this program is in no folder"))?;
    Ok(folder.to_owned())
}

/// A temporary directory for configurations, deleted on drop.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Creates a new directory.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn new() -> io::Result<Folder> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("ratekeeper-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in the directory and returns its path.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, name: &str, text: &str) -> io::Result<PathBuf> {
        let file = self.0.join(name);
        fs::write(&file, text)?;
        Ok(file)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running program, with all processes that it has started.
#[derive(Debug)]
pub struct Running {
    /// A shell that leads the program's process group. It kills the whole group when its standard input closes, which
    /// also happens if this process crashes.
    keeper: Child,
}

impl Running {
    /// Starts a program and waits until it listens. Its standard error goes to a file next to its configuration.
    ///
    /// # Errors
    /// If it does not start; the message includes its standard error.
    pub fn start(
        folder: &Folder,
        name: &str,
        program: &Path,
        arguments: &[&str],
        port: u16,
    ) -> io::Result<Running> {
        let log = folder.path().join(format!("{name}.log"));
        let keeper = Command::new("sh")
            .args(["-c", "\"$@\" </dev/null & read -r _; kill -9 0", "keeper"])
            .arg(program)
            .args(arguments)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        let running = Running { keeper };
        if !listens(port) {
            let output = fs::read_to_string(&log).unwrap_or_default();
            return Err(io::Error::other(format!("{name} does not listen on port {port}: {output}")));
        }
        Ok(running)
    }

    /// The processor time that all of its processes have used, in microseconds.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn cpu_us(&self) -> io::Result<u64> {
        let mut ticks = 0;
        for process in fs::read_dir("/proc")? {
            // Processes may end during the scan.
            let Ok(stat) = fs::read_to_string(process?.path().join("stat")) else { continue };
            let Some((_, fields)) = stat.rsplit_once(')') else { continue };
            let fields: Vec<u64> = fields.split_whitespace().map(|it| it.parse().unwrap_or(0)).collect();
            if fields.get(GROUP) == Some(&u64::from(self.keeper.id())) {
                let spent = |field: usize| fields.get(field).copied().unwrap_or(0);
                ticks += spent(USER_TIME) + spent(SYSTEM_TIME);
            }
        }
        Ok(ticks * US_PER_TICK)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}
