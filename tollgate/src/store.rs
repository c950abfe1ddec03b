//! The seam between a limiter and where its states are kept.

use std::fmt;
use std::future::Future;
use std::hash::Hash;

use smallvec::SmallVec;
use tollgate_core::{Decision, Limit, Time};

/// A key as a store knows it: a seeded hash, never the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(pub(crate) u128);

/// What a request takes from one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Which of the limiter's limits, in the order in which they were given.
    pub limit: usize,
    /// Whose budget.
    pub key: Key,
    /// How much.
    pub cost: u32,
}

/// What several limits say to one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub(crate) decisions: SmallVec<[Decision; 4]>,
    /// The store did not answer, and each limit's policy did.
    pub(crate) is_degraded: bool,
    /// Of these, one has said that nothing passes then.
    pub(crate) is_closed: bool,
    /// When it was decided.
    pub(crate) at: Time,
}

impl Verdict {
    /// Each limit's own decision, in the order of the charges. Where another limit denied the request, `remaining`
    /// is what is left untouched.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// Whether every limit allowed the request.
    pub fn allowed(&self) -> bool {
        self.decisions.iter().all(|decision| decision.allowed)
    }

    /// Whether the store did not answer in time, so that each limit's policy for that case has decided. Never so with
    /// the store in memory.
    pub fn is_degraded(&self) -> bool {
        self.is_degraded
    }

    /// Whether it is denied only because the store did not answer, by a limit whose policy is that nothing passes then.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// When it was decided, by the store's clock: who gives back what was charged names this time.
    pub fn at(&self) -> Time {
        self.at
    }

    /// All of them as one: see [`Decision::and`].
    pub fn decision(&self) -> Decision {
        self.decisions.iter().copied().reduce(Decision::and).unwrap_or(NO_LIMIT)
    }
}

/// The decision of no limit at all.
pub(crate) const NO_LIMIT: Decision = Decision {
    allowed: true,
    limit: u32::MAX,
    remaining: u32::MAX,
    retry_after: tollgate_core::RetryAfter::Now,
    reset_after: std::time::Duration::ZERO,
    delay: std::time::Duration::ZERO,
};

/// Keeps the states of keys, and takes the whole decision about a request in one step.
pub trait Store {
    /// Why a request could not be decided.
    type Error;

    /// The key as this store knows it.
    fn key<K: Hash + ?Sized>(&self, key: &K) -> Key;

    /// Charges all of a request's limits, or none if any of them denies it.
    fn charge(&self, charges: &[Charge]) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Says what the charges would be told, and takes nothing.
    fn look(&self, charges: &[Charge]) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Undoes charges that were made [at a time](Verdict::at): never more comes back than if they had not been made. If
    /// the time is not known, what is given back is the oldest that still counts, and never more than there is. Charges
    /// of a log that counts all requests stay.
    fn give_back(
        &self,
        charges: &[Charge],
        at: Option<Time>,
    ) -> impl Future<Output = Result<(), Unreached>> + Send;

    /// Forgets the keys of these charges: they are as good as new, for these limits.
    fn forget(&self, charges: &[Charge]) -> impl Future<Output = Result<(), Unreached>> + Send;

    /// Charges a limit that is none of its own but came with the request, or looks. Keys are apart from those of other
    /// limits, but what was used of a window counts on where
    /// one comes along that differs only in its size; a bucket of another size is another budget.
    fn charge_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        is_look: bool,
    ) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Undoes a [`charge_by`](Self::charge_by).
    fn give_back_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        at: Option<Time>,
    ) -> impl Future<Output = Result<(), Unreached>> + Send;

    /// Whether its answers are there as soon as they are asked for, so that nobody need wait for them.
    const IS_IMMEDIATE: bool = false;
}

/// A store that did not do what it was told: why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreached(pub String);

impl fmt::Display for Unreached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreached {}

/// A request that names its limits wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChargeError {
    /// There is no such limit.
    UnknownLimit {
        /// The limit that was named.
        limit: usize,
        /// How many the limiter has.
        limits: usize,
    },
    /// One request charges the same key of the same limit twice.
    SameKeyTwice(usize),
    /// A limit that comes with a request is a bucket or a fixed window: of others too much would have to be remembered.
    NotToBeBrought,
}

impl fmt::Display for ChargeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChargeError::UnknownLimit { limit, limits } => {
                write!(f, "there is no limit {limit}: the limiter has {limits}, counted from 0")
            }
            ChargeError::NotToBeBrought => {
                write!(f, "a limit that comes with a request must be a bucket or a fixed window")
            }
            ChargeError::SameKeyTwice(limit) => {
                write!(f, "a key of limit {limit} is charged twice in one request: add the costs up")
            }
        }
    }
}

impl std::error::Error for ChargeError {}

/// Whether every charge names a limit that there is, and none the same key twice.
pub(crate) fn check_charges(charges: &[Charge], limits: usize) -> Result<(), ChargeError> {
    for (index, charge) in charges.iter().enumerate() {
        if charge.limit >= limits {
            return Err(ChargeError::UnknownLimit { limit: charge.limit, limits });
        }
        if charges[..index].iter().any(|other| (other.limit, other.key) == (charge.limit, charge.key)) {
            return Err(ChargeError::SameKeyTwice(charge.limit));
        }
    }
    Ok(())
}
