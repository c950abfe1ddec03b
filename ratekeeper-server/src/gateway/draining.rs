//! Signals graceful shutdown to connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use tokio::sync::watch;

/// State of the graceful shutdown.
#[derive(Debug, Default)]
pub(crate) struct Draining {
    begun: Arc<AtomicBool>,
    news: watch::Sender<bool>,
    /// True once the drain timeout has passed.
    over: watch::Sender<bool>,
}

impl Draining {
    pub(crate) fn begin(&self) {
        // In this order: a task that is woken reads the flag.
        self.begun.store(true, Ordering::Release);
        self.news.send_replace(true);
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// The drain timeout has passed: remaining tunnels are cut.
    pub(crate) fn end(&self) {
        self.over.send_replace(true);
    }

    /// Completes when the drain timeout has passed. For tasks that are rarely polled: see [`Waiting`].
    pub(crate) async fn over(&self) {
        // A dropped sender also ends the wait.
        let _ = self.over.subscribe().wait_for(|is_over| *is_over).await;
    }

    /// Returns a future that completes when draining begins.
    pub(crate) fn wait(&self) -> Waiting {
        let (begun, mut news) = (self.begun.clone(), self.news.subscribe());
        let waiting = Box::pin(async move {
            // A dropped sender also ends the wait.
            let _ = news.wait_for(|has_begun| *has_begun).await;
        });
        Waiting { begun, waiting, told: None }
    }
}

/// Completes when draining begins.
///
/// All waiters are in one list, behind a lock that the workers share. A connection is polled several times per
/// request and must not take the lock each time: once registered, it reads a flag that is written only once.
pub(crate) struct Waiting {
    begun: Arc<AtomicBool>,
    waiting: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The registered waker.
    told: Option<Waker>,
}

impl Future for Waiting {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let is_told = self.told.as_ref().is_some_and(|told| told.will_wake(context.waker()));
        if is_told && !self.begun.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.told = Some(context.waker().clone());
        self.waiting.as_mut().poll(context)
    }
}
