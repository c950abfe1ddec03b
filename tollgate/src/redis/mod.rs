//! Limits that several processes share, through a Redis server.
//!
//! | file | what it does |
//! |---|---|
//! | `library.lua` | the decisions, inside Redis: one call is one atomic step |
//! | `protocol` | limit and cost -> what the library is told; its answer -> a decision, by the core's arithmetic |
//! | `key` | a key's name in Redis: a hash with the deployment's secret |
//! | `settings`, `server` | where the server is, and how a connection is made |
//! | `link` | a connection, and the task that puts requests together into calls |
//! | `node` | a server, with its connections and whether it answers |
//! | `route`, `cluster` | to which node of a cluster a request goes, and where it is sent on to |
//! | `across` | several limits of one request whose keys are with several nodes |
//! | `denied` | denials that are known, and need no asking |
//! | `lease`, `leased` | budget that is taken ahead and spent without asking |
//! | `slots`, `claim`, `slots.lua` | how many requests are under way in all processes, for the middleware |
//! | `records`, `records.lua` | what doors remember for a while, for all processes |
//! | `breaker` | stops waiting for a server that does not answer |
//! | `failure` | what is decided then |
//! | `brought` | limits that come with requests, and what is given back |
//! | `renewal` | limits that change while they are in use |
//!
//! The path of a check: key -> its name -> its node, whose breaker lets it ask -> a link's queue -> one call, the
//! server's own time inside -> decision. Or, if that fails or takes too long: the limit's policy decides.

mod across;
mod breaker;
mod brought;
mod claim;
mod cluster;
mod denied;
mod failure;
mod key;
mod lease;
mod leased;
mod link;
mod node;
mod protocol;
mod records;
mod renewal;
mod route;
mod server;
mod settings;
#[cfg(feature = "tower")]
mod slots;

use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
pub use tollgate_core::{Failure, Lease};
use tollgate_core::{Limit, Time};

use self::denied::Denials;
use self::failure::Fallback;
use self::key::Names;
use self::lease::{Leases, Terms};
pub use self::link::StoreError;
use self::link::{Common, Item, Items, Library, Task, What};
use self::protocol::Packed;
pub use self::records::{Claim as RecordClaim, Records, Taken};
use self::route::Servers;
use self::server::Place;
pub use self::settings::{Settings, SettingsError};
#[cfg(feature = "tower")]
pub(crate) use self::slots::Slots;
use crate::Limiter;
use crate::clock::{Clock, SystemClock};
use crate::store::{Charge, ChargeError, Key, Store, Unreached, Verdict, check_charges};

/// What goes over the wire, for the benchmark and for tests that send it by hand.
#[doc(hidden)]
pub mod wire {
    use tollgate_core::{Decision, Limit, Time};

    /// The text of the library, and the name of its function.
    pub fn library() -> (String, String) {
        let super::Library { text, charge, .. } = super::Library::new();
        (text, charge)
    }

    /// A charge as the function takes it.
    pub fn charge(limit: &Limit, cost: u32) -> Vec<u8> {
        super::Packed::new(limit, limit.limit()).charge(cost, false, false)
    }

    /// The undoing of a charge that was made at this instant, or at one that is not known.
    pub fn give_back(limit: &Limit, cost: u32, at: Option<Time>) -> Vec<u8> {
        super::Packed::new(limit, limit.limit()).give_back(cost, at)
    }

    /// The time of a call, where it is not to be the server's.
    pub fn time(at: Time) -> Vec<u8> {
        let mut text = Vec::new();
        super::protocol::push_instant(&mut text, at.as_nanos());
        text
    }

    /// Takes the time of the decisions off the front of a reply.
    pub fn take_time(reply: &mut &[u8]) -> Option<Time> {
        super::protocol::take_instant(reply).map(Time::from_nanos)
    }

    /// Takes the answer to a charge off the front of a reply, after the time.
    pub fn take_decision(reply: &mut &[u8], limit: &Limit, cost: u32, now: Time) -> Option<Decision> {
        super::Packed::new(limit, limit.limit()).decision(reply, now, cost)
    }

    /// Takes the answer to a give-back off the front of a reply, after the time.
    pub fn take_given_back(reply: &mut &[u8]) -> Option<()> {
        super::Packed::given_back(reply)
    }
}

