//! Limits that several processes share through Redis.
//!
//! | file | what it does |
//! |---|---|
//! | `library.lua` | decides inside Redis; one call is one atomic step |
//! | `protocol` | packs arguments for the library; turns its replies into decisions by the core's arithmetic |
//! | `key` | names a key in Redis: a hash with the deployment's secret |
//! | `settings`, `address` | the options and the address of Redis |
//! | `server`, `network` | how a connection is opened; the seam at which the network can be replaced |
//! | `link`, `resp` | an open connection, and the protocol of Redis |
//! | `call`, `batcher` | batches checks into calls; the task that drives a connection |
//! | `node` | one Redis server: the connections of each runtime, and its circuit breaker |
//! | `route`, `cluster` | finds the cluster node of a request and follows redirections |
//! | `cross_slot` | a request whose limits have keys in several hash slots |
//! | `denial_cache` | answers repeated denials locally |
//! | `lease`, `lease_tasks` | budget leased from Redis and spent locally |
//! | `concurrency`, `claim`, `concurrency.lua` | concurrency limits shared by all processes, for the middleware |
//! | `records`, `records.lua` | short-lived records of the APIs, shared by all processes |
//! | `breaker` | the circuit breaker of a server that does not answer |
//! | `failure_policy` | decides while Redis is unavailable |
//! | `failures` | counts failed calls by cause, and says what to do |
//! | `inline` | inline limits, and refunds |
//! | `reload` | limits that change while they are in use |
//!
//! The path of a check: key -> its name in Redis -> its node, if the breaker permits -> the queue of a connection ->
//! one call, decided by the server's clock -> decision. If a step fails or the deadline passes, the limit's failure
//! policy decides.

mod address;
mod batcher;
mod breaker;
mod call;
mod claim;
mod cluster;
#[cfg(feature = "tower")]
mod concurrency;
mod cross_slot;
mod denial_cache;
#[cfg(test)]
mod environment_tests;
mod failure_policy;
mod failures;
mod inline;
mod key;
mod lease;
mod lease_tasks;
mod library;
mod link;
mod network;
mod node;
mod protocol;
mod records;
mod reload;
mod resp;
mod route;
mod server;
mod settings;
mod store_error;

use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, TryFutureExt};
pub use ratekeeper_core::{FailurePolicy, Lease};
use ratekeeper_core::{Limit, Time};
use smallvec::SmallVec;

pub use self::address::{AddressError, check_address};
use self::batcher::ConnectionOptions;
use self::call::{ChargeOp, Item, Items, Task};
#[cfg(feature = "tower")]
pub(crate) use self::concurrency::{PermitNames, SharedPermits};
use self::denial_cache::DenialCache;
use self::failure_policy::Fallback;
pub use self::failures::FailureCause;
use self::key::Names;
use self::lease::{LeaseTerms, Leases};
use self::library::Library;
use self::protocol::PackedLimit;
pub use self::records::{RecordClaim, Records, TakeResult};
use self::route::Servers;
use self::server::Topology;
pub use self::settings::{Settings, SettingsError};
pub use self::store_error::StoreError;
use crate::Limiter;
use crate::clock::{Clock as _, SharedClock};
use crate::store::{Charge, ChargeError, InlineLimit, Key, Store, StoreUnavailable, Verdict, check_charges};

/// The wire format, for the benchmark and for tests that send raw calls.
#[doc(hidden)]
pub mod wire {
    use ratekeeper_core::{Decision, Limit, Time};

    /// The source text of the library and the name of its charge function.
    pub fn library() -> (String, String) {
        let super::Library { text, charge, .. } = super::Library::new();
        (text, charge)
    }

    /// A charge in the format of the charge function.
    pub fn charge(limit: &Limit, cost: u32) -> Vec<u8> {
        super::PackedLimit::new(limit, limit.limit()).charge(cost, false, false)
    }

    /// The refund of a charge made at `at`, or at an unknown time.
    pub fn refund(limit: &Limit, cost: u32, at: Option<Time>) -> Vec<u8> {
        super::PackedLimit::new(limit, limit.limit()).refund(cost, at)
    }

