//! Keeps file descriptors for the gateway.

use nix::sys::resource::{Resource, getrlimit};

/// Of the process's file descriptors, the most that a listener other than the gateway's uses for connections: one of
/// so many. There are four, the APIs and the admin listener, so that a third is left for the gateway and the store.
const LISTENER_SHARE: u64 = 6;

/// Most connections of a listener other than the gateway's.
pub(crate) fn connections_max() -> usize {
    let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((u64::MAX, u64::MAX));
    usize::try_from(descriptors / LISTENER_SHARE).unwrap_or(usize::MAX).max(1)
}
