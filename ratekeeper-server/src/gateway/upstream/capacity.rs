//! Limits the connections to one server over all workers, and queues requests that wait for one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::client::conn::http1;
use tokio::sync::oneshot;

use super::shared::SharedStream;
use crate::gateway::body::RequestBody;

/// Shortest queue from which abandoned waiters are removed; they are removed each time the queue has doubled.
const CLEANUP_LEN_MIN: usize = 64;

/// The connection limit of one server. It holds no connections: each connection holds a permit, [`ConnectionPermit`].
#[derive(Debug)]
pub(crate) struct ConnectionLimit {
    max: usize,
    queue: Mutex<Queue>,
    /// Length of the queue. Returning a connection reads this first and mostly needs no lock.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    /// Permits in use. While requests wait, all are.
    in_use: usize,
    /// Oldest first.
    waiters: VecDeque<oneshot::Sender<Grant>>,
    /// Queue length after the last removal of abandoned waiters.
    len_after_cleanup: usize,
}

/// What a waiter receives.
#[derive(Debug)]
pub(crate) enum Grant {
    /// A connection that another request has finished with.
    Idle(http1::SendRequest<RequestBody>),
    /// A stream of a connection that requests share.
    Stream(SharedStream),
    /// A permit to open one.
    Permit(ConnectionPermit),
}

/// A permit for one connection, released on drop.
///
/// The socket holds the permit and closes when the connection's request sender is dropped. The permit must not
/// reference a pool, which holds that sender: an upstream that is no longer in use would keep itself alive.
#[derive(Debug)]
pub(crate) struct ConnectionPermit(Arc<ConnectionLimit>);

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl ConnectionLimit {
    pub(crate) fn new(max: usize) -> ConnectionLimit {
        ConnectionLimit { max, queue: Mutex::default(), waiting: AtomicUsize::new(0) }
    }

    /// Number of connections.
    pub(crate) fn in_use(&self) -> usize {
        self.lock().in_use
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Takes a permit, or joins the queue.
    ///
    /// After joining, the caller must check again for an idle connection. That check and the return of a connection
    /// both happen under a pool's lock, so if they are concurrent, one sees the other.
    pub(crate) fn acquire(self: &Arc<ConnectionLimit>) -> Result<ConnectionPermit, oneshot::Receiver<Grant>> {
        let mut queue = self.lock();
        if queue.in_use < self.max {
            queue.in_use += 1;
            return Ok(ConnectionPermit(self.clone()));
        }
        if queue.waiters.len() >= 2 * queue.len_after_cleanup.max(CLEANUP_LEN_MIN) {
            queue.waiters.retain(|waiter| !waiter.is_closed());
            queue.len_after_cleanup = queue.waiters.len();
        }
        let (waiter, granted) = oneshot::channel();
        queue.waiters.push_back(waiter);
        self.waiting.store(queue.waiters.len(), Ordering::Relaxed);
        Err(granted)
    }

    /// Hands a connection or a stream to the oldest waiter; returns it if there is none.
    pub(crate) fn hand_over(&self, mut grant: Grant) -> Option<Grant> {
        while let Some(waiter) = self.next_waiter() {
            match waiter.send(grant) {
                Ok(()) => return None,
                Err(back) => grant = back,
            }
        }
        Some(grant)
    }

    /// Passes the permit directly to the oldest waiter, so that no later request overtakes it.
    fn release(self: &Arc<ConnectionLimit>) {
        let mut queue = self.lock();
        match self.pop(&mut queue) {
            None => queue.in_use -= 1,
            Some(waiter) => {
                drop(queue);
                // If the waiter has given up, the permit is dropped, which calls this function again.
                let _ = waiter.send(Grant::Permit(ConnectionPermit(self.clone())));
            }
        }
    }

    fn next_waiter(&self) -> Option<oneshot::Sender<Grant>> {
        self.pop(&mut self.lock())
    }

    fn pop(&self, queue: &mut Queue) -> Option<oneshot::Sender<Grant>> {
        let mut waiter = queue.waiters.pop_front();
        while waiter.as_ref().is_some_and(oneshot::Sender::is_closed) {
            waiter = queue.waiters.pop_front();
        }
        self.waiting.store(queue.waiters.len(), Ordering::Relaxed);
        waiter
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received_permit(granted: &mut oneshot::Receiver<Grant>) -> Option<ConnectionPermit> {
        match granted.try_recv() {
            Ok(Grant::Permit(permit)) => Some(permit),
            _ => None,
        }
    }

    #[test]
    fn released_permit_goes_to_the_oldest_waiter() {
        let limit = Arc::new(ConnectionLimit::new(1));
        let first = limit.acquire().expect("a permit is free");
        let (mut abandoned, mut one, mut other) =
            (limit.acquire().unwrap_err(), limit.acquire().unwrap_err(), limit.acquire().unwrap_err());
        abandoned.close();
        drop(first);
        let permit = received_permit(&mut one).expect("the oldest waiter that has not given up");
        assert_eq!((limit.in_use(), limit.has_waiters()), (1, true));
        drop(one);
        drop(permit);
        let last = received_permit(&mut other).expect("the next waiter");
        drop(last);
        assert_eq!((limit.in_use(), limit.has_waiters()), (0, false));
    }

    /// The waiter gives up after the permit was sent to it.
    #[test]
    fn permit_of_an_abandoned_waiter_passes_to_the_next() {
        let limit = Arc::new(ConnectionLimit::new(1));
        let first = limit.acquire().expect("a permit is free");
        let (one, mut other) = (limit.acquire().unwrap_err(), limit.acquire().unwrap_err());
        drop(first);
        drop(one);
        assert!(received_permit(&mut other).is_some());
        assert_eq!(limit.in_use(), 0);
    }

    #[test]
    fn abandoned_waiters_are_removed_from_the_queue() {
        let limit = Arc::new(ConnectionLimit::new(1));
        let _first = limit.acquire().expect("a permit is free");
        for _ in 0..100_000 {
            drop(limit.acquire());
        }
        assert!(limit.lock().waiters.len() <= 2 * CLEANUP_LEN_MIN + 1);
    }
}
