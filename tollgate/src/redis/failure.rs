//! What is decided while Redis does not answer: the one place where a store's failure becomes a verdict.

use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tollgate_core::{Decision, Failure, Limit, RetryAfter};

use super::breaker::TRY_EVERY;
use crate::clock::SystemClock;
use crate::memory::{Bounds, Memory, WhenFull};
use crate::store::{Charge, ChargeError, Key, Verdict};

/// What is remembered while Redis is away.
const BOUNDS: Bounds = Bounds { max_keys: 100_000, max_bytes: 64 << 20, when_full: WhenFull::Share };

/// The limits' policies, and the store of those that are local.
#[derive(Debug)]
pub(crate) struct Fallback {
    limits: Box<[Away]>,
    memory: Memory<SystemClock>,
    /// Of limits that come with requests.
    usual: Failure,
}

/// A limit while Redis is away.
#[derive(Debug)]
enum Away {
    Open(Limit),
    Closed(Limit),
    /// Its share is so numbered in the memory store.
    Local(usize),
}

impl Fallback {
    pub(crate) fn new(limits: &[(Limit, Failure)], usual: Failure) -> Fallback {
        let (limits, shares) = away(limits);
        Fallback { limits, memory: Memory::new(&shares, SystemClock::new(), BOUNDS), usual }
    }

    /// Goes on where this one stands: limit n is what limit `from[n]` was here, if any.
    pub(crate) fn renewed(&self, limits: &[(Limit, Failure)], from: &[Option<usize>]) -> Fallback {
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

    /// Decides without Redis by a limit that came with the request.
    pub(crate) fn verdict_by(
        &self,
        limit: &Limit,
        key: Key,
        cost: u32,
        is_look: bool,
    ) -> Result<Verdict, ChargeError> {
        let verdict = match self.usual {
            Failure::Open => Verdict { decisions: smallvec![unlimited(limit)], ..Verdict::default() },
            Failure::Closed => closed_verdict(limit),
            Failure::Local { nodes } => match limit.share(nodes) {
                Some(share) => self.memory.decide_by(&share, key, cost, is_look)?,
                None => closed_verdict(limit),
            },
        };
        Ok(Verdict { is_degraded: true, ..verdict })
    }

    /// Decides without Redis. The charges name limits that there are.
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
        // Denied by another limit: nothing is taken here.
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

/// The policies, and the shares of those that are local, in their order.
fn away(limits: &[(Limit, Failure)]) -> (Box<[Away]>, Vec<Limit>) {
    let mut shares = Vec::new();
    let limits = limits.iter().map(|(limit, failure)| match *failure {
        Failure::Open => Away::Open(limit.clone()),
        Failure::Closed => Away::Closed(limit.clone()),
        Failure::Local { nodes } => match limit.share(nodes) {
            Some(share) => {
                shares.push(share);
                Away::Local(shares.len() - 1)
            }
            // Less than one request for each: none may pass.
            None => Away::Closed(limit.clone()),
        },
    });
    (limits.collect(), shares)
}

/// As a fresh key would be told, whatever the cost.
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
        // When Redis is asked again.
        retry_after: RetryAfter::After(TRY_EVERY),
        reset_after: TRY_EVERY,
        delay: Duration::ZERO,
    }
}
