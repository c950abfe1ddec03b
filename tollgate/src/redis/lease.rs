//! Budget that was taken from Redis ahead, in slices, and is spent here without asking.
//!
//! Slices are taken in the background, for keys that are asked about again and again; a request that finds none is
//! decided by Redis as ever. A slice is twice as large as the one before if that was spent in time, and half as large if
//! it was not. What is not spent in time is given back.
//!
//! Never more is admitted than the limit allows: units are taken by [`Limit::taken_ahead`], which leaves room for their
//! being spent later, and are not spent after the window in which they count.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_core::{Decision, Lease, Limit, RetryAfter, Time};

use crate::store::{Charge, Key};

/// How many keys have slices at a time. Where two meet, one goes without.
const PLACES: usize = 4_096;
/// The size of a key's first slice.
const FIRST_SIZE: u32 = 8;

#[derive(Debug)]
pub(crate) struct Leases {
    terms: Box<[Option<Terms>]>,
    places: Box<[Mutex<Place>]>,
    /// What could not be given back yet.
    unreturned: Mutex<Vec<Unspent>>,
    /// Nothing is held any more.
    is_closed: AtomicBool,
}

/// What is leased of a limit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Terms {
    pub(crate) limit: Limit,
    /// By which units are taken.
    pub(crate) ahead: Limit,
    pub(crate) lease: Lease,
}

impl Terms {
    /// None if the limit cannot be leased like that.
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
    /// When the owner was last asked about.
    seen_at: Time,
    slice: Option<Slice>,
    /// What is spent when the slice is.
    next: Option<Slice>,
    /// Of the next slice that is taken.
    size: u32,
    is_taking: bool,
    /// After a denial nothing is taken for a while.
    takes_from: Time,
}

#[derive(Clone, Copy, Debug)]
struct Slice {
    left: u32,
    asked_at: Time,
    /// By our clock.
    until: Time,
    /// By the server's.
    taken_at: Time,
    /// What the server said of it.
    told: Decision,
}

/// Units that a request has spent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    pub(crate) decision: Decision,
    pub(crate) taken_at: Time,
}

/// Units that were not spent in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unspent {
    pub(crate) charge: Charge,
    pub(crate) taken_at: Time,
}

/// What is to be done in the background.
#[derive(Debug, Default)]
pub(crate) struct Chores {
    pub(crate) take: Vec<Charge>,
    pub(crate) give_back: Vec<Unspent>,
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

    /// How often [`sweep`](Self::sweep) is due, if ever.
    pub(crate) fn sweep_every(&self) -> Option<Duration> {
        self.terms.iter().flatten().map(|terms| terms.lease.hold).min()
    }