    /// The time argument of a call, which replaces the server's clock.
    pub fn time(at: Time) -> Vec<u8> {
        let mut text = Vec::new();
        super::protocol::push_instant(&mut text, at.as_nanos());
        text
    }

    /// Reads the time of the decisions from the front of a reply.
    pub fn take_time(reply: &mut &[u8]) -> Option<Time> {
        super::protocol::take_instant(reply).map(Time::from_nanos)
    }

    /// Reads one decision from the front of a reply, after the time.
    pub fn take_decision(reply: &mut &[u8], limit: &Limit, cost: u32, now: Time) -> Option<Decision> {
        super::PackedLimit::new(limit, limit.limit()).decision(reply, now, cost)
    }

    /// Reads the result of one refund from the front of a reply, after the time.
    pub fn take_refunded(reply: &mut &[u8]) -> Option<()> {
        super::PackedLimit::refunded(reply)
    }
}

/// Keeps the state of every key in Redis, shared by all processes that use it.
#[derive(Debug)]
pub struct Redis(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limits: Box<[Arc<PackedLimit>]>,
    /// The configured limits; a leased limit is enforced in Redis by a stricter one.
    configured: Box<[Limit]>,
    names: Names,
    /// Stores created by a reload share the connections.
    servers: Arc<Servers>,
    /// The settings without the options of single limits.
    base: Settings,
    deadline: Duration,
    denials: DenialCache,
    leases: Leases,
    fallback: Fallback,
    clock: SharedClock,
}

impl Redis {
    /// `base` holds the settings without the options of single limits.
    pub(crate) fn new(
        limits: &[Limit],
        settings: &Settings,
        base: &Settings,
    ) -> Result<Redis, SettingsError> {
        let library = Arc::new(Library::new());
        let options =
            ConnectionOptions { library, deadline: settings.deadline, connections: settings.connections };
        let terms = settings.terms(limits)?;
        let clock = settings.environment.clock();
        let fallback = Fallback::new(&settings.policies(limits)?, settings.default_policy(), clock.clone());
        // Invalid settings are reported before any task is started.
        settings.names(limits)?;
        let topology = Topology::new(settings)?;
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(SettingsError::NoRuntime);
        }
        let servers = Arc::new(Servers::new(topology, options, clock));
        Redis::with_servers(servers, limits, settings, base, terms, fallback)
    }

    fn with_servers(
        servers: Arc<Servers>,
        limits: &[Limit],
        settings: &Settings,
        base: &Settings,
        terms: Vec<Option<LeaseTerms>>,
        fallback: Fallback,
    ) -> Result<Redis, SettingsError> {
        let in_redis = limits.iter().zip(&terms).map(|(limit, terms)| {
            let enforced = terms.as_ref().map_or(limit, |terms| &terms.lease_limit);
            Arc::new(PackedLimit::new(enforced, limit.limit()))
        });
        let packed: Box<[Arc<PackedLimit>]> = in_redis.collect();
        let named = settings.names(limits)?.into_iter().zip(&packed);
        let named = limits
            .iter()
            .zip(named)
            .map(|(limit, (name, packed))| (limit.name(), name, packed.scale_of(name)));
        let holds =
            terms.iter().map(|terms| terms.as_ref().map(|terms| terms.lease.hold)).collect::<Vec<_>>();
        let inner = Arc::new(Inner {
            names: Names::new(&settings.secret, &settings.namespace, named),
            clock: servers.clock.clone(),
            servers,
            limits: packed,
            configured: limits.into(),
            base: base.clone(),
            deadline: settings.deadline,
            denials: DenialCache::new(limits.iter().zip(holds)),
            leases: Leases::new(terms),
            fallback,
        });
        if let Some(every) = inner.leases.sweep_every() {
            tokio::spawn(lease_tasks::sweep(Arc::downgrade(&inner), every));
        }
        Ok(Redis(inner))
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let held = self.0.leases.close();
        if let (false, Ok(runtime)) = (held.is_empty(), tokio::runtime::Handle::try_current()) {
            let inner = self.0.clone();
            runtime.spawn(async move { inner.refund_all(held).await });
        }
    }
}

