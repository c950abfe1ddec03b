//! Concurrency limits that several processes share.
//!
//! A process holds permits of a key and lends them to its requests without a call to Redis. When it needs more, it
//! claims more; permits that stay unused for a few milliseconds are released, or immediately if another request was
//! denied recently. Both use the same call, a [`Claim`]: the number of requests in flight, the permits to keep, the
//! permits to add. Each key has one claim in flight at a time; requests that arrive meanwhile share the next. All
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

use super::batcher::Task;
use super::claim::{Claim, Claimed};
use super::key::Names;
use super::{Inner, Redis, Settings, SettingsError};
use crate::clock::Clock as _;
use crate::limiter::MAX_KEYS;
use crate::slots::{Counter, Found, Place, Slot, Taken, Wanted};
use crate::store::Key;
use crate::sync::lock;

/// How long an unused permit is kept; on a busy key the next request arrives sooner.
const KEPT_FOR: Duration = Duration::from_millis(5);
/// After this many looks, one every `KEPT_FOR`, a claim is made anyway, to learn whether another process was denied.
const KEPT_TIMES: usize = 4;
/// Requests of one key that may wait for a claim.
const WAITING_MAX: usize = 1_024;
/// Number of shards; each has a lock and a share of the keys.
const PARTS: usize = 64;
/// Claims renewed in one call.
const RENEWED_MAX: usize = 64;
/// Renewal calls in flight at the same time.
const CALLS_MAX: usize = 64;
/// Time limit of a renewal call.
const UNHURRIED: Duration = Duration::from_secs(1);

/// Counts requests in flight, together with other processes.
#[derive(Debug)]
pub(crate) struct Slots {
    store: Arc<Inner>,
    names: Names,
    /// The concurrency limit of each rule.
    most: Box<[u32]>,
    failure: FailurePolicy,
    hold: Duration,
    /// Distinguishes this process from others.
    process: u64,
    /// Number of claims made so far.
    claims: AtomicU64,
    parts: Box<[Mutex<Part>]>,
    /// Permits may be released outside of a runtime.
    runtime: Handle,
}

type Part = HashMap<Place, Entry, foldhash::fast::RandomState>;

/// A key with requests in flight, permits or waiting requests.
#[derive(Debug, Default)]
struct Entry {
    /// Requests in flight.
    under_way: u32,
    /// Permits of this process by the last claim, and the time until which they are certain.
    own: u32,
    until: Time,
    /// Permits of other processes at that time.
    others: u32,
    /// Permits of this process that no request has used since the last look.
    unused: u32,
    waiting: Vec<oneshot::Sender<Result<(Slot, Found), NoSlot>>>,
    /// A request was denied recently: unused permits are released immediately.
    is_contended: bool,
    /// A claim is in flight.
    is_claiming: bool,
    /// A task is about to look at unused permits.
    is_watched: bool,
}

/// Why a permit was not granted.
#[derive(Clone, Copy, Debug)]
enum NoSlot {
    Full,
    /// Redis did not answer.
    Unknown,
}

/// A claim about to be sent.
#[derive(Debug)]
struct Claiming {
    place: Place,
    claim: Claim,
    at: Time,
}

impl Entry {
    fn is_idle(&self) -> bool {
        self.under_way == 0 && self.own == 0 && self.waiting.is_empty() && !self.is_claiming
    }

    /// Permits of this process that are not in use.
    fn spare(&self) -> u32 {
        self.own.saturating_sub(self.under_way)
    }

    /// Counts one more request in flight and returns how many permits are left.
    fn enter(&mut self, most: u32) -> Found {
        self.under_way += 1;
        self.unused = self.unused.min(self.spare());
        Found { is_free: true, left: most.saturating_sub(self.others).saturating_sub(self.under_way) }
    }
}

impl Redis {
    /// Shares concurrency limits, given as names with their number of permits.
    pub(crate) fn slots<'a>(
        &self,
        settings: &Settings,
        slots: impl Iterator<Item = (&'a str, u32)> + Clone,
    ) -> Result<Arc<Slots>, SettingsError> {
        let hold = settings.checked_slots_hold()?;
        let names = slots.clone().map(|(name, _)| ("slots", Some(name), Vec::new()));
        let slots = Arc::new(Slots {
            names: Names::new(&settings.secret, &settings.namespace, names),
            store: self.0.clone(),
            most: slots.map(|(_, most)| most).collect(),
            failure: settings.failure_of_all(),
            hold,
            process: RandomState::new().hash_one(()),
            claims: AtomicU64::new(0),
            parts: (0..PARTS).map(|_| Mutex::default()).collect(),
            runtime: Handle::try_current().map_err(|_| SettingsError::NoRuntime)?,
        });
        slots.runtime.spawn(renew(Arc::downgrade(&slots), hold / 3));
        Ok(slots)
    }
}

/// Renews all claims until the `Slots` are dropped.
async fn renew(slots: Weak<Slots>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(slots) = slots.upgrade() else { return };
        slots.renew_all().await;
    }
}

