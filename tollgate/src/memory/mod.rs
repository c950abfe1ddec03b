//! The store in this process: bounded memory, one atomic step a decision.

use std::hash::{BuildHasher, Hash};
use std::sync::{Arc, OnceLock};

use smallvec::{SmallVec, smallvec};
use tollgate_core::{Bucket, Counter, Decision, FixedWindow, Limit, Log, NarrowBucket, State, Steps, Time};

use crate::clock::{Clock, SystemClock};
use crate::store::{Charge, ChargeError, Key, Store, Unreached, Verdict, check_charges};

mod brought;
mod full;
mod line;
mod map;
mod older;
mod pack;
mod part;
mod table;

use brought::Brought;
pub use full::WhenFull;
use map::Map;
use older::Older;
use pack::{SmallCounter, SmallWindow};
use table::Table;

/// The states of one limit's keys, each kind of state in the table that fits it.
#[derive(Debug)]
enum States {
    Bucket(Table<NarrowBucket, 1>),
    WideBucket(Table<Bucket, 2>),
    Steps(Table<Steps, 2>),
    FixedWindow(Table<SmallWindow, 1>),
    WideFixedWindow(Table<FixedWindow, 2>),
    Counter(Table<SmallCounter<2>, 1>),
    WideCounter(Table<SmallCounter<2>, 2>),
    FineCounter(Table<SmallCounter<8>, 5>),
    FinestCounter(Map<Counter>),
    Log(Map<Log>),
}

/// Does the same with whichever table it is.
macro_rules! with {
    ($states:expr, $table:ident => $do:expr) => {
        match $states {
            States::Bucket($table) => $do,
            States::WideBucket($table) => $do,
            States::Steps($table) => $do,
            States::FixedWindow($table) => $do,
            States::WideFixedWindow($table) => $do,
            States::Counter($table) => $do,
            States::WideCounter($table) => $do,
            States::FineCounter($table) => $do,
            States::FinestCounter($table) => $do,
            States::Log($table) => $do,
        }
    };
}

impl States {
    fn new(limit: &Limit, bounds: Bounds, older: Older) -> States {
        macro_rules! table {
            ($algorithm:expr) => {
                Table::new($algorithm, bounds, older)
            };
        }
        match limit {
            Limit::Bucket(it) => match it.narrow() {
                Some(narrow) => States::Bucket(table!(narrow)),
                None => States::WideBucket(table!(it.clone())),
            },
            Limit::Steps(it) => States::Steps(table!(it.clone())),
            Limit::FixedWindow(it) => match SmallWindow::new(it) {
                Some(small) => States::FixedWindow(table!(small)),
                None => States::WideFixedWindow(table!(it.clone())),
            },
            Limit::Counter(it) => {
                if let Some(smallest) = SmallCounter::in_a_word(it) {
                    States::Counter(table!(smallest))
                } else if let Some(small) = SmallCounter::new(it) {
                    States::WideCounter(table!(small))
                } else if let Some(fine) = SmallCounter::new(it) {
                    States::FineCounter(table!(fine))
                } else {
                    States::FinestCounter(Map::new(it.clone(), bounds, older))
                }
            }
            Limit::Log(it) => States::Log(Map::new(it.clone(), bounds, older)),
        }
    }

    fn older(&self) -> &Older {
        with!(self, table => table.older())
    }

    /// What a key has used, here or before.
    fn state(&self, hash: u64, now: Time) -> Option<State> {
        with!(self, table => table.state(hash, now))
    }

    fn reset(&self, hash: u64, now: Time) {
        with!(self, table => table.hold(hash, now).reset());
    }

    fn bytes(&self) -> usize {
        with!(self, table => table.bytes() + table.older().bytes())
    }

    #[inline]
    fn decide<R>(
        &self,
        hash: u64,
        now: impl FnOnce() -> Time,
        cost: u32,
        told: impl FnOnce(Decision) -> R,
    ) -> R {
        with!(self, table => table.decide(hash, now, cost, told))
    }
}

/// Keeps the state of every key in this process.
#[derive(Debug)]
pub struct Memory<C = SystemClock> {
    clock: C,
    hasher: foldhash::quality::RandomState,
    /// In place where there is one limit, as in most limiters: a decision need not go further for it.
    states: SmallVec<[Arc<States>; 1]>,
    limits: Box<[Limit]>,
    /// In which order keys of several limits are held: everybody who shares some of the states has the same, so nobody
    /// waits in a circle. Those of newer limits are held first, because they ask older ones.
    ranks: Box<[i64]>,
    /// The limits in that order.
    order: Box<[usize]>,
    /// The keys of limits that come with requests, once there is one.
    brought: Arc<OnceLock<Brought>>,
    bounds: Bounds,
}

