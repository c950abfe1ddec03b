//! Client connections: how many one client has, and which are closed for new ones when `max_connections` is near.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::client_timeouts::{Close, ConnectionActivity, WaitingState};
use super::timer::Ticks;

/// Bits of an IPv6 address that name a client; a client chooses the others itself.
const IPV6_CLIENT_BITS: u32 = 64;

/// Of `max_connections`, the share that is kept free by closing connections that wait: one of so many.
const FREE_SHARE: usize = 10;
/// How long a request head may take before its connection is closed to keep capacity free. If all connections are in
/// use, the time does not matter.
const HEAD_AGE_MIN: Duration = Duration::from_secs(1);

/// Connections by client. There are at most as many entries as connections.
#[derive(Debug, Default)]
pub(crate) struct ClientCounts(Mutex<HashMap<IpAddr, usize>>);

impl ClientCounts {
    /// Counts a connection until the permit is dropped; None if the client has `max` connections.
    pub(crate) fn acquire(self: &Arc<ClientCounts>, client: IpAddr, max: usize) -> Option<ClientPermit> {
        let client = match client {
            IpAddr::V4(_) => client,
            IpAddr::V6(address) => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - IPV6_CLIENT_BITS))))
            }
        };
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(client).or_default();
        // An entry is never zero here: the last permit of a client removes it.
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(ClientPermit { counts: self.clone(), client })
    }
}

/// A connection of a client, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct ClientPermit {
    counts: Arc<ClientCounts>,
    client: IpAddr,
}

impl Drop for ClientPermit {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock().unwrap_or_else(PoisonError::into_inner);
        match counts.get_mut(&self.client) {
            Some(count) if *count > 1 => *count -= 1,
            _ => _ = counts.remove(&self.client),
        }
    }
}

/// The connections of a worker.
#[derive(Debug, Default)]
pub(crate) struct ConnectionRegistry(Mutex<Registered>);

#[derive(Debug, Default)]
struct Registered {
    connections: Vec<Weak<ConnectionActivity>>,
    /// Number after the last removal of closed connections; they are removed each time it has doubled.
    after_cleanup: usize,
}

/// Smallest number of connections at which closed ones are removed.
const CLEANUP_LEN_MIN: usize = 64;

impl ConnectionRegistry {
    pub(crate) fn add(&self, connection: &Arc<ConnectionActivity>) {
        let mut registered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if registered.connections.len() >= 2 * registered.after_cleanup.max(CLEANUP_LEN_MIN) {
            registered.connections.retain(|connection| connection.strong_count() > 0);
            registered.after_cleanup = registered.connections.len();
        }
        registered.connections.push(Arc::downgrade(connection));
    }

    /// The open connections.
    fn open(&self) -> Vec<Arc<ConnectionActivity>> {
        let registered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = registered.connections.iter().filter_map(Weak::upgrade);
        connections.filter(|connection| !connection.has_ended()).collect()
    }
}

/// Number of connections from which waiting ones are closed.
pub(crate) fn reap_from(max_connections: usize) -> usize {
    max_connections.saturating_sub(reaped_max(max_connections))
}

fn reaped_max(max_connections: usize) -> usize {
    (max_connections / FREE_SHARE).max(1)
}

/// Chooses connections to close for new ones: those that have waited longest.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    /// The connections to close if all are in use, the next one last. They may end before.
    queue: Vec<(WaitingState, Weak<ConnectionActivity>)>,
    /// When the last search was that found none.
    searched_at: Option<Ticks>,
}

