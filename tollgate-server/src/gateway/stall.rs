//! Streams of HTTP/2 whose client takes nothing.
//!
//! A client of HTTP/2 says how much it is ready to take, of each stream, and may say nothing for ever while its connection
//! is as lively as any. What the response holds until then, a place among the requests under way and an upstream's
//! connection, others wait for. Whose turn it is shows in the response's body: as long as hyper asks it for more, the
//! upstream is what we wait for; once it has given something and is not asked again, it is the client.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::Executor;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep};

use super::ticks::{Ticker, Ticks};

#[derive(Clone, Copy, Debug)]
enum Turn {
    /// The body was not asked for anything.
    AsBefore,
    Client,
    Upstream,
}

thread_local! {
    /// What the body of the stream that is at work on this thread was last asked. A stream and its body are polled
    /// together, one stream at a time, so there is no need for them to know each other.
    static TURN: Cell<Turn> = const { Cell::new(Turn::AsBefore) };
}

/// A response's body was asked for more, and had something or had not.
pub(crate) fn asked(had_something: bool) {
    TURN.set(if had_something { Turn::Client } else { Turn::Upstream });
}

/// Runs the streams of a connection, each for as long as its client takes something of it now and then.
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
        // Set for the first stall and left as it is by the next, as most last for no time at all.
        alarm: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for Stream<F> {
    type Output = ();

    /// To end without the stream is to reset it.
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
                tracing::debug!("a stream is reset: its client takes nothing");
                return Poll::Ready(());
            };
            alarm.as_mut().reset(Instant::now() + left);
        }
    }
}
