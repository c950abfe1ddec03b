//! Denial cache: a denied request is denied locally until its `retry_after` has passed.
//!
//! This is exact, because other requests never shorten the wait. Resets and refunds do: those of this process remove
//! the denial; those of others take effect when the entry expires, after [`KNOWN_MAX`] or, for a leased limit, the
//! hold time of the lease if that is shorter. A log that counts denied requests is never cached. If several limits
//! are charged, the decisions of the others are repeated from the cached verdict.

use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratekeeper_core::{Decision, Limit, LogPolicy, RetryAfter, Time};
use smallvec::SmallVec;

use crate::store::{Charge, Key, Verdict};

/// How long a denial is cached at most, and so how late a reset by another process takes effect.
const KNOWN_MAX: Duration = Duration::from_secs(1);
/// Number of entries. If two requests collide, the newer replaces the older.
const PLACES: usize = 4096;

#[derive(Debug)]
pub(crate) struct Denials {
    places: Box<[Mutex<Option<Denial>>]>,
    /// How long denials of each limit may be cached.
    limits: Box<[Duration]>,
    /// When a key was last reset or refunded, in nanoseconds; verdicts from before that are outdated. Keys share
    /// these cells, so a reset may drop another key's denial, which costs one extra call.
    forgotten_ns: Box<[AtomicU64]>,
    hasher: foldhash::fast::FixedState,
}

#[derive(Clone, Debug)]
struct Denial {
    charges: SmallVec<[Charge; 4]>,
    decisions: SmallVec<[Decision; 4]>,
    /// When Redis was called, by the local clock: slightly before it decided, so that no request is denied too long.
    asked_at: Time,
    known_for: Duration,
}

impl Denials {
    /// Takes the limits, each with the hold time of its lease, if any.
    pub(crate) fn new<'a>(limits: impl Iterator<Item = (&'a Limit, Option<Duration>)>) -> Denials {
        let known_for = |(limit, hold): (&Limit, Option<Duration>)| match limit {
            Limit::Log(log) if log.count() == LogPolicy::All => Duration::ZERO,
            _ => hold.map_or(KNOWN_MAX, |hold| hold.min(KNOWN_MAX)),
        };
        Denials {
            places: (0..PLACES).map(|_| Mutex::new(None)).collect(),
            limits: limits.map(known_for).collect(),
            forgotten_ns: (0..PLACES).map(|_| AtomicU64::new(0)).collect(),
            hasher: foldhash::fast::FixedState::default(),
        }
    }

    fn place(&self, charges: &[Charge]) -> MutexGuard<'_, Option<Denial>> {
        let mut hasher = self.hasher.build_hasher();
        for charge in charges {
            (charge.limit, charge.key.0).hash(&mut hasher);
        }
        lock(&self.places[hasher.finish() as usize % PLACES])
    }

    fn forgotten(&self, key: Key) -> &AtomicU64 {
        &self.forgotten_ns[self.hasher.hash_one(key.0) as usize % PLACES]
    }

    /// The cached verdict of a request that is denied at `now`.
    pub(crate) fn known(&self, charges: &[Charge], now: Time) -> Option<Verdict> {
        let place = self.place(charges);
        let denial = place.as_ref()?;
        let gone = now.saturating_since(denial.asked_at);
        let asked_ns = denial.asked_at.as_nanos();
        let is_known = denial.charges.as_slice() == charges
            && gone < denial.known_for
            && charges.iter().all(|charge| self.forgotten(charge.key).load(Ordering::Acquire) < asked_ns);
        let decisions = denial.decisions.iter().map(|decision| Decision {
            retry_after: match decision.retry_after {
                // The wait of one limit may be over while the request is still denied by another.
                RetryAfter::After(wait) => RetryAfter::After(wait.saturating_sub(gone)),
                other => other,
            },
            reset_after: decision.reset_after.saturating_sub(gone),
            ..*decision
        });
        is_known.then(|| Verdict { decisions: decisions.collect(), ..Verdict::default() })
    }

    /// Caches a denial that Redis returned to a request sent at `asked_at`.
    pub(crate) fn learn(&self, charges: &[Charge], verdict: &Verdict, asked_at: Time) {
        let waits = verdict.decisions().iter().filter_map(|decision| match decision.retry_after {
            RetryAfter::After(wait) => Some(wait),
            _ => None,
        });
        // The request is denied until the last limit allows it.
        let Some(wait) = waits.max() else { return };
        let known_for = charges.iter().map(|charge| self.limits[charge.limit]).fold(wait, Duration::min);
        if known_for.is_zero() {
            return;
        }
        let decisions = verdict.decisions.clone();
        let denial = Denial { charges: SmallVec::from_slice(charges), decisions, asked_at, known_for };
        *self.place(charges) = Some(denial);
    }

    /// Copies the denials of continued limits to `to`, under their new numbers; the others are dropped.
    pub(crate) fn hand_on(&self, to: &Denials, number: impl Fn(usize) -> Option<usize>) {
        for (before, after) in self.forgotten_ns.iter().zip(&to.forgotten_ns) {
            after.fetch_max(before.load(Ordering::Acquire), Ordering::AcqRel);
        }
        for place in &self.places {
            let Some(denial) = lock(place).clone() else { continue };
            let renumbered = |charge: &Charge| Some(Charge { limit: number(charge.limit)?, ..*charge });
            let Some(charges) = denial.charges.iter().map(renumbered).collect::<Option<SmallVec<_>>>() else {
                continue;
            };
            let mut place = to.place(&charges);
            *place = Some(Denial { charges, ..denial });
        }
    }

    /// Drops the denials of a key that was reset or refunded at `now`.
    pub(crate) fn forget(&self, key: Key, now: Time) {
        self.forgotten(key).fetch_max(now.as_nanos(), Ordering::AcqRel);
    }
}

