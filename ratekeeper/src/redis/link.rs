//! An open connection to a server.

use std::fmt;
use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::address::Login;
use super::network::ByteStream;
use super::resp::{self, NotResp, RespValue};

/// Bytes for which space is made before each read.
const READ_BYTES: usize = 4 << 10;
/// Memory beyond this is released before the next commands.
const BUFFER_BYTES_KEPT: usize = 64 << 10;

/// Why a connection cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    NotResp(#[from] NotResp),
    #[error("no connection within a second")]
    TimedOut,
    #[error("{0}")]
    ErrorReply(String),
    #[error("the sentinel names a server that is not a master")]
    NotMaster,
    #[error("the sentinel does not know the master {0:?}")]
    UnknownMaster(String),
}

impl LinkError {
    pub(crate) fn of_reply(text: &[u8]) -> LinkError {
        LinkError::ErrorReply(String::from_utf8_lossy(text).into_owned())
    }
}

/// An open connection to a server. After an error, it must not be used any more.
pub(crate) struct Link {
    stream: Box<dyn ByteStream>,
    /// Received bytes; those before `parsed` belong to earlier replies.
    input: Vec<u8>,
    parsed: usize,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("unparsed", &(self.input.len() - self.parsed)).finish_non_exhaustive()
    }
}

impl Link {
    /// Logs in on a new stream. The connection is verified before the first call, because a call cannot be repeated.
    pub(crate) async fn log_in(stream: Box<dyn ByteStream>, login: &Login) -> Result<Link, LinkError> {
        let mut link = Link { stream, input: Vec::new(), parsed: 0 };
        let (mut commands, mut replies) = (Vec::new(), 0);
        if let Some((name, password)) = &login.user {
            let name = Some(name.as_bytes()).filter(|name| !name.is_empty());
            let words = [Some(b"AUTH".as_slice()), name, Some(password.as_bytes())];
            resp::push_all(&mut commands, &words.into_iter().flatten().collect::<Vec<_>>());
            replies += 1;
        }
        if login.database > 0 {
            resp::push_all(&mut commands, &[b"SELECT", login.database.to_string().as_bytes()]);
            replies += 1;
        }
        if replies == 0 {
            link.ping().await?;
            return Ok(link);
        }
        link.send(&commands).await?;
        for _ in 0..replies {
            if let RespValue::Error(text) = link.receive().await? {
                return Err(LinkError::of_reply(text));
            }
        }
        Ok(link)
    }

    /// Verifies that the server answers. Calls report a missing login or permission.
    pub(crate) async fn ping(&mut self) -> Result<(), LinkError> {
        self.send(b"*1\r\n$4\r\nPING\r\n").await?;
        match self.receive().await? {
            RespValue::Error(text) if !text.starts_with(b"NOAUTH") && !text.starts_with(b"NOPERM") => {
                Err(LinkError::of_reply(text))
            }
            _ => Ok(()),
        }
    }

    /// Returns when the server has closed the connection, or has sent a reply without a command.
    pub(crate) async fn wait_closed(&mut self) {
        // Cancel-safe: a byte that is read ends the connection.
        let _ = self.stream.read_u8().await;
    }

    /// Sends commands.
    pub(crate) async fn send(&mut self, commands: &[u8]) -> Result<(), LinkError> {
        if self.parsed < self.input.len() {
            // The server has sent a reply too many, and the next replies would answer the wrong requests.
            return Err(NotResp.into());
        }
        self.input.clear();
        self.parsed = 0;
        self.input.shrink_to(BUFFER_BYTES_KEPT);
        self.stream.write_all(commands).await?;
        Ok(self.stream.flush().await?)
    }

    /// Receives the next reply.
    pub(crate) async fn receive(&mut self) -> Result<RespValue<'_>, LinkError> {
        let length = loop {
            // Parsed again below: the borrow checker does not accept a value that a loop returns.
            if let Some((_, length)) = resp::parse(&self.input[self.parsed..])? {
                break length;
            }
            self.read().await?;
        };
        let reply = self.parsed..self.parsed + length;
        self.parsed = reply.end;
        let (value, _) = resp::parse(&self.input[reply])?.ok_or(NotResp)?;
        Ok(value)
    }

    async fn read(&mut self) -> Result<(), LinkError> {
        self.input.drain(..self.parsed);
        self.parsed = 0;
        self.input.reserve(READ_BYTES);
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection").into()),
            _ => Ok(()),
        }
    }
}
