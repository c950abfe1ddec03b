use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::conversation::Conversation;
use crate::patience::wait_until;
use crate::process::free_port;

/// How long an answer may take that is waited for at all.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// The same for a walk over all keys.
const SCAN_PATIENCE: Duration = Duration::from_secs(120);

/// A Redis server that keeps nothing on disk.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    folder: PathBuf,
    options: Vec<String>,
    keeper: Option<Child>,
    pid: u32,
}

impl RedisServer {
    /// Starts a server, and waits until it is ready.
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start.
    pub fn start() -> io::Result<RedisServer> {
        RedisServer::start_with(&[])
    }

    /// The same, with options of `redis-server`.
    ///
    /// # Errors
    /// If `redis-server` is not installed or does not start.
    pub fn start_with(options: &[&str]) -> io::Result<RedisServer> {
        let port = free_port()?;
        let folder = std::env::temp_dir().join(format!("tollgate-redis-{}-{port}", std::process::id()));
        // A test that was killed may have left one of this name, and a node of a cluster would believe what is in it.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)?;
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut server = RedisServer { port, folder, options, keeper: None, pid: 0 };
        server.restart()?;
        Ok(server)
    }

    /// Starts it again after it was [killed](Self::kill), on the same port and with nothing in it.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill()?;
        // A shell between us and the server outlives neither: when our end of its input closes, however we ended, it
        // kills the server. If we did not say before that we want the folder, nobody else will clear it away.
        // It closes its own output, so that the output ends when the server does.
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
        let said = keeper.stdout.take().map(BufReader::new);
        self.keeper = Some(keeper);
        // Both, in whichever order: on a busy machine the server is ready before the shell says its number. If we were
        // gone by then, the shell would die of saying so, and the server would stay.
        let (mut pid, mut is_ready) = (None, false);
        for line in said.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
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

