//! Client connections: how many one client has, and which are closed when `max_connections` is near.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::client_timeouts::ConnectionActivity;
use super::timer::Ticks;

/// Bits of an IPv6 address that name a client; a client chooses the others itself.
const IPV6_CLIENT_BITS: u32 = 64;

/// Of `max_connections`, the share that is kept free by closing idle connections: one of so many.
const FREE_SHARE: usize = 10;

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

/// The connections of a worker that speak HTTP.
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

    /// The idle connections, and since when they are idle.
    fn idle(&self) -> Vec<(Ticks, Arc<ConnectionActivity>)> {
        let registered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let open = registered.connections.iter().filter_map(Weak::upgrade);
        open.filter_map(|connection| Some((connection.idle_since()?, connection))).collect()
    }
}

/// Number of connections from which idle ones are closed.
pub(crate) fn reap_from(max_connections: usize) -> usize {
    max_connections.saturating_sub((max_connections / FREE_SHARE).max(1))
}

/// Closes the connections that have been idle longest, a tenth of `max_connections`. Returns how many.
pub(crate) fn reap<'r>(
    registries: impl Iterator<Item = &'r ConnectionRegistry>,
    max_connections: usize,
) -> usize {
    let mut idle: Vec<_> = registries.flat_map(ConnectionRegistry::idle).collect();
    idle.sort_by_key(|(since, _)| *since);
    idle.truncate((max_connections / FREE_SHARE).max(1));
    idle.iter().for_each(|(_, connection)| connection.close());
    idle.len()
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
