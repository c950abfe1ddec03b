use std::io::{self, BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

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
        // Bound and let go: the system does not hand the same port out again for a while.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let folder = std::env::temp_dir().join(format!("tollgate-redis-{}-{port}", std::process::id()));
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
        // kills the server.
        let mut keeper = Command::new("sh")
            .args(["-c", "redis-server \"$@\" & echo pid $!; cat; kill -9 $!", "redis-server"])
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
        for line in said.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
            if let Some(pid) = line.strip_prefix("pid ") {
                self.pid = pid.parse().unwrap_or(0);
            }
            if line.contains("Ready to accept connections") {
                return Ok(());
            }
        }
        Err(io::Error::other("redis-server ended before it was ready; is it installed?"))
    }

    /// `kill -9`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&mut self) -> io::Result<()> {
        if let Some(mut keeper) = self.keeper.take() {
            drop(keeper.stdin.take());
            keeper.wait()?;
        }
        Ok(())
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
        let without = self.cli(&["-e", "EVAL", script, "0"])?;
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
}
