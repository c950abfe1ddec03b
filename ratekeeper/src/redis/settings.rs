//! The address of Redis and the options for its use.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper_core::{FailurePolicy, Lease, Limit};

use super::lease::LeaseTerms;
use super::network::Network;
use crate::clock::{SharedClock, SystemClock};

/// The address of Redis and the options for its use.
#[derive(Clone)]
pub struct Settings {
    pub(crate) url: String,
    pub(crate) secret: Vec<u8>,
    pub(crate) namespace: String,
    pub(crate) deadline: Duration,
    permit_hold: Duration,
    policy: FailurePolicy,
    /// Options of single limits; the latest comes first.
    limit_policies: Vec<(usize, FailurePolicy)>,
    leases: Vec<(usize, Lease)>,
    names: Vec<(usize, String)>,
    pub(crate) connections: Option<usize>,
    pub(crate) ca: Option<Vec<u8>>,
    pub(crate) certificate: Option<(Vec<u8>, Vec<u8>)>,
    pub(crate) environment: Environment,
}

impl Settings {
    /// Uses the server at an address: `redis://127.0.0.1:6379`, `redis://user:password@host:6379/0`,
    /// `rediss://host:6379` with TLS, or `unix:///run/redis.sock`. For Sentinel,
    /// `redis+sentinel://user:password@host:26379,other:26379/master` names the master; for a cluster,
    /// `redis+cluster://user:password@host:6379,other:6379` names some of its nodes, with TLS `rediss+cluster://`. A
    /// dedicated Redis user needs these permissions, the last two only in a cluster:
    ///
    /// ```text
    /// ACL SETUSER ratekeeper on >password ~rate_limit:* +fcall +function|load +time +get +set +incrby +getrange
    ///     +setrange +pexpire +pttl +unlink +zadd +zcard +zscore +zrange +zrem +hset +hget +hdel +cluster|slots +asking
    ///     +ping +role +select
    /// ```
    pub fn new(url: &str) -> Settings {
        Settings {
            url: url.to_owned(),
            secret: Vec::new(),
            namespace: String::new(),
            deadline: FailurePolicy::DEADLINE_DEFAULT,
            permit_hold: Duration::from_secs(10),
            policy: FailurePolicy::default(),
            limit_policies: Vec::new(),
            leases: Vec::new(),
            names: Vec::new(),
            connections: None,
            ca: None,
            certificate: None,
            environment: Environment::default(),
        }
    }

    /// The CA that signed the server's certificate, in PEM. Default: the CAs of the system.
    #[must_use]
    pub fn tls_ca(mut self, pem: &[u8]) -> Settings {
        self.ca = Some(pem.to_vec());
        self
    }

    /// The client certificate and its key, both in PEM, for a server that requires one.
    #[must_use]
    pub fn tls_certificate(mut self, certificate_pem: &[u8], key_pem: &[u8]) -> Settings {
        self.certificate = Some((certificate_pem.to_vec(), key_pem.to_vec()));
        self
    }

    /// The secret with which keys are hashed before they reach Redis; all processes must use the same one. Without a
    /// secret, anyone who can read Redis can test which keys exist.
    #[must_use]
    pub fn secret(mut self, secret: &[u8]) -> Settings {
        self.secret = secret.to_vec();
        self
    }

