use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::process::free_port;
use crate::resp_client::RespClient;
use crate::wait::block_until;

/// Timeout of a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a scan over all keys.
const SCAN_TIMEOUT: Duration = Duration::from_secs(120);

/// A Redis server without persistence.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    folder: PathBuf,
    options: Vec<String>,
    keeper: Option<Child>,
    pid: u32,
}

impl RedisServer {
    /// Starts a server and waits until it is ready.
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start.
    pub fn start() -> io::Result<RedisServer> {
        RedisServer::start_with(&[])
    }

    /// The same, with options for `redis-server`.
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start.
    pub fn start_with(options: &[&str]) -> io::Result<RedisServer> {
        let port = free_port()?;
        let folder = std::env::temp_dir().join(format!("ratekeeper-redis-{}-{port}", std::process::id()));
        // A killed test may have left a directory of this name, and a cluster node would load the configuration in
        // it.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)?;
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut server = RedisServer { port, folder, options, keeper: None, pid: 0 };
        server.restart()?;
        Ok(server)
    }

    /// Starts the server again after it was [killed](Self::kill), on the same port and without data.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill()?;
        // The shell kills the server when its standard input closes, which also happens if this process crashes. It
        // then deletes the directory, unless it was sent `wanted` before: after a crash no other process would delete
        // it. It closes its standard output, so that the pipe ends when the server does.
        let keeper = "folder=$1; shift; redis-server \"$@\" & echo pid $!; exec >&-; \
            read -r wanted; kill -9 $!; wait $!; [ \"$wanted\" ] || rm -rf \"$folder\"";
        let mut keeper = Command::new("sh")
            .args(["-c", keeper, "keeper"])
            .arg(&self.folder)
            .args([
                "--port",
                &self.port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ])
            .arg("--dir")
            .arg(&self.folder)
            .args(&self.options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| io::Error::other(format!("cannot start a shell: {error}")))?;
        let output = keeper.stdout.take().map(BufReader::new);
        self.keeper = Some(keeper);
        // Waits for both lines, in either order: on a busy machine the server is ready before the shell prints the
        // process id. If the pipe were closed by then, the shell would die of SIGPIPE and leave the server running.
        let (mut pid, mut is_ready) = (None, false);
        for line in output.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
            if let Some(number) = line.strip_prefix("pid ") {
                pid = number.parse().ok();
            }
            is_ready |= line.contains("Ready to accept connections");
            if let (Some(pid), true) = (pid, is_ready) {
                self.pid = pid;
                return Ok(());
            }
        }
        Err(io::Error::other("redis-server ended before it was ready; is it installed?"))
    }

    /// `kill -9`. On return the process has ended, and its port and its directory are free.
    ///
    /// # Errors
    /// If the process cannot be killed.
    pub fn kill(&mut self) -> io::Result<()> {
        if let Some(mut keeper) = self.keeper.take() {
            if let Some(mut input) = keeper.stdin.take() {
                // A write error means that the shell was killed; its exit status shows that.
                let _ = input.write_all(b"wanted\n");
            }
            if !keeper.wait()?.success() {
                return self.kill_orphan();
            }
        }
        Ok(())
    }

    /// Kills the server if its shell was killed from outside and cannot do so.
    fn kill_orphan(&self) -> io::Result<()> {
        // The process id may have been reused since, so the server must confirm it.
        let own = format!("process_id:{}", self.pid);
        if !self
            .command(&["INFO", "server"])
            .is_ok_and(|info| info.lines().any(|line| line.trim_end() == own))
        {
            return Ok(());
        }
        self.signal("KILL")?;
        let is_gone = || TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err();
        if block_until(REPLY_TIMEOUT, is_gone) { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Pauses the process by SIGSTOP, to simulate a machine that swaps or loses its network.
    ///
    /// # Errors
    /// If the signal cannot be sent.
    pub fn pause(&self) -> io::Result<()> {
        self.signal("STOP")
    }

    /// Resumes the paused process.
    ///
    /// # Errors
    /// If the signal cannot be sent.
    pub fn resume(&self) -> io::Result<()> {
        self.signal("CONT")
    }

    fn signal(&self, signal: &str) -> io::Result<()> {
        let status = Command::new("kill").args(["-s", signal, &self.pid.to_string()]).status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("kill -s {signal} failed"))) }
    }

    /// The port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the server.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The server's URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Runs `redis-cli` with a command and returns its output.
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn cli(&self, arguments: &[&str]) -> io::Result<String> {
        let output =
            Command::new("redis-cli").args(["-p", &self.port.to_string()]).args(arguments).output()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
            return Err(io::Error::other(format!("redis-cli failed: {why}")));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// Sends a command and returns its reply, one line for each string or number. Unlike [`cli`](Self::cli), this
    /// waits at most ten seconds.
    ///
    /// # Errors
    /// If the server does not reply, or replies with an error: then the message is the server's, also for `ASK` and
    /// `MOVED`.
    pub fn command(&self, words: &[&str]) -> io::Result<String> {
        self.client()?.command_text(words)
    }

    pub(crate) fn client(&self) -> io::Result<RespClient> {
        RespClient::open(self.port, REPLY_TIMEOUT)
    }

    /// All keys without an expiry. Tests assert that there are none.
    ///
    /// # Errors
    /// If the server does not reply.
    pub fn keys_without_expiry(&self) -> io::Result<Vec<String>> {
        // A single call for any number of keys.
        let script = "local cursor, without = '0', {} \
            repeat \
              local page = redis.call('SCAN', cursor, 'COUNT', 1000) \
              cursor = page[1] \
              for _, key in ipairs(page[2]) do \
                if redis.call('PTTL', key) == -1 then without[#without + 1] = key end \
              end \
            until cursor == '0' \
            return table.concat(without, '\\n')";
        let mut server = RespClient::open(self.port, SCAN_TIMEOUT)?;
        // A cluster node shows the keys of a hash slot that it is importing only after `ASKING`. Servers that are not
        // in a cluster reply with an error, which is ignored.
        let _ = server.command(&["ASKING"]);
        let without = server.command_text(&["EVAL", script, "0"])?;
        Ok(without.lines().map(str::to_owned).collect())
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // SIGKILL also ends a paused process.
        let _ = self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Whether a process with this id exists.
#[cfg(test)]
pub(crate) fn is_running(pid: u32) -> bool {
    let status = Command::new("kill").args(["-s", "0", &pid.to_string()]).stderr(Stdio::null()).status();
    status.unwrap().success()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_without_expiry_are_found_among_many() {
        let mut server = RedisServer::start().unwrap();
        let fill = "for i = 1, 5000 do redis.call('SET', 'key' .. i, i, 'EX', 1000) end";
        server.cli(&["-e", "EVAL", fill, "0"]).unwrap();
        assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
        for key in ["key7", "another"] {
            server.cli(&["SET", key, "for ever"]).unwrap();
        }
        let mut found = server.keys_without_expiry().unwrap();
        found.sort();
        assert_eq!(found, ["another", "key7"]);
        server.kill().unwrap();
        assert!(server.keys_without_expiry().is_err(), "no answer is not the answer `none`");
    }
    #[test]
    fn replies_are_lines_and_error_replies_are_errors() {
        let server = RedisServer::start().unwrap();
        assert_eq!(server.command(&["ECHO", "a\r\nb"]).unwrap(), "a\r\nb");
        let nested = "return {1, {'two', {'three'}}, false, {}, redis.status_reply('four')}";
        assert_eq!(server.command(&["EVAL", nested, "0"]).unwrap(), "1\ntwo\nthree\nfour");
        assert_eq!(server.command(&["GET", "nothing"]).unwrap(), "");
        let error = server.command(&["EVAL", "return redis.error_reply('ASK 7 there')", "0"]).unwrap_err();
        assert_eq!(error.to_string(), "ASK 7 there");
    }

    #[test]
    fn server_that_does_not_start_is_an_error() {
        let server = RedisServer::start().unwrap();
        let taken = server.port().to_string();
        assert!(RedisServer::start_with(&["--port", &taken]).is_err());
        assert!(RedisServer::start_with(&["--no-such-option", "1"]).is_err());
        assert_eq!(server.command(&["PING"]).unwrap(), "PONG");
    }

    #[test]
    fn killed_server_has_ended_on_return_and_restarts() {
        let mut server = RedisServer::start().unwrap();
        for _ in 0..10 {
            let pid = server.pid();
            assert!(is_running(pid));
            server.kill().unwrap();
            assert!(!is_running(pid));
            assert!(server.command(&["PING"]).is_err());
            server.restart().unwrap();
            assert_eq!(server.command(&["PING"]).unwrap(), "PONG");
        }
    }

    #[test]
    fn server_is_killed_with_its_keeper() {
        let mut server = RedisServer::start().unwrap();
        let (pid, keeper) = (server.pid(), server.keeper.as_ref().unwrap().id());
        assert!(Command::new("kill").args(["-s", "KILL", &keeper.to_string()]).status().unwrap().success());
        server.kill().unwrap();
        assert!(server.command(&["PING"]).is_err(), "{pid} still answers");
        server.restart().unwrap();
        assert_eq!(server.command(&["PING"]).unwrap(), "PONG");
    }

    /// Set in the process that the next test starts and kills.
    const VICTIM: &str = "TESTBED_VICTIM";

    #[test]
    fn nothing_outlives_a_process_that_is_killed() {
        if std::env::var_os(VICTIM).is_some() {
            let server = RedisServer::start().unwrap();
            println!("\nserver {} {}", server.pid(), server.folder.display());
            // No input arrives: the process is killed while it waits. If the parent fails first, the pipe closes and
            // this ends.
            io::stdin().read_line(&mut String::new()).unwrap();
            return;
        }
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "redis::tests::nothing_outlives_a_process_that_is_killed"])
            .arg("--nocapture")
            .env(VICTIM, "")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(victim.stdout.take().unwrap());
        let server = output.lines().find_map(|line| Some(line.unwrap().strip_prefix("server ")?.to_owned()));
        let server = server.unwrap();
        let (pid, folder) = server.split_once(' ').unwrap();
        let (pid, folder) = (pid.parse().unwrap(), PathBuf::from(folder));
        assert!(is_running(pid) && folder.exists());
        victim.kill().unwrap();
        victim.wait().unwrap();
        assert!(block_until(REPLY_TIMEOUT, || !is_running(pid)));
        assert!(block_until(REPLY_TIMEOUT, || !folder.exists()));
    }
}
