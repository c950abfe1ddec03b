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

use super::timer::{Ticker, Ticks};

#[derive(Clone, Copy, Debug)]
enum Turn {
    /// The body was not polled.
    AsBefore,
    Client,
    Upstream,
}

thread_local! {
    /// Result of the last body poll of the stream that runs on this thread. A stream and its body are polled
    /// together, one stream at a time, so they need no reference to each other.
    static TURN: Cell<Turn> = const { Cell::new(Turn::AsBefore) };
}

/// Records that a response body was polled, and whether it was ready.
pub(crate) fn asked(had_something: bool) {
    TURN.set(if had_something { Turn::Client } else { Turn::Upstream });
}

/// Runs the streams of a connection and resets a stream whose client reads nothing for `patience`.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    ticker: Arc<Ticker>,
    patience: Duration,
}

impl Streams {
    pub(crate) fn new(ticker: Arc<Ticker>, patience: Duration) -> Streams {
        Streams { ticker, patience }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let streams = self.clone();
        tokio::spawn(Stream { stream, streams, stalled_since: None, alarm: None });
    }
}

pin_project! {
    struct Stream<F> {
        #[pin]
        stream: F,
        streams: Streams,
        stalled_since: Option<Ticks>,
        // Set by the first stall and kept for the next, because most stalls are very short.
        alarm: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for Stream<F> {
    type Output = ();

    /// Returning before the inner stream has completed resets it.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let stream = self.project();
        let Streams { ticker, patience } = stream.streams;
        TURN.set(Turn::AsBefore);
        if stream.stream.poll(context).is_ready() {
            return Poll::Ready(());
        }
        match TURN.get() {
            Turn::AsBefore => {}
            Turn::Client => *stream.stalled_since = Some(ticker.now()),
            Turn::Upstream => *stream.stalled_since = None,
        }
        let Some(since) = *stream.stalled_since else { return Poll::Pending };
        let alarm = stream.alarm.get_or_insert_with(|| Box::pin(sleep(*patience)));
        loop {
            ready!(alarm.as_mut().poll(context));
            let past = ticker.now().since(since);
            let Some(left) = patience.checked_sub(past).filter(|left| !left.is_zero()) else {
                tracing::debug!("stream reset: client does not read");
                return Poll::Ready(());
            };
            alarm.as_mut().reset(Instant::now() + left);
        }
    }
}
