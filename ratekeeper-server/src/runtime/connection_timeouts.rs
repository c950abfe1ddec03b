//! The time limits for request heads and for responses. A head arrives before its sender is authenticated, so a slow
//! one is cut off early, while a connection that has already served a request may be idle for longer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::observed_stream::{PolledIo, StreamObserver};

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

/// Fails the reads and writes of a stream whose client is too slow with a head, or does not read a response.
#[derive(Debug)]
pub(crate) struct ClientDeadlines {
    state: ConnectionState,
    deadline: Instant,
    /// Created on the first wait: most heads arrive in one read.
    timer: Option<Pin<Box<Sleep>>>,
    /// Set while a write waits for the client.
    write_timer: Option<Pin<Box<Sleep>>>,
}

impl ClientDeadlines {
    pub(crate) fn new(state: ConnectionState) -> ClientDeadlines {
        ClientDeadlines { state, deadline: Instant::now() + HEAD_TIMEOUT, timer: None, write_timer: None }
    }

    /// Ready once the time for a head is over.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(self.deadline)));
        if timer.deadline() != self.deadline {
            timer.as_mut().reset(self.deadline);
        }
        timer.as_mut().poll(context)
    }
}

impl StreamObserver for ClientDeadlines {
    fn after_read(&mut self, context: &mut Context<'_>, bytes: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        match self.state.phase() {
            READING_HEAD if read.is_pending() => {
                ready!(self.poll_timeout(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            IDLE if !bytes.is_empty() => {
                self.state.set_waiting();
                // A connection that the accept loop has just closed stays closed.
                self.state.change(IDLE, READING_HEAD);
                self.deadline = Instant::now() + HEAD_TIMEOUT;
            }
            _ => {}
        }
        read
    }

    /// Returns an error once writes have waited for [`READ_TIMEOUT`].
    fn after_write(&mut self, context: &mut Context<'_>, written: PolledIo<usize>) -> PolledIo<usize> {
        if written.is_ready() {
            self.write_timer = None;
            return written;
        }
        let timer = self.write_timer.get_or_insert_with(|| Box::pin(sleep(READ_TIMEOUT)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn after_flush(&mut self, _: &mut Context<'_>, flushed: PolledIo<()>) -> PolledIo<()> {
        if flushed.is_ready() {
            self.state.flushed();
        }
        flushed
    }
}
