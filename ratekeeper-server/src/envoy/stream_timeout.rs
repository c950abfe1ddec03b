//! Resets the streams of clients that do not read their responses.
//!
//! An HTTP/2 client sets a window for each stream, and may keep it closed while its connection stays active.

use std::cell::Cell;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Response;
use hyper::rt::Executor;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

use super::unary::CallBody;

thread_local! {
    /// Whether the stream that runs on this thread has begun a response that has to end. A stream and its call are
    /// polled together, one stream at a time, so they need no reference to each other.
    static HAS_BEGUN: Cell<bool> = const { Cell::new(false) };
}

/// Records that a response begins. From then on, its client has the timeout to read it, unless it is a stream that may
/// never end.
pub(super) fn begun(response: Response<CallBody>) -> Response<CallBody> {
    HAS_BEGUN.set(!matches!(response.body(), CallBody::Stream { .. }));
    response
}

/// Runs the streams of a connection, and resets those whose response is not read in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallExecutor {
    pub(super) timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for CallExecutor {
    fn execute(&self, stream: F) {
        tokio::spawn(CallStream { stream, timeout: self.timeout, timer: None });
    }
}

pin_project! {
    struct CallStream<F> {
        #[pin]
        stream: F,
        timeout: Duration,
        // Set if the response has begun and waits for its client. Most streams end before.
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for CallStream<F> {
    type Output = ();

    /// Returning before the inner stream has completed resets it.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let task = self.project();
        HAS_BEGUN.set(false);
        if task.stream.poll(context).is_ready() {
            return Poll::Ready(());
        }
        if HAS_BEGUN.get() {
            *task.timer = Some(Box::pin(sleep(*task.timeout)));
        }
        task.timer.as_mut().map_or(Poll::Pending, |timer| timer.as_mut().poll(context))
    }
}
