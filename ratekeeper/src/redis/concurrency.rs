//! Concurrency limits that several processes share.
//!
//! A process holds permits of a key and lends them to its requests without a call to Redis. When it needs more, it
//! claims more; permits that stay unused for a few milliseconds are released, or immediately if another request was
//! denied recently. Both use the same call, a [`PermitClaim`]: the number of requests in flight, the permits to keep,
//! the permits to add. Each key has one claim in flight at a time; requests that arrive meanwhile share the next. All
//! claims are renewed every third of the hold time. The permits of a process that ends are free when the hold time is
//! over.
//!
//! Requests allowed by a failure policy are counted here too, and are claimed as soon as Redis answers again.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper_core::{FailurePolicy, Time};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::call::{CLAIMS_MAX, Task};
use super::claim::{ClaimResult, PermitClaim};
use super::key::Names;
use super::route::Servers;
use super::{Redis, Settings, SettingsError};
use crate::clock::{Clock as _, SharedClock};
use crate::concurrency::{Acquisition, Permit, PermitAvailability, PermitCounts, PermitKey, PermitRequest};
use crate::limiter::MAX_KEYS;
use crate::store::Key;
use crate::sync::lock;

/// How long an unused permit is kept; on a busy key the next request arrives sooner.
const UNUSED_HOLD: Duration = Duration::from_millis(5);
/// After this many checks, one every `UNUSED_HOLD`, a claim is made anyway, to learn whether another process was
/// denied.
const UNUSED_HOLDS_MAX: usize = 4;
/// Requests of one key that may wait for a claim.
const WAITING_MAX: usize = 1_024;
/// Number of shards; each has a lock and a share of the keys.
const SHARDS: usize = 64;
/// Renewal calls in flight at the same time.
const CALLS_MAX: usize = 64;
/// Time limit of a renewal call.
const BACKGROUND_TIMEOUT: Duration = Duration::from_secs(1);

/// The names of keys in Redis, by index of the limit.
pub(crate) type PermitNames = Names;

/// Counts requests in flight, together with other processes.
#[derive(Debug)]
pub(crate) struct SharedPermits {
    servers: Arc<Servers>,
    clock: SharedClock,
    deadline: Duration,
    policy: FailurePolicy,
    hold: Duration,
    /// Distinguishes this process from others.
    process: u64,
    /// Number of claims made so far.
    claims: AtomicU64,
    shards: Box<[Mutex<ClaimShard>]>,
    /// Permits may be released outside of a runtime.
    runtime: Handle,
}

type ClaimShard = HashMap<PermitKey, PermitEntry, foldhash::fast::RandomState>;

/// A key with requests in flight, permits or waiting requests.
#[derive(Debug, Default)]
struct PermitEntry {
    /// The key's name in Redis.
    name: String,
    /// The limit, as of the last request.
    max: u32,
    /// Requests in flight.
    in_flight: u32,
    /// Permits of this process by the last claim, and the time until which they are certain.
    own: u32,
    until: Time,
    /// Permits of other processes at that time.
    others: u32,
    /// Permits of this process that no request has used since the last check.
    unused: u32,
    waiting: Vec<oneshot::Sender<Result<(Permit, PermitAvailability), PermitError>>>,
    /// A request was denied recently: unused permits are released immediately.
    is_contended: bool,
    /// A claim is in flight.
    is_claiming: bool,
    /// A task is about to check for unused permits.
    is_watched: bool,
}

/// Why a permit was not granted.
#[derive(Clone, Copy, Debug)]
enum PermitError {
    Exhausted,
    /// Redis did not answer.
    Unknown,
}

/// A claim about to be sent.
#[derive(Debug)]
struct PendingClaim {
    key: PermitKey,
    claim: PermitClaim,
    at: Time,
}

impl PermitEntry {
    fn new(request: &PermitRequest, names: &PermitNames) -> PermitEntry {
        let name = names.name(request.rule, Key(request.key.key));
        PermitEntry { name, max: request.max, ..PermitEntry::default() }
    }

    fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.own == 0 && self.waiting.is_empty() && !self.is_claiming
    }

    /// Permits of this process that are not in use.
    fn spare(&self) -> u32 {
        self.own.saturating_sub(self.in_flight)
    }

    /// Counts one more request in flight and returns how many permits are left.
    fn enter(&mut self) -> PermitAvailability {
        self.in_flight += 1;
        self.unused = self.unused.min(self.spare());
        PermitAvailability {
            is_free: true,
            left: self.max.saturating_sub(self.others).saturating_sub(self.in_flight),
        }
    }
}

impl Redis {
    /// The names of the keys of concurrency limits.
    pub(crate) fn permit_names<'a>(&self, limits: impl Iterator<Item = &'a str>) -> PermitNames {
        let Settings { secret, namespace, .. } = self.base();
        Names::new(secret, namespace, limits.map(|name| ("concurrency", Some(name), Vec::new())))
    }

    /// Counts permits together with other processes.
    pub(crate) fn shared_permits(&self) -> Result<Arc<SharedPermits>, SettingsError> {
        let hold = self.base().checked_permit_hold()?;
        let permits = Arc::new(SharedPermits {
            servers: self.0.servers.clone(),
            clock: self.0.clock.clone(),
            deadline: self.0.deadline,
            policy: self.base().default_policy(),
            hold,
            process: RandomState::new().hash_one(()),
            claims: AtomicU64::new(0),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            runtime: Handle::try_current().map_err(|_| SettingsError::NoRuntime)?,
        });
        permits.runtime.spawn(renew(Arc::downgrade(&permits), hold / 3));
        Ok(permits)
    }
}

/// Renews all claims until the `SharedPermits` are dropped.
async fn renew(permits: Weak<SharedPermits>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(permits) = permits.upgrade() else { return };
        permits.renew_all().await;
    }
}

