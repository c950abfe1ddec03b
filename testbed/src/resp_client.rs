use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// A connection to a Redis server.
///
/// Used instead of `redis-cli` where a paused server must cause a timeout, or where many commands must not start a
/// process each.
#[derive(Debug)]
pub(crate) struct RespClient {
    stream: BufReader<TcpStream>,
}

impl RespClient {
    /// Connects. `timeout` applies to connecting and of each reply.
    pub(crate) fn open(port: u16, timeout: Duration) -> io::Result<RespClient> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(RespClient { stream: BufReader::new(stream) })
    }

    /// Sends a command and returns the strings and numbers of the reply, flattened in order. An error reply is
    /// returned as an error with the server's message.
    pub(crate) fn command(&mut self, words: &[impl AsRef<[u8]>]) -> io::Result<Vec<Vec<u8>>> {
        let mut command = format!("*{}\r\n", words.len()).into_bytes();
        for word in words.iter().map(AsRef::as_ref) {
            command.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            command.extend_from_slice(word);
            command.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&command)?;
        self.read_reply()
    }

    /// The same, joined by newlines into one string.
    pub(crate) fn command_text(&mut self, words: &[impl AsRef<[u8]>]) -> io::Result<String> {
        let answer = self.command(words)?;
        let texts: Vec<_> = answer.iter().map(|text| String::from_utf8_lossy(text)).collect();
        Ok(texts.join("\n"))
    }

    fn read_reply(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut values = Vec::new();
        // Values of this reply that have not been read yet. An array is one value and adds its elements.
        let mut to_come = 1_usize;
        while to_come > 0 {
            to_come -= 1;
            let line = self.line()?;
            match line.split_at_checked(1) {
                Some(("+" | ":", text)) => values.push(text.as_bytes().to_vec()),
                Some(("-", error)) => return Err(io::Error::other(error)),
                // Nil.
                Some(("$" | "*", "-1")) => {}
                Some(("$", length)) => {
                    let mut value = vec![0; number(length)? + 2];
                    self.stream.read_exact(&mut value)?;
                    value.truncate(value.len() - 2);
                    values.push(value);
                }
                Some(("*", length)) => to_come += number(length)?,
                _ => return Err(not_redis(&line)),
            }
        }
        Ok(values)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None => Err(ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn number(text: &str) -> io::Result<usize> {
    text.parse().map_err(|_| not_redis(text))
}

fn not_redis(text: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("not an answer of Redis: {text:?}"))
}
