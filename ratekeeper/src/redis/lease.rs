//! Leases: budget taken from Redis in advance and spent in this process without a call.
//!
//! Leases are taken in the background for busy keys; a request that finds none is decided by Redis. A lease is twice
//! as large as the previous one if that was spent in time, and half as large if not. Units that are not spent in time
//! are refunded.
//!
//! Leases never exceed the limit: units are taken under [`Limit::lease_limit`], which allows for their being spent
//! later, and are not spent after the window in which they count.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratekeeper_core::{Decision, Lease, Limit, RetryAfter, Time};

use crate::store::{Charge, Key};

/// Maximum number of keys with leases. If two keys collide in the table, the second has no lease.
const ENTRIES: usize = 4_096;
/// Units of a key's first lease.
const FIRST_SIZE: u32 = 8;

#[derive(Debug)]
pub(crate) struct Leases {
    terms: Box<[Option<LeaseTerms>]>,
    entries: Box<[Mutex<LeaseEntry>]>,
    /// Refunds that could not be sent yet.
    pending_refunds: Mutex<Vec<UnspentUnits>>,
    /// New leases are refunded instead of held.
    is_closed: AtomicBool,
}

/// How a limit is leased.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LeaseTerms {
    pub(crate) limit: Limit,
    /// The stricter limit under which units are taken.
    pub(crate) lease_limit: Limit,
    pub(crate) lease: Lease,
}

impl LeaseTerms {
    /// None if the limit cannot be leased with these parameters.
    pub(crate) fn new(limit: &Limit, lease: Lease) -> Option<LeaseTerms> {
        let lease_limit = limit.lease_limit(lease.hold)?;
        let is_possible = lease.max > 0 && (Duration::from_nanos(1)..=Lease::HOLD_MAX).contains(&lease.hold);
        let lease = Lease { max: lease.max.min(lease_limit.limit()), ..lease };
        is_possible.then(|| LeaseTerms { limit: limit.clone(), lease_limit, lease })
    }
}

#[derive(Debug, Default)]
struct LeaseEntry {
    owner: Option<(usize, Key)>,
    /// When the owner was last checked.
    seen_at: Time,
    current: Option<HeldLease>,
    /// Spent after `current`.
    next: Option<HeldLease>,
    /// Units of the next lease.
    size: u32,
    is_requesting: bool,
    /// After a denial, no lease is taken before this time.
    retry_at: Time,
}

#[derive(Clone, Copy, Debug)]
struct HeldLease {
    left: u32,
    requested_at: Time,
    /// By the local clock.
    until: Time,
    /// By the server's clock.
    taken_at: Time,
    /// The server's decision on the lease.
    decision: Decision,
}

/// Units spent by a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpentUnits {
    pub(crate) decision: Decision,
    pub(crate) taken_at: Time,
}

/// Units not spent in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnspentUnits {
    pub(crate) charge: Charge,
    pub(crate) taken_at: Time,
}

/// Work for background tasks.
#[derive(Debug, Default)]
pub(crate) struct LeaseTasks {
    pub(crate) take: Vec<Charge>,
    pub(crate) refund: Vec<UnspentUnits>,
}