/// Keeps the state of every key in a Redis server, shared with all processes that use it.
#[derive(Debug)]
pub struct Redis(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limits: Box<[Arc<Packed>]>,
    /// As they were given, and not as they are enforced where budget is taken ahead.
    given: Box<[Limit]>,
    names: Names,
    /// Those that come after share the connections.
    servers: Arc<Servers>,
    /// What was said before anything was said of single limits.
    base: Settings,
    deadline: Duration,
    denials: Denials,
    leases: Leases,
    fallback: Fallback,
    clock: SystemClock,
}

impl Redis {
    /// `base` is what the settings were before anything was said of single limits.
    pub(crate) fn new(
        limits: &[Limit],
        settings: &Settings,
        base: &Settings,
    ) -> Result<Redis, SettingsError> {
        let library = Arc::new(Library::new());
        let common = Common { library, deadline: settings.deadline };
        let terms = settings.terms(limits)?;
        let fallback = Fallback::new(&settings.policies(limits)?, settings.failure_of_all());
        // What cannot be used is found before anything is started.
        settings.names(limits)?;
        let place = Place::new(settings)?;
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(SettingsError::NoRuntime);
        }
        let servers = Arc::new(Servers::new(place, settings.links, common));
        Redis::on(servers, limits, settings, base, terms, fallback)
    }

    fn on(
        servers: Arc<Servers>,
        limits: &[Limit],
        settings: &Settings,
        base: &Settings,
        terms: Vec<Option<Terms>>,
        fallback: Fallback,
    ) -> Result<Redis, SettingsError> {
        let in_redis = limits.iter().zip(&terms).map(|(limit, terms)| {
            let enforced = terms.as_ref().map_or(limit, |terms| &terms.ahead);
            Arc::new(Packed::new(enforced, limit.limit()))
        });
        let packed: Box<[Arc<Packed>]> = in_redis.collect();
        let named = settings.names(limits)?.into_iter().zip(&packed);
        let named =
            limits.iter().zip(named).map(|(limit, (name, packed))| (limit.name(), name, packed.scale()));
        let holds =
            terms.iter().map(|terms| terms.as_ref().map(|terms| terms.lease.hold)).collect::<Vec<_>>();
        let inner = Arc::new(Inner {
            names: Names::new(&settings.secret, &settings.namespace, named),
            servers,
            limits: packed,
            given: limits.into(),
            base: base.clone(),
            deadline: settings.deadline,
            denials: Denials::new(limits.iter().zip(holds)),
            leases: Leases::new(terms),
            fallback,
            clock: SystemClock::new(),
        });
        if let Some(every) = inner.leases.sweep_every() {
            tokio::spawn(leased::sweep(Arc::downgrade(&inner), every));
        }
        Ok(Redis(inner))
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let held = self.0.leases.close();
        if let (false, Ok(runtime)) = (held.is_empty(), tokio::runtime::Handle::try_current()) {
            let inner = self.0.clone();
            runtime.spawn(async move { inner.give_back_all(held).await });
        }
    }
}

impl Inner {
    /// Asks Redis, and waits no longer than the deadline.
    async fn ask(
        self: &Arc<Self>,
        charges: &[Charge],
        is_look: bool,
        at: Option<Time>,
    ) -> Result<Verdict, StoreError> {
        let items: Items = charges.iter().map(|charge| self.item(charge)).collect();
        let what = if is_look { What::Look } else { What::Make };
        match self.servers.slot_of_all(&items) {
            Some(slot) => {
                let task = Task::Charge { items, what, at };
                let told = self.servers.carry_out(slot, task, self.deadline).await?;
                Ok(Verdict { at: told.at, ..told.verdict })
            }
            None => self.ask_across(items, is_look, at).await,
        }
    }

    fn item(&self, charge: &Charge) -> Item {
        Item {
            limit: self.limits[charge.limit].clone(),
            key: self.names.name(charge.limit, charge.key),
            cost: charge.cost,
        }
    }

