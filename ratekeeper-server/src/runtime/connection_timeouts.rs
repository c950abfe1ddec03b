//! The time limits for request heads and for responses. A head arrives before its sender is authenticated, so a slow
//! one is cut off early, while a connection that has already served a request may be idle for longer.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// How long a head may take from its first byte; for the first head, from when the connection is accepted.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may read nothing of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a connection. Reader and service are polled by one task, one after the other; the accept loop closes
/// connections that wait for their client.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionState(Arc<StateCell>);

#[derive(Debug)]
struct StateCell {
    phase: AtomicU8,
    /// When the listener was started, and since when the connection waits for its client, in milliseconds after that.
    started: Instant,
    waits_since: AtomicU64,
}

/// The client sends a head.
const READING_HEAD: u8 = 0;
/// The server reads the body and responds. Bodies have a separate time limit.
const RESPONDING: u8 = 1;
/// The response is complete, but not yet written.
const FLUSHING: u8 = 2;
/// All requests are answered, and no byte has arrived since.
const IDLE: u8 = 3;
/// The accept loop closes the connection; it serves no further request.
const CLOSED: u8 = 4;

impl ConnectionState {
    /// The state of a new connection of a listener that was started at `started`.
    pub(crate) fn new(started: Instant) -> ConnectionState {
        let cell = StateCell { phase: AtomicU8::new(READING_HEAD), started, waits_since: AtomicU64::new(0) };
        let state = ConnectionState(Arc::new(cell));
        state.set_waiting();
        state
    }

    fn phase(&self) -> u8 {
        self.0.phase.load(Ordering::Relaxed)
    }

    /// Changes the phase, if it is still `from`; the accept loop may have closed the connection.
    fn change(&self, from: u8, to: u8) -> bool {
        self.0.phase.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn set_waiting(&self) {
        let now = u64::try_from(self.0.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.waits_since.store(now, Ordering::Relaxed);
    }

    /// A head is complete. Returns false if the connection is closed: the request must not be served.
    #[must_use]
    pub(crate) fn head_complete(&self) -> bool {
        let phase = self.phase();
        phase != CLOSED && self.change(phase, RESPONDING)
    }

    /// The response is complete. The connection is idle once the response is also written.
    fn response_complete(&self) {
        self.change(RESPONDING, FLUSHING);
    }

    /// All data is written.
    fn flushed(&self) {
        if self.phase() == FLUSHING {
            self.set_waiting();
            self.change(FLUSHING, IDLE);
        }
    }

    /// Since when the connection waits for a head or for the rest of it, in milliseconds; None if it serves a request or
    /// writes its response.
    pub(crate) fn waits_since(&self) -> Option<u64> {
        matches!(self.phase(), READING_HEAD | IDLE).then(|| self.0.waits_since.load(Ordering::Relaxed))
    }

    /// Closes the connection to requests, unless it serves one. Returns whether it is closed.
    pub(crate) fn close(&self) -> bool {
        self.change(READING_HEAD, CLOSED) || self.change(IDLE, CLOSED)
    }
}

/// The body of a response. When it is dropped, the response is complete.
#[derive(Debug)]
pub(crate) struct TrackedBody {
    body: Body,
    state: ConnectionState,
}

impl TrackedBody {
    pub(crate) fn new(body: Body, state: ConnectionState) -> TrackedBody {
        TrackedBody { body, state }
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.state.response_complete();
    }
}

impl hyper::body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
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
        match this.state.phase() {
            READING_HEAD if read.is_pending() => {
                ready!(this.poll_timeout(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            IDLE if buffer.filled().len() > before => {
                this.state.set_waiting();
                // A connection that the accept loop has just closed stays closed.
                this.state.change(IDLE, READING_HEAD);
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
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(context);
        if flushed.is_ready() {
            this.state.flushed();
        }
        flushed
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
