//! Who takes part, each by its natural fastest call.
//!
//! Every contender borrows the key, reads its own clock as it does in production, hands its whole answer to
//! [`black_box`], and is then asked the same: was it allowed?

use std::error::Error;
use std::hash::{BuildHasher, Hash};
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::ValueEnum;
use governor::clock::DefaultClock;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};
use serde::Serialize;
use throttlecrab::PeriodicStore;
use tollgate::{Limit, Limiter, Rate, Style};

use crate::timing;

/// A limiter whose limit and table are set.
pub(crate) trait Contender<K>: Sync {
    /// Decides a request for each key in turn. How many were allowed?
    fn decide_all(&self, keys: &[K]) -> usize;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Who {
    /// Yes or no, as governor answers.
    Allows,
    /// The whole verdict: what remains, and the waits.
    Check,
    CheckMany,
    Governor,
    GovernorAhash,
    Throttlecrab,
}

/// How many checks `check_many` is given at once.
const BATCH: usize = 16;

impl Who {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Who::Allows => "allows",
            Who::Check => "check",
            Who::CheckMany => "check_many(16)",
            Who::Governor => "governor",
            Who::GovernorAhash => "governor+ahash",
            Who::Throttlecrab => "throttlecrab",
        }
    }
}

/// A budget that all contenders can express: so many at once, and one more after each period.
#[derive(Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) capacity: u32,
    pub(crate) period: Duration,
}

impl Budget {
    /// Never used up, and slow to come back, so that no key becomes idle and gives up its place.
    pub(crate) const AMPLE: Budget = Budget { capacity: 50_000_000, period: Duration::from_secs(60) };
    /// Used up by [`Budget::SPENT_BY`] requests for the rest of the run. It is not 1, because throttlecrab never
    /// denies a request of a budget of 1.
    pub(crate) const SCANT: Budget = Budget { capacity: 2, period: Duration::from_secs(86_400) };
    pub(crate) const SPENT_BY: usize = 2;

    pub(crate) fn token_bucket(self) -> Result<Limit, Box<dyn Error>> {
        Ok(Limit::token_bucket(self.capacity, Rate::new(1, self.period)?, Style::Smooth)?)
    }

    fn quota(self) -> Result<Quota, Box<dyn Error>> {
        let capacity = NonZeroU32::new(self.capacity).ok_or("a capacity of 0")?;
        Ok(Quota::with_period(self.period).ok_or("a period of 0")?.allow_burst(capacity))
    }
}

/// A key type, and who can hold it.
pub(crate) trait Held: Hash + Sized {
    const NAME: &'static str;
    const WHO: &'static [Who];

    /// A contender with an empty table for `keys` keys.
    fn contender(who: Who, budget: Budget, keys: usize) -> Result<Box<dyn Contender<Self>>, Box<dyn Error>>;
}

impl Held for u64 {
    const NAME: &'static str = "u64";
    const WHO: &'static [Who] = &[Who::Allows, Who::Check, Who::CheckMany, Who::Governor, Who::GovernorAhash];

    fn contender(who: Who, budget: Budget, keys: usize) -> Result<Box<dyn Contender<u64>>, Box<dyn Error>> {
        any_key(who, budget, keys)
    }
}

impl Held for String {
    const NAME: &'static str = "String";
    const WHO: &'static [Who] =
        &[Who::Allows, Who::Check, Who::CheckMany, Who::Governor, Who::GovernorAhash, Who::Throttlecrab];

    fn contender(
        who: Who,
        budget: Budget,
        keys: usize,
    ) -> Result<Box<dyn Contender<String>>, Box<dyn Error>> {
        match who {
            Who::Throttlecrab => Ok(Box::new(Throttlecrab::new(budget, keys))),
            other => any_key(other, budget, keys),
        }
    }
}

fn any_key<K>(who: Who, budget: Budget, keys: usize) -> Result<Box<dyn Contender<K>>, Box<dyn Error>>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
{
    Ok(match who {
        Who::Allows => Box::new(Allows(tollgate(budget.token_bucket()?, keys)?)),
        Who::Check => Box::new(tollgate(budget.token_bucket()?, keys)?),
        Who::CheckMany => Box::new(Many(tollgate(budget.token_bucket()?, keys)?)),
        Who::Governor => Box::new(RateLimiter::keyed(budget.quota()?)),
        Who::GovernorAhash => {
            Box::new(RateLimiter::dashmap_with_hasher(budget.quota()?, ahash::RandomState::new()))
        }
        Who::Throttlecrab => return Err("throttlecrab takes text keys only".into()),
    })
}

/// Our own limiter with any of our limits.
pub(crate) fn tollgate(limit: Limit, keys: usize) -> Result<Limiter, Box<dyn Error>> {
    Ok(Limiter::builder(limit).max_keys(keys).build()?)
}

impl<K: Hash> Contender<K> for Limiter {
    fn decide_all(&self, keys: &[K]) -> usize {
        keys.iter().filter(|key| black_box(self.check(*key)).allowed).count()
    }
}

struct Allows(Limiter);

impl<K: Hash> Contender<K> for Allows {
    fn decide_all(&self, keys: &[K]) -> usize {
        keys.iter().filter(|key| black_box(self.0.allows(*key))).count()
    }
}

struct Many(Limiter);

impl<K: Hash> Contender<K> for Many {
    fn decide_all(&self, keys: &[K]) -> usize {
        let mut allowed = 0;
        for batch in keys.chunks(BATCH) {
            self.0.check_many(batch, |_, decision| allowed += usize::from(black_box(decision).allowed));
        }
        allowed
    }
}

impl<K, S> Contender<K> for RateLimiter<K, DashMapStateStore<K, S>, DefaultClock>
where
    K: Hash + Eq + Clone + Send + Sync,
    S: BuildHasher + Clone + Send + Sync,
{
    fn decide_all(&self, keys: &[K]) -> usize {
        keys.iter().filter(|key| black_box(self.check_key(key)).is_ok()).count()
    }
}

/// Behind a lock, since its calls take `&mut self`. Of its three stores the periodic one is the fastest: it sweeps
/// once a minute, the others every so many requests.
struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<PeriodicStore>>,
    capacity: i64,
    period_secs: i64,
}

impl Throttlecrab {
    fn new(budget: Budget, keys: usize) -> Throttlecrab {
        Throttlecrab {
            limiter: Mutex::new(throttlecrab::RateLimiter::new(PeriodicStore::with_capacity(keys))),
            capacity: i64::from(budget.capacity),
            period_secs: budget.period.as_secs().cast_signed(),
        }
    }
}

impl Contender<String> for Throttlecrab {
    fn decide_all(&self, keys: &[String]) -> usize {
        let decide = |key: &String| {
            let now = timing::now();
            let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
            limiter.rate_limit(key, self.capacity, 1, self.period_secs, 1, now)
        };
        keys.iter().filter(|key| matches!(black_box(decide(key)), Ok((true, _)))).count()
    }
}
