//! The limit on open files and sockets.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ratekeeper_config::{Config, Gateway};

/// Descriptors beyond connections: listeners, thread runtimes, logs, connections to Redis, health checks.
const OTHERS: u64 = 200;

/// Raises the soft limit to the hard one. The default soft limit is often 1024, for programs that use `select`.
pub(crate) fn raise() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| match soft < hard {
        true => setrlimit(Resource::RLIMIT_NOFILE, hard, hard),
        false => Ok(()),
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the open file limit");
    }
}

/// Logs a warning if `max_connections` may need more descriptors than the process is allowed.
pub(crate) fn check(config: &Config) {
    let Some(gateway) = &config.gateway else { return };
    let Ok((allowed, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let needed = needed(gateway);
    if allowed < needed {
        tracing::warn!(
            allowed,
            needed,
            "the open file limit may be too low for `max_connections`; raise it (`ulimit -Hn`, or LimitNOFILE of \
             systemd), or lower `max_connections`"
        );
    }
}

/// One descriptor per client connection, and one upstream connection for each, up to the upstreams'
/// `max_connections`.
fn needed(gateway: &Gateway) -> u64 {
    let upstreams: usize = gateway.upstreams.iter().map(|it| it.max_connections * it.addresses.len()).sum();
    let clients = gateway.max_connections;
    (clients + upstreams.min(clients)) as u64 + OTHERS
}