impl Slots {
    /// Takes permits of all wanted keys or of none. A request denied by one limit may hold permits of the others
    /// briefly.
    pub(crate) async fn take(self: &Arc<Self>, wanted: &[Wanted]) -> Taken {
        let mut taken = Taken { allowed: true, ..Taken::default() };
        taken.found.resize(wanted.len(), Found::default());
        // Shadow limits come last, so that they do not count a request that an enforced limit denies.
        for shadows in [false, true] {
            let these = wanted.iter().enumerate().filter(|(_, it)| it.is_shadow == shadows && taken.allowed);
            let these = these.map(async |(at, wanted)| (at, wanted, self.take_one(wanted.place).await));
            for (at, wanted, got) in join_all(these.collect::<Vec<_>>()).await {
                let got = got.or_else(|why| match why {
                    NoSlot::Full => Err(NoSlot::Full),
                    NoSlot::Unknown => {
                        taken.is_degraded = true;
                        self.take_by_policy(wanted.place)
                    }
                });
                match got {
                    Ok((slot, found)) => {
                        taken.held.push(slot);
                        taken.found[at] = found;
                    }
                    Err(why) if !shadows => {
                        taken.allowed = false;
                        taken.is_closed |= matches!(why, NoSlot::Unknown);
                    }
                    Err(_) => {}
                }
            }
        }
        if !taken.allowed {
            taken.held.clear();
        }
        taken
    }

    pub(crate) fn held(&self) -> Vec<usize> {
        let mut held = vec![0; self.most.len()];
        for part in &self.parts {
            lock(part).iter().for_each(|(place, entry)| held[place.rule] += entry.under_way as usize);
        }
        held
    }

