//! Timeouts of client connections.
//!
//! A connection is receiving a head, busy with requests, or idle. The phase is an atomic, written on each event and read
//! only when a timer expires, so requests set no timers.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hyper::rt::{Read, ReadBufCursor, Write};
use ratekeeper_config::Timeouts;
use tokio::time::Instant;

use super::min_rate::MinRate;
use super::timer::{Ticker, Ticks};

const HEAD: u8 = 0;
const BUSY: u8 = 1;
const IDLE: u8 = 2;

/// How a connection that waits for a request is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Close {
    /// Over HTTP/2, with GOAWAY and time to read it.
    Graceful,
    Immediate,
}

const OPEN: u8 = 0;
const CLOSE_GRACEFUL: u8 = 1;
const CLOSE_IMMEDIATE: u8 = 2;

/// A connection that waits for a request or for the rest of a request head. Those that have waited longest come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Waiting {
    pub(crate) since: Ticks,
    /// Orders connections that wait since the same step of the clock.
    accepted_at: Instant,
    /// Whether a head has begun, or the connection is new.
    pub(crate) is_head: bool,
}

/// The phase of a connection, and since when it lasts.
#[derive(Debug)]
pub(crate) struct ConnectionActivity {
    ticker: Arc<Ticker>,
    accepted_at: Instant,
    phase: AtomicU8,
    since: AtomicU64,
    requests: AtomicU32,
    /// Whether and how the connection is to be closed if it still waits for a request; a [`Close`] or [`OPEN`].
    closing: AtomicU8,
    /// Whether the client sends too many frames that nothing answers.
    is_flood: AtomicBool,
    /// The connection's task.
    waker: OnceLock<Waker>,
    /// Since when the client does not read pending data, in milliseconds; 0 if it reads.
    blocked_since: AtomicU64,
    /// How long the client has not read pending data before, in milliseconds, less what reading has restored.
    blocked_before: AtomicU64,
    min_rate: MinRate,
}

/// When a connection's current timeout expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expiry {
    Expired,
    In(Duration),
}

impl ConnectionActivity {
    /// The activity of a connection that is accepted now. It starts in the head phase.
    pub(crate) fn new(ticker: Arc<Ticker>, min_rate: MinRate) -> Arc<ConnectionActivity> {
        let since = AtomicU64::new(ticker.now().as_millis());
        Arc::new(ConnectionActivity {
            ticker,
            accepted_at: Instant::now(),
            phase: AtomicU8::new(HEAD),
            since,
            requests: AtomicU32::new(0),
            closing: AtomicU8::new(OPEN),
            is_flood: AtomicBool::new(false),
            waker: OnceLock::new(),
            blocked_since: AtomicU64::new(0),
            blocked_before: AtomicU64::new(0),
            min_rate,
        })
    }

