//! One client's connection, from its first byte to its last.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use std::{io, mem};

use bytes::BufMut;
use ratekeeper::Store;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::counts::{Became, Tally};
use super::pipeline::{Groups, all};
use super::protocol::{COMMAND_BYTES_MAX, Parser, ProtocolError};
use super::reply::Replies;
use super::session::Session;
use super::{ServiceContext, Shared, ask, drained};

/// Most bytes of unsent replies; one more reply, of at most a word's length, may exceed it.
const UNSENT_BYTES_MAX: usize = 64 << 10;
/// Initial size of a read, kept as long as it suffices: most commands are short.
const READ_BYTES_MIN: usize = 512;
/// Larger buffers are freed when the client is idle.
const KEPT_BYTES_MAX: usize = 4 << 10;
/// How long an idle client stays connected when the API closes, so that a command in transit is still answered.
const LAST_CALL: Duration = Duration::from_millis(500);
/// Most bytes discarded from a closing connection, so that the client can read the last reply.
const LINGER_BYTES_MAX: usize = 1 << 20;
const LINGER: Duration = Duration::from_secs(2);

/// A connection, with its buffers.
struct Connection<B> {
    shared: Arc<Shared<B>>,
    stream: TcpStream,
    session: Session,
    parser: Parser,
    /// Bytes that were read and not yet answered.
    unread: Vec<u8>,
    /// Size of the next read, in bytes.
    room: usize,
    arrived: Instant,
    replies: Replies,
    tally: Tally,
}

/// What follows an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Read on.
    Read,
    /// Close: the client has its last reply.
    Close,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The client sent nothing more.
    Silent,
    /// The client may not have read the last reply yet.
    Said,
}

/// Serves a connection until it ends.
pub(super) async fn run<B: ServiceContext>(shared: Arc<Shared<B>>, stream: TcpStream, number: u64) {
    let session = Session::new(number, shared.behind.token().is_none());
    let mut connection = Connection {
        stream,
        session,
        parser: Parser::default(),
        unread: Vec::new(),
        room: READ_BYTES_MIN,
        arrived: Instant::now(),
        replies: Replies::default(),
        tally: Tally::default(),
        shared,
    };
    // After an error there is nothing left to deliver.
    if let Ok(Ending::Said) = connection.talk().await {
        connection.linger().await;
    }
}

impl<B: ServiceContext> Connection<B> {
    /// Reads and answers, in turns.
    async fn talk(&mut self) -> io::Result<Ending> {
        let news = self.shared.draining.clone();
        let mut draining = pin!(drained(self.shared.draining.clone()));
        // One timer for all deadlines; it is not reset by input that arrives in time.
        let mut alarm = pin!(sleep_until(self.arrived + self.shared.patience.idle));
        // When the incomplete command began, or when the client became idle.
        let mut since = self.arrived;
        // The last moment to read, once the API is closing.
        let mut last_call = None;
        loop {
            let was_empty = self.unread.is_empty();
            if !self.more(draining.as_mut(), alarm.as_mut(), since, &mut last_call).await? {
                return Ok(Ending::Silent);
            }
            let read = self.unread.len();
            let next = self.answer().await?;
            self.send().await?;
            // A client that sends without pause would otherwise never reach the closing branch.
            if last_call.is_none() && *news.borrow() {
                last_call = Some(Instant::now() + LAST_CALL);
            }
            if next == Next::Close || last_call.is_some_and(|last_call| Instant::now() >= last_call) {
                return Ok(Ending::Said);
            }
            // A client that sends a command byte by byte gets no more time with each byte.
            if was_empty || self.unread.len() < read {
                since = Instant::now();
            }
        }
    }

