//! How long the head of a request may take. It comes before anybody knows who sends it, so whoever is slow at it is not
//! waited for, while a connection that has been of use may be silent for longer.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// How long a head may take from its first byte, and the first one from when its client has come.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Whose turn it is on a connection. Reader and service are polled by one task, one after the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn(Arc<AtomicU8>);

/// The client sends a head.
const HEAD: u8 = 0;
/// We answer. Bodies have a time of their own.
const OURS: u8 = 1;
/// Everything is answered, and nothing has come since.
const IDLE: u8 = 2;

impl Turn {
    /// A head is complete.
    pub(super) fn ours(&self) {
        self.0.store(OURS, Ordering::Relaxed);
    }

    /// It is answered.
    pub(super) fn answered(&self) {
        self.0.store(IDLE, Ordering::Relaxed);
    }
}

/// A stream that fails for a client that is slow with a head.
#[derive(Debug)]
pub(super) struct Heads<I> {
    stream: I,
    turn: Turn,
    deadline: Instant,
    /// Most heads come at once, and nobody waits for those.
    late: Option<Pin<Box<Sleep>>>,
}

impl<I> Heads<I> {
    pub(super) fn new(stream: I, turn: Turn) -> Heads<I> {
        Heads { stream, turn, deadline: Instant::now() + HEAD_TIMEOUT, late: None }
    }

    /// Once the time for a head is over.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let late = self.late.get_or_insert_with(|| Box::pin(sleep_until(self.deadline)));
        if late.deadline() != self.deadline {
            late.as_mut().reset(self.deadline);
        }
        late.as_mut().poll(context)
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Heads<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        match this.turn.0.load(Ordering::Relaxed) {
            HEAD if read.is_pending() => {
                ready!(this.poll_late(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            IDLE if buffer.filled().len() > before => {
                this.turn.0.store(HEAD, Ordering::Relaxed);
                this.deadline = Instant::now() + HEAD_TIMEOUT;
            }
            _ => {}
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Heads<I> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
