//! Timeouts of client connections.
//!
//! A connection is receiving a head, busy with requests, or idle. The phase is an atomic, written on each event and read
//! only when a timer expires, so requests set no timers.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use ratekeeper_config::Timeouts;
use tokio::io::ReadBuf;
use tokio::time::Instant;

use super::min_rate::MinRate;
use super::timer::{Ticker, Ticks};
use crate::runtime::observed_stream::{PolledIo, StreamObserver};

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

/// The accept loop has requested a [`Close`].
const GRACEFUL_REQUESTED: u8 = 1;
const IMMEDIATE_REQUESTED: u8 = 2;
const REQUESTED: u8 = GRACEFUL_REQUESTED | IMMEDIATE_REQUESTED;
/// The connection's task has begun to close the connection.
const CLOSE_BEGUN: u8 = 4;
const ENDED: u8 = 8;

/// Since when a connection waits for a request or for the rest of a request head. Those that have waited longest come
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaitingState {
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
    /// The flags from [`GRACEFUL_REQUESTED`] to [`ENDED`]; 0 if the connection is open.
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
            closing: AtomicU8::new(0),
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

    /// Whether no request is in flight and all responses are written.
    fn is_waiting(&self) -> bool {
        !self.is_busy() && self.blocked_since.load(Ordering::Relaxed) == 0
    }

    /// Since when the connection waits for a request; None also if it has ended or is being closed immediately.
    pub(crate) fn waiting(&self) -> Option<WaitingState> {
        let is_open = self.closing.load(Ordering::Relaxed) & (IMMEDIATE_REQUESTED | ENDED) == 0;
        let is_head = self.phase.load(Ordering::Relaxed) == HEAD;
        let since = Ticks::from_millis(self.since.load(Ordering::Relaxed));
        (is_open && self.is_waiting()).then_some(WaitingState {
            since,
            accepted_at: self.accepted_at,
            is_head,
        })
    }

    /// Asks the connection's task to close the connection, if it still waits for a request then. Returns false if the
    /// connection has ended, or if this was asked before.
    pub(crate) fn close(&self, close: Close) -> bool {
        let requested = match close {
            Close::Graceful => GRACEFUL_REQUESTED,
            Close::Immediate => IMMEDIATE_REQUESTED,
        };
        let before = self.closing.fetch_or(requested, Ordering::Relaxed);
        // Either this finds the waker, or the task that sets it finds the request.
        fence(Ordering::SeqCst);
        if let Some(waker) = self.waker.get() {
            waker.wake_by_ref();
        }
        before & (requested | ENDED) == 0
    }

    /// Records that the connection's task closes the connection. It may still be closed immediately.
    pub(crate) fn begin_close(&self) {
        self.closing.fetch_or(CLOSE_BEGUN, Ordering::Relaxed);
    }

    /// Records that the connection has ended.
    pub(crate) fn end(&self) {
        self.closing.fetch_or(ENDED, Ordering::Relaxed);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.closing.load(Ordering::Relaxed) & ENDED != 0
    }

    /// Whether the connection is being closed, so that its capacity is free soon.
    pub(crate) fn is_closing(&self) -> bool {
        let closing = self.closing.load(Ordering::Relaxed);
        closing & CLOSE_BEGUN != 0 || closing & REQUESTED != 0 && self.is_waiting()
    }

    /// Whether the accept loop has requested a close, which no request has undone.
    pub(crate) fn is_reaped(&self) -> bool {
        self.closing.load(Ordering::Relaxed) & REQUESTED != 0
    }

    /// Ready once the connection is to be closed.
    pub(crate) fn poll_close(&self, context: &Context<'_>) -> Poll<Close> {
        // The task of a connection, and so its waker, stays the same.
        if self.waker.get().is_none() {
            self.waker.get_or_init(|| context.waker().clone());
            fence(Ordering::SeqCst);
        }
        let closing = self.closing.load(Ordering::Relaxed);
        let has_begun = closing & CLOSE_BEGUN != 0;
        if self.is_flood() && !has_begun {
            return Poll::Ready(Close::Graceful);
        }
        if closing & REQUESTED == 0 {
            return Poll::Pending;
        }
        if !self.is_waiting() {
            // The client sees a graceful close that has begun, so it is not undone.
            let undone = if has_begun { IMMEDIATE_REQUESTED } else { REQUESTED };
            self.closing.fetch_and(!undone, Ordering::Relaxed);
            return Poll::Pending;
        }
        match closing & IMMEDIATE_REQUESTED != 0 {
            true => Poll::Ready(Close::Immediate),
            false if has_begun => Poll::Pending,
            false => Poll::Ready(Close::Graceful),
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

/// Updates the [`ConnectionActivity`] of a client connection as it is read and written.
#[derive(Debug)]
pub(crate) struct ActivityObserver {
    /// Bytes read during connection setup.
    read_ahead: Bytes,
    activity: Arc<ConnectionActivity>,
    /// In HTTP/1, data on an idle connection begins a request head; in HTTP/2, it may be a ping or a window update.
    is_http1: bool,
}

impl ActivityObserver {
    pub(crate) fn http1(read_ahead: Bytes, activity: Arc<ConnectionActivity>) -> ActivityObserver {
        ActivityObserver { read_ahead, activity, is_http1: true }
    }

    pub(crate) fn http2(read_ahead: Bytes, activity: Arc<ConnectionActivity>) -> ActivityObserver {
        ActivityObserver { read_ahead, activity, is_http1: false }
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

impl StreamObserver for ActivityObserver {
    fn before_read(&mut self, buffer: &mut ReadBuf<'_>) -> Option<PolledIo<()>> {
        if self.read_ahead.is_empty() {
            return None;
        }
        let count = self.read_ahead.len().min(buffer.remaining());
        buffer.put_slice(&self.read_ahead.split_to(count));
        Some(Poll::Ready(Ok(())))
    }

    fn after_read(&mut self, _: &mut Context<'_>, _: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        if self.is_http1 && read.is_ready() && self.activity.is_idle() {
            self.activity.enter(HEAD);
        }
        read
    }

    fn after_write(&mut self, _: &mut Context<'_>, written: PolledIo<usize>) -> PolledIo<usize> {
        self.track_write(written, |bytes| *bytes)
    }

    fn after_flush(&mut self, _: &mut Context<'_>, flushed: PolledIo<()>) -> PolledIo<()> {
        self.track_write(flushed, |()| 0)
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

    #[test]
    fn connection_with_an_unread_response_is_not_closed_for_another() {
        let activity = ConnectionActivity::new(Arc::new(Ticker::new()), MinRate(0));
        let context = Context::from_waker(Waker::noop());
        // The response ends and waits for the client: before the connection is chosen, or after.
        activity.close(Close::Immediate);
        let request = activity.begin_request();
        activity.set_blocked();
        drop(request);
        assert!(activity.poll_close(&context).is_pending());
        assert_eq!(activity.waiting(), None);
        activity.set_unblocked(1);
        assert!(activity.waiting().is_some());
        assert!(activity.poll_close(&context).is_pending(), "the request to close it was undone");
        activity.close(Close::Immediate);
        assert!(activity.poll_close(&context).is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_reads_below_the_minimum_rate_is_disconnected() {
        for (bytes, seconds) in [(0, 60), (100, 70), (1_250, 110), (2_500, 3_600), (100_000, 3_600)] {
            assert_eq!(connected_for(bytes, 250).await.as_secs(), seconds, "{bytes} bytes per 10 s");
        }
        assert_eq!(connected_for(1, 0).await.as_secs(), 3_600);
    }
}
