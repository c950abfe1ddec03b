//! Where Redis is, and how it is used.

use std::fmt;
use std::time::Duration;

use tollgate_core::{Failure, Lease, Limit};

use super::lease::Terms;

/// Where Redis is, and how it is used.
#[derive(Clone)]
pub struct Settings {
    pub(crate) url: String,
    pub(crate) secret: Vec<u8>,
    pub(crate) namespace: String,
    pub(crate) deadline: Duration,
    slots_hold: Duration,
    failure: Failure,
    /// Of single limits, the last first.
    failures: Vec<(usize, Failure)>,
    leases: Vec<(usize, Lease)>,
    names: Vec<(usize, String)>,
    pub(crate) links: usize,
    pub(crate) authority: Option<Vec<u8>>,
    pub(crate) certificate: Option<(Vec<u8>, Vec<u8>)>,
}

impl Settings {
    /// A server by its address: `redis://127.0.0.1:6379`, `redis://user:password@host:6379/0`, `rediss://host:6379`
    /// with TLS, `unix:///run/redis.sock`; the master that sentinels name,
    /// `redis+sentinel://user:password@host:26379,other:26379/master`; or a cluster by some of its nodes,
    /// `redis+cluster://user:password@host:6379,other:6379`, with TLS `rediss+cluster://`. A user of its own needs these
    /// rights, the last two for a cluster only:
    ///
    /// ```text
    /// ACL SETUSER tollgate on >password ~rate_limit:* +fcall +function|load +time +get +set +incrby +getrange
    ///     +setrange +pexpire +pttl +unlink +zadd +zcard +zscore +zrange +zrem +hset +hget +hdel +cluster|slots +asking
    /// ```
    pub fn new(url: &str) -> Settings {
        Settings {
            url: url.to_owned(),
            secret: Vec::new(),
            namespace: String::new(),
            deadline: Duration::from_millis(20),
            slots_hold: Duration::from_secs(10),
            failure: Failure::default(),
            failures: Vec::new(),
            leases: Vec::new(),
            names: Vec::new(),
            links: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            authority: None,
            certificate: None,
        }
    }

    /// The authority that signs the server's certificate, in PEM; those of the system if none is given.
    #[must_use]
    pub fn tls_authority(mut self, pem: &[u8]) -> Settings {
        self.authority = Some(pem.to_vec());
        self
    }

    /// A certificate of our own with its key, both in PEM, for a server that asks for one.
    #[must_use]
    pub fn tls_certificate(mut self, certificate_pem: &[u8], key_pem: &[u8]) -> Settings {
        self.certificate = Some((certificate_pem.to_vec(), key_pem.to_vec()));
        self
    }

    /// The secret with which keys are hashed before they reach Redis, the same in all processes. Without one, whoever
    /// can read Redis can find out by trying which keys are there.
    #[must_use]
    pub fn secret(mut self, secret: &[u8]) -> Settings {
        self.secret = secret.to_vec();
        self
    }

