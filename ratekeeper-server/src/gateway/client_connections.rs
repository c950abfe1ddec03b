//! Client connections: how many one client has, and which are closed for new ones when `max_connections` is near.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::client_timeouts::{Close, ConnectionActivity, Waiting};
use super::timer::Ticks;

/// Bits of an IPv6 address that name a client; a client chooses the others itself.
const IPV6_CLIENT_BITS: u32 = 64;

/// Of `max_connections`, the share that is kept free by closing connections that wait: one of so many.
const FREE_SHARE: usize = 10;
/// How long a request head may take before its connection is closed to keep places free. If none is free, the time does
/// not matter.
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

    /// The connections that wait for a request or for the rest of a head.
    fn waiting(&self) -> Vec<(Waiting, Arc<ConnectionActivity>)> {
        let registered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let open = registered.connections.iter().filter_map(Weak::upgrade);
        open.filter_map(|connection| Some((connection.waiting()?, connection))).collect()
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
    /// The connections to close if no place is free, the next one last.
    queue: Vec<(Waiting, Arc<ConnectionActivity>)>,
    /// When the last search was that found none.
    searched_at: Option<Ticks>,
}

impl Reaper {
    /// Closes idle connections and old half heads, a tenth of `max_connections`. Returns how many.
    pub(crate) fn keep_free<'r>(
        registries: impl Iterator<Item = &'r ConnectionRegistry>,
        max_connections: usize,
        now: Ticks,
    ) -> usize {
        let mut waiting: Vec<_> = registries.flat_map(ConnectionRegistry::waiting).collect();
        waiting.retain(|(waiting, _)| !waiting.is_head || now.since(waiting.since) >= HEAD_AGE_MIN);
        waiting.sort_by_key(|(waiting, _)| *waiting);
        waiting.truncate(reaped_max(max_connections));
        waiting.iter().for_each(|(_, connection)| connection.close(Close::Graceful));
        waiting.len()
    }

    /// Closes the connection that has waited longest, however short. Returns false if none waits.
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
        self.queue = registries.flat_map(ConnectionRegistry::waiting).collect();
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
            if connection.waiting() == Some(before) {
                connection.close(Close::Immediate);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
