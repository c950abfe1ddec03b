//! Denials that are known: until its wait is over, a key is denied without asking Redis.
//!
//! That is exact: nobody else's request makes a wait shorter, and a request that costs no less waits no less. Only a
//! reset does, so a denial is known for [`KNOWN_MAX`] at most. A log that counts denied requests must be asked.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tollgate_core::{Count, Decision, Limit, RetryAfter, Time};

use crate::store::{Charge, Key};

/// How long a denial is known before Redis is asked again: after so long a reset by another process is seen.
const KNOWN_MAX: Duration = Duration::from_secs(1);
/// How many denials are known. Where two keys meet, the newer takes the place.
const PLACES: usize = 4096;

#[derive(Debug)]
pub(crate) struct Denials {
    places: Box<[Mutex<Option<Denial>>]>,
    /// Whether each limit's denials may be known.
    limits: Box<[bool]>,
}

#[derive(Clone, Copy, Debug)]
struct Denial {
    limit: usize,
    key: Key,
    cost: u32,
    decision: Decision,
    /// When Redis was asked, by our own clock: a little before it decided, so that nothing is denied too long.
    asked_at: Time,
    wait: Duration,
}

impl Denials {
    pub(crate) fn new<'a>(limits: impl Iterator<Item = &'a Limit>) -> Denials {
        let may_be_known = |limit: &Limit| !matches!(limit, Limit::Log(log) if log.count() == Count::All);
        Denials {
            places: (0..PLACES).map(|_| Mutex::new(None)).collect(),
            limits: limits.map(may_be_known).collect(),
        }
    }

    fn place(&self, limit: usize, key: Key) -> &Mutex<Option<Denial>> {
        // Keys are hashed already.
        &self.places[(key.0 as usize).wrapping_add(limit) % PLACES]
    }

    /// What a request is told if it is known to be denied at `now`.
    pub(crate) fn known(&self, charge: &Charge, now: Time) -> Option<Decision> {
        let place = self.place(charge.limit, charge.key).lock().unwrap_or_else(PoisonError::into_inner);
        let denial = (*place)?;
        let gone = now.saturating_since(denial.asked_at);
        let is_same = denial.limit == charge.limit && denial.key == charge.key;
        let is_known = is_same && charge.cost >= denial.cost && gone < denial.wait.min(KNOWN_MAX);
        is_known.then(|| Decision {
            retry_after: RetryAfter::After(denial.wait - gone),
            reset_after: denial.decision.reset_after.saturating_sub(gone),
            ..denial.decision
        })
    }

    /// Remembers what Redis said to a request that asked at `asked_at`.
    pub(crate) fn learn(&self, charge: &Charge, decision: &Decision, asked_at: Time) {
        let RetryAfter::After(wait) = decision.retry_after else { return };
        if !self.limits[charge.limit] {
            return;
        }
        let (limit, key, cost) = (charge.limit, charge.key, charge.cost);
        let denial = Denial { limit, key, cost, decision: *decision, asked_at, wait };
        *self.place(limit, key).lock().unwrap_or_else(PoisonError::into_inner) = Some(denial);
    }

    /// Forgets a key.
    pub(crate) fn forget(&self, limit: usize, key: Key) {
        *self.place(limit, key).lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::Align;

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
        Limit::fixed_window(5, Duration::from_secs(60), Align::Clock).unwrap()
    }

    #[test]
    fn a_denial_is_known_until_its_wait_is_over() {
        let denials = Denials::new([window()].iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 2 };
        let ms = Duration::from_millis;
        denials.learn(&charge, &denied(ms(300)), NOW);

        let later = denials.known(&charge, NOW.saturating_add(ms(299))).unwrap();
        assert_eq!((later.allowed, later.retry_after), (false, RetryAfter::After(ms(1))));
        assert_eq!(later.reset_after, ms(301));
        assert_eq!(denials.known(&charge, NOW.saturating_add(ms(300))), None);
        assert!(denials.known(&Charge { cost: 3, ..charge }, NOW).is_some());
        assert_eq!(denials.known(&Charge { cost: 1, ..charge }, NOW), None, "a smaller one may pass");
        assert_eq!(denials.known(&Charge { key: Key(8), ..charge }, NOW), None);
        denials.forget(0, Key(7));
        assert_eq!(denials.known(&charge, NOW), None);
    }

    #[test]
    fn a_long_denial_is_asked_about_again() {
        let denials = Denials::new([window()].iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 1 };
        denials.learn(&charge, &denied(Duration::from_secs(60)), NOW);
        assert!(denials.known(&charge, NOW).is_some());
        assert_eq!(denials.known(&charge, NOW.saturating_add(KNOWN_MAX)), None);
    }

    #[test]
    fn a_log_of_all_requests_is_always_asked() {
        let log = Limit::sliding_window_log(5, Duration::from_secs(60), Count::All).unwrap();
        let denials = Denials::new([log].iter());
        let charge = Charge { limit: 0, key: Key(7), cost: 1 };
        denials.learn(&charge, &denied(Duration::from_secs(60)), NOW);
        assert_eq!(denials.known(&charge, NOW), None);
    }
}
