//! Denial cache: a denied request is denied locally until its `retry_after` has passed.
//!
//! This is exact, because other requests never shorten the wait. Resets and refunds do: those of this process remove
//! the denial; those of others take effect when the entry expires, after [`CACHED_MAX`] or, for a leased limit, the
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
const CACHED_MAX: Duration = Duration::from_secs(1);
/// Number of entries. If two requests collide, the newer replaces the older.
const ENTRIES: usize = 4096;

#[derive(Debug)]
pub(crate) struct DenialCache {
    entries: Box<[Mutex<Option<CachedDenial>>]>,
    /// How long denials of each limit may be cached.
    limits: Box<[Duration]>,
    /// When a key was last reset or refunded, in nanoseconds; verdicts from before that are outdated. Keys share
    /// these cells, so a reset may drop another key's denial, which costs one extra call.
    invalidated_ns: Box<[AtomicU64]>,
    hasher: foldhash::fast::FixedState,
}

#[derive(Clone, Debug)]
struct CachedDenial {
    charges: SmallVec<[Charge; 4]>,
    decisions: SmallVec<[Decision; 4]>,
    /// When Redis was called, by the local clock: slightly before it decided, so that no request is denied too long.
    sent_at: Time,
    valid_for: Duration,
}

impl DenialCache {
    /// Takes the limits, each with the hold time of its lease, if any.
    pub(crate) fn new<'a>(limits: impl Iterator<Item = (&'a Limit, Option<Duration>)>) -> DenialCache {
        let valid_for = |(limit, hold): (&Limit, Option<Duration>)| match limit {
            Limit::Log(log) if log.count() == LogPolicy::All => Duration::ZERO,
            _ => hold.map_or(CACHED_MAX, |hold| hold.min(CACHED_MAX)),
        };
        DenialCache {
            entries: (0..ENTRIES).map(|_| Mutex::new(None)).collect(),
            limits: limits.map(valid_for).collect(),
            invalidated_ns: (0..ENTRIES).map(|_| AtomicU64::new(0)).collect(),
            hasher: foldhash::fast::FixedState::default(),
        }
    }

    fn entry(&self, charges: &[Charge]) -> MutexGuard<'_, Option<CachedDenial>> {
        let mut hasher = self.hasher.build_hasher();
        for charge in charges {
            (charge.limit, charge.key.0).hash(&mut hasher);
        }
        lock(&self.entries[hasher.finish() as usize % ENTRIES])
    }

    fn invalidated_at(&self, key: Key) -> &AtomicU64 {
        &self.invalidated_ns[self.hasher.hash_one(key.0) as usize % ENTRIES]
    }

    /// The cached verdict of a request that is denied at `now`.
    pub(crate) fn get(&self, charges: &[Charge], now: Time) -> Option<Verdict> {
        let entry = self.entry(charges);
        let denial = entry.as_ref()?;
        let elapsed = now.saturating_since(denial.sent_at);
        let sent_ns = denial.sent_at.as_nanos();
        let is_valid = denial.charges.as_slice() == charges
            && elapsed < denial.valid_for
            && charges.iter().all(|charge| self.invalidated_at(charge.key).load(Ordering::Acquire) < sent_ns);
        let decisions = denial.decisions.iter().map(|decision| Decision {
            retry_after: match decision.retry_after {
                // The wait of one limit may be over while the request is still denied by another.
                RetryAfter::After(wait) => RetryAfter::After(wait.saturating_sub(elapsed)),
                other => other,
            },
            reset_after: decision.reset_after.saturating_sub(elapsed),
            ..*decision
        });
        is_valid.then(|| Verdict { decisions: decisions.collect(), ..Verdict::default() })
    }

    /// Caches a denial that Redis returned to a request sent at `sent_at`.
    pub(crate) fn insert(&self, charges: &[Charge], verdict: &Verdict, sent_at: Time) {
        let waits = verdict.decisions().iter().filter_map(|decision| match decision.retry_after {
            RetryAfter::After(wait) => Some(wait),
            _ => None,
        });
        // The request is denied until the last limit allows it.
        let Some(wait) = waits.max() else { return };
        let valid_for = charges.iter().map(|charge| self.limits[charge.limit]).fold(wait, Duration::min);
        if valid_for.is_zero() {
            return;
        }
        let decisions = verdict.decisions.clone();
        let denial = CachedDenial { charges: SmallVec::from_slice(charges), decisions, sent_at, valid_for };
        *self.entry(charges) = Some(denial);
    }

    /// Copies the denials of continued limits to `to`, under their new numbers; the others are dropped.
    pub(crate) fn migrate_to(&self, to: &DenialCache, number: impl Fn(usize) -> Option<usize>) {
        for (before, after) in self.invalidated_ns.iter().zip(&to.invalidated_ns) {
            after.fetch_max(before.load(Ordering::Acquire), Ordering::AcqRel);
        }
        for entry in &self.entries {
            let Some(denial) = lock(entry).clone() else { continue };
            let renumbered = |charge: &Charge| Some(Charge { limit: number(charge.limit)?, ..*charge });
            let Some(charges) = denial.charges.iter().map(renumbered).collect::<Option<SmallVec<_>>>() else {
                continue;
            };
            let mut entry = to.entry(&charges);
            *entry = Some(CachedDenial { charges, ..denial });
        }
    }

    /// Drops the denials of a key that was reset or refunded at `now`.
    pub(crate) fn invalidate(&self, key: Key, now: Time) {
        self.invalidated_at(key).fetch_max(now.as_nanos(), Ordering::AcqRel);
    }
}

