//! How connections learn that the gateway is about to end.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use tokio::sync::watch;

/// Whether the gateway is about to end.
#[derive(Debug, Default)]
pub(crate) struct Draining {
    begun: Arc<AtomicBool>,
    news: watch::Sender<bool>,
    /// Whether nobody is waited for any more.
    over: watch::Sender<bool>,
}

impl Draining {
    pub(crate) fn begin(&self) {
        // In this order: whoever hears the news looks at the word.
        self.begun.store(true, Ordering::Release);
        self.news.send_replace(true);
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Whoever is still there was waited for long enough.
    pub(crate) fn end(&self) {
        self.over.send_replace(true);
    }

    /// Ends when nobody is waited for any more. For those who are seldom looked at: see [`Waiting`].
    pub(crate) async fn over(&self) {
        // If nobody is left who could tell, it is over, too.
        let _ = self.over.subscribe().wait_for(|is_over| *is_over).await;
    }

    /// Ends when draining begins.
    pub(crate) fn wait(&self) -> Waiting {
        let (begun, mut news) = (self.begun.clone(), self.news.subscribe());
        let waiting = Box::pin(async move {
            // Nobody is left who could tell: then it is over, too.
            let _ = news.wait_for(|has_begun| *has_begun).await;
        });
        Waiting { begun, waiting, told: None }
    }
}

/// One that waits for the end.
///
/// Those who wait stand in one list, behind a lock that all workers share. A connection is looked at several times for
/// each request, and must not take the lock each time: once it is in the list, it looks at a word that nobody writes.
pub(crate) struct Waiting {
    begun: Arc<AtomicBool>,
    waiting: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Who is woken by the news.
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