impl Reaper {
    /// If nine tenths of `max_connections` are in use, closes idle connections and old incomplete request heads, a tenth
    /// of `max_connections`. Connections that are being closed do not count.
    pub(crate) fn keep_free<'r>(
        registries: impl Iterator<Item = &'r ConnectionRegistry>,
        max_connections: usize,
        now: Ticks,
    ) {
        let mut open: Vec<_> = registries.flat_map(ConnectionRegistry::open).collect();
        open.retain(|connection| !connection.is_closing());
        if open.len() < reap_from(max_connections) {
            return;
        }
        let mut waiting: Vec<_> = open.iter().filter_map(|open| Some((open.waiting()?, open))).collect();
        waiting.retain(|(waiting, _)| !waiting.is_head || now.since(waiting.since) >= HEAD_AGE_MIN);
        waiting.sort_by_key(|(waiting, _)| *waiting);
        for (_, connection) in waiting.iter().take(reaped_max(max_connections)) {
            connection.close(Close::Graceful);
        }
    }

    /// Closes the connection that has waited longest, however briefly. Returns false if none waits.
    pub(crate) fn close_one<'r>(
        &mut self,
        registries: impl Iterator<Item = &'r ConnectionRegistry>,
        max_connections: usize,
        now: Ticks,
    ) -> bool {
        if self.close_queued() {
            return true;
        }
        // A search takes longer than accepting a connection, so a search without a result is not repeated immediately.
        if self.searched_at == Some(now) {
            return false;
        }
        let open = registries.flat_map(ConnectionRegistry::open);
        self.queue = open.filter_map(|open| Some((open.waiting()?, Arc::downgrade(&open)))).collect();
        self.queue.sort_by_key(|(waiting, _)| Reverse(*waiting));
        let kept = self.queue.len().saturating_sub(reaped_max(max_connections));
        self.queue.drain(..kept);
        let is_closed = self.close_queued();
        self.searched_at = (!is_closed).then_some(now);
        is_closed
    }

    fn close_queued(&mut self) -> bool {
        while let Some((before, connection)) = self.queue.pop() {
            // A connection that has served a request since then is not one of the oldest.
            if let Some(connection) = connection.upgrade()
                && connection.waiting() == Some(before)
                && connection.close(Close::Immediate)
            {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::super::min_rate::MinRate;
    use super::super::timer::Ticker;
    use super::*;

    /// Idle connections of one worker.
    fn idle(count: usize) -> (Arc<Ticker>, ConnectionRegistry, Vec<Arc<ConnectionActivity>>) {
        let (ticker, registry) = (Arc::new(Ticker::new()), ConnectionRegistry::default());
        let open = || {
            let connection = ConnectionActivity::new(ticker.clone(), MinRate(0));
            registry.add(&connection);
            drop(connection.begin_request());
            connection
        };
        let connections = (0..count).map(|_| open()).collect();
        (ticker, registry, connections)
    }

    fn closed(connections: &[Arc<ConnectionActivity>]) -> usize {
        let context = Context::from_waker(Waker::noop());
        connections.iter().filter(|connection| connection.poll_close(&context).is_ready()).count()
    }

    #[test]
    fn connections_that_are_being_closed_count_as_free() {
        let (ticker, registry, connections) = idle(95);
        for _ in 0..3 {
            Reaper::keep_free([&registry].into_iter(), 100, ticker.now());
            assert_eq!(closed(&connections), 10);
        }
        // As many new ones as were closed.
        let more: Vec<_> = (0..5).map(|_| ConnectionActivity::new(ticker.clone(), MinRate(0))).collect();
        more.iter().for_each(|connection| registry.add(connection));
        Reaper::keep_free([&registry].into_iter(), 100, ticker.now());
        assert_eq!(closed(&connections), 20);
    }

    #[test]
    fn connection_that_is_closed_gracefully_may_still_be_closed_immediately() {
        let (ticker, registry, connections) = idle(10);
        let context = Context::from_waker(Waker::noop());
        let oldest = &connections[0];
        Reaper::keep_free([&registry].into_iter(), 10, ticker.now());
        assert_eq!(oldest.poll_close(&context), Poll::Ready(Close::Graceful));
        oldest.begin_close();
        assert!(oldest.poll_close(&context).is_pending());
        let mut reaper = Reaper::default();
        assert!(reaper.close_one([&registry].into_iter(), 10, ticker.now()));
        assert_eq!(oldest.poll_close(&context), Poll::Ready(Close::Immediate));
        // It is not chosen again.
        assert!(reaper.close_one([&registry].into_iter(), 10, ticker.now()));
        assert_eq!(connections[1].poll_close(&context), Poll::Ready(Close::Immediate));
    }

    #[test]
    fn connection_that_has_ended_is_not_chosen() {
        let (ticker, registry, connections) = idle(30);
        let mut reaper = Reaper::default();
        assert!(reaper.close_one([&registry].into_iter(), 30, ticker.now()));
        // Both are still held: one as it was chosen, one in the queue.
        connections[..2].iter().for_each(|connection| connection.end());
        assert!(reaper.close_one([&registry].into_iter(), 30, ticker.now()));
        assert_eq!(closed(&connections[1..]), 1);
        assert_eq!(connections[2].waiting(), None);
        connections.iter().for_each(|connection| connection.end());
        assert!(!reaper.close_one([&registry].into_iter(), 30, ticker.now()));
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let counts = Arc::new(ClientCounts::default());
        let address = |text: &str| text.parse::<IpAddr>().expect("it is an address");
        let one = counts.acquire(address("2001:db8::1"), 2);
        let other = counts.acquire(address("2001:db8::ffff:1"), 2);
        assert!(one.is_some() && other.is_some());
        assert!(counts.acquire(address("2001:db8::2"), 2).is_none());
        assert!(counts.acquire(address("2001:db8:0:1::1"), 2).is_some());
        drop(one);
        assert!(counts.acquire(address("2001:db8::2"), 2).is_some());
        drop(other);
        assert!(counts.0.lock().expect("no thread has panicked").is_empty());
    }
}