fn lock(place: &Mutex<Option<Denial>>) -> MutexGuard<'_, Option<Denial>> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratekeeper_core::WindowAlign;

    const NOW: Time = Time::from_secs(1_700_000_000);

    fn denied(wait: Duration) -> Decision {
        Decision {
            allowed: false,
            limit: 5,
            remaining: 1,
            retry_after: RetryAfter::After(wait),
            reset_after: 2 * wait,
            delay: Duration::ZERO,
        }
    }

    fn window() -> Limit {
        Limit::fixed_window(5, Duration::from_secs(60), WindowAlign::Clock).unwrap()
    }

    fn verdict(decisions: &[Decision]) -> Verdict {
        Verdict { decisions: SmallVec::from_slice(decisions), ..Verdict::default() }
    }

    #[test]
    fn denial_is_cached_until_retry_after() {
        let denials = Denials::new([(&window(), None)].into_iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 2 };
        let ms = Duration::from_millis;
        denials.learn(&[charge], &verdict(&[denied(ms(300))]), NOW);

        let later = denials.known(&[charge], NOW.saturating_add(ms(299))).unwrap().decision();
        assert_eq!((later.allowed, later.retry_after), (false, RetryAfter::After(ms(1))));
        assert_eq!(later.reset_after, ms(301));
        assert_eq!(denials.known(&[charge], NOW.saturating_add(ms(300))), None);
        for cost in [1, 3] {
            assert_eq!(denials.known(&[Charge { cost, ..charge }], NOW), None, "another wait, or none");
        }
        assert_eq!(denials.known(&[Charge { key: Key(8), ..charge }], NOW), None);
        denials.forget(Key(7), NOW);
        assert_eq!(denials.known(&[charge], NOW), None);
        denials.learn(&[charge], &verdict(&[denied(ms(300))]), NOW);
        assert_eq!(denials.known(&[charge], NOW), None, "it was asked before the reset");
    }

    /// The second limit becomes the first; the first is removed.
    #[test]
    fn reload_keeps_denials_of_unchanged_limits() {
        let two = || Denials::new([(&window(), None), (&window(), None)].into_iter());
        let (before, after) = (two(), two());
        let [first, second] = [0, 1].map(|limit| Charge { limit, key: Key(7), cost: 1 });
        let wait = Duration::from_millis(300);
        before.learn(&[first], &verdict(&[denied(wait)]), NOW);
        before.learn(&[second], &verdict(&[denied(wait)]), NOW);
        before.learn(&[first, second], &verdict(&[denied(wait); 2]), NOW);
        before.hand_on(&after, |limit| limit.checked_sub(1));
        assert!(after.known(&[first], NOW).is_some());
        assert_eq!(after.known(&[second], NOW), None);
        assert_eq!(after.known(&[first, second], NOW), None);
        assert!(before.known(&[first, second], NOW).is_some(), "who is on the way is told the same");
    }

    #[test]
    fn denial_is_cached_no_longer_than_a_lease_is_held() {
        let ms = Duration::from_millis;
        let denials = Denials::new([(&window(), Some(ms(100)))].into_iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 1 };
        denials.learn(&[charge], &verdict(&[denied(ms(300))]), NOW);
        assert!(denials.known(&[charge], NOW.saturating_add(ms(99))).is_some());
        assert_eq!(denials.known(&[charge], NOW.saturating_add(ms(100))), None);
    }

    #[test]
    fn longest_wait_of_several_limits_applies() {
        let denials = Denials::new([(&window(), None); 3].into_iter());
        let charges = [0, 1, 2].map(|limit| Charge { limit, key: Key(limit as u128), cost: 1 });
        let ms = Duration::from_millis;
        let allowed = Decision { allowed: true, retry_after: RetryAfter::Now, ..denied(ms(0)) };
        denials.learn(&charges, &verdict(&[denied(ms(100)), allowed, denied(ms(300))]), NOW);

        let later = denials.known(&charges, NOW.saturating_add(ms(200))).unwrap();
        assert!(!later.allowed() && later.decisions()[1].allowed);
        assert_eq!(later.decision().retry_after, RetryAfter::After(ms(100)));
        assert_eq!(denials.known(&charges, NOW.saturating_add(ms(300))), None);
        assert_eq!(denials.known(&charges[..2], NOW), None, "another request");
        denials.forget(Key(1), NOW);
        assert_eq!(denials.known(&charges, NOW), None);
    }

    #[test]
    fn long_denial_is_rechecked_after_a_second() {
        let denials = Denials::new([(&window(), None)].into_iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 1 };
        denials.learn(&[charge], &verdict(&[denied(Duration::from_secs(60))]), NOW);
        assert!(denials.known(&[charge], NOW).is_some());
        assert_eq!(denials.known(&[charge], NOW.saturating_add(KNOWN_MAX)), None);
    }

    #[test]
    fn log_of_all_requests_is_never_cached() {
        let log = Limit::sliding_window_log(5, Duration::from_secs(60), LogPolicy::All).unwrap();
        let denials = Denials::new([(&window(), None), (&log, None)].into_iter());
        let charges = [0, 1].map(|limit| Charge { limit, key: Key(7), cost: 1 });
        denials.learn(&charges, &verdict(&[denied(Duration::from_secs(60)); 2]), NOW);
        assert_eq!(denials.known(&charges, NOW), None);
    }
}