    fn place(&self, limit: usize, key: Key) -> MutexGuard<'_, Place> {
        // Keys are hashed already.
        lock(&self.places[(key.0 as usize).wrapping_add(limit) % PLACES])
    }

    /// Spends what a charge needs, if it is there.
    pub(crate) fn spend(&self, charge: &Charge, now: Time, chores: &mut Chores) -> Option<Spent> {
        let terms = self.terms[charge.limit].as_ref()?;
        let mut place = self.place(charge.limit, charge.key);
        let owner = (charge.limit, charge.key);
        place.roll(now, &mut chores.give_back);
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
            // The slice before was spent in time.
            if place.slice.is_some() {
                place.size = place.size.saturating_mul(2).min(terms.lease.most);
            }
            chores.take.push(Charge { cost: place.size, ..*charge });
        }
        spent
    }

    /// Takes back what a charge has spent, because another limit denied the request.
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

    /// Enters a slice that Redis was asked for at `asked_at` and has decided about at `taken_at`, or has not.
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

    /// Forgets a key.
    pub(crate) fn forget(&self, limit: usize, key: Key) {
        if self.terms[limit].is_some() {
            let mut place = self.place(limit, key);
            if place.owner == Some((limit, key)) {
                *place = Place::default();
            }
        }
    }

    /// What nobody has spent in time, and what could not be given back before.
    pub(crate) fn sweep(&self, now: Time) -> Vec<Unspent> {
        let mut unspent = std::mem::take(&mut *lock(&self.unreturned));
        for place in &self.places {
            lock(place).roll(now, &mut unspent);
        }
        unspent
    }

    /// Everything that is held, spent in time or not.
    pub(crate) fn take_all(&self) -> Vec<Unspent> {
        self.sweep(Time::from_nanos(u64::MAX))
    }

    /// The same, and nothing is held from now on: what is on its way comes back, too.
    pub(crate) fn close(&self) -> Vec<Unspent> {
        // Whoever enters a slice later sees this; what was entered before is taken.
        self.is_closed.store(true, Ordering::Release);
        self.take_all()
    }

    /// Whether a limit is leased in the same way there.
    pub(crate) fn are_same(&self, limit: usize, other: &Leases, number: usize) -> bool {
        self.terms.get(limit) == other.terms.get(number)
    }

    /// Leaves what is held of limits to others, under their new numbers, and gives what is held of those that have none.
    /// What is on its way comes back here, and finds nobody who waits for it.
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

    /// Keeps what could not be given back until the next sweep, as far as there is room.
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
    /// Whether the place may be given to another key.
    fn is_idle(&self, now: Time, hold: Duration) -> bool {
        !self.is_taking && self.left() == 0 && now.saturating_since(self.seen_at) >= hold
    }

    fn slices(&mut self) -> impl Iterator<Item = &mut Slice> {
        self.slice.iter_mut().chain(&mut self.next)
    }

    fn left(&self) -> u32 {
        self.slice.iter().chain(&self.next).map(|slice| slice.left).sum()
    }

    /// Drops slices that are too old, and goes on to the next when one is spent.
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
                // Spent in time: the next may be larger.
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
    use tollgate_core::{Algorithm as _, Align, Count, Edge, Mode, Rate, Style};

    use super::*;
    use crate::{Clock as _, Limiter, ManualClock};

    const NOW: Time = Time::from_secs(1_700_000_000);
    const KEY: Key = Key(7);
    const CHARGE: Charge = Charge { limit: 0, key: KEY, cost: 1 };

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn window(limit: u32) -> Limit {
        Limit::fixed_window(limit, Duration::from_secs(60), Align::Clock).unwrap()
    }

    /// The second limit has become the first, and the first is another now.
    #[test]
    fn slices_of_limits_that_stay_are_handed_on() {
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
    fn a_busy_key_gets_a_slice_and_spends_it() {
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
        assert!(chores.give_back.is_empty());
    }

    #[test]
    fn what_is_not_spent_in_time_is_given_back() {
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
    fn after_a_denial_nothing_is_taken_for_a_while() {
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
    fn what_must_be_asked_about_each_time_is_not_leased() {
        let rate = Rate::new(10, Duration::from_secs(1)).unwrap();
        let second = Duration::from_secs(1);
        for limit in [
            Limit::leaky_bucket(10, rate, Mode::Shape),
            Limit::sliding_window_log(10, second, Count::All),
            Limit::token_bucket(1, rate, Style::Smooth),
        ] {
            assert!(Terms::new(&limit.unwrap(), Lease::of(5)).is_none());
        }
        let log = Limit::sliding_window_log(10, second, Count::Admitted).unwrap();
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
            (size.clone(), rate.clone()).prop_map(|(n, rate)| Limit::token_bucket(n, rate, Style::Smooth)),
            (size.clone(), rate.clone()).prop_map(|(n, rate)| Limit::token_bucket(n, rate, Style::Stepped)),
            (size.clone(), rate).prop_map(|(n, rate)| Limit::leaky_bucket(n, rate, Mode::Police)),
            (size.clone(), length.clone()).prop_map(|(n, w)| Limit::sliding_window_log(
                n,
                w,
                Count::Admitted
            )),
            (size.clone(), length.clone()).prop_map(|(n, w)| Limit::fixed_window(n, w, Align::Clock)),
            (size.clone(), length.clone()).prop_map(|(n, w)| Limit::fixed_window(n, w, Align::FirstRequest)),
            (size, length).prop_map(|(n, w)| Limit::sliding_window_counter(n, w, 1, Edge::Weigh)),
        ]
        .prop_map(Result::unwrap)
    }

    /// What passes a limit in any stretch of time, for the instants (in milliseconds) at which units passed.
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
            Limit::Steps(it) => pairs().all(|pair| {
                // One period more: it began before.
                let periods = within(pair.0, pair.1) / it.rate().period().as_nanos() + 1;
                count(pair) <= u128::from(it.capacity()) + periods * u128::from(it.rate().count())
            }),
            Limit::Log(it) => pairs().all(|pair| {
                within(pair.0, pair.1) >= it.window().as_nanos() || count(pair) <= u128::from(it.limit())
            }),
            // Where windows begin with the first request, two of them meet at most.
            Limit::FixedWindow(it) if it.align() == Align::FirstRequest => pairs().all(|pair| {
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

        /// Three processes lease one limit and ask at random; answers take their time. In no stretch of time more
        /// passes than the limit allows. What is not spent is not given back here, which other tests are about.
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
            // Slices on their way back: when they arrive, to whom, when they were asked for, and what was said.
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