    /// Limiters with the same namespace share their limits, by their [names](Self::named) or else one by one in the
    /// order in which they were given; those with another do not.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Settings {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// How long a decision may take before [`Failure`] decides; 20 ms if nothing is said.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Settings {
        self.deadline = deadline;
        self
    }

    /// For how long a process has the slots of its requests under way (`tollgate::tower::slots`) without saying so again;
    /// 10 s if nothing is said. It says so each third of that. When a process has died, its slots are free so much later.
    /// All processes should have the same.
    #[must_use]
    pub fn slots_hold(mut self, hold: Duration) -> Settings {
        self.slots_hold = hold;
        self
    }

    /// What the limits do while Redis does not answer; each process by itself if nothing is said.
    #[must_use]
    pub fn failure(mut self, failure: Failure) -> Settings {
        self.failure = failure;
        self
    }

    /// What one of the limits does while Redis does not answer; `limit` is its number in the order in which they were
    /// given, from 0.
    #[must_use]
    pub fn failure_of(mut self, limit: usize, failure: Failure) -> Settings {
        self.failures.insert(0, (limit, failure));
        self
    }

    /// Gives one of the limits a name, by which it is known whatever its place among the others; `limit` is its number in
    /// the order in which they were given, from 0.
    #[must_use]
    pub fn named(mut self, limit: usize, name: &str) -> Settings {
        self.names.insert(0, (limit, name.to_owned()));
        self
    }

    /// Has this process take the budget of one of the limits in slices and spend them without asking, for keys that are
    /// asked about often; `limit` is its number in the order in which they were given, from 0. All processes must have
    /// the same lease.
    ///
    /// Never more is admitted than the limit allows, but less may be: a process may hold two slices of a key, of up to
    /// [`Lease::most`] units each, for [`Lease::hold`] while another has none; a bucket holds less by what refills during
    /// the hold, rounded up; the window of a log is longer by the hold; what other processes are told is left is without
    /// what is held; and a slice whose answer is lost, or whose process ends without
    /// [`Limiter::release`](crate::Limiter::release), is gone until it expires.
    /// A limit that must be asked about each request has no lease: a leaky bucket that delays, a log that counts all.
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

    /// What is done while Redis does not answer, unless a limit has something else.
    pub(crate) fn failure_of_all(&self) -> Failure {
        self.failure
    }

    /// How long slots are held.
    #[cfg(feature = "tower")]
    pub(crate) fn checked_slots_hold(&self) -> Result<Duration, SettingsError> {
        let range = Duration::from_millis(30)..=Duration::from_secs(3600);
        range.contains(&self.slots_hold).then_some(self.slots_hold).ok_or(SettingsError::SlotsHold)
    }

    /// What each limit does while Redis does not answer.
    pub(crate) fn policies(&self, limits: &[Limit]) -> Result<Vec<(Limit, Failure)>, SettingsError> {
        check_numbers(self.failures.iter().map(|(number, _)| *number), limits)?;
        let policy = |number| of(&self.failures, number).unwrap_or(self.failure);
        Ok(limits.iter().enumerate().map(|(number, limit)| (limit.clone(), policy(number))).collect())
    }

    /// How each limit is leased, if it is.
    pub(crate) fn terms(&self, limits: &[Limit]) -> Result<Vec<Option<Terms>>, SettingsError> {
        check_numbers(self.leases.iter().map(|(number, _)| *number), limits)?;
        let terms = |(number, limit)| match of(&self.leases, number) {
            Some(lease) => Terms::new(limit, lease).map(Some).ok_or(SettingsError::Lease { limit: number }),
            None => Ok(None),
        };
        limits.iter().enumerate().map(terms).collect()
    }

    /// How many connections are used; as many as there are cores if nothing is said.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Settings {
        self.links = connections.max(1);
        self
    }
}

impl fmt::Debug for Settings {
    /// Without the secret, and without the password that may be in the address.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("namespace", &self.namespace)
            .field("deadline", &self.deadline)
            .field("failure", &self.failure)
            .field("failures", &self.failures)
            .field("leases", &self.leases)
            .field("connections", &self.links)
            .finish_non_exhaustive()
    }
}

/// What is said of the limit with a number.
fn of<T: Copy>(all: &[(usize, T)], number: usize) -> Option<T> {
    all.iter().find(|(its, _)| *its == number).map(|(_, said)| *said)
}

fn check_numbers(mut numbers: impl Iterator<Item = usize>, limits: &[Limit]) -> Result<(), SettingsError> {
    match numbers.find(|number| *number >= limits.len()) {
        Some(limit) => Err(SettingsError::UnknownLimit { limit, limits: limits.len() }),
        None => Ok(()),
    }
}

/// Settings that do not work.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettingsError {
    /// The address cannot be understood.
    Address(String),
    /// There is no tokio runtime to drive the connections.
    NoRuntime,
    /// Something is said of a limit that there is not.
    UnknownLimit {
        /// Its number.
        limit: usize,
        /// How many there are.
        limits: usize,
    },
    /// Slots cannot be held for so long or so short a time.
    SlotsHold,
    /// A limit cannot be leased like that.
    Lease {
        /// Its number.
        limit: usize,
    },
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingsError::Address(why) => {
                write!(f, "the address of Redis is wrong: {why}; write it as in redis://127.0.0.1:6379")
            }
            SettingsError::UnknownLimit { limit, limits } => {
                write!(f, "there is no limit {limit}: the limiter has {limits}, counted from 0")
            }
            SettingsError::Lease { limit } => write!(
                f,
                "limit {limit} cannot be leased: write a lease of at least 1, held for no longer than a second and \
                 than it takes to fill half of a bucket; a leaky bucket that delays and a log that counts all \
                 requests have none"
            ),
            SettingsError::SlotsHold => {
                write!(f, "slots are held for 30 ms to an hour; write a time in between")
            }
            SettingsError::NoRuntime => {
                write!(f, "a limiter on Redis needs a tokio runtime: make it inside of one")
            }
        }
    }
}

impl std::error::Error for SettingsError {}
