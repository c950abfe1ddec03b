//! The interface between a limiter and the store of its states.

use std::future::Future;
use std::hash::Hash;

use ratekeeper_core::{Decision, Gcra, Limit, Time};
use smallvec::SmallVec;

/// A key in a store: a seeded hash, never the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(pub(crate) u128);

/// The cost of a request for one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Index of the limit, in the order in which the limiter was given them.
    pub limit: usize,
    /// The key whose budget is charged.
    pub key: Key,
    /// Units to charge.
    pub cost: u32,
}

/// The outcome over all limits of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub(crate) decisions: SmallVec<[Decision; 4]>,
    /// The store was unavailable, and each limit's failure policy decided.
    pub(crate) is_degraded: bool,
    /// Denied by a limit whose failure policy is closed.
    pub(crate) is_closed: bool,
    /// When the request was decided.
    pub(crate) at: Time,
}

impl Verdict {
    /// Each limit's decision, in the order of the charges. If another limit denied the request, `remaining` is the
    /// uncharged budget.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// Whether every limit allowed the request.
    pub fn allowed(&self) -> bool {
        self.decisions.iter().all(|decision| decision.allowed)
    }

    /// Whether the store did not answer in time, so that each limit's failure policy decided. Always false with the
    /// store in memory.
    pub fn is_degraded(&self) -> bool {
        self.is_degraded
    }

    /// Whether the request was denied only because the store did not answer, by a limit whose failure policy is
    /// closed.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// When the request was decided, by the store's clock. A refund of its charges states this time.
    pub fn at(&self) -> Time {
        self.at
    }

    /// All decisions combined into one: see [`Decision::and`].
    pub fn decision(&self) -> Decision {
        self.decisions.iter().copied().reduce(Decision::and).unwrap_or(NO_LIMIT)
    }
}

/// The decision of a limiter without limits.
pub(crate) const NO_LIMIT: Decision = Decision {
    allowed: true,
    limit: u32::MAX,
    remaining: u32::MAX,
    retry_after: ratekeeper_core::RetryAfter::Now,
    reset_after: std::time::Duration::ZERO,
    delay: std::time::Duration::ZERO,
};

/// Keeps the states of keys, and decides each request in one atomic step.
pub trait Store {
    /// The reason why a request could not be decided.
    type Error;

    /// Hashes a key with this store's seed.
    fn key<K: Hash + ?Sized>(&self, key: &K) -> Key;

    /// Charges all of a request's limits atomically: if any limit denies the request, none is charged.
    fn charge(&self, charges: &[Charge]) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Decides without charging.
    fn peek(&self, charges: &[Charge]) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Refunds charges made [at a time](Verdict::at). Afterwards a key has at most the budget that it would have
    /// without the charge. If the time is not known, the oldest units that still count are refunded, and never more
    /// than are charged. Charges of a log that counts all requests are not refunded.
    fn refund(
        &self,
        charges: &[Charge],
        at: Option<Time>,
    ) -> impl Future<Output = Result<(), StoreUnavailable>> + Send;

    /// Resets the keys of these charges to their full budget, for these limits.
    fn reset(&self, charges: &[Charge]) -> impl Future<Output = Result<(), StoreUnavailable>> + Send;

    /// Charges an inline limit, or peeks if `is_peek` is set.
    fn charge_inline(
        &self,
        limit: InlineLimit<'_>,
        key: Key,
        cost: u32,
        is_peek: bool,
    ) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Refunds a [`charge_inline`](Self::charge_inline).
    fn refund_inline(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        at: Option<Time>,
    ) -> impl Future<Output = Result<(), StoreUnavailable>> + Send;

    /// Whether the store's futures are ready at the first poll, so that callers need not wait for them.
    const IS_IMMEDIATE: bool = false;
}

/// A limit that a request brings along, for [`Store::charge_inline`].
#[derive(Clone, Copy, Debug)]
pub enum InlineLimit<'a> {
    /// Its keys are separate from those of other limits. Inline limits that differ only in their size share the used
    /// units, except leaky buckets and token buckets with smooth refill: a bucket of another size is another budget.
    Limit(&'a Limit),
    /// A token bucket whose parameters may differ from request to request: a key has one state, whatever the
    /// parameters. Its keys are separate from those of all limits.
    Gcra(&'a Gcra),
}

impl InlineLimit<'_> {
    /// The limit or capacity.
    pub fn limit(self) -> u32 {
        match self {
            InlineLimit::Limit(limit) => limit.limit(),
            InlineLimit::Gcra(gcra) => gcra.bucket().capacity(),
        }
    }
}

/// The store did not execute a call; contains the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StoreUnavailable(pub String);

/// An invalid charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChargeError {
    /// The limit does not exist.
    #[error("there is no limit {limit}: the limiter has {limits}, counted from 0")]
    UnknownLimit {
        /// Index of the limit in the charge.
        limit: usize,
        /// How many limits the limiter has.
        limits: usize,
    },
    /// One request charges the same key of the same limit twice.
    #[error("a key of limit {0} is charged twice in one request: add the costs up")]
    SameKeyTwice(usize),
    /// An inline limit must be a bucket or a fixed window: the states of other algorithms are too large.
    #[error("a limit that comes with a request must be a bucket or a fixed window")]
    UnsupportedInline,
}

/// Checks that every charge names an existing limit, and that no two name the same key of one limit.
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