impl Inner {
    /// Checks or peeks in Redis, within the deadline. What is sent is no part of the future, which stays small.
    fn call<'a>(
        self: &'a Arc<Self>,
        charges: &[Charge],
        is_peek: bool,
        at: Option<Time>,
    ) -> impl Future<Output = Result<Verdict, StoreError>> + Send + use<'a> {
        let items: Items = charges.iter().map(|charge| self.item(charge)).collect();
        let op = if is_peek { ChargeOp::Peek } else { ChargeOp::Charge };
        match self.servers.slot_of_all(&items) {
            Some(slot) => {
                let called = self.servers.execute(slot, Task::Charge { items, op, at }, self.deadline);
                Either::Left(called.map_ok(|reply| Verdict { at: reply.at, ..reply.verdict }))
            }
            None => Either::Right(Box::pin(self.decide_cross_slot(items, is_peek, at))),
        }
    }

    fn item(&self, charge: &Charge) -> Item {
        Item {
            limit: self.limits[charge.limit].clone(),
            key: self.names.name(charge.limit, charge.key),
            cost: charge.cost,
        }
    }

    async fn decide(self: &Arc<Self>, charges: &[Charge], is_peek: bool) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.limits.len())?;
        let sent_at = self.clock.now();
        let verdict = match is_peek {
            true => self.call(charges, true, None).await,
            false => self.spend_or_call(charges, sent_at).await,
        };
        verdict.or_else(|_| self.fallback.verdict(charges, is_peek))
    }

    /// Resets the keys of charges, with one call for adjacent charges of the same key.
    async fn reset(&self, charges: &[Charge]) -> Result<(), StoreError> {
        for charges in charges.chunk_by(|one, other| one.key == other.key) {
            let Some(Charge { key, .. }) = charges.first() else { continue };
            let names: Vec<_> = charges.iter().map(|it| self.names.name(it.limit, it.key)).collect();
            // All names of one key share a hash slot.
            let slot = self.servers.slot(&names[0]);
            self.servers.execute(slot, Task::Unlink(names), self.deadline).await?;
            self.denials.invalidate(*key, self.clock.now());
            charges.iter().for_each(|it| self.leases.drop_key(it.limit, it.key));
        }
        Ok(())
    }

    fn charges_of_all_limits(&self, key: Key, cost: u32) -> SmallVec<[Charge; 4]> {
        (0..self.limits.len()).map(|limit| Charge { limit, key, cost }).collect()
    }
}

impl Store for Redis {
    type Error = ChargeError;

    fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.0.names.key(key)
    }

    async fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.0.decide(charges, false).await
    }

    async fn peek(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.0.decide(charges, true).await
    }

    async fn refund(&self, charges: &[Charge], at: Option<Time>) -> Result<(), StoreUnavailable> {
        let each = charges.iter().map(|charge| self.0.item(charge));
        self.0.refund_items(each, at).await?;
        // A cached denial may no longer hold after the refund.
        charges.iter().for_each(|charge| self.0.denials.invalidate(charge.key, self.0.clock.now()));
        Ok(())
    }

    async fn reset(&self, charges: &[Charge]) -> Result<(), StoreUnavailable> {
        self.0.reset(charges).await.map_err(|why| StoreUnavailable(why.to_string()))
    }

    async fn charge_inline(
        &self,
        limit: InlineLimit<'_>,
        key: Key,
        cost: u32,
        is_peek: bool,
    ) -> Result<Verdict, ChargeError> {
        self.0.decide_inline(limit, key, cost, is_peek).await
    }

    async fn refund_inline(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        at: Option<Time>,
    ) -> Result<(), StoreUnavailable> {
        self.0.refund_items(std::iter::once(self.0.inline_item(limit, key, cost)), at).await
    }
}

impl Limiter<Redis> {
    /// Checks a request of cost 1: decides it and charges all limits if it is allowed.
    pub async fn check<K: Hash + ?Sized>(&self, key: &K) -> Verdict {
        self.check_n(key, 1).await
    }

    /// Checks a request of `cost` units. A cost of 0 charges nothing.
    pub async fn check_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Verdict {
        self.charges_of_all_limits(key, cost, false).await
    }

