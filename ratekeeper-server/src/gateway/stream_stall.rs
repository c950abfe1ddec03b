//! HTTP/2 streams whose client does not read.
//!
//! An HTTP/2 client sets a window for each stream and may keep it closed forever while its connection stays active.
//! Meanwhile the response holds an in-flight permit and an upstream connection, which other requests wait for. The
//! response body shows which side is awaited: while hyper polls it for more, the upstream is; once it has yielded
//! data and is not polled again, the client is.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::Executor;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep};

use super::min_rate::MinRate;
use super::timer::{Ticker, Ticks};

#[derive(Clone, Copy, Debug)]
enum AwaitedPeer {
    /// The body was not polled.
    Unchanged,
    Client,
    Upstream,
}

thread_local! {
    /// Result of the last body poll of the stream that runs on this thread, and the bytes of all its body polls. A stream
    /// and its body are polled together, one stream at a time, so they need no reference to each other.
    static AWAITED: Cell<(AwaitedPeer, usize)> = const { Cell::new((AwaitedPeer::Unchanged, 0)) };
}

/// Records that a response body has yielded so many bytes.
pub(crate) fn record_yielded_data(bytes: usize) {
    AWAITED.set((AwaitedPeer::Client, AWAITED.get().1.saturating_add(bytes)));
}

/// Records that a response body waits for its upstream.
pub(crate) fn record_pending_body() {
    AWAITED.set((AwaitedPeer::Upstream, AWAITED.get().1));
}

/// Runs the streams of a connection and resets a stream whose client has been awaited for `timeout`; data that the client
/// reads restores that time at the minimum rate.
#[derive(Clone, Debug)]
pub(crate) struct StreamExecutor {
    ticker: Arc<Ticker>,
    timeout: Duration,
    min_rate: MinRate,
}

impl StreamExecutor {
    pub(crate) fn new(ticker: Arc<Ticker>, timeout: Duration, min_rate: MinRate) -> StreamExecutor {
        StreamExecutor { ticker, timeout, min_rate }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let executor = self.clone();
        let waited = Duration::ZERO;
        tokio::spawn(StreamTask { stream, executor, stalled_since: None, waited, timer: None });
    }
}

pin_project! {
    struct StreamTask<F> {
        #[pin]
        stream: F,
        executor: StreamExecutor,
        stalled_since: Option<Ticks>,
        // How long the client was awaited before, less what data has restored.
        waited: Duration,
        // Set by the first stall and kept for the next, because most stalls are very short.
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for StreamTask<F> {
    type Output = ();

    /// Returning before the inner stream has completed resets it.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let stream = self.project();
        let StreamExecutor { ticker, timeout, min_rate } = stream.executor;
        AWAITED.set((AwaitedPeer::Unchanged, 0));
        if stream.stream.poll(context).is_ready() {
            return Poll::Ready(());
        }
        let (awaited, bytes) = AWAITED.get();
        if !matches!(awaited, AwaitedPeer::Unchanged) {
            let now = ticker.now();
            if let Some(since) = stream.stalled_since.take() {
                *stream.waited += now.since(since);
            }
            // A body yields data once the client has read what it yielded before.
            *stream.waited = min_rate.left_after(*stream.waited, bytes);
            *stream.stalled_since = matches!(awaited, AwaitedPeer::Client).then_some(now);
        }
        let Some(since) = *stream.stalled_since else { return Poll::Pending };
        let timer = stream.timer.get_or_insert_with(|| Box::pin(sleep(*timeout)));
        loop {
            ready!(timer.as_mut().poll(context));
            let past = *stream.waited + ticker.now().since(since);
            let Some(left) = timeout.checked_sub(past).filter(|left| !left.is_zero()) else {
                tracing::debug!("stream reset: client does not read");
                return Poll::Ready(());
            };
            timer.as_mut().reset(Instant::now() + left);
        }
    }
}
