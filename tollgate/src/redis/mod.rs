//! Limits that several processes share, through a Redis server.
//!
//! | file | what it does |
//! |---|---|
//! | `library.lua` | the decisions, inside Redis: one call is one atomic step |
//! | `protocol` | limit and cost -> what the library is told; its answer -> a decision, by the core's arithmetic |
//! | `key` | a key's name in Redis: a hash with the deployment's secret |
//! | `server` | where the server is, and how a connection is made |
//! | `link` | a connection, and the task that puts requests together into calls |
//! | `denied` | denials that are known, and need no asking |
//! | `breaker` | stops waiting for a server that does not answer |
//! | `failure` | what is decided then |
//!
//! The path of a check: key -> its name -> the breaker lets it ask -> a link's queue -> one call, the server's own time
//! inside -> decision. Or, if that fails or takes too long: the limit's policy decides.

mod breaker;
mod denied;
mod failure;
mod key;
mod link;
mod protocol;
mod server;

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tollgate_core::{Limit, Time};

use self::breaker::Breaker;
use self::denied::Denials;
pub use self::failure::Failure;
use self::failure::Fallback;
use self::key::Names;
pub use self::link::StoreError;
use self::link::{Ask, Item, Library, Link};
use self::protocol::Packed;
use self::server::Server;
use crate::Limiter;
use crate::clock::{Clock, SystemClock};
use crate::store::{Charge, ChargeError, Key, Store, Verdict, check_charges};

/// What goes over the wire, for the benchmark that sends it by hand.
#[doc(hidden)]
pub mod wire {
    use tollgate_core::Limit;

    /// The text of the library, and the name of its function.
    pub fn library() -> (String, String) {
        let super::Library { text, charge } = super::Library::new();
        (text, charge)
    }

    /// A charge as the function takes it.
    pub fn charge(limit: &Limit, cost: u32) -> Vec<u8> {
        super::Packed::new(limit).charge(cost, false, false)
    }
}

/// Where Redis is, and how it is used.
#[derive(Clone)]
pub struct Settings {
    url: String,
    secret: Vec<u8>,
    namespace: String,
    deadline: Duration,
    failure: Failure,
    links: usize,
    authority: Option<Vec<u8>>,
    certificate: Option<(Vec<u8>, Vec<u8>)>,
}

impl Settings {
    /// A server by its address: `redis://127.0.0.1:6379`, `redis://user:password@host:6379/0`, `rediss://host:6379`
    /// with TLS, `unix:///run/redis.sock`, or the master that sentinels name,
    /// `redis+sentinel://user:password@host:26379,other:26379/master`. A user of its own needs these rights:
    ///
    /// ```text
    /// ACL SETUSER tollgate on >password ~rate_limit:* +fcall +function|load +time +get +set +getrange +setrange
    ///     +pexpire +unlink
    /// ```
    pub fn new(url: &str) -> Settings {
        Settings {
            url: url.to_owned(),
            secret: Vec::new(),
            namespace: String::new(),
            deadline: Duration::from_millis(20),
            failure: Failure::default(),
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

    /// Limiters with the same namespace share their limits, one by one in the order in which they were given; those
    /// with another do not.
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

    /// What the limits do while Redis does not answer; each process by itself if nothing is said.
    #[must_use]
    pub fn failure(mut self, failure: Failure) -> Settings {
        self.failure = failure;
        self
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
            .field("connections", &self.links)
            .finish_non_exhaustive()
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
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingsError::Address(why) => {
                write!(f, "the address of Redis is wrong: {why}; write it as in redis://127.0.0.1:6379")
            }
            SettingsError::NoRuntime => {
                write!(f, "a limiter on Redis needs a tokio runtime: make it inside of one")
            }
        }
    }
}

impl std::error::Error for SettingsError {}

/// Keeps the state of every key in a Redis server, shared with all processes that use it.
#[derive(Debug)]
pub struct Redis {
    limits: Arc<[Packed]>,
    names: Names,
    links: Box<[Link]>,
    next_link: AtomicUsize,
    deadline: Duration,
    breaker: Breaker,
    denials: Denials,
    fallback: Fallback,
    clock: SystemClock,
}

impl Redis {
    pub(crate) fn new(limits: &[Limit], settings: &Settings) -> Result<Redis, SettingsError> {
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(SettingsError::NoRuntime);
        }
        let server = Server::new(settings)?;
        let packed: Arc<[Packed]> = limits.iter().map(Packed::new).collect();
        let library = Arc::new(Library::new());
        let link = |_| Link::new(server.clone(), library.clone(), packed.clone(), settings.deadline);
        let numbered: Vec<String> =
            (0..limits.len()).map(|number| format!("{}/{number}", settings.namespace)).collect();
        let policies: Vec<_> = limits.iter().map(|limit| (limit.clone(), settings.failure)).collect();
        Ok(Redis {
            names: Names::new(
                &settings.secret,
                limits.iter().map(Limit::name).zip(numbered.iter().map(String::as_str)),
            ),
            links: (0..settings.links).map(link).collect(),
            limits: packed,
            next_link: AtomicUsize::new(0),
            deadline: settings.deadline,
            breaker: Breaker::default(),
            denials: Denials::new(limits.iter()),
            fallback: Fallback::new(&policies),
            clock: SystemClock::new(),
        })
    }