impl Leases {
    pub(crate) fn new(terms: Vec<Option<LeaseTerms>>) -> Leases {
        let entries = if terms.iter().any(Option::is_some) { ENTRIES } else { 0 };
        let entries = (0..entries).map(|_| Mutex::default()).collect();
        Leases {
            terms: terms.into(),
            entries,
            pending_refunds: Mutex::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// The interval of [`sweep`](Self::sweep), if any limit is leased.
    pub(crate) fn sweep_every(&self) -> Option<Duration> {
        self.terms.iter().flatten().map(|terms| terms.lease.hold).min()
    }

    fn entry(&self, limit: usize, key: Key) -> MutexGuard<'_, LeaseEntry> {
        // Keys are already hashed.
        lock(&self.entries[(key.0 as usize).wrapping_add(limit) % ENTRIES])
    }

    /// Spends the cost of a charge from a lease, if one has enough units.
    pub(crate) fn spend(&self, charge: &Charge, now: Time, tasks: &mut LeaseTasks) -> Option<SpentUnits> {
        let terms = self.terms[charge.limit].as_ref()?;
        let mut entry = self.entry(charge.limit, charge.key);
        let owner = (charge.limit, charge.key);
        entry.roll(now, &mut tasks.refund);
        if entry.owner != Some(owner) {
            if entry.is_idle(now, terms.lease.hold) {
                let size = FIRST_SIZE.min(terms.lease.max);
                *entry = LeaseEntry { owner: Some(owner), seen_at: now, size, ..LeaseEntry::default() };
            }
            return None;
        }
        let spent = entry.spend(charge.cost, now, terms.limit.limit());
        let is_low = entry.next.is_none() && (entry.left() < entry.size / 2 || spent.is_none());
        let is_busy = now.saturating_since(entry.seen_at) < terms.lease.hold;
        entry.seen_at = now;
        if is_low && is_busy && !entry.is_requesting && now >= entry.retry_at {
            entry.is_requesting = true;
            // The previous lease was spent in time.
            if entry.current.is_some() {
                entry.size = entry.size.saturating_mul(2).min(terms.lease.max);
            }
            tasks.take.push(Charge { cost: entry.size, ..*charge });
        }
        spent
    }

    /// Reverses a spend because another limit denied the request. Returns the units if their lease is no longer held.
    pub(crate) fn unspend(&self, charge: &Charge, spent: &SpentUnits) -> Option<UnspentUnits> {
        let mut entry = self.entry(charge.limit, charge.key);
        let is_owner = entry.owner == Some((charge.limit, charge.key));
        match entry.held_leases().find(|lease| is_owner && lease.taken_at == spent.taken_at) {
            Some(lease) => {
                lease.left += charge.cost;
                None
            }
            None => Some(UnspentUnits { charge: *charge, taken_at: spent.taken_at }),
        }
    }

    /// Stores a lease requested at `requested_at`, if Redis granted it, or returns it if it cannot be held.
    pub(crate) fn store_lease(
        &self,
        charge: Charge,
        requested_at: Time,
        now: Time,
        decision: Option<(Decision, Time)>,
    ) -> Option<UnspentUnits> {
        let terms = self.terms[charge.limit].as_ref()?;
        let mut entry = self.entry(charge.limit, charge.key);
        let is_owner = entry.owner == Some((charge.limit, charge.key));
        if is_owner {
            entry.is_requesting = false;
        }
        let (decision, taken_at) = match decision {
            Some((decision, taken_at)) if decision.allowed => (decision, taken_at),
            _ => {
                if is_owner {
                    entry.retry_at = now.saturating_add(terms.lease.hold);
                    entry.size = (entry.size / 4).max(1);
                }
                return None;
            }
        };
        if !is_owner || entry.next.is_some() || self.is_closed.load(Ordering::Acquire) {
            return Some(UnspentUnits { charge, taken_at });
        }
        let within = terms.limit.spend_within(taken_at, &decision).min(terms.lease.hold);
        let until = requested_at.saturating_add(within);
        let lease = Some(HeldLease { left: charge.cost, requested_at, until, taken_at, decision });
        if entry.current.is_some_and(|current| current.left > 0) {
            entry.next = lease;
        } else {
            entry.current = lease;
        }
        None
    }

    /// Drops the leases of a key that was reset.
    pub(crate) fn drop_key(&self, limit: usize, key: Key) {
        if self.terms[limit].is_some() {
            let mut entry = self.entry(limit, key);
            if entry.owner == Some((limit, key)) {
                *entry = LeaseEntry::default();
            }
        }
    }

    /// Takes all expired leases and pending refunds.
    pub(crate) fn sweep(&self, now: Time) -> Vec<UnspentUnits> {
        let mut unspent = std::mem::take(&mut *lock(&self.pending_refunds));
        for entry in &self.entries {
            lock(entry).roll(now, &mut unspent);
        }
        unspent
    }

    /// Takes all leases and pending refunds.
    pub(crate) fn take_all(&self) -> Vec<UnspentUnits> {
        self.sweep(Time::from_nanos(u64::MAX))
    }

    /// Takes all leases and pending refunds, and refuses new ones: leases still in flight are refunded on arrival.
    pub(crate) fn close(&self) -> Vec<UnspentUnits> {
        // A lease that is stored later sees the flag; one that was stored before is taken below.
        self.is_closed.store(true, Ordering::Release);
        self.take_all()
    }

    /// Whether a limit has the same lease terms in `other`.
    pub(crate) fn are_same(&self, limit: usize, other: &Leases, number: usize) -> bool {
        self.terms.get(limit) == other.terms.get(number)
    }

    /// Moves the leases of continued limits to `to`, under their new numbers, and returns the others. Leases still in
    /// flight arrive here and are refunded.
    pub(crate) fn migrate_to(
        &self,
        to: &Leases,
        number: impl Fn(usize) -> Option<usize>,
    ) -> Vec<UnspentUnits> {
        let mut unspent = Vec::new();
        for entry in &self.entries {
            let mut entry = lock(entry);
            let Some((limit, key)) = entry.owner else { continue };
            if let Some(number) = number(limit) {
                let mut free = to.entry(number, key);
                if free.owner.is_none() {
                    let entry = std::mem::take(&mut *entry);
                    *free = LeaseEntry { owner: Some((number, key)), is_requesting: false, ..entry };
                    continue;
                }
            }
            entry.roll(Time::MAX, &mut unspent);
        }
        unspent
    }

    /// Keeps a refund for the next sweep. At most `ENTRIES` are kept.
    pub(crate) fn keep_refund(&self, unspent: UnspentUnits) {
        let mut pending_refunds = lock(&self.pending_refunds);
        if pending_refunds.len() < ENTRIES {
            pending_refunds.push(unspent);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LeaseEntry {
    /// Whether another key may use this entry.
    fn is_idle(&self, now: Time, hold: Duration) -> bool {
        !self.is_requesting && self.left() == 0 && now.saturating_since(self.seen_at) >= hold
    }

    fn held_leases(&mut self) -> impl Iterator<Item = &mut HeldLease> {
        self.current.iter_mut().chain(&mut self.next)
    }

    fn left(&self) -> u32 {
        self.current.iter().chain(&self.next).map(|lease| lease.left).sum()
    }

    /// Drops expired leases and moves on to the next lease when the current one is spent.
    fn roll(&mut self, now: Time, unspent: &mut Vec<UnspentUnits>) {
        while let Some(current) = self.current {
            let is_over = now >= current.until;
            if current.left > 0 && !is_over {
                return;
            }
            if let (1.., Some((limit, key))) = (current.left, self.owner) {
                self.size = (self.size / 2).max(1);
                let charge = Charge { limit, key, cost: current.left };
                unspent.push(UnspentUnits { charge, taken_at: current.taken_at });
            }
            if !is_over && self.next.is_none() {
                // Spent in time: the next lease may be larger.
                return;
            }
            self.current = self.next.take();
        }
    }

    fn spend(&mut self, cost: u32, now: Time, limit: u32) -> Option<SpentUnits> {
        let lease = self.held_leases().find(|lease| lease.left >= cost && now < lease.until)?;
        lease.left -= cost;
        let HeldLease { decision, taken_at, requested_at, .. } = *lease;
        let elapsed = now.saturating_since(requested_at);
        let decision = Decision {
            allowed: true,
            limit,
            remaining: decision.remaining.saturating_add(self.left()).min(limit),
            retry_after: RetryAfter::Now,
            reset_after: decision.reset_after.saturating_sub(elapsed),
            delay: Duration::ZERO,
        };
        Some(SpentUnits { decision, taken_at })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;
    use ratekeeper_core::{Algorithm as _, EdgePolicy, LeakyMode, LogPolicy, Rate, RefillStyle, WindowAlign};

    use super::*;
    use crate::{Clock as _, Limiter, ManualClock};

    const NOW: Time = Time::from_secs(1_700_000_000);
    const KEY: Key = Key(7);
    const CHARGE: Charge = Charge { limit: 0, key: KEY, cost: 1 };

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn window(limit: u32) -> Limit {
        Limit::fixed_window(limit, Duration::from_secs(60), WindowAlign::Clock).unwrap()
    }

    /// The second limit becomes the first; the first is removed.
    #[test]
    fn reload_moves_leases_of_unchanged_limits() {
        let terms = || Some(LeaseTerms::new(&window(100), Lease::new(10)).unwrap());
        let (before, after) = (Leases::new(vec![terms(), terms()]), Leases::new(vec![terms()]));
        let limit = window(100);
        let Limit::FixedWindow(window) = &limit else { unreachable!() };
        let decision = window.decide(&mut window.fresh(), NOW, 8);
        for limit in [0, 1] {
            let charge = Charge { limit, cost: 8, ..CHARGE };
            assert!(before.spend(&charge, NOW, &mut LeaseTasks::default()).is_none());
            assert_eq!(before.store_lease(charge, NOW, NOW, Some((decision, NOW))), None);
        }
        let unspent = before.migrate_to(&after, |limit| limit.checked_sub(1));
        assert_eq!(unspent, [UnspentUnits { charge: Charge { cost: 8, ..CHARGE }, taken_at: NOW }]);
        let spent =
            |leases: &Leases, charge| leases.spend(&charge, NOW, &mut LeaseTasks::default()).is_some();
        assert!((0..8).all(|_| spent(&after, CHARGE)) && !spent(&after, CHARGE));
        assert!(!spent(&before, CHARGE) && !spent(&before, Charge { limit: 1, ..CHARGE }));
        assert_eq!(before.take_all(), [], "nothing is refunded twice");
    }

    fn leases(limit: &Limit, max: u32) -> Leases {
        Leases::new(vec![Some(LeaseTerms::new(limit, Lease::new(max)).unwrap())])
    }

    fn allowed(remaining: u32) -> Decision {
        Decision {
            allowed: true,
            limit: 1_000,
            remaining,
            retry_after: RetryAfter::Now,
            reset_after: Duration::from_secs(30),
            delay: Duration::ZERO,
        }
    }

    #[test]
    fn busy_key_gets_a_lease_and_spends_it() {
        let (leases, mut tasks) = (leases(&window(1_000), 100), LeaseTasks::default());
        assert!(leases.spend(&CHARGE, NOW, &mut tasks).is_none());
        assert!(tasks.take.is_empty(), "a single request takes no lease");
        assert!(leases.spend(&CHARGE, NOW, &mut tasks).is_none());
        assert_eq!(tasks.take, [Charge { cost: 8, ..CHARGE }]);
        assert!(leases.spend(&CHARGE, NOW, &mut tasks).is_none());
        assert_eq!(tasks.take.len(), 1, "one lease at a time");

        assert_eq!(leases.store_lease(tasks.take[0], NOW, NOW, Some((allowed(990), NOW))), None);
        for left in (0..8).rev() {
            let spent = leases.spend(&CHARGE, NOW, &mut tasks).unwrap();
            assert_eq!(spent.decision.remaining, 990 + left);
        }
        assert!(leases.spend(&CHARGE, NOW, &mut tasks).is_none());
        assert_eq!(tasks.take[1..], [Charge { cost: 16, ..CHARGE }], "the next lease is larger");
        assert!(tasks.refund.is_empty());
    }

    #[test]
    fn unspent_lease_is_refunded() {
        let (leases, mut tasks) = (leases(&window(1_000), 100), LeaseTasks::default());
        leases.spend(&CHARGE, NOW, &mut tasks);
        leases.spend(&CHARGE, NOW, &mut tasks);
        leases.store_lease(tasks.take[0], NOW, NOW, Some((allowed(990), NOW)));
        let spent = leases.spend(&CHARGE, NOW, &mut tasks).unwrap();
        leases.spend(&CHARGE, NOW, &mut tasks).unwrap();
        assert_eq!(leases.unspend(&CHARGE, &spent), None, "the lease is still held");

        assert_eq!(leases.sweep(NOW.saturating_add(ms(99))), []);
        let unspent = UnspentUnits { charge: Charge { cost: 7, ..CHARGE }, taken_at: NOW };
        assert_eq!(leases.sweep(NOW.saturating_add(ms(100))), [unspent]);
        assert_eq!(leases.sweep(NOW.saturating_add(ms(200))), [], "units are refunded once");
        let unspent = UnspentUnits { charge: CHARGE, taken_at: NOW };
        assert_eq!(leases.unspend(&CHARGE, &spent), Some(unspent), "the lease is no longer held");
    }

    #[test]
    fn denied_lease_is_not_retried_within_the_hold() {
        let (leases, mut tasks) = (leases(&window(1_000), 100), LeaseTasks::default());
        leases.spend(&CHARGE, NOW, &mut tasks);
        leases.spend(&CHARGE, NOW, &mut tasks);
        leases.store_lease(tasks.take[0], NOW, NOW, Some((Decision { allowed: false, ..allowed(3) }, NOW)));
        leases.spend(&CHARGE, NOW.saturating_add(ms(50)), &mut tasks);
        leases.spend(&CHARGE, NOW.saturating_add(ms(99)), &mut tasks);
        assert_eq!(tasks.take.len(), 1);
        leases.spend(&CHARGE, NOW.saturating_add(ms(100)), &mut tasks);
        assert_eq!(tasks.take[1..], [Charge { cost: 2, ..CHARGE }]);
    }

    #[test]
    fn unsupported_limits_and_terms_are_not_leased() {
        let rate = Rate::new(10, Duration::from_secs(1)).unwrap();
        let second = Duration::from_secs(1);
        for limit in [
            Limit::leaky_bucket(10, rate, LeakyMode::Shape),
            Limit::sliding_window_log(10, second, LogPolicy::All),
            Limit::token_bucket(1, rate, RefillStyle::Smooth),
        ] {
            assert!(LeaseTerms::new(&limit.unwrap(), Lease::new(5)).is_none());
        }
        let log = Limit::sliding_window_log(10, second, LogPolicy::Admitted).unwrap();
        for (max, hold) in [(0, ms(1)), (1, Duration::ZERO), (1, ms(1_001))] {
            assert!(LeaseTerms::new(&log, Lease { max, hold }).is_none());
        }
    }

    fn any_limit() -> impl Strategy<Value = Limit> {
        let rate =
            (1_u64..50, 1_u64..20).prop_map(|(count, tenths)| Rate::new(count, ms(tenths * 100)).unwrap());
        let size = 5_u32..60;
        let length = (1_u64..20).prop_map(|tenths| ms(tenths * 100));
        prop_oneof![
            (size.clone(), rate.clone()).prop_map(|(n, rate)| Limit::token_bucket(
                n,
                rate,
                RefillStyle::Smooth
            )),
            (size.clone(), rate.clone()).prop_map(|(n, rate)| Limit::token_bucket(
                n,
                rate,
                RefillStyle::Stepped
            )),
            (size.clone(), rate).prop_map(|(n, rate)| Limit::leaky_bucket(n, rate, LeakyMode::Police)),
            (size.clone(), length.clone()).prop_map(|(n, w)| Limit::sliding_window_log(
                n,
                w,
                LogPolicy::Admitted
            )),
            (size.clone(), length.clone()).prop_map(|(n, w)| Limit::fixed_window(n, w, WindowAlign::Clock)),
            (size.clone(), length.clone()).prop_map(|(n, w)| Limit::fixed_window(
                n,
                w,
                WindowAlign::FirstRequest
            )),
            (size, length).prop_map(|(n, w)| Limit::sliding_window_counter(n, w, 1, EdgePolicy::Weigh)),
        ]
        .prop_map(Result::unwrap)
    }

    /// Whether the limit was kept in every interval, given the times in milliseconds at which units were allowed.
    fn is_kept(limit: &Limit, passed: &[u64]) -> bool {
        let within = |first: usize, last: usize| u128::from(passed[last] - passed[first]) * 1_000_000;
        let pairs = || (0..passed.len()).flat_map(|last| (0..=last).map(move |first| (first, last)));
        let count = |(first, last): (usize, usize)| (last - first + 1) as u128;
        match limit {
            Limit::Bucket(it) => pairs().all(|pair| {
                let period = it.rate().period().as_nanos();
                let refilled = u128::from(it.rate().count()) * within(pair.0, pair.1) / period;
                count(pair) <= u128::from(it.capacity()) + refilled
            }),
            Limit::SteppedBucket(it) => pairs().all(|pair| {
                // One more period: the first may have begun earlier.
                let periods = within(pair.0, pair.1) / it.rate().period().as_nanos() + 1;
                count(pair) <= u128::from(it.capacity()) + periods * u128::from(it.rate().count())
            }),
            Limit::Log(it) => pairs().all(|pair| {
                within(pair.0, pair.1) >= it.window().as_nanos() || count(pair) <= u128::from(it.limit())
            }),
            // If windows begin with the first request, an interval of one window overlaps at most two of them.
            Limit::FixedWindow(it) if it.align() == WindowAlign::FirstRequest => pairs().all(|pair| {
                within(pair.0, pair.1) >= it.window().as_nanos() || count(pair) <= 2 * u128::from(it.limit())
            }),
            Limit::FixedWindow(_) | Limit::Counter(_) => {
                let window = limit.window().as_millis() as u64;
                let mut counts = std::collections::BTreeMap::new();
                passed.iter().for_each(|at| *counts.entry(at / window).or_insert(0) += 1);
                counts.values().all(|count| *count <= limit.limit())
            }
        }
    }

    proptest! {
        #![proptest_config(testbed::property::cases(2_000))]

        /// Three processes lease one limit and check at random, with delayed replies. In no interval may more be
        /// allowed than the limit permits. Unspent leases are not refunded here; other tests cover that.
        #[test]
        fn never_more_than_the_limit(
            limit in any_limit(),
            max in 1_u32..40,
            hold in 1_u64..300,
            steps in proptest::collection::vec((0_u64..60, 0_usize..3, 1_usize..12, 0_u64..20), 1..120),
        ) {
            let lease = Lease { max, hold: ms(hold) };
            let Some(terms) = LeaseTerms::new(&limit, lease) else { return Ok(()) };
            let clock = ManualClock::new(NOW);
            let server = Limiter::builder(terms.lease_limit.clone()).clock(clock.clone()).build().unwrap();
            let processes: Vec<_> = (0..3).map(|_| Leases::new(vec![Some(terms.clone())])).collect();
            let mut passed = Vec::new();
            // Leases in flight: arrival, process, charge, time of the request, decision and its time.
            let mut coming: VecDeque<(Time, usize, Charge, Time, Decision, Time)> = VecDeque::new();
            for (pause, who, count, trip) in steps {
                clock.advance(ms(pause));
                let now = clock.now();
                while let Some((_, who, charge, requested_at, decision, at)) =
                    coming.front().filter(|lease| lease.0 <= now).copied()
                {
                    processes[who].store_lease(charge, requested_at, now, Some((decision, at)));
                    coming.pop_front();
                }
                for _ in 0..count {
                    let mut tasks = LeaseTasks::default();
                    let is_passed = match processes[who].spend(&CHARGE, now, &mut tasks) {
                        Some(spent) => spent.decision.allowed,
                        None => server.check(&0).allowed,
                    };
                    if is_passed {
                        passed.push(now.saturating_since(NOW).as_millis() as u64
                            + NOW.as_nanos() / 1_000_000);
                    }
                    for charge in tasks.take {
                        let decision = server.check_n(&0, charge.cost);
                        let arrives = now.saturating_add(ms(trip));
                        coming.push_back((arrives, who, charge, now, decision, now));
                        coming.make_contiguous().sort_by_key(|lease| lease.0);
                    }
                }
            }
            prop_assert!(is_kept(&limit, &passed), "{limit:?} {lease:?}: {passed:?}");
        }
    }
}
