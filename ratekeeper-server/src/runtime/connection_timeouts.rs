//! The time limits for request heads and for responses. A head arrives before its sender is authenticated, so a slow
//! one is cut off early, while a connection that has already served a request may be idle for longer.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// How long a head may take from its first byte; for the first head, from when the connection is accepted.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may read nothing of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a connection. Reader and service are polled by one task, one after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionState(Arc<AtomicU8>);

/// The client sends a head.
const READING_HEAD: u8 = 0;
/// The server reads the body and responds. Bodies have a separate time limit.
const RESPONDING: u8 = 1;
/// All requests are answered, and no byte has arrived since.
const IDLE: u8 = 2;

impl ConnectionState {
    /// A head is complete.
    pub(crate) fn head_complete(&self) {
        self.0.store(RESPONDING, Ordering::Relaxed);
    }

    /// The response is complete.
    pub(crate) fn response_complete(&self) {
        self.0.store(IDLE, Ordering::Relaxed);
    }
}

/// A stream that fails if the client is too slow with a head, or does not read a response.
#[derive(Debug)]
pub(crate) struct ClientTimeoutIo<I> {
    stream: I,
    state: ConnectionState,
    deadline: Instant,
    /// Created on the first wait: most heads arrive in one read.
    timer: Option<Pin<Box<Sleep>>>,
    /// Set while a write waits for the client.
    write_timer: Option<Pin<Box<Sleep>>>,
}

impl<I> ClientTimeoutIo<I> {
    pub(crate) fn new(stream: I, state: ConnectionState) -> ClientTimeoutIo<I> {
        ClientTimeoutIo {
            stream,
            state,
            deadline: Instant::now() + HEAD_TIMEOUT,
            timer: None,
            write_timer: None,
        }
    }

    /// Ready once the time for a head is over.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(self.deadline)));
        if timer.deadline() != self.deadline {
            timer.as_mut().reset(self.deadline);
        }
        timer.as_mut().poll(context)
    }

    /// The result of a write; an error once writes have waited for [`READ_TIMEOUT`].
    fn track_write<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.write_timer = None;
            return written;
        }
        let timer = self.write_timer.get_or_insert_with(|| Box::pin(sleep(READ_TIMEOUT)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for ClientTimeoutIo<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        match this.state.0.load(Ordering::Relaxed) {
            READING_HEAD if read.is_pending() => {
                ready!(this.poll_timeout(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            IDLE if buffer.filled().len() > before => {
                this.state.0.store(READING_HEAD, Ordering::Relaxed);
                this.deadline = Instant::now() + HEAD_TIMEOUT;
            }
            _ => {}
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for ClientTimeoutIo<I> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.track_write(context, written)
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
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, parts);
        this.track_write(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