    /// Reads the next input. Returns false if there is none: the client has ended, or the API is closing.
    async fn more(
        &mut self,
        mut draining: Pin<&mut impl Future<Output = ()>>,
        mut alarm: Pin<&mut Sleep>,
        since: Instant,
        last_call: &mut Option<Instant>,
    ) -> io::Result<bool> {
        let patience = &self.shared.patience;
        let mut deadline = since + if self.unread.is_empty() { patience.idle } else { patience.command };
        if !self.session.is_known() {
            // Unauthenticated connections must not use up the capacity.
            deadline = deadline.min(self.arrived + patience.command);
        }
        if self.unread.is_empty() && self.unread.capacity() > KEPT_BYTES_MAX {
            self.unread = Vec::new();
        }
        loop {
            let until = last_call.map_or(deadline, |last_call| last_call.min(deadline));
            if alarm.deadline() > until {
                alarm.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                read = self.read() => return Ok(read? > 0),
                () = &mut alarm => {
                    let now = Instant::now();
                    if now >= deadline {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    if now >= until {
                        return Ok(false);
                    }
                    alarm.as_mut().reset(until);
                }
                () = &mut draining, if last_call.is_none() => {
                    *last_call = Some(Instant::now() + LAST_CALL);
                }
            }
        }
    }

    /// Reads what has arrived, into a buffer that doubles when it was filled.
    async fn read(&mut self) -> io::Result<usize> {
        if self.unread.capacity() < self.room {
            // Wait before allocating: an idle client uses no buffer.
            self.stream.readable().await?;
            self.unread.reserve(self.room - self.unread.len());
        }
        // At most the longest command: its end is within, or the command is too long.
        let most = self.unread.capacity().min(COMMAND_BYTES_MAX).saturating_sub(self.unread.len());
        let read = self.stream.read_buf(&mut (&mut self.unread).limit(most)).await?;
        if self.unread.len() == self.unread.capacity() {
            self.room = (2 * self.unread.capacity()).min(COMMAND_BYTES_MAX);
        }
        Ok(read)
    }

    /// Answers all commands that have arrived.
    async fn answer(&mut self) -> io::Result<Next> {
        let answered = match B::Store::IS_IMMEDIATE {
            true => self.answer_each().await,
            false => self.answer_together().await,
        };
        self.shared.counts.take(&mut self.tally);
        answered
    }

    /// One after the other, for a store that decides immediately.
    async fn answer_each(&mut self) -> io::Result<Next> {
        let layer = self.shared.behind.limits();
        let limits = layer.as_ref().map(|layer| (layer, self.shared.behind.named_limits()));
        let mut at = 0;
        let next = loop {
            let bytes = self.unread.get(at..).unwrap_or_default();
            match self.parser.next(bytes) {
                Ok(Some(length)) => {
                    let words = self.parser.words(bytes);
                    let around = (&*self.shared.behind, &*self.shared.counts);
                    let became = self.session.answer(words, limits, around, &mut self.replies).await;
                    became.into_iter().for_each(|became| self.tally.add(became));
                    at += length;
                }
                Ok(None) => break Next::Read,
                Err(error) => break self.refuse(error),
            }
            if self.session.is_over {
                break Next::Close;
            }
            self.send_if_many().await?;
        };
        self.unread.drain(..at.min(self.unread.len()));
        Ok(next)
    }

    /// In groups of commands that do not depend on each other.
    async fn answer_together(&mut self) -> io::Result<Next> {
        let layer = self.shared.behind.limits();
        let limits = layer.as_ref().map(|layer| (layer, self.shared.behind.named_limits()));
        let unread = mem::take(&mut self.unread);
        let mut groups = Groups::new(&unread);
        let mut at = 0;
        let next = loop {
            let session = &self.session;
            let group = groups.next(&mut self.parser, |words| session.asks_about(words).map(|(_, key)| key));
            match (group.as_slice(), groups.wrong) {
                ([], None) => break Next::Read,
                ([], Some(error)) => break self.refuse(error),
                ([one], _) => {
                    let around = (&*self.shared.behind, &*self.shared.counts);
                    let words = one.words(&unread);
                    let became = self.session.answer(words, limits, around, &mut self.replies).await;
                    became.into_iter().for_each(|became| self.tally.add(became));
                }
                (several, _) => {
                    let protocol = self.replies.protocol;
                    let asking = several.iter().filter_map(|one| {
                        let words = one.words(&unread);
                        let (command, _) = self.session.asks_about(words)?;
                        Some(Box::pin(async move {
                            let mut out = Replies { protocol, ..Replies::default() };
                            let became = ask::answer(command, words, limits, &mut out).await;
                            (out, became)
                        }) as Pin<Box<dyn Future<Output = _> + Send + '_>>)
                    });
                    for (out, became) in all::<(Replies, Became)>(asking.collect()).await {
                        self.replies.bytes.extend_from_slice(&out.bytes);
                        self.tally.add(became);
                    }
                }
            }
            at = group.last().map_or(at, |last| last.end);
            if self.session.is_over {
                break Next::Close;
            }
            self.send_if_many().await?;
        };
        self.unread = unread;
        self.unread.drain(..at.min(self.unread.len()));
        Ok(next)
    }

    /// A protocol error: nothing after it can be parsed.
    fn refuse(&mut self, error: ProtocolError) -> Next {
        self.replies.error(&format!("ERR Protocol error: {error}"));
        self.tally.add(Became::Refused);
        Next::Close
    }

    /// Sends early, because replies that are longer than their commands would accumulate.
    async fn send_if_many(&mut self) -> io::Result<()> {
        match self.replies.bytes.len() >= UNSENT_BYTES_MAX {
            true => self.send().await,
            false => Ok(()),
        }
    }

    /// Sends all replies, within the time limit for the client to read them.
    async fn send(&mut self) -> io::Result<()> {
        let mut bytes = self.replies.bytes.as_slice();
        // Usually the socket accepts everything immediately, and no timer is needed.
        while !bytes.is_empty() {
            match self.stream.try_write(bytes) {
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if !bytes.is_empty() {
            timeout(self.shared.patience.write, self.stream.write_all(bytes)).await??;
        }
        self.replies.bytes.clear();
        if self.replies.bytes.capacity() > KEPT_BYTES_MAX {
            self.replies.bytes = Vec::new();
        }
        Ok(())
    }

    /// Shuts down the write side and reads on for a while: closing a socket with unread input resets the connection,
    /// and the client could lose the last reply.
    async fn linger(&mut self) {
        let stream = &mut self.stream;
        let reading = async {
            stream.shutdown().await.ok()?;
            let (mut bytes, mut left) = ([0; 1024], LINGER_BYTES_MAX);
            while left > 0 {
                let read = stream.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
                left = left.saturating_sub(read);
            }
            Some(())
        };
        let _ = timeout(LINGER, reading).await;
    }
}
