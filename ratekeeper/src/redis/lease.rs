//! Leases: budget taken from Redis in advance and spent in this process without a call.
//!
//! Leases are taken in the background for busy keys; a request that finds none is decided by Redis. A lease is twice
//! as large as the previous one if that was spent in time, and half as large if not. Units that are not spent in time
//! are refunded.
//!
//! Leases never exceed the limit: units are taken under [`Limit::taken_ahead`], which allows for their being spent
//! later, and are not spent after the window in which they count.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratekeeper_core::{Decision, Lease, Limit, RetryAfter, Time};

use crate::store::{Charge, Key};

/// Maximum number of keys with leases. If two keys collide in the table, the second has no lease.
const PLACES: usize = 4_096;
/// Units of a key's first lease.
const FIRST_SIZE: u32 = 8;

#[derive(Debug)]
pub(crate) struct Leases {
    terms: Box<[Option<Terms>]>,
    places: Box<[Mutex<Place>]>,
    /// Refunds that could not be sent yet.
    unreturned: Mutex<Vec<Unspent>>,
    /// New leases are refunded instead of held.
    is_closed: AtomicBool,
}

/// How a limit is leased.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Terms {
    pub(crate) limit: Limit,
    /// The stricter limit under which units are taken.
    pub(crate) ahead: Limit,
    pub(crate) lease: Lease,
}

impl Terms {
    /// None if the limit cannot be leased with these parameters.
    pub(crate) fn new(limit: &Limit, lease: Lease) -> Option<Terms> {
        let ahead = limit.taken_ahead(lease.hold)?;
        let is_possible = lease.most > 0 && (Duration::from_nanos(1)..=Lease::HOLD_MAX).contains(&lease.hold);
        let lease = Lease { most: lease.most.min(ahead.limit()), ..lease };
        is_possible.then(|| Terms { limit: limit.clone(), ahead, lease })
    }
}

#[derive(Debug, Default)]
struct Place {
    owner: Option<(usize, Key)>,
    /// When the owner was last checked.
    seen_at: Time,
    slice: Option<Slice>,
    /// Spent after `slice`.
    next: Option<Slice>,
    /// Units of the next lease.
    size: u32,
    is_taking: bool,
    /// After a denial, no lease is taken before this time.
    takes_from: Time,
}

#[derive(Clone, Copy, Debug)]
struct Slice {
    left: u32,
    asked_at: Time,
    /// By the local clock.
    until: Time,
    /// By the server's clock.
    taken_at: Time,
    /// The server's decision on the lease.
    told: Decision,
}

/// Units spent by a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    pub(crate) decision: Decision,
    pub(crate) taken_at: Time,
}

/// Units not spent in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unspent {
    pub(crate) charge: Charge,
    pub(crate) taken_at: Time,
}

/// Work for background tasks.
#[derive(Debug, Default)]
pub(crate) struct Chores {
    pub(crate) take: Vec<Charge>,
    pub(crate) refund: Vec<Unspent>,
}

