//! One client's connection, from its first byte to its last.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::{io, mem};

use bytes::BufMut;
use ratekeeper::Store;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::metrics::OutcomeTally;
use super::pipeline::{CommandGroups, join_all};
use super::protocol::{COMMAND_BYTES_MAX, Parser, ProtocolError};
use super::reply::Replies;
use super::session::Session;
use super::{RedisApi, check, wait_for_drain};
use crate::runtime::connection_end::{DRAIN_GRACE, linger};
use crate::runtime::metrics::CommandOutcome;

/// Most bytes of unsent replies; one more reply, of at most a word's length, may exceed it.
const UNSENT_BYTES_MAX: usize = 64 << 10;
/// Initial size of a read, kept as long as it suffices: most commands are short.
const READ_BYTES_MIN: usize = 512;
/// Larger buffers are freed when the client is idle.
const IDLE_BUFFER_BYTES_MAX: usize = 4 << 10;

/// A connection, with its buffers.
struct RedisConnection<S> {
    api: Arc<RedisApi<S>>,
    stream: TcpStream,
    session: Session,
    parser: Parser,
    /// Bytes that were read and not yet answered.
    unread: Vec<u8>,
    /// Size of the next read, in bytes.
    read_size: usize,
    arrived: Instant,
    replies: Replies,
    tally: OutcomeTally,
}

/// What follows after the received commands are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextStep {
    /// Read on.
    Read,
    /// Close: the client has its last reply.
    Close,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionEnd {
    /// The client sent nothing more.
    WithoutReply,
    /// The client may not have read the last reply yet.
    AfterReply,
}

/// Serves a connection until it ends.
pub(super) async fn run<S: Store + Send + Sync + 'static>(
    api: Arc<RedisApi<S>>,
    stream: TcpStream,
    number: u64,
) {
    let session = Session::new(number, api.current.load().token.is_none());
    let mut connection = RedisConnection {
        stream,
        session,
        parser: Parser::default(),
        unread: Vec::new(),
        read_size: READ_BYTES_MIN,
        arrived: Instant::now(),
        replies: Replies::default(),
        tally: OutcomeTally::default(),
        api,
    };
    // After an error there is nothing left to deliver.
    if let Ok(ConnectionEnd::AfterReply) = connection.serve().await {
        linger(&mut connection.stream).await;
    }
}

