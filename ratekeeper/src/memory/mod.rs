//! The store in this process: bounded memory, and one atomic step per decision.

use std::hash::{BuildHasher, Hash};
use std::sync::{Arc, OnceLock};

use ratekeeper_core::{Decision, Limit, Time};
use smallvec::{SmallVec, smallvec};

use crate::clock::{Clock, SystemClock};
use crate::store::{Charge, ChargeError, InlineLimit, Key, Store, StoreUnavailable, Verdict, check_charges};

mod budget;
mod inline;
mod line;
mod map;
mod overflow;
mod pack;
mod predecessor;
mod scale;
mod shard;
mod states;
mod table;

use budget::Reservation;
use inline::{InlineAlgorithm, InlineTable};
use overflow::Quota;
pub use overflow::WhenFull;
use predecessor::Predecessor;
use states::{States, with};

/// Keeps the state of every key in this process.
#[derive(Debug)]
pub struct Memory<C = SystemClock> {
    clock: C,
    hasher: foldhash::quality::RandomState,
    /// Stored inline for one limit, the usual case, which saves a decision one pointer.
    states: SmallVec<[States; 1]>,
    limits: Box<[Limit]>,
    /// Lock order of the limits. Stores that share states have the same order, so requests cannot deadlock. Newer
    /// tables are locked first, because they read the states of their predecessors.
    ranks: Box<[i64]>,
    /// The limits in lock order.
    order: Box<[usize]>,
    /// The keys of inline limits, created with the first.
    inline_table: Arc<OnceLock<InlineTable>>,
    bounds: Bounds,
    /// The bytes of the tables of all generations, at most `max_bytes`.
    budget: Arc<Quota>,
}

/// The bounds of a [`Memory`], and its policy when it is full.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) max_keys: usize,
    pub(crate) max_bytes: usize,
    pub(crate) when_full: WhenFull,
}

impl Bounds {
    /// The bytes of a table beside `limits` limits. Half of all is kept for tables that a reload adds while the tables
    /// before are still in use.
    fn table_bytes(self, limits: usize) -> usize {
        self.max_bytes / 2 / limits.max(1)
    }
}

/// The least bytes of a table: below this, bookkeeping would take all of the memory.
pub(crate) const TABLE_BYTES_MIN: usize = 8 << 10;

/// Keys whose states are fetched from memory at the same time.
const BATCH: usize = 16;

/// A key whose state moves to another limit at a reload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MovedState {
    #[cfg(feature = "tower")]
    pub(crate) key: Key,
    /// Index of its limit in the store before.
    pub(crate) from: usize,
    /// Index of its limit in the new store.
    pub(crate) to: usize,
}

/// The tables in use leave no memory for another one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoBytesLeft {
    pub(crate) in_use: usize,
}

impl<C: Clock> Memory<C> {
    pub(crate) fn new(limits: &[Limit], clock: C, bounds: Bounds) -> Memory<C> {
        let budget = Arc::new(Quota::new(bounds.max_bytes));
        let states = limits.iter().map(|limit| {
            let reserved = Reservation::for_new(&budget, bounds.table_bytes(limits.len()));
            States::new(limit, bounds, reserved, None)
        });
        Memory {
            states: states.collect(),
            inline_table: Arc::default(),
            bounds,
            clock,
            hasher: foldhash::quality::RandomState::default(),
            limits: limits.into(),
            ranks: (0..).take(limits.len()).collect(),
            order: (0..limits.len()).collect(),
            budget,
        }
    }