    /// `kill -9`. When this returns, its process is gone, and its port and its folder are free.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&mut self) -> io::Result<()> {
        if let Some(mut keeper) = self.keeper.take() {
            if let Some(mut input) = keeper.stdin.take() {
                // If it cannot be told, somebody has killed it.
                let _ = input.write_all(b"wanted\n");
            }
            if !keeper.wait()?.success() {
                return self.kill_orphan();
            }
        }
        Ok(())
    }

    /// Ends the server after somebody has killed the shell that would have done so.
    fn kill_orphan(&self) -> io::Result<()> {
        // Nobody holds the number for us any more: it may belong to another process by now. The server tells.
        let own = format!("process_id:{}", self.pid);
        if !self.ask(&["INFO", "server"]).is_ok_and(|info| info.lines().any(|line| line.trim_end() == own)) {
            return Ok(());
        }
        self.signal("KILL")?;
        let is_gone = || TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err();
        if wait_until(ANSWER_PATIENCE, is_gone) { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Stops it in its tracks, as a machine does that swaps or loses its network.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pause(&self) -> io::Result<()> {
        self.signal("STOP")
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn resume(&self) -> io::Result<()> {
        self.signal("CONT")
    }

    fn signal(&self, signal: &str) -> io::Result<()> {
        let status = Command::new("kill").args(["-s", signal, &self.pid.to_string()]).status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("kill -s {signal} failed"))) }
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its address as clients take it.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends a command, and gives what `redis-cli` would print without a terminal.
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

    /// Sends a command, and gives its answer, a line for each text or number in it. Unlike [`cli`](Self::cli), this
    /// waits ten seconds at most.
    ///
    /// # Errors
    /// If the server does not answer, or answers with an error: then the message is what it says, `ASK` and `MOVED`
    /// included.
    pub fn ask(&self, words: &[&str]) -> io::Result<String> {
        self.conversation()?.ask_text(words)
    }

    pub(crate) fn conversation(&self) -> io::Result<Conversation> {
        Conversation::open(self.port, ANSWER_PATIENCE)
    }

    /// Every key without an expiry: there must be none.
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn keys_without_expiry(&self) -> io::Result<Vec<String>> {
        // One call, however many keys there are.
        let script = "local cursor, without = '0', {} \
            repeat \
              local page = redis.call('SCAN', cursor, 'COUNT', 1000) \
              cursor = page[1] \
              for _, key in ipairs(page[2]) do \
                if redis.call('PTTL', key) == -1 then without[#without + 1] = key end \
              end \
            until cursor == '0' \
            return table.concat(without, '\\n')";
        let mut server = Conversation::open(self.port, SCAN_PATIENCE)?;
        // In a cluster, the keys of a slot that is just moving here are shown only to those who ask so. Any other server
        // does not know the word, and need not.
        let _ = server.ask(&["ASKING"]);
        let without = server.ask_text(&["EVAL", script, "0"])?;
        Ok(without.lines().map(str::to_owned).collect())
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // A paused process dies of this, too.
        let _ = self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Whether there is a process of this number.
#[cfg(test)]
pub(crate) fn is_running(pid: u32) -> bool {
    let asked = Command::new("kill").args(["-s", "0", &pid.to_string()]).stderr(Stdio::null()).status();
    asked.unwrap().success()
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
    fn answers_are_lines_and_errors_are_errors() {
        let server = RedisServer::start().unwrap();
        assert_eq!(server.ask(&["ECHO", "a\r\nb"]).unwrap(), "a\r\nb");
        let nested = "return {1, {'two', {'three'}}, false, {}, redis.status_reply('four')}";
        assert_eq!(server.ask(&["EVAL", nested, "0"]).unwrap(), "1\ntwo\nthree\nfour");
        assert_eq!(server.ask(&["GET", "nothing"]).unwrap(), "");
        let error = server.ask(&["EVAL", "return redis.error_reply('ASK 7 there')", "0"]).unwrap_err();
        assert_eq!(error.to_string(), "ASK 7 there");
    }

    #[test]
    fn a_server_that_does_not_start_is_an_error() {
        let server = RedisServer::start().unwrap();
        let taken = server.port().to_string();
        assert!(RedisServer::start_with(&["--port", &taken]).is_err());
        assert!(RedisServer::start_with(&["--no-such-option", "1"]).is_err());
        assert_eq!(server.ask(&["PING"]).unwrap(), "PONG");
    }

    #[test]
    fn a_killed_server_is_gone_at_once_and_starts_again() {
        let mut server = RedisServer::start().unwrap();
        for _ in 0..10 {
            let pid = server.pid();
            assert!(is_running(pid));
            server.kill().unwrap();
            assert!(!is_running(pid));
            assert!(server.ask(&["PING"]).is_err());
            server.restart().unwrap();
            assert_eq!(server.ask(&["PING"]).unwrap(), "PONG");
        }
    }

    #[test]
    fn a_server_whose_keeper_was_killed_does_not_stay() {
        let mut server = RedisServer::start().unwrap();
        let (pid, keeper) = (server.pid(), server.keeper.as_ref().unwrap().id());
        assert!(Command::new("kill").args(["-s", "KILL", &keeper.to_string()]).status().unwrap().success());
        server.kill().unwrap();
        assert!(server.ask(&["PING"]).is_err(), "{pid} still answers");
        server.restart().unwrap();
        assert_eq!(server.ask(&["PING"]).unwrap(), "PONG");
    }

    /// Set in the process that the next test starts and kills.
    const VICTIM: &str = "TESTBED_VICTIM";

    #[test]
    fn nothing_outlives_a_process_that_is_killed() {
        if std::env::var_os(VICTIM).is_some() {
            let server = RedisServer::start().unwrap();
            println!("\nserver {} {}", server.pid(), server.folder.display());
            // Nothing comes: it is killed while it waits. If the other process fails first, this ends as well.
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
        let said = BufReader::new(victim.stdout.take().unwrap());
        let server = said.lines().find_map(|line| Some(line.unwrap().strip_prefix("server ")?.to_owned()));
        let server = server.unwrap();
        let (pid, folder) = server.split_once(' ').unwrap();
        let (pid, folder) = (pid.parse().unwrap(), PathBuf::from(folder));
        assert!(is_running(pid) && folder.exists());
        victim.kill().unwrap();
        victim.wait().unwrap();
        assert!(wait_until(ANSWER_PATIENCE, || !is_running(pid)));
        assert!(wait_until(ANSWER_PATIENCE, || !folder.exists()));
    }
}
