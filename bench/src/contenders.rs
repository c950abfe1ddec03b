//! The contenders, each called in its fastest usual way.
//!
//! Every contender borrows the key, reads its own clock as in production, passes its whole result to [`black_box`],
//! and reports whether the request was allowed.

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
use ratekeeper::{Limit, Limiter, Rate, RefillStyle};
use serde::Serialize;
use throttlecrab::PeriodicStore;

use crate::timing;

/// A limiter with a limit and an allocated table.
pub(crate) trait Contender<K>: Sync {
    /// Decides a request for each key in turn; returns the number allowed.
    fn decide_all(&self, keys: &[K]) -> usize;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ContenderKind {
    /// Allowed or denied only, as governor returns.
    Allows,
    /// The whole decision: remaining budget and waits.
    Check,
    /// The whole decision, at a time that is read once for sixteen.
    CheckAt,
    CheckMany,
    Governor,
    GovernorAhash,
    Throttlecrab,
}

/// Keys per call of `check_many`, and per reading of the clock for `check_at`.
const BATCH: usize = 16;

impl ContenderKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ContenderKind::Allows => "allows",
            ContenderKind::Check => "check",
            ContenderKind::CheckAt => "check_at(16)",
            ContenderKind::CheckMany => "check_many(16)",
            ContenderKind::Governor => "governor",
            ContenderKind::GovernorAhash => "governor+ahash",
            ContenderKind::Throttlecrab => "throttlecrab",
        }
    }
}

/// A budget that all contenders support: a burst of `capacity`, and one more unit per `period`.
#[derive(Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) capacity: u32,
    pub(crate) period: Duration,
}

impl Budget {
    /// Never exhausted, and refilled so slowly that no key becomes idle and is evicted.
    pub(crate) const AMPLE: Budget = Budget { capacity: 50_000_000, period: Duration::from_secs(60) };
    /// Exhausted for the rest of the run by [`Budget::SPENT_BY`] requests. Not 1, because throttlecrab never denies a
    /// request with a budget of 1.
    pub(crate) const SCANT: Budget = Budget { capacity: 2, period: Duration::from_secs(86_400) };
    pub(crate) const SPENT_BY: usize = 2;

    pub(crate) fn token_bucket(self) -> Result<Limit, Box<dyn Error>> {
        Ok(Limit::token_bucket(self.capacity, Rate::new(1, self.period)?, RefillStyle::Smooth)?)
    }

    fn quota(self) -> Result<Quota, Box<dyn Error>> {
        let capacity = NonZeroU32::new(self.capacity).ok_or("a capacity of 0")?;
        Ok(Quota::with_period(self.period).ok_or("a period of 0")?.allow_burst(capacity))
    }
}

/// A key type, and the contenders that support it.
pub(crate) trait KeyType: Hash + Sized {
    const NAME: &'static str;
    const CONTENDERS: &'static [ContenderKind];

    /// Creates a contender with an empty table for `keys` keys.
    fn contender(
        kind: ContenderKind,
        budget: Budget,
        keys: usize,
    ) -> Result<Box<dyn Contender<Self>>, Box<dyn Error>>;
}

impl KeyType for u64 {
    const NAME: &'static str = "u64";
    const CONTENDERS: &'static [ContenderKind] = &[
        ContenderKind::Allows,
        ContenderKind::Check,
        ContenderKind::CheckAt,
        ContenderKind::CheckMany,
        ContenderKind::Governor,
        ContenderKind::GovernorAhash,
    ];

    fn contender(
        kind: ContenderKind,
        budget: Budget,
        keys: usize,
    ) -> Result<Box<dyn Contender<u64>>, Box<dyn Error>> {
        any_key(kind, budget, keys)
    }
}

impl KeyType for String {
    const NAME: &'static str = "String";
    const CONTENDERS: &'static [ContenderKind] = &[
        ContenderKind::Allows,
        ContenderKind::Check,
        ContenderKind::CheckAt,
        ContenderKind::CheckMany,
        ContenderKind::Governor,
        ContenderKind::GovernorAhash,
        ContenderKind::Throttlecrab,
    ];

    fn contender(
        kind: ContenderKind,
        budget: Budget,
        keys: usize,
    ) -> Result<Box<dyn Contender<String>>, Box<dyn Error>> {
        match kind {
            ContenderKind::Throttlecrab => Ok(Box::new(Throttlecrab::new(budget, keys))),
            other => any_key(other, budget, keys),
        }
    }
}

fn any_key<K>(
    kind: ContenderKind,
    budget: Budget,
    keys: usize,
) -> Result<Box<dyn Contender<K>>, Box<dyn Error>>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
{
    Ok(match kind {
        ContenderKind::Allows => Box::new(Allows(ratekeeper(budget.token_bucket()?, keys)?)),
        ContenderKind::Check => Box::new(ratekeeper(budget.token_bucket()?, keys)?),
        ContenderKind::CheckAt => Box::new(At(ratekeeper(budget.token_bucket()?, keys)?)),
        ContenderKind::CheckMany => Box::new(Many(ratekeeper(budget.token_bucket()?, keys)?)),
        ContenderKind::Governor => Box::new(RateLimiter::keyed(budget.quota()?)),
        ContenderKind::GovernorAhash => {
            Box::new(RateLimiter::dashmap_with_hasher(budget.quota()?, ahash::RandomState::new()))
        }
        ContenderKind::Throttlecrab => return Err("throttlecrab takes text keys only".into()),
    })
}

/// Creates Ratekeeper's limiter with any of its limits.
pub(crate) fn ratekeeper(limit: Limit, keys: usize) -> Result<Limiter, Box<dyn Error>> {
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

struct At(Limiter);

impl<K: Hash> Contender<K> for At {
    fn decide_all(&self, keys: &[K]) -> usize {
        let decide = |batch: &[K]| {
            let now = self.0.now();
            batch.iter().filter(|key| black_box(self.0.check_at(now, *key, 1)).allowed).count()
        };
        keys.chunks(BATCH).map(decide).sum()
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

/// Locked, because its calls take `&mut self`. The periodic store is the fastest of its three: it sweeps once a
/// minute, the others after a number of requests.
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