    fn enter(&self, phase: u8) {
        self.blocked_before.store(0, Ordering::Relaxed);
        self.since.store(self.ticker.now().as_millis(), Ordering::Relaxed);
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// Counts a new request and marks the connection busy.
    pub(crate) fn begin_request(self: &Arc<ConnectionActivity>) -> ActiveRequest {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.phase.store(BUSY, Ordering::Relaxed);
        ActiveRequest(self.clone())
    }

    pub(crate) fn accepted_at(&self) -> Instant {
        self.accepted_at
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == IDLE
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == BUSY
    }

    pub(crate) fn now(&self) -> Ticks {
        self.ticker.now()
    }

    pub(crate) fn set_flood(&self) {
        self.is_flood.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_flood(&self) -> bool {
        self.is_flood.load(Ordering::Relaxed)
    }

    /// Whether the connection waits for a request; None also if it is being closed.
    pub(crate) fn waiting(&self) -> Option<Waiting> {
        let phase = self.phase.load(Ordering::Relaxed);
        let is_waiting = phase != BUSY && self.closing.load(Ordering::Relaxed) == OPEN;
        let since = Ticks::from_millis(self.since.load(Ordering::Relaxed));
        is_waiting.then_some(Waiting { since, accepted_at: self.accepted_at, is_head: phase == HEAD })
    }

    /// Asks the connection's task to close the connection, if it still waits for a request then.
    pub(crate) fn close(&self, close: Close) {
        let closing = match close {
            Close::Graceful => CLOSE_GRACEFUL,
            Close::Immediate => CLOSE_IMMEDIATE,
        };
        self.closing.store(closing, Ordering::Relaxed);
        if let Some(waker) = self.waker.get() {
            waker.wake_by_ref();
        }
    }

    /// Ready once the connection is to be closed.
    pub(crate) fn poll_close(&self, context: &Context<'_>) -> Poll<Close> {
        if self.is_flood() {
            return Poll::Ready(Close::Graceful);
        }
        // The task of a connection, and so its waker, stays the same.
        self.waker.get_or_init(|| context.waker().clone());
        match self.closing.load(Ordering::Relaxed) {
            OPEN => Poll::Pending,
            _ if self.is_busy() => {
                self.closing.store(OPEN, Ordering::Relaxed);
                Poll::Pending
            }
            CLOSE_GRACEFUL => Poll::Ready(Close::Graceful),
            _ => Poll::Ready(Close::Immediate),
        }
    }

    /// When the timeout of the current phase expires; while a request is served, when to check again.
    pub(crate) fn expiry(&self, timeouts: &Timeouts) -> Expiry {
        let now = self.ticker.now();
        let expiry = |since: u64, timeout: Duration, before: Duration| {
            let past = before + now.since(Ticks::from_millis(since));
            timeout.checked_sub(past).filter(|left| !left.is_zero()).map_or(Expiry::Expired, Expiry::In)
        };
        let since = self.since.load(Ordering::Relaxed);
        match (self.phase.load(Ordering::Relaxed), self.blocked_since.load(Ordering::Relaxed)) {
            (HEAD, _) => expiry(since, timeouts.header, Duration::ZERO),
            (IDLE, _) => expiry(since, timeouts.idle, Duration::ZERO),
            (_, 0) => Expiry::In(timeouts.header),
            (_, blocked_since) => {
                let before = Duration::from_millis(self.blocked_before.load(Ordering::Relaxed));
                expiry(blocked_since, timeouts.idle, before)
            }
        }
    }

    /// Records that data waits for the client to read.
    fn set_blocked(&self) {
        if self.blocked_since.load(Ordering::Relaxed) == 0 {
            self.blocked_since.store(self.now().as_millis().max(1), Ordering::Relaxed);
        }
    }

    /// Records that the client has read, so that `bytes` more could be written.
    fn set_unblocked(&self, bytes: usize) {
        let since = self.blocked_since.load(Ordering::Relaxed);
        let mut blocked = Duration::from_millis(self.blocked_before.load(Ordering::Relaxed));
        if since == 0 && blocked.is_zero() {
            return;
        }
        if since > 0 {
            self.blocked_since.store(0, Ordering::Relaxed);
            blocked += self.now().since(Ticks::from_millis(since));
        }
        let left = self.min_rate.left_after(blocked, bytes).as_millis();
        self.blocked_before.store(u64::try_from(left).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// A request in flight, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<ConnectionActivity>);

impl ActiveRequest {
    /// Whether data waits for the client to read.
    pub(crate) fn is_client_blocked(&self) -> bool {
        self.0.blocked_since.load(Ordering::Relaxed) > 0
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        if self.0.requests.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.enter(IDLE);
        }
    }
}

/// A client connection whose reads and writes update its [`ConnectionActivity`].
#[derive(Debug)]
pub(crate) struct TimedIo<I> {
    pub(crate) io: I,
    /// Bytes read during connection setup.
    read_ahead: Bytes,
    activity: Arc<ConnectionActivity>,
    /// In HTTP/1, data on an idle connection begins a request head; in HTTP/2, it may be a ping or a window update.
    is_http1: bool,
}

impl<I> TimedIo<I> {
    pub(crate) fn http1(io: I, read_ahead: Bytes, activity: Arc<ConnectionActivity>) -> TimedIo<I> {
        TimedIo { io, read_ahead, activity, is_http1: true }
    }

    pub(crate) fn http2(io: I, read_ahead: Bytes, activity: Arc<ConnectionActivity>) -> TimedIo<I> {
        TimedIo { io, read_ahead, activity, is_http1: false }
    }

    fn track_write<T>(
        &self,
        written: Poll<io::Result<T>>,
        bytes: impl FnOnce(&T) -> usize,
    ) -> Poll<io::Result<T>> {
        match &written {
            Poll::Pending => self.activity.set_blocked(),
            Poll::Ready(written) => self.activity.set_unblocked(written.as_ref().map_or(0, bytes)),
        }
        written
    }
}

impl<I: Read + Unpin> Read for TimedIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.read_ahead.is_empty() {
            let count = self.read_ahead.len().min(buffer.remaining());
            buffer.put_slice(&self.read_ahead.split_to(count));
            return Poll::Ready(Ok(()));
        }
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if self.is_http1 && read.is_ready() && self.activity.is_idle() {
            self.activity.enter(HEAD);
        }
        read
    }
}

impl<I: Write + Unpin> Write for TimedIo<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.track_write(written, |bytes| *bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.track_write(flushed, |()| 0)
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
        self.track_write(written, |bytes| *bytes)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const PAUSE: Duration = Duration::from_secs(10);

    /// How long a client stays connected if it reads `bytes` after each pause; at most an hour.
    async fn connected_for(bytes: usize, min_rate: u32) -> Duration {
        let (ticker, timeouts) = (Arc::new(Ticker::new()), Timeouts::default());
        advance(PAUSE).await;
        ticker.tick();
        let activity = ConnectionActivity::new(ticker.clone(), MinRate(min_rate));
        let _request = activity.begin_request();
        let mut connected = Duration::ZERO;
        while connected < Duration::from_secs(3_600) {
            activity.set_blocked();
            advance(PAUSE).await;
            ticker.tick();
            connected += PAUSE;
            if activity.expiry(&timeouts) == Expiry::Expired {
                break;
            }
            activity.set_unblocked(bytes);
            // The upstream is awaited.
            advance(PAUSE).await;
            ticker.tick();
        }
        connected
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_reads_below_the_minimum_rate_is_disconnected() {
        for (bytes, seconds) in [(0, 60), (100, 70), (1_250, 110), (2_500, 3_600), (100_000, 3_600)] {
            assert_eq!(connected_for(bytes, 250).await.as_secs(), seconds, "{bytes} bytes per 10 s");
        }
        assert_eq!(connected_for(1, 0).await.as_secs(), 3_600);
    }
}
