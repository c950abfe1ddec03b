//! How many files and sockets the process may have open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tollgate_config::{Config, Gateway};

/// What the process has open beside connections: listening sockets, the runtimes of its threads, logs, connections to Redis,
/// health checks.
const OTHERS: u64 = 200;

/// Takes as many as the system gives. What is given at first is often 1024, for programs of old that cannot count further.
pub(crate) fn raise() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| match soft < hard {
        true => setrlimit(Resource::RLIMIT_NOFILE, hard, hard),
        false => Ok(()),
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
}

/// Says so if there may be more connections than the process can have.
pub(crate) fn check(config: &Config) {
    let Some(gateway) = &config.gateway else { return };
    let Ok((allowed, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let needed = needed(gateway);
    if allowed < needed {
        tracing::warn!(
            allowed,
            needed,
            "there may be fewer open files than `max_connections` needs; raise the limit (`ulimit -Hn`, or LimitNOFILE \
             of systemd), or write a smaller `max_connections`"
        );
    }
}

/// Each client's connection, and one to an upstream for each, as far as upstreams may have so many.
fn needed(gateway: &Gateway) -> u64 {
    let upstreams: usize = gateway.upstreams.iter().map(|it| it.max_connections * it.addresses.len()).sum();
    let clients = gateway.max_connections;
    (clients + upstreams.min(clients)) as u64 + OTHERS
}
