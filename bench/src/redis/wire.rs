//! A minimal client of the Redis protocol: commands are packed before timing starts, and replies are parsed only as
//! far as needed.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

pub(super) struct Wire {
    write: TcpStream,
    read: BufReader<TcpStream>,
}

/// A reply, as far as this benchmark reads it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Number(i64),
    Text(Vec<u8>),
    Many(Vec<Reply>),
}

impl Wire {
    pub(super) fn connect(port: u16) -> io::Result<Wire> {
        let write = TcpStream::connect(("127.0.0.1", port))?;
        write.set_nodelay(true)?;
        let read = BufReader::with_capacity(1 << 16, write.try_clone()?);
        Ok(Wire { write, read })
    }

    /// Sends packed commands and reads `replies` replies.
    pub(super) fn send(
        &mut self,
        packed: &[u8],
        replies: usize,
        mut hear: impl FnMut(Reply),
    ) -> io::Result<()> {
        self.write.write_all(packed)?;
        (0..replies).try_for_each(|_| self.reply().map(&mut hear))
    }

    pub(super) fn call(&mut self, parts: &[&[u8]]) -> io::Result<Reply> {
        let mut packed = Vec::new();
        pack(&mut packed, parts);
        self.write.write_all(&packed)?;
        self.reply()
    }

    pub(super) fn text(&mut self, parts: &[&str]) -> io::Result<String> {
        let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
        match self.call(&parts)? {
            Reply::Text(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Reply::Number(number) => Ok(number.to_string()),
            Reply::Many(_) => Err(io::Error::other("expected one value, got a list")),
        }
    }

    fn reply(&mut self) -> io::Result<Reply> {
        let mut line = String::new();
        self.read.read_line(&mut line)?;
        let (kind, rest) = (line.bytes().next(), line.get(1..).unwrap_or_default().trim_end());
        let number = || rest.parse::<i64>().map_err(io::Error::other);
        match kind {
            Some(b'+') => Ok(Reply::Text(rest.into())),
            Some(b':') => Ok(Reply::Number(number()?)),
            Some(b'$') => {
                let mut text = vec![0; usize::try_from(number()?).map_or(0, |length| length + 2)];
                self.read.read_exact(&mut text)?;
                text.truncate(text.len().saturating_sub(2));
                Ok(Reply::Text(text))
            }
            Some(b'*') => (0..number()?).map(|_| self.reply()).collect::<io::Result<_>>().map(Reply::Many),
            _ => Err(io::Error::other(format!("Redis replied: {}", line.trim_end()))),
        }
    }
}

/// Appends a command.
pub(super) fn pack(packed: &mut Vec<u8>, parts: &[&[u8]]) {
    packed.extend(format!("*{}\r\n", parts.len()).bytes());
    for part in parts {
        packed.extend(format!("${}\r\n", part.len()).bytes());
        packed.extend(*part);
        packed.extend(b"\r\n");
    }
}
