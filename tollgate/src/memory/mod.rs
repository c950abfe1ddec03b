//! The store in this process: bounded memory, one atomic step a decision.

use std::hash::{BuildHasher, Hash};

use smallvec::SmallVec;
use tollgate_core::{Bucket, Counter, Decision, FixedWindow, Limit, Log, NarrowBucket, Steps, Time};

use crate::clock::{Clock, SystemClock};
use crate::store::{Charge, ChargeError, Key, Store, Verdict, check_charges};

mod full;
mod line;
mod map;
mod pack;
mod part;
mod table;

pub use full::WhenFull;
use map::Map;
use pack::SmallCounter;
use table::Table;

/// The states of one limit's keys, each kind of state in the table that fits it.
#[derive(Debug)]
enum States {
    Bucket(Table<NarrowBucket, 1>),
    WideBucket(Table<Bucket, 2>),
    Steps(Table<Steps, 2>),
    FixedWindow(Table<FixedWindow, 1>),
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
    fn new(limit: &Limit, max_keys: usize, max_bytes: usize, when_full: WhenFull) -> States {
        macro_rules! table {
            ($algorithm:expr) => {
                Table::new($algorithm, max_keys, max_bytes, when_full)
            };
        }
        match limit {
            Limit::Bucket(it) => match it.narrow() {
                Some(narrow) => States::Bucket(table!(narrow)),
                None => States::WideBucket(table!(it.clone())),
            },
            Limit::Steps(it) => States::Steps(table!(it.clone())),
            Limit::FixedWindow(it) if pack::fixed_window_fits_a_word(it) => {
                States::FixedWindow(table!(it.clone()))
            }
            Limit::FixedWindow(it) => States::WideFixedWindow(table!(it.clone())),
            Limit::Counter(it) => match (SmallCounter::<2>::new(it), SmallCounter::<8>::new(it)) {
                (Some(small), _) if small.fits_a_word() => States::Counter(table!(small)),
                (Some(small), _) => States::WideCounter(table!(small)),
                (None, Some(fine)) => States::FineCounter(table!(fine)),
                (None, None) => States::FinestCounter(Map::new(it.clone(), max_keys, max_bytes, when_full)),
            },
            Limit::Log(it) => States::Log(Map::new(it.clone(), max_keys, max_bytes, when_full)),
        }
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
    states: Box<[States]>,
}

/// How much room a [`Memory`] has, and what happens when it is full.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) max_keys: usize,
    pub(crate) max_bytes: usize,
    pub(crate) when_full: WhenFull,
}

impl<C: Clock> Memory<C> {
    pub(crate) fn new(limits: &[Limit], clock: C, bounds: Bounds) -> Memory<C> {
        let Bounds { max_keys, max_bytes, when_full } = bounds;
        let share = max_bytes / limits.len().max(1);
        Memory {
            clock,
            hasher: foldhash::quality::RandomState::default(),
            states: limits.iter().map(|limit| States::new(limit, max_keys, share, when_full)).collect(),
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
        let charges = (0..self.states.len()).map(|limit| Charge { limit, key: Key(u128::from(hash)), cost });
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
        with!(only, table => {
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
            self.states.iter().fold(0, |all, states| all ^ with!(states, table => table.touch(hash)));
        std::hint::black_box(touched);
    }

    pub(crate) fn peek<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        let (hash, now) = (self.hash(key), self.clock.now());
        let looks = self.states.iter().map(|states| with!(states, table => table.look(hash, now, cost)));
        Verdict { decisions: looks.collect(), ..Verdict::default() }.decision()
    }

    pub(crate) fn reset<K: Hash + ?Sized>(&self, key: &K) {
        let (hash, now) = (self.hash(key), self.clock.now());
        for states in &self.states {
            with!(states, table => table.hold(hash, now).reset());
        }
    }

    /// Charges all or none, or says what would be decided.
    pub(crate) fn charge_or_look(&self, charges: &[Charge], is_look: bool) -> Result<Verdict, ChargeError> {
        if !is_look {
            return self.charge_all(charges);
        }
        let now = self.clock.now();
        let looks = charges.iter().map(|charge| {
            with!(&self.states[charge.limit], table => table.look(charge.key.0 as u64, now, charge.cost))
        });
        Ok(Verdict { decisions: looks.collect(), ..Verdict::default() })
    }

    pub(crate) fn charge_all(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        check_charges(charges, self.states.len())?;
        // Everybody takes hold of limits in the same order, so nobody waits in a circle.
        let mut order: SmallVec<[usize; 4]> = (0..charges.len()).collect();
        order.sort_unstable_by_key(|&at| charges[at].limit);
        let ordered: SmallVec<[Charge; 4]> = order.iter().map(|&at| charges[at]).collect();
        let mut decisions = SmallVec::new();
        self.charge_from(&ordered, self.clock.now(), true, &mut decisions);
        // Back into the order of the request.
        let mut verdict = Verdict { decisions: decisions.clone(), ..Verdict::default() };
        for (decision, &at) in decisions.into_iter().zip(&order) {
            verdict.decisions[at] = decision;
        }
        Ok(verdict)
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
        with!(&self.states[limit], table => {
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
        self.states.iter().map(|states| with!(states, table => table.overflowed())).sum()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.states.iter().map(|states| with!(states, table => table.bytes())).sum()
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

    const IS_IMMEDIATE: bool = true;
}