impl<S: Store + Send + Sync + 'static> RedisConnection<S> {
    /// Reads and answers commands until the connection ends.
    async fn serve(&mut self) -> io::Result<ConnectionEnd> {
        let is_draining = self.api.draining.clone();
        let mut draining = pin!(wait_for_drain(self.api.draining.clone()));
        // One timer for all deadlines; it is not reset by input that arrives in time.
        let mut timer = pin!(sleep_until(self.arrived + self.api.timeouts.idle));
        // When the incomplete command began, or when the client became idle.
        let mut since = self.arrived;
        // The last moment to read, once the API is closing.
        let mut drain_deadline = None;
        loop {
            let was_empty = self.unread.is_empty();
            if !self.read_more(draining.as_mut(), timer.as_mut(), since, &mut drain_deadline).await? {
                return Ok(ConnectionEnd::WithoutReply);
            }
            let read = self.unread.len();
            let next = self.answer().await?;
            self.send().await?;
            // A client that sends without pause would otherwise never reach the closing branch.
            if drain_deadline.is_none() && *is_draining.borrow() {
                drain_deadline = Some(Instant::now() + DRAIN_GRACE);
            }
            if next == NextStep::Close
                || drain_deadline.is_some_and(|drain_deadline| Instant::now() >= drain_deadline)
            {
                return Ok(ConnectionEnd::AfterReply);
            }
            // A client that sends a command byte by byte gets no more time with each byte.
            if was_empty || self.unread.len() < read {
                since = Instant::now();
            }
        }
    }

    /// Reads the next input. Returns false if there is none: the client has ended, or the API is closing.
    async fn read_more(
        &mut self,
        mut draining: Pin<&mut impl Future<Output = ()>>,
        mut timer: Pin<&mut Sleep>,
        since: Instant,
        drain_deadline: &mut Option<Instant>,
    ) -> io::Result<bool> {
        let timeouts = &self.api.timeouts;
        let mut deadline = since + if self.unread.is_empty() { timeouts.idle } else { timeouts.command };
        if !self.session.is_authenticated() {
            // Unauthenticated connections must not use up the capacity.
            deadline = deadline.min(self.arrived + timeouts.command);
        }
        if self.unread.is_empty() && self.unread.capacity() > IDLE_BUFFER_BYTES_MAX {
            self.unread = Vec::new();
        }
        loop {
            let until = drain_deadline.map_or(deadline, |drain_deadline| drain_deadline.min(deadline));
            if timer.deadline() > until {
                timer.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                read = self.read() => return Ok(read? > 0),
                () = &mut timer => {
                    let now = Instant::now();
                    if now >= deadline {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    if now >= until {
                        return Ok(false);
                    }
                    timer.as_mut().reset(until);
                }
                () = &mut draining, if drain_deadline.is_none() => {
                    *drain_deadline = Some(Instant::now() + DRAIN_GRACE);
                }
            }
        }
    }

    /// Reads what has arrived, into a buffer that doubles when it was filled.
    async fn read(&mut self) -> io::Result<usize> {
        if self.unread.capacity() < self.read_size {
            // Wait before allocating: an idle client uses no buffer.
            self.stream.readable().await?;
            self.unread.reserve(self.read_size - self.unread.len());
        }
        // At most the longest command: its end is within, or the command is too long.
        let free = self.unread.capacity().min(COMMAND_BYTES_MAX).saturating_sub(self.unread.len());
        let read = self.stream.read_buf(&mut (&mut self.unread).limit(free)).await?;
        if self.unread.len() == self.unread.capacity() {
            self.read_size = (2 * self.unread.capacity()).min(COMMAND_BYTES_MAX);
        }
        Ok(read)
    }

    /// Answers all commands that have arrived.
    async fn answer(&mut self) -> io::Result<NextStep> {
        let next = match S::IS_IMMEDIATE {
            true => self.answer_each().await,
            false => self.answer_concurrently().await,
        };
        self.api.metrics.add(&mut self.tally);
        next
    }

    /// One after the other, for a store that decides immediately.
    async fn answer_each(&mut self) -> io::Result<NextStep> {
        let snapshot = self.api.current.load();
        let limits = snapshot.layer.as_ref().map(|layer| (layer, snapshot.named_limits));
        let mut at = 0;
        let next = loop {
            let bytes = self.unread.get(at..).unwrap_or_default();
            match self.parser.next(bytes) {
                Ok(Some(length)) => {
                    let words = self.parser.words(bytes);
                    let context = (snapshot.token.as_ref(), &*self.api.metrics);
                    let outcome = self.session.answer(words, limits, context, &mut self.replies).await;
                    outcome.into_iter().for_each(|outcome| self.tally.add(outcome));
                    at += length;
                }
                Ok(None) => break NextStep::Read,
                Err(error) => break self.reject(error),
            }
            if self.session.is_closing {
                break NextStep::Close;
            }
            self.send_if_many().await?;
        };
        self.unread.drain(..at.min(self.unread.len()));
        Ok(next)
    }

    /// In groups of commands that do not depend on each other.
    async fn answer_concurrently(&mut self) -> io::Result<NextStep> {
        let snapshot = self.api.current.load();
        let limits = snapshot.layer.as_ref().map(|layer| (layer, snapshot.named_limits));
        let unread = mem::take(&mut self.unread);
        let mut groups = CommandGroups::new(&unread);
        let mut at = 0;
        let next = loop {
            let session = &self.session;
            let group = groups.next(&mut self.parser, |words| session.limit_check(words).map(|(_, key)| key));
            match (group.as_slice(), groups.error) {
                ([], None) => break NextStep::Read,
                ([], Some(error)) => break self.reject(error),
                ([one], _) => {
                    let context = (snapshot.token.as_ref(), &*self.api.metrics);
                    let words = one.words(&unread);
                    let outcome = self.session.answer(words, limits, context, &mut self.replies).await;
                    outcome.into_iter().for_each(|outcome| self.tally.add(outcome));
                }
                (several, _) => {
                    let protocol = self.replies.protocol;
                    let checks = several.iter().filter_map(|one| {
                        let words = one.words(&unread);
                        let (command, _) = self.session.limit_check(words)?;
                        Some(Box::pin(async move {
                            let mut out = Replies { protocol, ..Replies::default() };
                            let outcome = check::answer(command, words, limits, &mut out).await;
                            (out, outcome)
                        }) as Pin<Box<dyn Future<Output = _> + Send + '_>>)
                    });
                    for (out, outcome) in join_all::<(Replies, CommandOutcome)>(checks.collect()).await {
                        self.replies.bytes.extend_from_slice(&out.bytes);
                        self.tally.add(outcome);
                    }
                }
            }
            at = group.last().map_or(at, |last| last.end);
            if self.session.is_closing {
                break NextStep::Close;
            }
            self.send_if_many().await?;
        };
        self.unread = unread;
        self.unread.drain(..at.min(self.unread.len()));
        Ok(next)
    }

    /// A protocol error: nothing after it can be parsed.
    fn reject(&mut self, error: ProtocolError) -> NextStep {
        self.replies.error(&format!("ERR Protocol error: {error}"));
        self.tally.add(CommandOutcome::Error);
        NextStep::Close
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
            timeout(self.api.timeouts.write, self.stream.write_all(bytes)).await??;
        }
        self.replies.bytes.clear();
        if self.replies.bytes.capacity() > IDLE_BUFFER_BYTES_MAX {
            self.replies.bytes = Vec::new();
        }
        Ok(())
    }
}