/// How much room a [`Memory`] has, and what happens when it is full.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) max_keys: usize,
    pub(crate) max_bytes: usize,
    pub(crate) when_full: WhenFull,
}

impl Bounds {
    /// The part of one of so many limits.
    fn share(self, limits: usize) -> Bounds {
        Bounds { max_bytes: self.max_bytes / limits.max(1), ..self }
    }
}

impl<C: Clock> Memory<C> {
    pub(crate) fn new(limits: &[Limit], clock: C, bounds: Bounds) -> Memory<C> {
        let all = bounds;
        let bounds = bounds.share(limits.len());
        Memory {
            brought: Arc::default(),
            bounds: all,
            clock,
            hasher: foldhash::quality::RandomState::default(),
            states: limits
                .iter()
                .map(|limit| Arc::new(States::new(limit, bounds, Older::default())))
                .collect(),
            limits: limits.into(),
            ranks: (0..).take(limits.len()).collect(),
            order: (0..limits.len()).collect(),
        }
    }

    /// Goes on where this one stands: limit n with what limit `from[n]` counts here, if any. What is the same is shared;
    /// what has changed asks for what a key had used, when it sees the key.
    pub(crate) fn renewed(&self, limits: &[Limit], from: &[Option<usize>], bounds: Bounds) -> Memory<C>
    where
        C: Clone,
    {
        let (all, now) = (bounds, self.clock.now());
        let bounds = all.share(limits.len());
        let first = self.ranks.iter().min().map_or(0, |first| first - limits.len() as i64);
        let mut taken = vec![false; self.limits.len()];
        let renew = |(number, limit): (usize, &Limit)| {
            // Of two that want the same, the first gets it: one request holds nothing twice.
            let before = from.get(number).copied().flatten().filter(|&it| it < taken.len());
            let before = before.filter(|&it| !std::mem::replace(&mut taken[it], true));
            if let Some(before) = before.filter(|&it| self.limits[it] == *limit) {
                return (self.states[before].clone(), self.ranks[before]);
            }
            let older = before
                .filter(|&it| limit.carries_on(&self.limits[it]))
                .map(|it| Older::new(&self.limits[it], self.states[it].clone(), limit, now));
            let states = States::new(limit, bounds, older.unwrap_or_default());
            (Arc::new(states), first + number as i64)
        };
        let (states, ranks): (SmallVec<_>, Vec<i64>) = limits.iter().enumerate().map(renew).unzip();
        let mut order: Box<[usize]> = (0..limits.len()).collect();
        order.sort_unstable_by_key(|&limit| ranks[limit]);
        Memory {
            brought: self.brought.clone(),
            bounds: all,
            clock: self.clock.clone(),
            hasher: self.hasher.clone(),
            states,
            limits: limits.into(),
            ranks: ranks.into(),
            order,
        }
    }

    #[inline]
    fn hash<K: Hash + ?Sized>(&self, key: &K) -> u64 {
        self.hasher.hash_one(key)
    }

