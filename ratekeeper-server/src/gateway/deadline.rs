//! Request timeouts.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// A timer that the requests of a connection reuse one after the other.
///
/// Setting and cancelling a timer costs a request more than all its counters. The first request that waits sets this
/// timer and the next leaves it unchanged; if it fires before that request's deadline, it is set again.
#[derive(Debug, Default)]
pub(crate) struct Alarm(Mutex<Option<Pin<Box<Sleep>>>>);

impl Alarm {
    /// Returns the result of `work`, or None after `patience`. The timeout does not run while the client's body is
    /// awaited, and restarts with the client's latest data.
    pub(crate) async fn within<T>(
        &self,
        patience: Duration,
        upload: Option<&Upload>,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        // With several requests in flight, all but one create a timer each.
        let mut alarm = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut deadline = None;
        let done = poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Some(done));
            }
            let deadline = deadline.get_or_insert_with(|| Instant::now() + patience);
            let alarm = alarm.get_or_insert_with(|| Box::pin(sleep_until(*deadline)));
            if alarm.deadline() > *deadline {
                alarm.as_mut().reset(*deadline);
            }
            while alarm.as_mut().poll(context).is_ready() {
                if let Some(upload) = upload {
                    let later = upload.since().unwrap_or_else(Instant::now) + patience;
                    *deadline = later.max(*deadline);
                }
                if alarm.deadline() >= *deadline {
                    return Poll::Ready(None);
                }
                alarm.as_mut().reset(*deadline);
            }
            Poll::Pending
        });
        let done = done.await;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = alarm;
        done
    }
}

/// Progress of a request body.
#[derive(Debug, Default)]
pub(crate) struct Upload(Mutex<Option<Instant>>);

impl Upload {
    /// The client is awaited.
    pub(crate) fn waits_for_client(&self) {
        self.set(None);
    }

    /// The client has sent data or the whole body; the upstream is awaited.
    pub(crate) fn waits_for_upstream(&self) {
        self.set(Some(Instant::now()));
    }

    fn set(&self, since: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// Since when the upstream is awaited; None while the client is.
    fn since(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn takes(alarm: &Alarm, patience: Duration, work: Duration) -> bool {
        let begin = Instant::now();
        let done = alarm.within(patience, None, pin!(tokio::time::sleep(work))).await.is_some();
        assert_eq!(begin.elapsed().as_secs(), patience.min(work).as_secs());
        done
    }

    #[tokio::test(start_paused = true)]
    async fn reused_timer_keeps_the_timeout_of_each_request() {
        let alarm = Alarm::default();
        // The first request's timer fires during later requests, before their deadlines.
        for _ in 0..10 {
            assert!(takes(&alarm, 5 * SECOND, 4 * SECOND).await);
        }
        assert!(!takes(&alarm, 5 * SECOND, 6 * SECOND).await);
        assert!(takes(&alarm, 100 * SECOND, 99 * SECOND).await);
        // The timer is set for later than the next request's deadline.
        assert!(takes(&alarm, 1_000 * SECOND, SECOND).await);
        assert!(!takes(&alarm, 2 * SECOND, 3 * SECOND).await);
        assert_eq!(alarm.within(SECOND, None, pin!(std::future::ready(7))).await, Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_requests_have_independent_timeouts() {
        let alarm = Alarm::default();
        let (one, other) = (pin!(tokio::time::sleep(5 * SECOND)), pin!(tokio::time::sleep(5 * SECOND)));
        let (short, long) = (alarm.within(SECOND, None, one), alarm.within(10 * SECOND, None, other));
        assert_eq!(tokio::join!(short, long), (None, Some(())));
    }

    #[tokio::test(start_paused = true)]
    async fn timeout_is_paused_while_the_client_sends() {
        let (alarm, upload) = (Alarm::default(), Upload::default());
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
            late = alarm.within(5 * SECOND, Some(&upload), never.as_mut()) => assert_eq!(late, None),
        }
        assert_eq!(begin.elapsed(), 105 * SECOND);
    }
}