    /// A store for new limits, where limit n takes over the state of limit `from[n]` of this store, if any. The limits
    /// share their states with those of this store, unless they need wider states or the bounds allow more keys: then
    /// a key's state is migrated when the new limit first sees the key.
    pub(crate) fn reload(
        &self,
        limits: &[Limit],
        from: &[Option<usize>],
        moved: &[MovedState],
        bounds: Bounds,
    ) -> Result<Memory<C>, NoBytesLeft>
    where
        C: Clone,
    {
        self.budget.set_max(bounds.max_bytes);
        let now = self.clock.now();
        let bytes = bounds.table_bytes(limits.len());
        let first = self.ranks.iter().min().map_or(0, |first| first - limits.len() as i64);
        let is_raised = bounds.max_keys > self.bounds.max_keys || bounds.max_bytes > self.bounds.max_bytes;
        let mut is_used = vec![false; self.limits.len()];
        let mut states = SmallVec::new();
        let (mut followed, mut ranks) = (Vec::new(), Vec::new());
        for (number, limit) in limits.iter().enumerate() {
            // If two limits name the same predecessor, only the first gets it: otherwise one request would lock a key
            // twice.
            let before = from.get(number).copied().flatten().filter(|&it| it < is_used.len());
            let before = before.filter(|&it| !std::mem::replace(&mut is_used[it], true));
            let before = before.filter(|&it| limit.is_compatible(&self.limits[it]));
            let others = moved.iter().filter(|it| it.to == number).filter_map(|it| self.limits.get(it.from));
            let limit = before.map_or_else(|| limit.clone(), |it| limit.following(&self.limits[it]));
            let limit = others.fold(limit, |limit, other| limit.following_both(other));
            let larger = before
                .filter(|_| is_raised)
                .and_then(|it| self.states[it].larger(&limit, bounds, &self.budget, bytes, now))
                .map(|larger| (larger, first + number as i64));
            let next = || {
                let it = before?;
                Some((self.states[it].next(&limit, bounds.when_full, now)?, self.ranks[it]))
            };
            let next = larger.or_else(next);
            let (next, rank) = match (next, before) {
                (Some(next), _) => next,
                (None, before) => {
                    let reserved = match before {
                        Some(_) => Reservation::for_replacement(&self.budget, bytes),
                        None => Reservation::for_new(&self.budget, bytes),
                    };
                    if reserved.bytes() < TABLE_BYTES_MIN {
                        drop(reserved);
                        // This store stays in use, within its own bounds.
                        self.budget.set_max(self.bounds.max_bytes);
                        return Err(NoBytesLeft { in_use: self.budget.used() });
                    }
                    let replaced =
                        before.map(|it| (Predecessor::new(self.states[it].clone(), &limit, now), now));
                    (States::new(&limit, bounds, reserved, replaced), first + number as i64)
                }
            };
            states.push(next);
            ranks.push(rank);
            followed.push(limit);
        }
        let mut order: Box<[usize]> = (0..limits.len()).collect();
        order.sort_unstable_by_key(|&limit| ranks[limit]);
        Ok(Memory {
            inline_table: self.inline_table.clone(),
            bounds,
            clock: self.clock.clone(),
            hasher: self.hasher.clone(),
            states,
            limits: followed.into(),
            ranks: ranks.into(),
            order,
            budget: self.budget.clone(),
        })
    }

    /// Copies the states of single keys from limits of `before` to limits of this store, which was reloaded from it. A
    /// state that does not fit the new limit is not copied. `before` may stay in use, so its limits keep their states.
    #[cfg(feature = "tower")]
    pub(crate) fn move_states(&self, before: &Memory<C>, moved: &[MovedState]) {
        let now = self.clock.now();
        for &MovedState { key: Key(hash), from, to } in moved {
            let hash = hash as u64;
            let (Some(source), Some(target)) = (before.states.get(from), self.states.get(to)) else {
                continue;
            };
            let Some((limit, state)) = source.state(hash, now) else {
                // The target may have a state from an earlier move.
                target.reset(hash, now);
                continue;
            };
            if let Some(state) = self.limits[to].migrate_state(&limit, state, now) {
                with!(target, table => table.put(hash, state, now));
            }
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
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        self.decide(key, || self.clock.now(), cost, read)
    }

    #[inline]
    pub(crate) fn check_at<K: Hash + ?Sized>(&self, now: Time, key: &K, cost: u32) -> Decision {
        self.decide(key, || now, cost, |decision| decision)
    }

    #[inline(always)]
    fn decide<K: Hash + ?Sized, R>(
        &self,
        key: &K,
        now: impl FnOnce() -> Time,
        cost: u32,
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        let hash = self.hash(key);
        match &*self.states {
            [only] => only.decide(hash, now, cost, read),
            _ => read(self.decide_several(hash, now(), cost)),
        }
    }

    #[inline(never)]
    fn decide_several(&self, hash: u64, now: Time, cost: u32) -> Decision {
        let charges = self.order.iter().map(|&limit| Charge { limit, key: Key(u128::from(hash)), cost });
        let charges: SmallVec<[Charge; 4]> = charges.collect();
        let mut verdict = Verdict::default();
        self.charge_from(&charges, now, true, &mut verdict.decisions);
        verdict.decision()
    }

    /// The checks of a batch share one reading of the clock, and all their lines are being fetched from memory before
    /// the first is used.
    #[inline]
    pub(crate) fn check_many<K: Hash>(&self, keys: &[K], cost: u32, mut each: impl FnMut(usize, Decision)) {
        let [only] = &*self.states else {
            return keys
                .iter()
                .enumerate()
                .for_each(|(index, key)| self.check(key, cost, |it| each(index, it)));
        };
        with!(only, table => {
            for (batch, keys) in keys.chunks(BATCH).enumerate() {
                let mut hashes = [0; BATCH];
                for (hash, key) in hashes.iter_mut().zip(keys) {
                    *hash = self.hash(key);
                }
                std::hint::black_box(table.touch_many(&hashes[..keys.len()]));
                let now = self.clock.now();
                for (index, hash) in hashes.into_iter().take(keys.len()).enumerate() {
                    table.decide_touched(hash, now, cost, |decision| each(batch * BATCH + index, decision));
                }
            }
        });
    }

    /// The load of a table's line completes while the caller continues: no instruction waits for its result. A map is
    /// searched.
    #[inline]
    pub(crate) fn prefetch<K: Hash + ?Sized>(&self, key: &K) {
        let hash = self.hash(key);
        let touched =
            self.states.iter().fold(0, |all, states| all ^ with!(states, table => table.touch(hash)));
        std::hint::black_box(touched);
    }

    #[inline]
    pub(crate) fn prefetch_many<'a, K: Hash + ?Sized + 'a>(&self, keys: impl IntoIterator<Item = &'a K>) {
        let mut hashes = keys.into_iter().map(|key| self.hash(key));
        loop {
            let batch: SmallVec<[u64; BATCH]> = hashes.by_ref().take(BATCH).collect();
            for states in &self.states {
                std::hint::black_box(with!(states, table => table.touch_many(&batch)));
            }
            if batch.len() < BATCH {
                return;
            }
        }
    }

    pub(crate) fn peek<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        let (hash, now) = (self.hash(key), self.clock.now());
        let decisions = self.states.iter().map(|states| with!(states, table => table.peek(hash, now, cost)));
        Verdict { decisions: decisions.collect(), ..Verdict::default() }.decision()
    }