    /// Returns the verdict for a request of cost 1 without charging it.
    pub async fn peek<K: Hash + ?Sized>(&self, key: &K) -> Verdict {
        self.peek_n(key, 1).await
    }

    /// Returns the verdict for a request of `cost` units without charging it.
    pub async fn peek_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Verdict {
        self.charges_of_all_limits(key, cost, true).await
    }

    async fn charges_of_all_limits<K: Hash + ?Sized>(&self, key: &K, cost: u32, is_peek: bool) -> Verdict {
        let inner = &self.store().0;
        let charges = inner.charges_of_all_limits(self.key(key), cost);
        // Each limit occurs once and exists, so the charges are valid.
        inner.decide(&charges, is_peek).await.unwrap_or_default()
    }

    /// The key as [`charge`](Self::charge) takes it.
    pub fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.store().key(key)
    }

    /// Charges limits, each with its own key and cost, atomically: if one of them denies the request, none is
    /// charged.
    ///
    /// # Errors
    /// Returns an error if a charge names an unknown limit, or if two charges name the same key of the same limit.
    pub async fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.store().charge(charges).await
    }

    /// Refunds units that were charged [at a time](Verdict::at) and not used. A key never has more budget afterwards
    /// than without the charge. If the time is unknown, the oldest units that still count are refunded, never more
    /// than were charged.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer. It is then unknown whether the refund was made, so do not retry it.
    pub async fn refund(&self, charges: &[Charge], at: Option<Time>) -> Result<(), StoreUnavailable> {
        self.store().refund(charges, at).await
    }

    /// Resets a key to its full budget in all processes. Other processes may deny it from their denial cache for up
    /// to a second. Leases that they [already hold](Settings::lease) can still be spent, at most two per process.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn reset<K: Hash + ?Sized>(&self, key: &K) -> Result<(), StoreError> {
        let (store, key) = (&self.store().0, self.key(key));
        store.reset(&store.charges_of_all_limits(key, 0)).await
    }

    /// Refunds all [leases](Settings::lease) that this process holds and has not spent. Call it before the process
    /// exits.
    pub async fn release(&self) {
        let store = &self.store().0;
        store.refund_all(store.leases.take_all()).await;
    }

    /// Opens the connections of the current tokio runtime, without waiting for them. Otherwise the first check on a
    /// runtime opens them, and waits for one. The runtime that builds the limiter has its connections already.
    pub fn open_connections(&self) {
        self.store().0.servers.open_connections();
    }

    /// Checks that Redis answers, with a call that changes nothing.
    ///
    /// # Errors
    /// Returns the reason if Redis does not answer.
    pub async fn reach(&self) -> Result<(), StoreError> {
        let inner = &self.store().0;
        let charges = inner.charges_of_all_limits(self.key(""), 1);
        match charges.is_empty() {
            true => self.records().take("").await.map(drop),
            false => inner.call(&charges, true, None).await.map(drop),
        }
    }

    /// Whether Redis, or a node of its cluster, is unavailable, so that failure policies decide.
    pub fn is_degraded(&self) -> bool {
        self.store().0.servers.is_degraded()
    }

    /// Failed calls since the start, by cause. A failure policy has decided about their requests, also if Redis answers
    /// other calls.
    pub fn failures(&self) -> impl Iterator<Item = (FailureCause, u64)> {
        self.store().0.servers.failures.counts().into_iter()
    }

    /// The last error of a call since the last time that this was called. An error that states a reason is preferred to
    /// a timeout.
    pub fn take_last_failure(&self) -> Option<StoreError> {
        self.store().0.servers.failures.take_last()
    }

    /// Checks at a given time instead of the server's, to replay past traffic. No failure policy applies.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    #[doc(hidden)]
    pub async fn check_at<K: Hash + ?Sized>(
        &self,
        at: Time,
        key: &K,
        cost: u32,
    ) -> Result<Verdict, StoreError> {
        let inner = &self.store().0;
        let charges = inner.charges_of_all_limits(self.key(key), cost);
        inner.call(&charges, false, Some(at)).await
    }
}
