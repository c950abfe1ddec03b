//! Signals graceful shutdown to connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use tokio::sync::watch;

/// State of the graceful shutdown.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    begun: Arc<AtomicBool>,
    begin_signal: watch::Sender<bool>,
    /// True once the drain timeout has passed.
    timed_out: watch::Sender<bool>,
}

impl Drain {
    pub(crate) fn begin(&self) {
        // In this order: a task that is woken reads the flag.
        self.begun.store(true, Ordering::Release);
        self.begin_signal.send_replace(true);
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Called when the drain timeout has passed: remaining tunnels are closed.
    pub(crate) fn expire(&self) {
        self.timed_out.send_replace(true);
    }

    /// Completes when the drain timeout has passed. For tasks that are rarely polled: see [`DrainBegun`].
    pub(crate) async fn wait_timed_out(&self) {
        // A dropped sender also ends the wait.
        let _ = self.timed_out.subscribe().wait_for(|has_timed_out| *has_timed_out).await;
    }

    /// Returns a future that completes when draining begins.
    pub(crate) fn wait_begun(&self) -> DrainBegun {
        let (begun, mut begin_signal) = (self.begun.clone(), self.begin_signal.subscribe());
        let signal = Box::pin(async move {
            // A dropped sender also ends the wait.
            let _ = begin_signal.wait_for(|has_begun| *has_begun).await;
        });
        DrainBegun { begun, signal, registered: None }
    }
}

/// Completes when draining begins.
///
/// All waiters are in one list, behind a lock that the workers share. A connection is polled several times per
/// request and must not take the lock each time: once registered, it reads a flag that is written only once.
pub(crate) struct DrainBegun {
    begun: Arc<AtomicBool>,
    signal: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The waker registered with `signal`.
    registered: Option<Waker>,
}

impl Future for DrainBegun {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let is_registered = self.registered.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        if is_registered && !self.begun.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.registered = Some(context.waker().clone());
        self.signal.as_mut().poll(context)
    }
}