    /// Asks Redis, and waits no longer than the deadline.
    async fn ask(&self, charges: &[Charge], is_look: bool, at: Option<Time>) -> Result<Verdict, StoreError> {
        let items = charges.iter().map(|charge| Item {
            limit: charge.limit,
            key: self.names.name(charge.limit, charge.key),
            cost: charge.cost,
        });
        let items = items.collect();
        self.send(|tell| Ask::Charge { items, is_look, at, tell }).await
    }

    async fn send<T>(
        &self,
        ask: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> Ask,
    ) -> Result<T, StoreError> {
        if !self.breaker.lets_ask(self.clock.now()) {
            return Err(StoreError::Away);
        }
        let (tell, told) = oneshot::channel();
        let link = self.next_link.fetch_add(1, Ordering::Relaxed) % self.links.len();
        let answer = async {
            self.links[link].ask(ask(tell))?;
            told.await.unwrap_or(Err(StoreError::Unreachable("its driver has ended".to_owned())))
        };
        let answer = tokio::time::timeout(self.deadline, answer).await.unwrap_or(Err(StoreError::TimedOut));
        match &answer {
            Ok(_) => self.breaker.answered(),
            Err(_) => self.breaker.failed(self.clock.now()),
        }
        answer
    }

    async fn decide(&self, charges: &[Charge], is_look: bool) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.limits.len())?;
        // Of several limits one alone is not known: what the others would say is part of the answer.
        let alone = if let ([only], false) = (charges, is_look) { Some(only) } else { None };
        let asked_at = self.clock.now();
        if let Some(decision) = alone.and_then(|charge| self.denials.known(charge, asked_at)) {
            return Ok(Verdict { decisions: SmallVec::from_slice(&[decision]), ..Verdict::default() });
        }
        match self.ask(charges, is_look, None).await {
            Ok(verdict) => {
                if let (Some(charge), [decision]) = (alone, verdict.decisions()) {
                    self.denials.learn(charge, decision, asked_at);
                }
                Ok(verdict)
            }
            Err(_) => self.fallback.verdict(charges, is_look),
        }
    }

    fn of_all_limits(&self, key: Key, cost: u32) -> SmallVec<[Charge; 4]> {
        (0..self.limits.len()).map(|limit| Charge { limit, key, cost }).collect()
    }
}

impl Store for Redis {
    type Error = ChargeError;

    fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.names.key(key)
    }

    async fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.decide(charges, false).await
    }
}

impl Limiter<Redis> {
    /// Decides a request of cost 1.
    pub async fn check<K: Hash + ?Sized>(&self, key: &K) -> Verdict {
        self.check_n(key, 1).await
    }

    /// Decides a request of any cost. A cost of 0 takes nothing.
    pub async fn check_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Verdict {
        self.of_all_limits(key, cost, false).await
    }

    /// Says what a request of cost 1 would be told, and takes nothing.
    pub async fn peek<K: Hash + ?Sized>(&self, key: &K) -> Verdict {
        self.peek_n(key, 1).await
    }

    /// Says what a request of any cost would be told, and takes nothing.
    pub async fn peek_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Verdict {
        self.of_all_limits(key, cost, true).await
    }

    async fn of_all_limits<K: Hash + ?Sized>(&self, key: &K, cost: u32, is_look: bool) -> Verdict {
        let charges = self.store().of_all_limits(self.key(key), cost);
        // Each limit once, and none that there is not.
        self.store().decide(&charges, is_look).await.unwrap_or_default()
    }

    /// A key as [`charge`](Self::charge) takes it.
    pub fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.store().key(key)
    }

    /// Charges limits for keys of their own: all of them, or none if any denies the request.
    ///
    /// # Errors
    /// If a charge names a limit that there is not, or two name the same.
    pub async fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.store().charge(charges).await
    }

    /// Forgets a key: it is as good as new, in all processes; in those that know that it is denied, within a second.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn reset<K: Hash + ?Sized>(&self, key: &K) -> Result<(), StoreError> {
        let (store, key) = (self.store(), self.key(key));
        let keys = (0..store.limits.len()).map(|limit| store.names.name(limit, key)).collect();
        (0..store.limits.len()).for_each(|limit| store.denials.forget(limit, key));
        store.send(|tell| Ask::Forget { keys, tell }).await
    }

    /// Whether Redis has not answered for a while, so that the limits' policies decide.
    pub fn is_degraded(&self) -> bool {
        self.store().breaker.is_open()
    }

    /// Decides at a given time instead of the server's: for replaying what was. There is no policy: if Redis does not
    /// answer, that is an error.
    ///
    /// # Errors
    /// If Redis does not answer.
    #[doc(hidden)]
    pub async fn check_at<K: Hash + ?Sized>(
        &self,
        at: Time,
        key: &K,
        cost: u32,
    ) -> Result<Verdict, StoreError> {
        let charges = self.store().of_all_limits(self.key(key), cost);
        self.store().ask(&charges, false, Some(at)).await
    }
}