fn lock(entry: &Mutex<Option<CachedDenial>>) -> MutexGuard<'_, Option<CachedDenial>> {
    entry.lock().unwrap_or_else(PoisonError::into_inner)
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
        let denials = DenialCache::new([(&window(), None)].into_iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 2 };
        let ms = Duration::from_millis;
        denials.insert(&[charge], &verdict(&[denied(ms(300))]), NOW);

        let later = denials.get(&[charge], NOW.saturating_add(ms(299))).unwrap().decision();
        assert_eq!((later.allowed, later.retry_after), (false, RetryAfter::After(ms(1))));
        assert_eq!(later.reset_after, ms(301));
        assert_eq!(denials.get(&[charge], NOW.saturating_add(ms(300))), None);
        for cost in [1, 3] {
            assert_eq!(denials.get(&[Charge { cost, ..charge }], NOW), None, "another wait, or none");
        }
        assert_eq!(denials.get(&[Charge { key: Key(8), ..charge }], NOW), None);
        denials.invalidate(Key(7), NOW);
        assert_eq!(denials.get(&[charge], NOW), None);
        denials.insert(&[charge], &verdict(&[denied(ms(300))]), NOW);
        assert_eq!(denials.get(&[charge], NOW), None, "the check was sent before the reset");
    }

    /// The second limit becomes the first; the first is removed.
    #[test]
    fn reload_keeps_denials_of_unchanged_limits() {
        let two = || DenialCache::new([(&window(), None), (&window(), None)].into_iter());
        let (before, after) = (two(), two());
        let [first, second] = [0, 1].map(|limit| Charge { limit, key: Key(7), cost: 1 });
        let wait = Duration::from_millis(300);
        before.insert(&[first], &verdict(&[denied(wait)]), NOW);
        before.insert(&[second], &verdict(&[denied(wait)]), NOW);
        before.insert(&[first, second], &verdict(&[denied(wait); 2]), NOW);
        before.migrate_to(&after, |limit| limit.checked_sub(1));
        assert!(after.get(&[first], NOW).is_some());
        assert_eq!(after.get(&[second], NOW), None);
        assert_eq!(after.get(&[first, second], NOW), None);
        assert!(before.get(&[first, second], NOW).is_some(), "checks in flight get the same denial");
    }

    #[test]
    fn denial_is_cached_no_longer_than_a_lease_is_held() {
        let ms = Duration::from_millis;
        let denials = DenialCache::new([(&window(), Some(ms(100)))].into_iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 1 };
        denials.insert(&[charge], &verdict(&[denied(ms(300))]), NOW);
        assert!(denials.get(&[charge], NOW.saturating_add(ms(99))).is_some());
        assert_eq!(denials.get(&[charge], NOW.saturating_add(ms(100))), None);
    }

    #[test]
    fn longest_wait_of_several_limits_applies() {
        let denials = DenialCache::new([(&window(), None); 3].into_iter());
        let charges = [0, 1, 2].map(|limit| Charge { limit, key: Key(limit as u128), cost: 1 });
        let ms = Duration::from_millis;
        let allowed = Decision { allowed: true, retry_after: RetryAfter::Now, ..denied(ms(0)) };
        denials.insert(&charges, &verdict(&[denied(ms(100)), allowed, denied(ms(300))]), NOW);

        let later = denials.get(&charges, NOW.saturating_add(ms(200))).unwrap();
        assert!(!later.allowed() && later.decisions()[1].allowed);
        assert_eq!(later.decision().retry_after, RetryAfter::After(ms(100)));
        assert_eq!(denials.get(&charges, NOW.saturating_add(ms(300))), None);
        assert_eq!(denials.get(&charges[..2], NOW), None, "another request");
        denials.invalidate(Key(1), NOW);
        assert_eq!(denials.get(&charges, NOW), None);
    }

    #[test]
    fn long_denial_is_rechecked_after_a_second() {
        let denials = DenialCache::new([(&window(), None)].into_iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 1 };
        denials.insert(&[charge], &verdict(&[denied(Duration::from_secs(60))]), NOW);
        assert!(denials.get(&[charge], NOW).is_some());
        assert_eq!(denials.get(&[charge], NOW.saturating_add(CACHED_MAX)), None);
    }

    #[test]
    fn log_of_all_requests_is_never_cached() {
        let log = Limit::sliding_window_log(5, Duration::from_secs(60), LogPolicy::All).unwrap();
        let denials = DenialCache::new([(&window(), None), (&log, None)].into_iter());
        let charges = [0, 1].map(|limit| Charge { limit, key: Key(7), cost: 1 });
        denials.insert(&charges, &verdict(&[denied(Duration::from_secs(60)); 2]), NOW);
        assert_eq!(denials.get(&charges, NOW), None);
    }
}