    fn part(&self, place: Place) -> MutexGuard<'_, Part> {
        lock(&self.parts[(place.key as usize).wrapping_add(place.rule) % PARTS])
    }

    fn slot(self: &Arc<Self>, place: Place) -> Slot {
        Slot::new(Counter::Redis(self.clone()), place)
    }

    async fn take_one(self: &Arc<Self>, place: Place) -> Result<(Slot, Found), NoSlot> {
        let told = {
            let mut part = self.part(place);
            if part.len() >= MAX_KEYS / PARTS && !part.contains_key(&place) {
                return Err(NoSlot::Full);
            }
            let entry = part.entry(place).or_default();
            let now = self.store.clock.now();
            if entry.spare() > 0 && now < entry.until {
                let found = entry.enter(self.most[place.rule]);
                return Ok((self.slot(place), found));
            }
            if entry.waiting.len() >= WAITING_MAX {
                return Err(NoSlot::Unknown);
            }
            let (tell, told) = oneshot::channel();
            entry.waiting.push(tell);
            if !entry.is_claiming {
                let claiming = self.claiming(place, entry, now);
                self.runtime.spawn(self.clone().claim(claiming));
            }
            told
        };
        match tokio::time::timeout(self.store.deadline, told).await {
            Ok(Ok(answer)) => answer,
            _ => Err(NoSlot::Unknown),
        }
    }

    /// Applies the failure policy.
    fn take_by_policy(self: &Arc<Self>, place: Place) -> Result<(Slot, Found), NoSlot> {
        let most = self.most[place.rule];
        let most = match self.failure {
            FailurePolicy::Open => u32::MAX,
            FailurePolicy::Closed => return Err(NoSlot::Unknown),
            FailurePolicy::Local { instances: nodes } => (most / nodes.max(1)).max(1).min(most),
        };
        let mut part = self.part(place);
        let entry = part.entry(place).or_default();
        if entry.under_way < most {
            let found = entry.enter(self.most[place.rule]);
            return Ok((self.slot(place), found));
        }
        if entry.is_idle() {
            part.remove(&place);
        }
        Err(NoSlot::Full)
    }

    pub(crate) fn refund(self: &Arc<Self>, place: Place) {
        let mut part = self.part(place);
        let Some(entry) = part.get_mut(&place) else { return };
        entry.under_way = entry.under_way.saturating_sub(1);
        if !entry.is_claiming {
            self.leave(&mut part, place);
        }
    }

    /// Ends a claim that no request waits for, and releases or watches the permits that are not needed.
    fn leave(self: &Arc<Self>, part: &mut Part, place: Place) {
        let Some(entry) = part.get_mut(&place) else { return };
        entry.is_claiming = false;
        if entry.spare() > 0 && entry.is_contended {
            entry.own = entry.under_way;
            let claiming = self.claiming(place, entry, self.store.clock.now());
            self.runtime.spawn(self.clone().claim(claiming));
        } else if entry.spare() > 0 && !entry.is_watched {
            entry.is_watched = true;
            entry.unused = entry.spare();
            self.runtime.spawn(self.clone().watch(place));
        } else if entry.is_idle() {
            part.remove(&place);
        }
    }

    /// Releases permits that stay unused.
    async fn watch(self: Arc<Self>, place: Place) {
        let mut times = 0;
        let claiming = loop {
            tokio::time::sleep(KEPT_FOR).await;
            times += 1;
            let mut part = self.part(place);
            let Some(entry) = part.get_mut(&place) else { return };
            if entry.is_claiming || entry.spare() == 0 {
                entry.is_watched = false;
                if !entry.is_claiming {
                    self.leave(&mut part, place);
                }
                return;
            }
            if entry.unused > 0 || times == KEPT_TIMES {
                entry.is_watched = false;
                let (unused, now) = (std::mem::take(&mut entry.unused), self.store.clock.now());
                entry.own -= unused.min(entry.spare());
                break self.claiming(place, entry, now);
            }
            entry.unused = entry.spare();
        };
        self.claim(claiming).await;
    }

    /// The next claim of a key.
    fn claiming(&self, place: Place, entry: &mut Entry, now: Time) -> Claiming {
        entry.is_claiming = true;
        let Entry { under_way, own, .. } = *entry;
        let claim = Claim {
            key: self.names.name(place.rule, Key(place.key)),
            process: self.process,
            number: self.claims.fetch_add(1, Ordering::Relaxed) + 1,
            under_way,
            kept: if now < entry.until { under_way.max(own) } else { under_way },
            // At most WAITING_MAX.
            more: entry.waiting.len() as u32,
            most: self.most[place.rule],
            hold: self.hold,
        };
        Claiming { place, claim, at: now }
    }

    /// Sends a claim, and then the claims of requests that have arrived meanwhile.
    async fn claim(self: Arc<Self>, mut claiming: Claiming) {
        loop {
            let slot = self.store.servers.slot(&claiming.claim.key);
            let task = Task::Claim(vec![claiming.claim.clone()]);
            let told = self.store.servers.carry_out(slot, task, self.store.deadline).await;
            let told = told.ok().and_then(|told| told.claimed.first().copied().flatten());
            match self.told(&claiming, told) {
                Some(next) => claiming = next,
                None => return,
            }
        }
    }

    /// Applies the reply to a claim and answers the waiting requests. Returns the next claim if more requests wait.
    fn told(self: &Arc<Self>, claiming: &Claiming, told: Option<Claimed>) -> Option<Claiming> {
        let Claiming { place, claim, at } = claiming;
        let mut answers = Vec::new();
        let next = {
            let mut part = self.part(*place);
            let entry = part.get_mut(place)?;
            match told {
                Some(Claimed { own, others, is_contended }) => {
                    (entry.own, entry.others, entry.is_contended) = (own, others, is_contended);
                    entry.until = at.saturating_add(self.hold);
                }
                // Redis may or may not have applied the claim, so the smaller number is assumed.
                None => {
                    entry.own = entry.own.min(claim.under_way);
                    entry.is_contended = false;
                }
            }
            let asked = entry.waiting.len().min(claim.more as usize);
            let rest = entry.waiting.split_off(asked);
            for tell in std::mem::replace(&mut entry.waiting, rest) {
                if tell.is_closed() {
                    continue;
                }
                let answer = match (told, entry.spare() > 0) {
                    (None, _) => Err(NoSlot::Unknown),
                    (Some(_), true) => Ok((self.slot(*place), entry.enter(claim.most))),
                    (Some(_), false) => Err(NoSlot::Full),
                };
                answers.push((tell, answer));
            }
            entry.waiting.retain(|tell| !tell.is_closed());
            match entry.waiting.is_empty() {
                false => Some(self.claiming(*place, entry, self.store.clock.now())),
                true => {
                    self.leave(&mut part, *place);
                    None
                }
            }
        };
        // Sent without the lock: a permit whose receiver has been dropped is released right here, which takes the
        // lock.
        for (tell, answer) in answers {
            let _ = tell.send(answer);
        }
        next
    }

    /// Renews the claims of all keys that have no claim in flight.
    async fn renew_all(self: &Arc<Self>) {
        let mut calls: Vec<(u16, Vec<Claiming>)> = Vec::new();
        // Index of the last call of each hash slot.
        let mut last: HashMap<u16, usize> = HashMap::new();
        for part in &self.parts {
            for (place, entry) in lock(part).iter_mut().filter(|(_, entry)| !entry.is_claiming) {
                let claiming = self.claiming(*place, entry, self.store.clock.now());
                let slot = self.store.servers.slot(&claiming.claim.key);
                let call = last.get(&slot).copied().filter(|call| calls[*call].1.len() < RENEWED_MAX);
                let call = call.unwrap_or_else(|| {
                    calls.push((slot, Vec::new()));
                    last.insert(slot, calls.len() - 1);
                    calls.len() - 1
                });
                calls[call].1.push(claiming);
            }
        }
        for calls in calls.chunks(CALLS_MAX) {
            join_all(calls.iter().map(|(slot, all)| self.renew_call(*slot, all))).await;
        }
    }

    async fn renew_call(self: &Arc<Self>, slot: u16, all: &[Claiming]) {
        let task = Task::Claim(all.iter().map(|claiming| claiming.claim.clone()).collect());
        let told = self.store.servers.carry_out(slot, task, UNHURRIED).await;
        let told = told.map(|told| told.claimed).unwrap_or_default();
        for (at, claiming) in all.iter().enumerate() {
            if let Some(next) = self.told(claiming, told.get(at).copied().flatten()) {
                self.runtime.spawn(self.clone().claim(next));
            }
        }
    }
}
