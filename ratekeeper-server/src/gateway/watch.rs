//! Timeouts of client connections.
//!
//! A connection is receiving a head, busy with requests, or idle. This phase is a word in memory, written on each
//! event and read only when a timer expires, so requests set no timers.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::rt::{Read, ReadBufCursor, Write};
use ratekeeper_config::Timeouts;

use super::timer::{Ticker, Ticks};

const HEAD: u8 = 0;
const BUSY: u8 = 1;
const IDLE: u8 = 2;

/// The phase of a connection.
#[derive(Debug)]
pub(crate) struct Watch {
    ticker: Arc<Ticker>,
    phase: AtomicU8,
    since: AtomicU64,
    requests: AtomicU32,
    /// Since when the client has not read pending data, in milliseconds; 0 if it reads.
    stuck_since: AtomicU64,
}

/// Whether a connection's timeout has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    Over,
    For(Duration),
}

impl Watch {
    /// Starts in the head phase, counting from the connection's arrival.
    pub(crate) fn since(ticker: Arc<Ticker>, arrived: Ticks) -> Arc<Watch> {
        let since = AtomicU64::new(arrived.as_millis());
        Arc::new(Watch {
            ticker,
            phase: AtomicU8::new(HEAD),
            since,
            requests: AtomicU32::new(0),
            stuck_since: AtomicU64::new(0),
        })
    }

    fn enter(&self, phase: u8) {
        self.since.store(self.ticker.now().as_millis(), Ordering::Relaxed);
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// Counts a new request and marks the connection busy.
    pub(crate) fn begin(self: &Arc<Watch>) -> Busy {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.phase.store(BUSY, Ordering::Relaxed);
        Busy(self.clone())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == IDLE
    }

    /// Whether the client's timeout has passed, and if not, when to check again.
    pub(crate) fn patience(&self, timeouts: &Timeouts) -> Patience {
        let now = self.ticker.now();
        let left = |since: u64, all: Duration| {
            let past = now.since(Ticks::from_millis(since));
            all.checked_sub(past).filter(|left| !left.is_zero()).map_or(Patience::Over, Patience::For)
        };
        let since = self.since.load(Ordering::Relaxed);
        match (self.phase.load(Ordering::Relaxed), self.stuck_since.load(Ordering::Relaxed)) {
            (HEAD, _) => left(since, timeouts.header),
            (IDLE, _) => left(since, timeouts.idle),
            (_, 0) => Patience::For(timeouts.header),
            (_, stuck_since) => left(stuck_since, timeouts.idle),
        }
    }
}

/// A request in flight, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Watch>);

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.requests.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.enter(IDLE);
        }
    }
}

/// A connection whose reads and writes update its watch.
#[derive(Debug)]
pub(crate) struct Watched<I> {
    pub(crate) io: I,
    /// Bytes that were already read.
    first: Bytes,
    watch: Arc<Watch>,
    /// Whether data on an idle connection begins the next request's head.
    is_head_next: bool,
}

impl<I> Watched<I> {
    pub(crate) fn new(io: I, first: Bytes, watch: Arc<Watch>) -> Watched<I> {
        Watched { io, first, watch, is_head_next: true }
    }

    /// For HTTP/2: data on an idle connection may be a ping or a window update.
    pub(crate) fn in_frames(io: I, first: Bytes, watch: Arc<Watch>) -> Watched<I> {
        Watched { io, first, watch, is_head_next: false }
    }

    fn wrote<T>(&self, written: Poll<T>) -> Poll<T> {
        let stuck_since = &self.watch.stuck_since;
        match (written.is_pending(), stuck_since.load(Ordering::Relaxed)) {
            (true, 0) => stuck_since.store(self.watch.ticker.now().as_millis().max(1), Ordering::Relaxed),
            (false, 1..) => stuck_since.store(0, Ordering::Relaxed),
            _ => {}
        }
        written
    }
}

impl<I: Read + Unpin> Read for Watched<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let count = self.first.len().min(buffer.remaining());
            buffer.put_slice(&self.first.split_to(count));
            return Poll::Ready(Ok(()));
        }
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if self.is_head_next && read.is_ready() && self.watch.is_idle() {
            self.watch.enter(HEAD);
        }
        read
    }
}

impl<I: Write + Unpin> Write for Watched<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.wrote(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.wrote(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.wrote(written)
    }
}