    pub(crate) fn reset<K: Hash + ?Sized>(&self, key: &K) {
        let (hash, now) = (self.hash(key), self.clock.now());
        self.states.iter().for_each(|states| states.reset(hash, now));
    }

    /// Charges all limits or none; only peeks if `is_peek` is set.
    pub(crate) fn charge_or_peek(&self, charges: &[Charge], is_peek: bool) -> Result<Verdict, ChargeError> {
        if !is_peek {
            return self.charge_all(charges);
        }
        let now = self.clock.now();
        let decisions = charges.iter().map(|charge| {
            with!(&self.states[charge.limit], table => table.peek(charge.key.0 as u64, now, charge.cost))
        });
        Ok(Verdict { decisions: decisions.collect(), at: now, ..Verdict::default() })
    }

    pub(crate) fn charge_all(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.states.len())?;
        let now = self.clock.now();
        // Most requests have one limit, which needs no lock beyond its own decision.
        if let [Charge { limit, key, cost }] = charges {
            let decision = self.states[*limit].decide(key.0 as u64, || now, *cost, |decision| decision);
            return Ok(Verdict { decisions: smallvec![decision], at: now, ..Verdict::default() });
        }
        let is_again =
            |(at, charge): (usize, &Charge)| charges[..at].iter().any(|it| it.limit == charge.limit);
        let decisions = match charges.iter().enumerate().any(is_again) {
            false => self.charge_once(charges, now),
            true => self.charge_in_turn(charges, now),
        };
        Ok(Verdict { decisions, at: now, ..Verdict::default() })
    }

    /// Charges several keys of one limit, all or none. The keys may share a line, so they cannot be locked together:
    /// the store peeks at all of them, then charges them one at a time, and refunds if a concurrent request has used
    /// the budget in between.
    fn charge_in_turn(&self, charges: &[Charge], now: Time) -> SmallVec<[Decision; 4]> {
        let peek = |charge: &Charge| with!(&self.states[charge.limit], table => table.peek(charge.key.0 as u64, now, charge.cost));
        let mut decisions: SmallVec<[Decision; 4]> = charges.iter().map(peek).collect();
        let mut allowed = decisions.iter().all(|decision| decision.allowed);
        let mut charged = 0;
        for (decision, charge) in decisions.iter_mut().zip(charges) {
            with!(&self.states[charge.limit], table => {
                let mut held = table.hold(charge.key.0 as u64, now);
                // A log with `LogPolicy::All` counts denied requests, too.
                if allowed || held.counts_denied() {
                    *decision = held.decide(charge.cost);
                }
            });
            allowed &= decision.allowed;
            charged += usize::from(allowed);
        }
        if !allowed {
            self.refund_all(&charges[..charged], Some(now));
            for (decision, charge) in decisions.iter_mut().zip(&charges[..charged]) {
                *decision = peek(charge);
            }
        }
        decisions
    }

    /// Refunds charges that were made at `at`, or at an unknown time.
    pub(crate) fn refund_all(&self, charges: &[Charge], at: Option<Time>) {
        let now = self.clock.now();
        for charge in charges {
            if let Some(states) = self.states.get(charge.limit) {
                with!(states, table => table.hold(charge.key.0 as u64, now).refund(charge.cost, at));
            }
        }
    }

    /// Decides a request by an inline limit.
    pub(crate) fn decide_inline(
        &self,
        limit: InlineLimit<'_>,
        key: Key,
        cost: u32,
        is_peek: bool,
    ) -> Result<Verdict, ChargeError> {
        let algorithm = InlineAlgorithm::of(limit).ok_or(ChargeError::UnsupportedInline)?;
        let now = self.clock.now();
        let decision = self.inline_table().decide(&self.hasher, &algorithm, key.0 as u64, now, cost, is_peek);
        let decisions = smallvec![decision.ok_or(ChargeError::UnsupportedInline)?];
        Ok(Verdict { decisions, at: now, ..Verdict::default() })
    }

    #[inline]
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    fn inline_table(&self) -> &InlineTable {
        self.inline_table.get_or_init(|| {
            let bytes = self.bounds.table_bytes(self.limits.len());
            InlineTable::new(self.bounds, Reservation::for_new(&self.budget, bytes))
        })
    }

    fn charge_once(&self, charges: &[Charge], now: Time) -> SmallVec<[Decision; 4]> {
        let mut order: SmallVec<[usize; 4]> = (0..charges.len()).collect();
        order.sort_unstable_by_key(|&at| self.ranks[charges[at].limit]);
        let ordered: SmallVec<[Charge; 4]> = order.iter().map(|&at| charges[at]).collect();
        let mut decisions = SmallVec::new();
        self.charge_from(&ordered, now, true, &mut decisions);
        // Restores the order of the request.
        let mut ordered = decisions.clone();
        for (decision, &at) in decisions.into_iter().zip(&order) {
            ordered[at] = decision;
        }
        ordered
    }

    /// Locks and peeks at the first charge's key, then recursively at the others'. Once all are locked and their
    /// decisions known, each is charged as the recursion returns: all of them, or none.
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
        // This store's keys have 64 bits.
        let hash = key.0 as u64;
        with!(&self.states[limit], table => {
            let mut held = table.hold(hash, now);
            let peeked = held.peek(cost);
            let at = decisions.len();
            decisions.push(peeked);
            let allowed = self.charge_from(rest, now, allowed_so_far && peeked.allowed, decisions);
            // A limit that denies makes its own decision; a log that counts all requests counts this one, too.
            if allowed || !peeked.allowed || held.counts_denied() {
                decisions[at] = held.decide(cost);
            }
            allowed
        })
    }

    pub(crate) fn max_keys_and_bytes(&self) -> (usize, usize) {
        (self.bounds.max_keys, self.bounds.max_bytes)
    }

    pub(crate) fn overflowed(&self) -> u64 {
        let of_limits: u64 =
            self.states.iter().map(|states| with!(states, table => table.overflowed())).sum();
        of_limits + self.inline_table.get().map_or(0, InlineTable::overflowed)
    }

    pub(crate) fn keys(&self) -> usize {
        let now = self.clock.now();
        let of_limits: usize = self.states.iter().map(|states| with!(states, table => table.keys(now))).sum();
        of_limits + self.inline_table.get().map_or(0, InlineTable::keys)
    }

    pub(crate) fn bytes(&self) -> usize {
        let of_limits: usize = self.states.iter().map(|states| states.bytes()).sum();
        of_limits + self.inline_table.get().map_or(0, InlineTable::bytes)
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

    async fn peek(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.states.len())?;
        self.charge_or_peek(charges, true)
    }

    async fn refund(&self, charges: &[Charge], at: Option<Time>) -> Result<(), StoreUnavailable> {
        self.refund_all(charges, at);
        Ok(())
    }

    async fn reset(&self, charges: &[Charge]) -> Result<(), StoreUnavailable> {
        let now = self.clock.now();
        for charge in charges {
            if let Some(states) = self.states.get(charge.limit) {
                states.reset(charge.key.0 as u64, now);
            }
        }
        Ok(())
    }

    async fn charge_inline(
        &self,
        limit: InlineLimit<'_>,
        key: Key,
        cost: u32,
        is_peek: bool,
    ) -> Result<Verdict, ChargeError> {
        self.decide_inline(limit, key, cost, is_peek)
    }

    async fn refund_inline(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        at: Option<Time>,
    ) -> Result<(), StoreUnavailable> {
        self.inline_table().refund(&self.hasher, limit, key.0 as u64, self.clock.now(), cost, at);
        Ok(())
    }

    const IS_IMMEDIATE: bool = true;
}