    /// Limiters with the same namespace share their limits: by [name](Self::named), or else by position. Limiters
    /// with different namespaces share nothing.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Settings {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// The time limit of a decision, after which the [`FailurePolicy`] decides. Default:
    /// [`DEADLINE_DEFAULT`](FailurePolicy::DEADLINE_DEFAULT).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Settings {
        self.deadline = deadline;
        self
    }

    /// How long a process keeps its concurrency permits (`ratekeeper::tower::concurrency`) without renewing them; it
    /// renews them every third of this time. Default: 10 s. The permits of a crashed process are free after this
    /// time. All processes should use the same value.
    #[must_use]
    pub fn permit_hold(mut self, hold: Duration) -> Settings {
        self.permit_hold = hold;
        self
    }

    /// The failure policy of all limits. Default: each process enforces the limits locally.
    #[must_use]
    pub fn on_store_failure(mut self, policy: FailurePolicy) -> Settings {
        self.policy = policy;
        self
    }

    /// The failure policy of one limit; `limit` is its position, from 0.
    #[must_use]
    pub fn on_store_failure_of(mut self, limit: usize, policy: FailurePolicy) -> Settings {
        self.limit_policies.insert(0, (limit, policy));
        self
    }

    /// Names a limit, so that processes share it regardless of its position; `limit` is its position, from 0.
    #[must_use]
    pub fn named(mut self, limit: usize, name: &str) -> Settings {
        self.names.insert(0, (limit, name.to_owned()));
        self
    }

    /// Leases budget of a limit for busy keys: this process takes units from Redis in advance and spends them
    /// locally. `limit` is the limit's position, from 0. All processes must use the same lease.
    ///
    /// The limit is never exceeded, but less may be allowed:
    /// - A process may hold two leases of a key, of up to [`Lease::max`] units each, for [`Lease::hold`] while
    ///   another process has none.
    /// - A bucket is smaller by the units that refill during the hold, rounded up.
    /// - The window of a log is longer by the hold.
    /// - The remaining budget that other processes report excludes leased units.
    /// - If the reply to a lease is lost, or the process ends without [`Limiter::release`](crate::Limiter::release),
    ///   the leased units stay charged until they expire.
    ///
    /// Limits that must decide each request in Redis cannot be leased: a leaky bucket that delays and a log that
    /// counts all requests.
    #[must_use]
    pub fn lease(mut self, limit: usize, lease: Lease) -> Settings {
        self.leases.insert(0, (limit, lease));
        self
    }

    /// The name of each limit, if it has one.
    pub(crate) fn names(&self, limits: &[Limit]) -> Result<Vec<Option<&str>>, SettingsError> {
        check_numbers(self.names.iter().map(|(number, _)| *number), limits)?;
        let name = |number| self.names.iter().find(|(its, _)| *its == number).map(|(_, name)| name.as_str());
        Ok((0..limits.len()).map(name).collect())
    }

    /// The failure policy of limits that have no policy of their own.
    pub(crate) fn default_policy(&self) -> FailurePolicy {
        self.policy
    }

    /// How long concurrency permits are held: 30 ms to 1 h.
    #[cfg(feature = "tower")]
    pub(crate) fn checked_permit_hold(&self) -> Result<Duration, SettingsError> {
        let range = Duration::from_millis(30)..=Duration::from_secs(3600);
        range.contains(&self.permit_hold).then_some(self.permit_hold).ok_or(SettingsError::PermitHold)
    }

    /// Each limit with its failure policy.
    pub(crate) fn policies(&self, limits: &[Limit]) -> Result<Vec<(Limit, FailurePolicy)>, SettingsError> {
        check_numbers(self.limit_policies.iter().map(|(number, _)| *number), limits)?;
        let policy = |number| of(&self.limit_policies, number).unwrap_or(self.policy);
        Ok(limits.iter().enumerate().map(|(number, limit)| (limit.clone(), policy(number))).collect())
    }

    /// The lease terms of each limit, if it is leased.
    pub(crate) fn terms(&self, limits: &[Limit]) -> Result<Vec<Option<LeaseTerms>>, SettingsError> {
        check_numbers(self.leases.iter().map(|(number, _)| *number), limits)?;
        let terms = |(number, limit)| match of(&self.leases, number) {
            Some(lease) => {
                LeaseTerms::new(limit, lease).map(Some).ok_or(SettingsError::Lease { limit: number })
            }
            None => Ok(None),
        };
        limits.iter().enumerate().map(terms).collect()
    }

    /// The number of connections to each server that each tokio runtime opens. Default: one for each thread of the
    /// runtime.
    ///
    /// Each runtime that checks limits drives connections of its own, so it needs tokio's I/O and time drivers
    /// (`enable_all`). Use a runtime for many checks: its first check opens the connections, unless
    /// [`Limiter::open_connections`](crate::Limiter::open_connections) has opened them before.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Settings {
        self.connections = Some(connections.max(1));
        self
    }
}

impl fmt::Debug for Settings {
    /// Omits the secret, and the address because it may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("namespace", &self.namespace)
            .field("deadline", &self.deadline)
            .field("on_store_failure", &self.policy)
            .field("limit_policies", &self.limit_policies)
            .field("leases", &self.leases)
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

/// What a store takes from the outside: tests and simulations replace it. Timers are tokio's, whose clock can be paused.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// The network; by default that of the operating system.
    pub(crate) network: Option<Arc<dyn Network>>,
    /// The local time; by default the system's.
    pub(crate) clock: Option<SharedClock>,
}

impl Environment {
    pub(crate) fn clock(&self) -> SharedClock {
        self.clock.clone().unwrap_or_else(|| SharedClock::new(SystemClock::new()))
    }
}

/// The option of the limit at a position.
fn of<T: Copy>(all: &[(usize, T)], number: usize) -> Option<T> {
    all.iter().find(|(its, _)| *its == number).map(|(_, option)| *option)
}

fn check_numbers(mut numbers: impl Iterator<Item = usize>, limits: &[Limit]) -> Result<(), SettingsError> {
    match numbers.find(|number| *number >= limits.len()) {
        Some(limit) => Err(SettingsError::UnknownLimit { limit, limits: limits.len() }),
        None => Ok(()),
    }
}

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The address cannot be parsed.
    #[error("the address of Redis is wrong: {0}")]
    Address(String),
    /// The certificates for TLS cannot be used.
    #[error("the certificates for Redis cannot be used: {0}")]
    Tls(String),
    /// There is no tokio runtime to drive the connections.
    #[error("a limiter on Redis needs a tokio runtime: build it inside one")]
    NoRuntime,
    /// An option names a limit that does not exist.
    #[error("there is no limit {limit}: the limiter has {limits}, counted from 0")]
    UnknownLimit {
        /// Its position.
        limit: usize,
        /// The number of limits.
        limits: usize,
    },
    /// Concurrency permits cannot be held for this time.
    #[error("permit_hold must be between 30 ms and 1 h")]
    PermitHold,
    /// A limit cannot be leased with these terms.
    #[error(
        "limit {limit} cannot be leased: write a lease of at least 1, held for no longer than a second and than it \
         takes to fill half of a bucket; a leaky bucket that delays and a log that counts all requests have none"
    )]
    Lease {
        /// Its position.
        limit: usize,
    },
    /// A reload adds limits, and the limits in use leave no local memory for them.
    #[error(
        "the limits in use leave no memory to count further limits locally while Redis is unavailable: restart to \
         divide it anew"
    )]
    LocalMemory,
}