    pub(crate) fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        Key(u128::from(self.hash(key)))
    }

    #[inline]
    pub(crate) fn check<K: Hash + ?Sized, R>(
        &self,
        key: &K,
        cost: u32,
        told: impl FnOnce(Decision) -> R,
    ) -> R {
        let hash = self.hash(key);
        match &*self.states {
            [only] => only.decide(hash, || self.clock.now(), cost, told),
            _ => told(self.check_several(hash, cost)),
        }
    }

    #[inline(never)]
    fn check_several(&self, hash: u64, cost: u32) -> Decision {
        let charges = self.order.iter().map(|&limit| Charge { limit, key: Key(u128::from(hash)), cost });
        let charges: SmallVec<[Charge; 4]> = charges.collect();
        let mut verdict = Verdict::default();
        self.charge_from(&charges, self.clock.now(), true, &mut verdict.decisions);
        verdict.decision()
    }

    /// The checks of a batch share one reading of the clock, and all their lines are on the way from memory before
    /// the first is needed.
    #[inline]
    pub(crate) fn check_many<K: Hash>(&self, keys: &[K], cost: u32, mut each: impl FnMut(usize, Decision)) {
        const BATCH: usize = 16;
        let [only] = &*self.states else {
            return keys
                .iter()
                .enumerate()
                .for_each(|(index, key)| self.check(key, cost, |it| each(index, it)));
        };
        with!(&**only, table => {
            for (batch, keys) in keys.chunks(BATCH).enumerate() {
                let mut hashes = [0; BATCH];
                for (hash, key) in hashes.iter_mut().zip(keys) {
                    *hash = self.hash(key);
                }
                // In a loop of their own, so short that the processor has all of them on the way at once.
                let touched = hashes.iter().fold(0, |all, &hash| all ^ table.touch(hash));
                std::hint::black_box(touched);
                let now = self.clock.now();
                for (index, hash) in hashes.into_iter().take(keys.len()).enumerate() {
                    table.decide_touched(hash, now, cost, |decision| each(batch * BATCH + index, decision));
                }
            }
        });
    }

    /// All that is asked for comes while the caller does something else: nothing waits for what was touched.
    #[inline]
    pub(crate) fn prefetch<K: Hash + ?Sized>(&self, key: &K) {
        let hash = self.hash(key);
        let touched =
            self.states.iter().fold(0, |all, states| all ^ with!(&**states, table => table.touch(hash)));
        std::hint::black_box(touched);
    }

    pub(crate) fn peek<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        let (hash, now) = (self.hash(key), self.clock.now());
        let looks = self.states.iter().map(|states| with!(&**states, table => table.look(hash, now, cost)));
        Verdict { decisions: looks.collect(), ..Verdict::default() }.decision()
    }

    pub(crate) fn reset<K: Hash + ?Sized>(&self, key: &K) {
        let (hash, now) = (self.hash(key), self.clock.now());
        self.states.iter().for_each(|states| states.reset(hash, now));
    }

    /// Charges all or none, or says what would be decided.
    pub(crate) fn charge_or_look(&self, charges: &[Charge], is_look: bool) -> Result<Verdict, ChargeError> {
        if !is_look {
            return self.charge_all(charges);
        }
        let now = self.clock.now();
        let looks = charges.iter().map(|charge| {
            with!(&*self.states[charge.limit], table => table.look(charge.key.0 as u64, now, charge.cost))
        });
        Ok(Verdict { decisions: looks.collect(), at: now, ..Verdict::default() })
    }

    pub(crate) fn charge_all(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.states.len())?;
        let now = self.clock.now();
        let is_again =
            |(at, charge): (usize, &Charge)| charges[..at].iter().any(|it| it.limit == charge.limit);
        let decisions = match charges.iter().enumerate().any(is_again) {
            false => self.charge_once(charges, now),
            true => self.charge_in_turn(charges, now),
        };
        Ok(Verdict { decisions, at: now, ..Verdict::default() })
    }

    /// Charges several keys of one limit, all or none. They may be in one line, so they cannot be held together: all are
    /// asked first, then charged one limit at a time, and given back if another request was quicker meanwhile.
    fn charge_in_turn(&self, charges: &[Charge], now: Time) -> SmallVec<[Decision; 4]> {
        let look = |charge: &Charge| with!(&*self.states[charge.limit], table => table.look(charge.key.0 as u64, now, charge.cost));
        let mut decisions: SmallVec<[Decision; 4]> = charges.iter().map(look).collect();
        let mut allowed = decisions.iter().all(|decision| decision.allowed);
        let mut charged = 0;
        for (decision, charge) in decisions.iter_mut().zip(charges) {
            with!(&*self.states[charge.limit], table => {
                let mut held = table.hold(charge.key.0 as u64, now);
                // A log that counts all requests counts those that are denied.
                if allowed || held.counts_denied() {
                    *decision = held.decide(charge.cost);
                }
            });
            allowed &= decision.allowed;
            charged += usize::from(allowed);
        }
        if !allowed {
            self.give_back_all(&charges[..charged], Some(now));
            for (decision, charge) in decisions.iter_mut().zip(&charges[..charged]) {
                *decision = look(charge);
            }
        }
        decisions
    }

    /// Undoes charges that were made at an instant, or at one that is not known.
    pub(crate) fn give_back_all(&self, charges: &[Charge], at: Option<Time>) {
        let now = self.clock.now();
        for charge in charges {
            if let Some(states) = self.states.get(charge.limit) {
                with!(&**states, table => table.hold(charge.key.0 as u64, now).give_back(charge.cost, at));
            }
        }
    }

    /// Decides by a limit that came with the request.
    pub(crate) fn decide_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        is_look: bool,
    ) -> Result<Verdict, ChargeError> {
        let now = self.clock.now();
        let decision = self.brought().decide(&self.hasher, limit, key.0 as u64, now, cost, is_look);
        let decisions = smallvec![decision.ok_or(ChargeError::NotToBeBrought)?];
        Ok(Verdict { decisions, at: now, ..Verdict::default() })
    }

    #[cfg(feature = "redis")]
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    fn brought(&self) -> &Brought {
        self.brought.get_or_init(|| Brought::new(self.bounds))
    }

    fn charge_once(&self, charges: &[Charge], now: Time) -> SmallVec<[Decision; 4]> {
        let mut order: SmallVec<[usize; 4]> = (0..charges.len()).collect();
        order.sort_unstable_by_key(|&at| self.ranks[charges[at].limit]);
        let ordered: SmallVec<[Charge; 4]> = order.iter().map(|&at| charges[at]).collect();
        let mut decisions = SmallVec::new();
        self.charge_from(&ordered, now, true, &mut decisions);
        // Back into the order of the request.
        let mut ordered = decisions.clone();
        for (decision, &at) in decisions.into_iter().zip(&order) {
            ordered[at] = decision;
        }
        ordered
    }

    /// Takes hold of the first charge's key, then of the others', and once all are held and all have been asked,
    /// charges each on the way back: all of them, or none.
    fn charge_from(
        &self,
        charges: &[Charge],
        now: Time,
        allowed_so_far: bool,
        decisions: &mut SmallVec<[Decision; 4]>,
    ) -> bool {
        let Some((&Charge { limit, key, cost }, rest)) = charges.split_first() else {
            return allowed_so_far;
        };
        // A key of this store is 64 bits wide.
        let hash = key.0 as u64;
        with!(&*self.states[limit], table => {
            let mut held = table.hold(hash, now);
            let asked = held.look(cost);
            let at = decisions.len();
            decisions.push(asked);
            let allowed = self.charge_from(rest, now, allowed_so_far && asked.allowed, decisions);
            // A limit that denies decides for itself; one that counts all requests counts this one, too.
            if allowed || !asked.allowed || held.counts_denied() {
                decisions[at] = held.decide(cost);
            }
            allowed
        })
    }

    pub(crate) fn overflowed(&self) -> u64 {
        let of_limits: u64 =
            self.states.iter().map(|states| with!(&**states, table => table.overflowed())).sum();
        of_limits + self.brought.get().map_or(0, Brought::overflowed)
    }

    pub(crate) fn keys(&self) -> usize {
        let now = self.clock.now();
        let of_limits: usize =
            self.states.iter().map(|states| with!(&**states, table => table.keys(now))).sum();
        of_limits + self.brought.get().map_or(0, Brought::keys)
    }

    pub(crate) fn bytes(&self) -> usize {
        let of_limits: usize = self.states.iter().map(|states| states.bytes()).sum();
        of_limits + self.brought.get().map_or(0, Brought::bytes)
    }
}

impl<C: Clock + Send + Sync> Store for Memory<C> {
    type Error = ChargeError;

    fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.key(key)
    }

    async fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.charge_all(charges)
    }

    async fn look(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.states.len())?;
        self.charge_or_look(charges, true)
    }

    async fn give_back(&self, charges: &[Charge], at: Option<Time>) -> Result<(), Unreached> {
        self.give_back_all(charges, at);
        Ok(())
    }

    async fn forget(&self, charges: &[Charge]) -> Result<(), Unreached> {
        let now = self.clock.now();
        for charge in charges {
            if let Some(states) = self.states.get(charge.limit) {
                states.reset(charge.key.0 as u64, now);
            }
        }
        Ok(())
    }

    async fn charge_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        is_look: bool,
    ) -> Result<Verdict, ChargeError> {
        self.decide_by(limit, key, cost, is_look)
    }

    async fn give_back_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        at: Option<Time>,
    ) -> Result<(), Unreached> {
        self.brought().give_back(&self.hasher, limit, key.0 as u64, self.clock.now(), cost, at);
        Ok(())
    }

    const IS_IMMEDIATE: bool = true;
}