impl Leases {
    pub(crate) fn new(terms: Vec<Option<Terms>>) -> Leases {
        let places = if terms.iter().any(Option::is_some) { PLACES } else { 0 };
        let places = (0..places).map(|_| Mutex::default()).collect();
        Leases {
            terms: terms.into(),
            places,
            unreturned: Mutex::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// The interval of [`sweep`](Self::sweep), if any limit is leased.
    pub(crate) fn sweep_every(&self) -> Option<Duration> {
        self.terms.iter().flatten().map(|terms| terms.lease.hold).min()
    }

    fn place(&self, limit: usize, key: Key) -> MutexGuard<'_, Place> {
        // Keys are already hashed.
        lock(&self.places[(key.0 as usize).wrapping_add(limit) % PLACES])
    }

    /// Spends the cost of a charge from a lease, if one has enough units.
    pub(crate) fn spend(&self, charge: &Charge, now: Time, chores: &mut Chores) -> Option<Spent> {
        let terms = self.terms[charge.limit].as_ref()?;
        let mut place = self.place(charge.limit, charge.key);
        let owner = (charge.limit, charge.key);
        place.roll(now, &mut chores.refund);
        if place.owner != Some(owner) {
            if place.is_idle(now, terms.lease.hold) {
                let size = FIRST_SIZE.min(terms.lease.most);
                *place = Place { owner: Some(owner), seen_at: now, size, ..Place::default() };
            }
            return None;
        }
        let spent = place.spend(charge.cost, now, terms.limit.limit());
        let is_low = place.next.is_none() && (place.left() < place.size / 2 || spent.is_none());
        let is_busy = now.saturating_since(place.seen_at) < terms.lease.hold;
        place.seen_at = now;
        if is_low && is_busy && !place.is_taking && now >= place.takes_from {
            place.is_taking = true;
            // The previous lease was spent in time.
            if place.slice.is_some() {
                place.size = place.size.saturating_mul(2).min(terms.lease.most);
            }
            chores.take.push(Charge { cost: place.size, ..*charge });
        }
        spent
    }

    /// Reverses a spend because another limit denied the request. Returns the units if their lease is no longer held.
    pub(crate) fn unspend(&self, charge: &Charge, spent: &Spent) -> Option<Unspent> {
        let mut place = self.place(charge.limit, charge.key);
        let is_owner = place.owner == Some((charge.limit, charge.key));
        match place.slices().find(|slice| is_owner && slice.taken_at == spent.taken_at) {
            Some(slice) => {
                slice.left += charge.cost;
                None
            }
            None => Some(Unspent { charge: *charge, taken_at: spent.taken_at }),
        }
    }

    /// Stores a lease requested at `asked_at`, if Redis granted it, or returns it if it cannot be held.
    pub(crate) fn taken(
        &self,
        charge: Charge,
        asked_at: Time,
        now: Time,
        told: Option<(Decision, Time)>,
    ) -> Option<Unspent> {
        let terms = self.terms[charge.limit].as_ref()?;
        let mut place = self.place(charge.limit, charge.key);
        let is_owner = place.owner == Some((charge.limit, charge.key));
        if is_owner {
            place.is_taking = false;
        }
        let (told, taken_at) = match told {
            Some((told, taken_at)) if told.allowed => (told, taken_at),
            _ => {
                if is_owner {
                    place.takes_from = now.saturating_add(terms.lease.hold);
                    place.size = (place.size / 4).max(1);
                }
                return None;
            }
        };
        if !is_owner || place.next.is_some() || self.is_closed.load(Ordering::Acquire) {
            return Some(Unspent { charge, taken_at });
        }
        let within = terms.limit.spend_within(taken_at, &told).min(terms.lease.hold);
        let until = asked_at.saturating_add(within);
        let slice = Some(Slice { left: charge.cost, asked_at, until, taken_at, told });
        if place.slice.is_some_and(|slice| slice.left > 0) {
            place.next = slice;
        } else {
            place.slice = slice;
        }
        None
    }

    /// Drops the leases of a key that was reset.
    pub(crate) fn forget(&self, limit: usize, key: Key) {
        if self.terms[limit].is_some() {
            let mut place = self.place(limit, key);
            if place.owner == Some((limit, key)) {
                *place = Place::default();
            }
        }
    }

    /// Takes all expired leases and pending refunds.
    pub(crate) fn sweep(&self, now: Time) -> Vec<Unspent> {
        let mut unspent = std::mem::take(&mut *lock(&self.unreturned));
        for place in &self.places {
            lock(place).roll(now, &mut unspent);
        }
        unspent
    }

    /// Takes all leases and pending refunds.
    pub(crate) fn take_all(&self) -> Vec<Unspent> {
        self.sweep(Time::from_nanos(u64::MAX))
    }

    /// Takes all leases and pending refunds, and refuses new ones: leases still in flight are refunded on arrival.
    pub(crate) fn close(&self) -> Vec<Unspent> {
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
    pub(crate) fn hand_on(&self, to: &Leases, number: impl Fn(usize) -> Option<usize>) -> Vec<Unspent> {
        let mut unspent = Vec::new();
        for place in &self.places {
            let mut place = lock(place);
            let Some((limit, key)) = place.owner else { continue };
            if let Some(number) = number(limit) {
                let mut free = to.place(number, key);
                if free.owner.is_none() {
                    let place = std::mem::take(&mut *place);
                    *free = Place { owner: Some((number, key)), is_taking: false, ..place };
                    continue;
                }
            }
            place.roll(Time::MAX, &mut unspent);
        }
        unspent
    }

    /// Keeps a refund for the next sweep. At most `PLACES` are kept.
    pub(crate) fn keep(&self, unspent: Unspent) {
        let mut unreturned = lock(&self.unreturned);
        if unreturned.len() < PLACES {
            unreturned.push(unspent);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Place {
    /// Whether another key may use this entry.
    fn is_idle(&self, now: Time, hold: Duration) -> bool {
        !self.is_taking && self.left() == 0 && now.saturating_since(self.seen_at) >= hold
    }

    fn slices(&mut self) -> impl Iterator<Item = &mut Slice> {
        self.slice.iter_mut().chain(&mut self.next)
    }

    fn left(&self) -> u32 {
        self.slice.iter().chain(&self.next).map(|slice| slice.left).sum()
    }

    /// Drops expired leases and moves on to the next lease when the current one is spent.
    fn roll(&mut self, now: Time, unspent: &mut Vec<Unspent>) {
        while let Some(slice) = self.slice {
            let is_over = now >= slice.until;
            if slice.left > 0 && !is_over {
                return;
            }
            if let (1.., Some((limit, key))) = (slice.left, self.owner) {
                self.size = (self.size / 2).max(1);
                let charge = Charge { limit, key, cost: slice.left };
                unspent.push(Unspent { charge, taken_at: slice.taken_at });
            }
            if !is_over && self.next.is_none() {
                // Spent in time: the next lease may be larger.
                return;
            }
            self.slice = self.next.take();
        }
    }

    fn spend(&mut self, cost: u32, now: Time, limit: u32) -> Option<Spent> {
        let slice = self.slices().find(|slice| slice.left >= cost && now < slice.until)?;
        slice.left -= cost;
        let Slice { told, taken_at, asked_at, .. } = *slice;
        let gone = now.saturating_since(asked_at);
        let decision = Decision {
            allowed: true,
            limit,
            remaining: told.remaining.saturating_add(self.left()).min(limit),
            retry_after: RetryAfter::Now,
            reset_after: told.reset_after.saturating_sub(gone),
            delay: Duration::ZERO,
        };
        Some(Spent { decision, taken_at })
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
        let terms = || Some(Terms::new(&window(100), Lease::of(10)).unwrap());
        let (before, after) = (Leases::new(vec![terms(), terms()]), Leases::new(vec![terms()]));
        let told = window(100);
        let Limit::FixedWindow(told) = &told else { unreachable!() };
        let told = told.decide(&mut told.fresh(), NOW, 8);
        for limit in [0, 1] {
            let charge = Charge { limit, cost: 8, ..CHARGE };
            assert!(before.spend(&charge, NOW, &mut Chores::default()).is_none());
            assert_eq!(before.taken(charge, NOW, NOW, Some((told, NOW))), None);
        }
        let back = before.hand_on(&after, |limit| limit.checked_sub(1));
        assert_eq!(back, [Unspent { charge: Charge { cost: 8, ..CHARGE }, taken_at: NOW }]);
        let spent = |leases: &Leases, charge| leases.spend(&charge, NOW, &mut Chores::default()).is_some();
        assert!((0..8).all(|_| spent(&after, CHARGE)) && !spent(&after, CHARGE));
        assert!(!spent(&before, CHARGE) && !spent(&before, Charge { limit: 1, ..CHARGE }));
        assert_eq!(before.take_all(), [], "nothing is given back twice");
    }

    fn leases(limit: &Limit, most: u32) -> Leases {
        Leases::new(vec![Some(Terms::new(limit, Lease::of(most)).unwrap())])
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
        let (leases, mut chores) = (leases(&window(1_000), 100), Chores::default());
        assert!(leases.spend(&CHARGE, NOW, &mut chores).is_none());
        assert!(chores.take.is_empty(), "once is not often");
        assert!(leases.spend(&CHARGE, NOW, &mut chores).is_none());
        assert_eq!(chores.take, [Charge { cost: 8, ..CHARGE }]);
        assert!(leases.spend(&CHARGE, NOW, &mut chores).is_none());
        assert_eq!(chores.take.len(), 1, "one slice at a time");

        assert_eq!(leases.taken(chores.take[0], NOW, NOW, Some((allowed(990), NOW))), None);
        for left in (0..8).rev() {
            let spent = leases.spend(&CHARGE, NOW, &mut chores).unwrap();
            assert_eq!(spent.decision.remaining, 990 + left);
        }
        assert!(leases.spend(&CHARGE, NOW, &mut chores).is_none());
        assert_eq!(chores.take[1..], [Charge { cost: 16, ..CHARGE }], "the next in time, and larger");
        assert!(chores.refund.is_empty());
    }

    #[test]
    fn unspent_lease_is_refunded() {
        let (leases, mut chores) = (leases(&window(1_000), 100), Chores::default());
        leases.spend(&CHARGE, NOW, &mut chores);
        leases.spend(&CHARGE, NOW, &mut chores);
        leases.taken(chores.take[0], NOW, NOW, Some((allowed(990), NOW)));
        let spent = leases.spend(&CHARGE, NOW, &mut chores).unwrap();
        leases.spend(&CHARGE, NOW, &mut chores).unwrap();
        assert_eq!(leases.unspend(&CHARGE, &spent), None, "it is there still");

        assert_eq!(leases.sweep(NOW.saturating_add(ms(99))), []);
        let unspent = Unspent { charge: Charge { cost: 7, ..CHARGE }, taken_at: NOW };
        assert_eq!(leases.sweep(NOW.saturating_add(ms(100))), [unspent]);
        assert_eq!(leases.sweep(NOW.saturating_add(ms(200))), [], "only once");
        let unspent = Unspent { charge: CHARGE, taken_at: NOW };
        assert_eq!(leases.unspend(&CHARGE, &spent), Some(unspent), "too late to keep it");
    }

    #[test]
    fn denied_lease_is_not_retried_within_the_hold() {
        let (leases, mut chores) = (leases(&window(1_000), 100), Chores::default());
        leases.spend(&CHARGE, NOW, &mut chores);
        leases.spend(&CHARGE, NOW, &mut chores);
        leases.taken(chores.take[0], NOW, NOW, Some((Decision { allowed: false, ..allowed(3) }, NOW)));
        leases.spend(&CHARGE, NOW.saturating_add(ms(50)), &mut chores);
        leases.spend(&CHARGE, NOW.saturating_add(ms(99)), &mut chores);
        assert_eq!(chores.take.len(), 1);
        leases.spend(&CHARGE, NOW.saturating_add(ms(100)), &mut chores);
        assert_eq!(chores.take[1..], [Charge { cost: 2, ..CHARGE }]);
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
            assert!(Terms::new(&limit.unwrap(), Lease::of(5)).is_none());
        }
        let log = Limit::sliding_window_log(10, second, LogPolicy::Admitted).unwrap();
        for (most, hold) in [(0, ms(1)), (1, Duration::ZERO), (1, ms(1_001))] {
            assert!(Terms::new(&log, Lease { most, hold }).is_none());
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
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Three processes lease one limit and check at random, with delayed replies. In no interval may more be
        /// allowed than the limit permits. Unspent leases are not refunded here; other tests cover that.
        #[test]
        fn never_more_than_the_limit(
            limit in any_limit(),
            most in 1_u32..40,
            hold in 1_u64..300,
            steps in proptest::collection::vec((0_u64..60, 0_usize..3, 1_usize..12, 0_u64..20), 1..120),
        ) {
            let lease = Lease { most, hold: ms(hold) };
            let Some(terms) = Terms::new(&limit, lease) else { return Ok(()) };
            let clock = ManualClock::new(NOW);
            let server = Limiter::builder(terms.ahead.clone()).clock(clock.clone()).build().unwrap();
            let processes: Vec<_> = (0..3).map(|_| Leases::new(vec![Some(terms.clone())])).collect();
            let mut passed = Vec::new();
            // Leases in flight: arrival, process, charge, time of the request, decision and its time.
            let mut coming: VecDeque<(Time, usize, Charge, Time, Decision, Time)> = VecDeque::new();
            for (pause, who, count, trip) in steps {
                clock.advance(ms(pause));
                let now = clock.now();
                while let Some((_, who, charge, asked_at, told, at)) =
                    coming.front().filter(|slice| slice.0 <= now).copied()
                {
                    processes[who].taken(charge, asked_at, now, Some((told, at)));
                    coming.pop_front();
                }
                for _ in 0..count {
                    let mut chores = Chores::default();
                    let is_passed = match processes[who].spend(&CHARGE, now, &mut chores) {
                        Some(spent) => spent.decision.allowed,
                        None => server.check(&0).allowed,
                    };
                    if is_passed {
                        passed.push(now.saturating_since(NOW).as_millis() as u64
                            + NOW.as_nanos() / 1_000_000);
                    }
                    for charge in chores.take {
                        let told = server.check_n(&0, charge.cost);
                        let arrives = now.saturating_add(ms(trip));
                        coming.push_back((arrives, who, charge, now, told, now));
                        coming.make_contiguous().sort_by_key(|slice| slice.0);
                    }
                }
            }
            prop_assert!(is_kept(&limit, &passed), "{limit:?} {lease:?}: {passed:?}");
        }
    }
}
