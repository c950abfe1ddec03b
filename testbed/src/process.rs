//! A program that runs, and is gone when its value is.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::patience::wait_until;

/// How long a program may take until it answers.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// Linux counts processor time in hundredths of a second, on every machine.
const US_PER_TICK: u64 = 10_000;

/// Where a process number's group and times stand in `/proc/PID/stat`, counted from behind the program's name.
const GROUP: usize = 2;
const USER_TIME: usize = 11;
const SYSTEM_TIME: usize = 12;

/// A port that is free: bound and let go, it is not handed out again for a while.
///
/// # Errors
/// If there is none.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Waits until somebody listens on a port of the loopback. Says whether anybody does.
pub fn listens(port: u16) -> bool {
    wait_until(START_PATIENCE, || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok())
}

/// The folder for what is built.
///
/// # Errors
/// If this program is in no such folder.
pub fn target_folder() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    // Tests are one folder deeper than what people start.
    let mut folders = program.ancestors().skip(1).skip_while(|folder| folder.ends_with("deps"));
    let folder = folders.nth(1).ok_or_else(|| io::Error::other("this program is in no folder"))?;
    Ok(folder.to_owned())
}

/// A folder for configurations, gone when this is.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// A new one.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new() -> io::Result<Folder> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("tollgate-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in it, and says where that is.
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

/// A program, with all processes that it has started itself.
#[derive(Debug)]
pub struct Running {
    /// A shell that leads the program's group of processes. When our end of its input closes, however we ended, it kills
    /// the whole group.
    keeper: Child,
}

impl Running {
    /// Starts a program, and waits until it listens. What it complains of goes to a file beside its configuration.
    ///
    /// # Errors
    /// If it does not start, with what it has said.
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
            let said = fs::read_to_string(&log).unwrap_or_default();
            return Err(io::Error::other(format!("{name} does not listen on port {port}: {said}")));
        }
        Ok(running)
    }

    /// The processor time that all of its processes have used.
    ///
    /// # Errors
    /// If the system does not tell.
    pub fn cpu_us(&self) -> io::Result<u64> {
        let mut ticks = 0;
        for process in fs::read_dir("/proc")? {
            // Others come and go while we look.
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
