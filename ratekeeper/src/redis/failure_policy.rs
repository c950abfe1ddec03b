//! Failure policies: the only code that turns an unavailable store into a verdict.

use std::time::Duration;

use ratekeeper_core::{Decision, FailurePolicy, Limit, RetryAfter};
use smallvec::{SmallVec, smallvec};

use super::breaker::TRY_EVERY;
use crate::clock::SystemClock;
use crate::memory::{Bounds, Memory, WhenFull};
use crate::store::{Charge, ChargeError, Key, Verdict};

/// Memory bounds of local limits.
const BOUNDS: Bounds = Bounds { max_keys: 100_000, max_bytes: 64 << 20, when_full: WhenFull::Share };

/// The failure policies of the limits, and the memory store of the local ones.
#[derive(Debug)]
pub(crate) struct Fallback {
    limits: Box<[Away]>,
    memory: Memory<SystemClock>,
    /// The policy of inline limits.
    usual: FailurePolicy,
}

/// The failure policy of a limit.
#[derive(Debug)]
enum Away {
    Open(Limit),
    Closed(Limit),
    /// The index of its share in the memory store.
    Local(usize),
}

impl Fallback {
    pub(crate) fn new(limits: &[(Limit, FailurePolicy)], usual: FailurePolicy) -> Fallback {
        let (limits, shares) = away(limits);
        Fallback { limits, memory: Memory::new(&shares, SystemClock::new(), BOUNDS), usual }
    }

    /// Creates policies for new limits, with state migration: limit n continues limit `from[n]`, if any.
    pub(crate) fn renewed(&self, limits: &[(Limit, FailurePolicy)], from: &[Option<usize>]) -> Fallback {
        let (limits, shares) = away(limits);
        let before = |(number, away): (usize, &Away)| {
            matches!(away, Away::Local(_)).then(|| match self.limits.get((*from.get(number)?)?) {
                Some(Away::Local(share)) => Some(*share),
                _ => None,
            })
        };
        let from: Vec<Option<usize>> = limits.iter().enumerate().filter_map(before).collect();
        Fallback { memory: self.memory.renewed(&shares, &from, BOUNDS), limits, usual: self.usual }
    }

    /// Decides an inline limit without Redis.
    pub(crate) fn verdict_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        is_look: bool,
    ) -> Result<Verdict, ChargeError> {
        let verdict = match self.usual {
            FailurePolicy::Open => Verdict { decisions: smallvec![unlimited(limit)], ..Verdict::default() },
            FailurePolicy::Closed => closed_verdict(limit),
            FailurePolicy::Local { instances: nodes } => match limit.share(nodes) {
                Some(share) => self.memory.decide_by(&share, key, cost, is_look)?,
                None => closed_verdict(limit),
            },
        };
        Ok(Verdict { is_degraded: true, ..verdict })
    }

    /// Decides without Redis. The charges must name existing limits.
    pub(crate) fn verdict(&self, charges: &[Charge], is_look: bool) -> Result<Verdict, ChargeError> {
        let mut local = SmallVec::<[Charge; 4]>::new();
        let mut is_closed = false;
        for charge in charges {
            match self.limits[charge.limit] {
                Away::Open(_) => {}
                Away::Closed(_) => is_closed = true,
                Away::Local(share) => local.push(Charge { limit: share, ..*charge }),
            }
        }
        // If a closed limit denies the request, nothing is charged.
        let local = self.memory.charge_or_look(&local, is_closed || is_look)?;
        let mut local = local.decisions.into_iter();
        let decisions = charges.iter().map(|charge| match &self.limits[charge.limit] {
            Away::Open(limit) => unlimited(limit),
            Away::Closed(limit) => closed(limit),
            Away::Local(_) => local.next().unwrap_or(crate::store::NO_LIMIT),
        });
        let at = self.memory.now();
        Ok(Verdict { decisions: decisions.collect(), is_degraded: true, is_closed, at })
    }
}

/// The policies, and the shares of the local limits in the same order.
fn away(limits: &[(Limit, FailurePolicy)]) -> (Box<[Away]>, Vec<Limit>) {
    let mut shares = Vec::new();
    let limits = limits.iter().map(|(limit, failure)| match *failure {
        FailurePolicy::Open => Away::Open(limit.clone()),
        FailurePolicy::Closed => Away::Closed(limit.clone()),
        FailurePolicy::Local { instances: nodes } => match limit.share(nodes) {
            Some(share) => {
                shares.push(share);
                Away::Local(shares.len() - 1)
            }
            // The share of an instance is less than one request, so all are denied.
            None => Away::Closed(limit.clone()),
        },
    });
    (limits.collect(), shares)
}

/// The decision of a fresh key, for any cost.
fn unlimited(limit: &Limit) -> Decision {
    Decision {
        allowed: true,
        limit: limit.limit(),
        remaining: limit.limit(),
        retry_after: RetryAfter::Now,
        reset_after: Duration::ZERO,
        delay: Duration::ZERO,
    }
}

fn closed_verdict(limit: &Limit) -> Verdict {
    Verdict { decisions: smallvec![closed(limit)], is_closed: true, ..Verdict::default() }
}

fn closed(limit: &Limit) -> Decision {
    Decision {
        allowed: false,
        limit: limit.limit(),
        remaining: 0,
        // The next probe of Redis.
        retry_after: RetryAfter::After(TRY_EVERY),
        reset_after: TRY_EVERY,
        delay: Duration::ZERO,
    }
}
