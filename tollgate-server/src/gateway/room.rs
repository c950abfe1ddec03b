//! How many connections to a server there may be, over all workers, and who waits for one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::client::conn::http1;
use tokio::sync::oneshot;

use super::body::RequestBody;
use super::pool::Shared;

/// Those who have given up are looked for only among more than so many, so that waiting stays cheap.
const FORGOTTEN_MIN: usize = 64;

/// It holds no connection: each of them holds a [`Place`] in it.
#[derive(Debug)]
pub(crate) struct Room {
    most: usize,
    queue: Mutex<Queue>,
    /// How many are in the queue. Whoever gives a connection back looks here first, and mostly at nothing else.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    /// Places that are taken. If somebody waits, all are.
    taken: usize,
    /// The longest in front.
    waiters: VecDeque<oneshot::Sender<Handed>>,
    /// How many were left when those who have given up were last looked for.
    left: usize,
}

/// What those get who have waited.
#[derive(Debug)]
pub(crate) enum Handed {
    /// A connection that another request has done with.
    Idle(http1::SendRequest<RequestBody>),
    /// A connection for all.
    Shared(Shared),
    /// The right to open one.
    Place(Place),
}

/// The right to have one connection, until it is dropped.
///
/// Its socket holds this, and is closed when nobody holds the connection's other end. So it must not lead to a pool, which
/// holds that end: an upstream that is no longer in use would keep itself alive.
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

    /// How many connections there are.
    pub(crate) fn taken(&self) -> usize {
        self.lock().taken
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// A place, or where one will be told that there is something.
    ///
    /// Who waits has to look once more whether somebody has kept a connection meanwhile. Both that and keeping one happen
    /// under the lock of a pool, so of two who do it at the same time one sees the other.
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

    /// Gives a connection to the one who has waited longest; back, if nobody has.
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

    /// Tells everybody who waits of a connection that is for all.
    pub(crate) fn share(&self, connection: &Shared) {
        while let Some(waiter) = self.next() {
            // Who has gone since then needs none.
            let _ = waiter.send(Handed::Shared(connection.clone()));
        }
    }

    /// A place goes straight to the one who has waited longest: nobody who comes later is faster.
    fn leave(self: &Arc<Room>) {
        let mut queue = self.lock();
        match self.pop(&mut queue) {
            None => queue.taken -= 1,
            Some(waiter) => {
                drop(queue);
                // One who has gone since then lets go of it, which leads here again.
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
    fn a_place_goes_to_the_one_who_has_waited_longest() {
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

    /// Whoever gives up at the moment in which a place is handed over takes it along to nowhere.
    #[test]
    fn a_place_that_nobody_takes_goes_on() {
        let room = Arc::new(Room::new(1));
        let first = room.enter().expect("it is empty");
        let (one, mut other) = (room.enter().unwrap_err(), room.enter().unwrap_err());
        drop(first);
        drop(one);
        assert!(place(&mut other).is_some());
        assert_eq!(room.taken(), 0);
    }

    #[test]
    fn those_who_gave_up_are_forgotten() {
        let room = Arc::new(Room::new(1));
        let _first = room.enter().expect("it is empty");
        for _ in 0..100_000 {
            drop(room.enter());
        }
        assert!(room.lock().waiters.len() <= 2 * FORGOTTEN_MIN + 1);
    }
}