    async fn decide(self: &Arc<Self>, charges: &[Charge], is_look: bool) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.limits.len())?;
        let asked_at = self.clock.now();
        let told = match is_look {
            true => self.ask(charges, true, None).await,
            false => self.spend_or_ask(charges, asked_at).await,
        };
        told.or_else(|_| self.fallback.verdict(charges, is_look))
    }

    /// Forgets the keys of charges, those of one key together.
    async fn forget(&self, charges: &[Charge]) -> Result<(), StoreError> {
        for charges in charges.chunk_by(|one, other| one.key == other.key) {
            let Some(Charge { key, .. }) = charges.first() else { continue };
            let names: Vec<_> = charges.iter().map(|it| self.names.name(it.limit, it.key)).collect();
            // The names of one key are in one slot.
            let slot = self.servers.slot(&names[0]);
            self.servers.carry_out(slot, Task::Forget(names), self.deadline).await?;
            self.denials.forget(*key, self.clock.now());
            charges.iter().for_each(|it| self.leases.forget(it.limit, it.key));
        }
        Ok(())
    }

    fn of_all_limits(&self, key: Key, cost: u32) -> SmallVec<[Charge; 4]> {
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

    async fn look(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.0.decide(charges, true).await
    }

    async fn give_back(&self, charges: &[Charge], at: Option<Time>) -> Result<(), Unreached> {
        let each = charges.iter().map(|charge| self.0.item(charge));
        self.0.undo(each, at).await?;
        // Who was denied may pass now.
        charges.iter().for_each(|charge| self.0.denials.forget(charge.key, self.0.clock.now()));
        Ok(())
    }

    async fn forget(&self, charges: &[Charge]) -> Result<(), Unreached> {
        self.0.forget(charges).await.map_err(|why| Unreached(why.to_string()))
    }

    async fn charge_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        is_look: bool,
    ) -> Result<Verdict, ChargeError> {
        self.0.decide_by(limit, key, cost, is_look).await
    }

    async fn give_back_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        at: Option<Time>,
    ) -> Result<(), Unreached> {
        self.0.undo(std::iter::once(self.0.brought(limit, key, cost)), at).await
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
        let inner = &self.store().0;
        let charges = inner.of_all_limits(self.key(key), cost);
        // Each limit once, and none that there is not.
        inner.decide(&charges, is_look).await.unwrap_or_default()
    }

    /// A key as [`charge`](Self::charge) takes it.
    pub fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.store().key(key)
    }

    /// Charges limits for keys of their own: all of them, or none if any denies the request.
    ///
    /// # Errors
    /// If a charge names a limit that there is not, or two name the same key of one.
    pub async fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.store().charge(charges).await
    }

    /// Gives back what was charged [at a time](Verdict::at), because it was not used: never more than if it had not been
    /// charged. If the time is not known, the oldest that still counts is given back; in no case more than was taken.
    ///
    /// # Errors
    /// If Redis does not answer. Whether it was given back is not known then, and it is not to be tried again.
    pub async fn give_back(&self, charges: &[Charge], at: Option<Time>) -> Result<(), Unreached> {
        self.store().give_back(charges, at).await
    }

    /// Forgets a key: it is as good as new, in all processes; in those that know that it is denied, within a second.
    /// What processes have [taken ahead](Settings::lease) before comes on top: at most one lease for each.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn reset<K: Hash + ?Sized>(&self, key: &K) -> Result<(), StoreError> {
        let (store, key) = (&self.store().0, self.key(key));
        store.forget(&store.of_all_limits(key, 0)).await
    }

    /// Gives back what this process has [taken ahead](Settings::lease) and not spent: before it ends.
    pub async fn release(&self) {
        let store = &self.store().0;
        store.give_back_all(store.leases.take_all()).await;
    }

    /// Asks Redis what changes nothing: whether it answers, before anybody needs it.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn reach(&self) -> Result<(), StoreError> {
        let inner = &self.store().0;
        let charges = inner.of_all_limits(self.key(""), 1);
        match charges.is_empty() {
            true => self.records().take("").await.map(drop),
            false => inner.ask(&charges, true, None).await.map(drop),
        }
    }

    /// Whether Redis, or a node of its cluster, has not answered for a while, so that the limits' policies decide.
    pub fn is_degraded(&self) -> bool {
        self.store().0.servers.is_degraded()
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
        let inner = &self.store().0;
        let charges = inner.of_all_limits(self.key(key), cost);
        inner.ask(&charges, false, Some(at)).await
    }
}
