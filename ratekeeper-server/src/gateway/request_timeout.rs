//! Request timeouts.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// A timer that the requests of a connection reuse one after the other.
///
/// Setting and cancelling a timer costs a request more than all its counters. The first request that waits sets this
/// timer and the next leaves it unchanged; if it fires before that request's deadline, it is set again.
#[derive(Debug, Default)]
pub(crate) struct ReusableTimer(Mutex<Option<Pin<Box<Sleep>>>>);

impl ReusableTimer {
    /// Returns the result of `work`, or None after `limit`. The timeout does not run while the client's body is
    /// awaited, and restarts with the client's latest data.
    pub(crate) async fn timeout<T>(
        &self,
        limit: Duration,
        upload: Option<&UploadProgress>,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        // With several requests in flight, all but one create a timer each.
        let mut timer = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut deadline = None;
        let done = poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Some(done));
            }
            let deadline = deadline.get_or_insert_with(|| Instant::now() + limit);
            let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(*deadline)));
            if timer.deadline() > *deadline {
                timer.as_mut().reset(*deadline);
            }
            while timer.as_mut().poll(context).is_ready() {
                if let Some(upload) = upload {
                    let later = upload.upstream_awaited_since().unwrap_or_else(Instant::now) + limit;
                    *deadline = later.max(*deadline);
                }
                if timer.deadline() >= *deadline {
                    return Poll::Ready(None);
                }
                timer.as_mut().reset(*deadline);
            }
            Poll::Pending
        });
        let done = done.await;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = timer;
        done
    }
}

/// Whether the client or the upstream is awaited while a request body is sent.
#[derive(Debug, Default)]
pub(crate) struct UploadProgress {
    upstream_awaited_since: Mutex<Option<Instant>>,
    has_response: AtomicBool,
}

impl UploadProgress {
    /// The client is awaited.
    pub(crate) fn waits_for_client(&self) {
        self.set(None);
    }

    /// The client has sent data or the whole body; the upstream is awaited.
    pub(crate) fn waits_for_upstream(&self) {
        self.set(Some(Instant::now()));
    }

    fn set(&self, since: Option<Instant>) {
        *self.upstream_awaited_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// Since when the upstream is awaited; None while the client is.
    fn upstream_awaited_since(&self) -> Option<Instant> {
        *self.upstream_awaited_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The response begins before the end of the body.
    pub(crate) fn response_begins(&self) {
        self.has_response.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_response(&self) -> bool {
        self.has_response.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn completes_in_time(timer: &ReusableTimer, limit: Duration, work: Duration) -> bool {
        let begin = Instant::now();
        let done = timer.timeout(limit, None, pin!(tokio::time::sleep(work))).await.is_some();
        assert_eq!(begin.elapsed().as_secs(), limit.min(work).as_secs());
        done
    }

    #[tokio::test(start_paused = true)]
    async fn reused_timer_keeps_the_timeout_of_each_request() {
        let timer = ReusableTimer::default();
        // The first request's timer fires during later requests, before their deadlines.
        for _ in 0..10 {
            assert!(completes_in_time(&timer, 5 * SECOND, 4 * SECOND).await);
        }
        assert!(!completes_in_time(&timer, 5 * SECOND, 6 * SECOND).await);
        assert!(completes_in_time(&timer, 100 * SECOND, 99 * SECOND).await);
        // The timer is set for later than the next request's deadline.
        assert!(completes_in_time(&timer, 1_000 * SECOND, SECOND).await);
        assert!(!completes_in_time(&timer, 2 * SECOND, 3 * SECOND).await);
        assert_eq!(timer.timeout(SECOND, None, pin!(std::future::ready(7))).await, Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_requests_have_independent_timeouts() {
        let timer = ReusableTimer::default();
        let (one, other) = (pin!(tokio::time::sleep(5 * SECOND)), pin!(tokio::time::sleep(5 * SECOND)));
        let (short, long) = (timer.timeout(SECOND, None, one), timer.timeout(10 * SECOND, None, other));
        assert_eq!(tokio::join!(short, long), (None, Some(())));
    }

    #[tokio::test(start_paused = true)]
    async fn timeout_is_paused_while_the_client_sends() {
        let (timer, upload) = (ReusableTimer::default(), UploadProgress::default());
        let mut never = pin!(std::future::pending::<()>());
        let begin = Instant::now();
        let sending = async {
            for _ in 0..4 {
                tokio::time::sleep(9 * SECOND).await;
                upload.waits_for_upstream();
                tokio::time::sleep(SECOND).await;
                upload.waits_for_client();
            }
            tokio::time::sleep(60 * SECOND).await;
            upload.waits_for_upstream();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            () = sending => {}
            timed_out = timer.timeout(5 * SECOND, Some(&upload), never.as_mut()) => assert_eq!(timed_out, None),
        }
        assert_eq!(begin.elapsed(), 105 * SECOND);
    }
}
