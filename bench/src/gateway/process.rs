//! A program that runs, and is gone when its value is.

use std::error::Error;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::timing::Watch;

/// How long a program may take until it answers.
const START_PATIENCE: Duration = Duration::from_secs(20);
const GLANCE: Duration = Duration::from_millis(20);

/// Linux counts processor time in hundredths of a second, on every machine.
const US_PER_TICK: u64 = 10_000;

/// Where a process number's group and times stand in `/proc/PID/stat`, counted from behind the program's name.
const GROUP: usize = 2;
const USER_TIME: usize = 11;
const SYSTEM_TIME: usize = 12;

/// A port that is free now, and that the system does not hand out again for a while.
pub(super) fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The folder for what is built.
pub(super) fn target_folder() -> Result<PathBuf, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    Ok(program.ancestors().nth(2).ok_or("this program is in no folder")?.to_owned())
}

/// A folder for configurations, gone when this is.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> io::Result<Folder> {
        let folder = std::env::temp_dir().join(format!("tollgate-bench-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn write(&self, name: &str, text: &str) -> io::Result<PathBuf> {
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
pub(super) struct Running {
    /// A shell that leads the program's group of processes. When our end of its input closes, however we ended, it kills
    /// the whole group.
    keeper: Child,
}

impl Running {
    /// Starts a program, and waits until it listens. What it complains of goes to a file beside its configuration.
    pub(super) fn start(
        folder: &Folder,
        name: &str,
        program: &Path,
        arguments: &[&str],
        port: u16,
    ) -> Result<Running, Box<dyn Error>> {
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
        let watch = Watch::start();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if watch.elapsed() > START_PATIENCE {
                let said = fs::read_to_string(&log).unwrap_or_default();
                return Err(format!("{name} does not listen on port {port}: {said}").into());
            }
            std::thread::park_timeout(GLANCE);
        }
        Ok(running)
    }

    /// The processor time that all of its processes have used.
    pub(super) fn cpu_us(&self) -> Result<u64, Box<dyn Error>> {
        let mut ticks = 0;
        for process in fs::read_dir("/proc")? {
            // Others come and go while we look.
            let Ok(stat) = fs::read_to_string(process?.path().join("stat")) else { continue };
            let Some((_, fields)) = stat.rsplit_once(')') else { continue };
            let fields: Vec<u64> = fields.split_whitespace().map(|it| it.parse().unwrap_or(0)).collect();
            if fields.get(GROUP) == Some(&u64::from(self.keeper.id())) {
                ticks += fields[USER_TIME] + fields[SYSTEM_TIME];
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
