//! Limits the connections to one server over all workers, and queues requests that wait for one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::client::conn::http1;
use tokio::sync::oneshot;

use super::body::RequestBody;
use super::pool::Shared;

/// Abandoned waiters are removed when the queue has doubled, from at least this length, so that waiting stays cheap.
const FORGOTTEN_MIN: usize = 64;

/// The connection limit of one server. It holds no connections: each connection holds a permit, [`Place`].
#[derive(Debug)]
pub(crate) struct Room {
    most: usize,
    queue: Mutex<Queue>,
    /// Length of the queue. Returning a connection reads this first and mostly needs no lock.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    /// Permits in use. While requests wait, all are.
    taken: usize,
    /// Oldest first.
    waiters: VecDeque<oneshot::Sender<Handed>>,
    /// Queue length after the last removal of abandoned waiters.
    left: usize,
}

/// What a waiter receives.
#[derive(Debug)]
pub(crate) enum Handed {
    /// A connection that another request has finished with.
    Idle(http1::SendRequest<RequestBody>),
    /// A connection that all requests share.
    Shared(Shared),
    /// A permit to open one.
    Place(Place),
}

/// A permit for one connection, released on drop.
///
/// The socket holds the permit and closes when the connection's request sender is dropped. The permit must not
/// reference a pool, which holds that sender: an upstream that is no longer in use would keep itself alive.
#[derive(Debug)]
pub(crate) struct Place(Arc<Room>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Room {
    pub(crate) fn new(most: usize) -> Room {
        Room { most, queue: Mutex::default(), waiting: AtomicUsize::new(0) }
    }

    /// Number of connections.
    pub(crate) fn taken(&self) -> usize {
        self.lock().taken
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Takes a permit, or joins the queue.
    ///
    /// After joining, the caller must check again for an idle connection. That check and the return of a connection
    /// both happen under a pool's lock, so if they are concurrent, one sees the other.
    pub(crate) fn enter(self: &Arc<Room>) -> Result<Place, oneshot::Receiver<Handed>> {
        let mut queue = self.lock();
        if queue.taken < self.most {
            queue.taken += 1;
            return Ok(Place(self.clone()));
        }
        if queue.waiters.len() >= 2 * queue.left.max(FORGOTTEN_MIN) {
            queue.waiters.retain(|waiter| !waiter.is_closed());
            queue.left = queue.waiters.len();
        }
        let (waiter, told) = oneshot::channel();
        queue.waiters.push_back(waiter);
        self.waiting.store(queue.waiters.len(), Ordering::Relaxed);
        Err(told)
    }

    /// Hands a connection to the oldest waiter; returns it if there is none.
    pub(crate) fn hand(&self, connection: http1::SendRequest<RequestBody>) -> Option<Handed> {
        let mut handed = Handed::Idle(connection);
        while let Some(waiter) = self.next() {
            match waiter.send(handed) {
                Ok(()) => return None,
                Err(back) => handed = back,
            }
        }
        Some(handed)
    }

    /// Sends a shared connection to all waiters.
    pub(crate) fn share(&self, connection: &Shared) {
        while let Some(waiter) = self.next() {
            // A waiter that has given up needs none.
            let _ = waiter.send(Handed::Shared(connection.clone()));
        }
    }

    /// Passes the permit directly to the oldest waiter, so that no later request overtakes it.
    fn leave(self: &Arc<Room>) {
        let mut queue = self.lock();
        match self.pop(&mut queue) {
            None => queue.taken -= 1,
            Some(waiter) => {
                drop(queue);
                // If the waiter has given up, the permit is dropped, which calls this function again.
                let _ = waiter.send(Handed::Place(Place(self.clone())));
            }
        }
    }

    fn next(&self) -> Option<oneshot::Sender<Handed>> {
        self.pop(&mut self.lock())
    }

    fn pop(&self, queue: &mut Queue) -> Option<oneshot::Sender<Handed>> {
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

    fn place(told: &mut oneshot::Receiver<Handed>) -> Option<Place> {
        match told.try_recv() {
            Ok(Handed::Place(place)) => Some(place),
            _ => None,
        }
    }

    #[test]
    fn released_permit_goes_to_the_oldest_waiter() {
        let room = Arc::new(Room::new(1));
        let first = room.enter().expect("it is empty");
        let (mut gone, mut one, mut other) =
            (room.enter().unwrap_err(), room.enter().unwrap_err(), room.enter().unwrap_err());
        gone.close();
        drop(first);
        let place = place(&mut one).expect("it has waited longest of those who are there");
        assert_eq!((room.taken(), room.is_awaited()), (1, true));
        drop(one);
        drop(place);
        let last = self::place(&mut other).expect("it is next");
        drop(last);
        assert_eq!((room.taken(), room.is_awaited()), (0, false));
    }

    /// The waiter gives up after the permit was sent to it.
    #[test]
    fn permit_of_an_abandoned_waiter_passes_to_the_next() {
        let room = Arc::new(Room::new(1));
        let first = room.enter().expect("it is empty");
        let (one, mut other) = (room.enter().unwrap_err(), room.enter().unwrap_err());
        drop(first);
        drop(one);
        assert!(place(&mut other).is_some());
        assert_eq!(room.taken(), 0);
    }

    #[test]
    fn abandoned_waiters_are_removed_from_the_queue() {
        let room = Arc::new(Room::new(1));
        let _first = room.enter().expect("it is empty");
        for _ in 0..100_000 {
            drop(room.enter());
        }
        assert!(room.lock().waiters.len() <= 2 * FORGOTTEN_MIN + 1);
    }
}