impl SharedPermits {
    /// Takes permits of all requested keys or of none. A request denied by one limit may hold permits of the others
    /// briefly.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        requests: &[PermitRequest],
        names: &PermitNames,
    ) -> Acquisition {
        let mut acquired = Acquisition { allowed: true, ..Acquisition::default() };
        acquired.found.resize(requests.len(), PermitAvailability::default());
        // Shadow limits come last, so that they do not count a request that an enforced limit denies.
        for shadows in [false, true] {
            let these =
                requests.iter().enumerate().filter(|(_, it)| it.is_shadow == shadows && acquired.allowed);
            let these =
                these.map(async |(at, request)| (at, request, self.acquire_one(request, names).await));
            for (at, request, got) in join_all(these.collect::<Vec<_>>()).await {
                let got = got.or_else(|why| match why {
                    PermitError::Exhausted => Err(PermitError::Exhausted),
                    PermitError::Unknown => {
                        acquired.is_degraded = true;
                        self.acquire_by_policy(request, names)
                    }
                });
                match got {
                    Ok((permit, found)) => {
                        acquired.held.push(permit);
                        acquired.found[at] = found;
                    }
                    Err(why) if !shadows => {
                        acquired.allowed = false;
                        acquired.is_closed |= matches!(why, PermitError::Unknown);
                    }
                    Err(_) => {}
                }
            }
        }
        if !acquired.allowed {
            acquired.held.clear();
        }
        acquired
    }

    /// Calls `each` with every key that has requests in flight, and their number.
    pub(crate) fn each(&self, each: &mut impl FnMut(&PermitKey, u32)) {
        for shard in &self.shards {
            lock(shard).iter().for_each(|(key, entry)| each(key, entry.in_flight));
        }
    }

    fn shard(&self, key: PermitKey) -> MutexGuard<'_, ClaimShard> {
        lock(&self.shards[key.shard(SHARDS)])
    }

    fn permit(self: &Arc<Self>, key: PermitKey) -> Permit {
        Permit::new(PermitCounts::Redis(self.clone()), key)
    }

    async fn acquire_one(
        self: &Arc<Self>,
        request: &PermitRequest,
        names: &PermitNames,
    ) -> Result<(Permit, PermitAvailability), PermitError> {
        let key = request.key;
        let reply = {
            let mut shard = self.shard(key);
            if shard.len() >= MAX_KEYS / SHARDS && !shard.contains_key(&key) {
                return Err(PermitError::Exhausted);
            }
            let entry = shard.entry(key).or_insert_with(|| PermitEntry::new(request, names));
            entry.max = request.max;
            let now = self.clock.now();
            // After the limit was lowered, permits beyond it are not lent any more.
            if entry.spare() > 0 && now < entry.until && entry.in_flight < entry.max {
                let found = entry.enter();
                return Ok((self.permit(key), found));
            }
            if entry.waiting.len() >= WAITING_MAX {
                return Err(PermitError::Unknown);
            }
            let (sender, receiver) = oneshot::channel();
            entry.waiting.push(sender);
            if !entry.is_claiming {
                let pending = self.pending(key, entry, now);
                self.runtime.spawn(self.clone().claim(pending));
            }
            receiver
        };
        match tokio::time::timeout(self.deadline, reply).await {
            Ok(Ok(reply)) => reply,
            _ => Err(PermitError::Unknown),
        }
    }

    /// Applies the failure policy.
    fn acquire_by_policy(
        self: &Arc<Self>,
        request: &PermitRequest,
        names: &PermitNames,
    ) -> Result<(Permit, PermitAvailability), PermitError> {
        let PermitRequest { key, max, .. } = *request;
        let max = match self.policy {
            FailurePolicy::Open => u32::MAX,
            FailurePolicy::Closed => return Err(PermitError::Unknown),
            FailurePolicy::Local { instances } => (max / instances.max(1)).max(1).min(max),
        };
        let mut shard = self.shard(key);
        let entry = shard.entry(key).or_insert_with(|| PermitEntry::new(request, names));
        entry.max = request.max;
        if entry.in_flight < max {
            let found = entry.enter();
            return Ok((self.permit(key), found));
        }
        if entry.is_idle() {
            shard.remove(&key);
        }
        Err(PermitError::Exhausted)
    }

    pub(crate) fn release(self: &Arc<Self>, key: PermitKey) {
        let mut shard = self.shard(key);
        let Some(entry) = shard.get_mut(&key) else { return };
        entry.in_flight = entry.in_flight.saturating_sub(1);
        if !entry.is_claiming {
            self.finish_claim(&mut shard, key);
        }
    }

    /// Ends a claim that no request waits for, and releases or watches the permits that are not needed.
    fn finish_claim(self: &Arc<Self>, shard: &mut ClaimShard, key: PermitKey) {
        let Some(entry) = shard.get_mut(&key) else { return };
        entry.is_claiming = false;
        if entry.spare() > 0 && entry.is_contended {
            entry.own = entry.in_flight;
            let pending = self.pending(key, entry, self.clock.now());
            self.runtime.spawn(self.clone().claim(pending));
        } else if entry.spare() > 0 && !entry.is_watched {
            entry.is_watched = true;
            entry.unused = entry.spare();
            self.runtime.spawn(self.clone().watch(key));
        } else if entry.is_idle() {
            shard.remove(&key);
        }
    }

    /// Releases permits that stay unused.
    async fn watch(self: Arc<Self>, key: PermitKey) {
        let mut times = 0;
        let pending = loop {
            tokio::time::sleep(UNUSED_HOLD).await;
            times += 1;
            let mut shard = self.shard(key);
            let Some(entry) = shard.get_mut(&key) else { return };
            if entry.is_claiming || entry.spare() == 0 {
                entry.is_watched = false;
                if !entry.is_claiming {
                    self.finish_claim(&mut shard, key);
                }
                return;
            }
            if entry.unused > 0 || times == UNUSED_HOLDS_MAX {
                entry.is_watched = false;
                let (unused, now) = (std::mem::take(&mut entry.unused), self.clock.now());
                entry.own -= unused.min(entry.spare());
                break self.pending(key, entry, now);
            }
            entry.unused = entry.spare();
        };
        self.claim(pending).await;
    }

    /// The next claim of a key.
    fn pending(&self, key: PermitKey, entry: &mut PermitEntry, now: Time) -> PendingClaim {
        entry.is_claiming = true;
        let PermitEntry { in_flight, own, max, .. } = *entry;
        let claim = PermitClaim {
            key: entry.name.clone(),
            process: self.process,
            number: self.claims.fetch_add(1, Ordering::Relaxed) + 1,
            in_flight,
            kept: if now < entry.until { in_flight.max(own) } else { in_flight },
            // At most WAITING_MAX.
            more: entry.waiting.len() as u32,
            max,
            hold: self.hold,
        };
        PendingClaim { key, claim, at: now }
    }

    /// Sends a claim, and then the claims of requests that have arrived meanwhile.
    async fn claim(self: Arc<Self>, mut pending: PendingClaim) {
        loop {
            let slot = self.servers.slot(&pending.claim.key);
            let task = Task::Claim(vec![pending.claim.clone()]);
            let reply = self.servers.execute(slot, task, self.deadline).await;
            let result = reply.ok().and_then(|reply| reply.claims.first().copied().flatten());
            match self.apply_reply(&pending, result) {
                Some(next) => pending = next,
                None => return,
            }
        }
    }

    /// Applies the reply to a claim and answers the waiting requests. Returns the next claim if more requests wait.
    fn apply_reply(
        self: &Arc<Self>,
        pending: &PendingClaim,
        result: Option<ClaimResult>,
    ) -> Option<PendingClaim> {
        let PendingClaim { key, claim, at } = pending;
        let mut replies = Vec::new();
        let next = {
            let mut shard = self.shard(*key);
            let entry = shard.get_mut(key)?;
            match result {
                Some(ClaimResult { own, others, is_contended }) => {
                    (entry.own, entry.others, entry.is_contended) = (own, others, is_contended);
                    entry.until = at.saturating_add(self.hold);
                }
                // Redis may or may not have applied the claim, so the smaller number is assumed.
                None => {
                    entry.own = entry.own.min(claim.in_flight);
                    entry.is_contended = false;
                }
            }
            let count = entry.waiting.len().min(claim.more as usize);
            let rest = entry.waiting.split_off(count);
            for sender in std::mem::replace(&mut entry.waiting, rest) {
                if sender.is_closed() {
                    continue;
                }
                let reply = match (result, entry.spare() > 0) {
                    (None, _) => Err(PermitError::Unknown),
                    (Some(_), true) => Ok((self.permit(*key), entry.enter())),
                    (Some(_), false) => Err(PermitError::Exhausted),
                };
                replies.push((sender, reply));
            }
            entry.waiting.retain(|sender| !sender.is_closed());
            match entry.waiting.is_empty() {
                false => Some(self.pending(*key, entry, self.clock.now())),
                true => {
                    self.finish_claim(&mut shard, *key);
                    None
                }
            }
        };
        // Sent without the lock: a permit whose receiver has been dropped is released right here, which takes the
        // lock.
        for (sender, reply) in replies {
            let _ = sender.send(reply);
        }
        next
    }

    /// Renews the claims of all keys that have no claim in flight.
    async fn renew_all(self: &Arc<Self>) {
        let mut calls: Vec<(u16, Vec<PendingClaim>)> = Vec::new();
        // Index of the last call of each hash slot.
        let mut last: HashMap<u16, usize> = HashMap::new();
        for shard in &self.shards {
            for (key, entry) in lock(shard).iter_mut().filter(|(_, entry)| !entry.is_claiming) {
                let pending = self.pending(*key, entry, self.clock.now());
                let slot = self.servers.slot(&pending.claim.key);
                let call = last.get(&slot).copied().filter(|call| calls[*call].1.len() < CLAIMS_MAX);
                let call = call.unwrap_or_else(|| {
                    calls.push((slot, Vec::new()));
                    last.insert(slot, calls.len() - 1);
                    calls.len() - 1
                });
                calls[call].1.push(pending);
            }
        }
        for calls in calls.chunks(CALLS_MAX) {
            join_all(calls.iter().map(|(slot, all)| self.renew_call(*slot, all))).await;
        }
    }

    async fn renew_call(self: &Arc<Self>, slot: u16, all: &[PendingClaim]) {
        let task = Task::Claim(all.iter().map(|pending| pending.claim.clone()).collect());
        let reply = self.servers.execute(slot, task, BACKGROUND_TIMEOUT).await;
        let results = reply.map(|reply| reply.claims).unwrap_or_default();
        for (at, pending) in all.iter().enumerate() {
            if let Some(next) = self.apply_reply(pending, results.get(at).copied().flatten()) {
                self.runtime.spawn(self.clone().claim(next));
            }
        }
    }
}
