//! Failure policies: turns an unavailable store into a verdict. `concurrency.rs` does the same for permits.

use std::borrow::Cow;
use std::time::Duration;

use ratekeeper_core::{Decision, FailurePolicy, Limit, RetryAfter};
use smallvec::{SmallVec, smallvec};

use super::SettingsError;
use super::breaker::PROBE_EVERY;
use crate::clock::SharedClock;
use crate::memory::{Bounds, Memory, WhenFull};
use crate::store::{Charge, ChargeError, InlineLimit, Key, Verdict};

/// Memory bounds of local limits.
const BOUNDS: Bounds = Bounds { max_keys: 100_000, max_bytes: 64 << 20, when_full: WhenFull::Share };

/// The failure policies of the limits, and the memory store of the local ones.
#[derive(Debug)]
pub(crate) struct Fallback {
    limits: Box<[LimitFallback]>,
    memory: Memory<SharedClock>,
    /// The policy of inline limits.
    default_policy: FailurePolicy,
}

/// The failure policy of a limit.
#[derive(Debug)]
enum LimitFallback {
    Open(Limit),
    Closed(Limit),
    /// The index of its share in the memory store.
    Local(usize),
}

impl Fallback {
    pub(crate) fn new(
        limits: &[(Limit, FailurePolicy)],
        default_policy: FailurePolicy,
        clock: SharedClock,
    ) -> Fallback {
        let (limits, shares) = fallbacks(limits);
        Fallback { limits, memory: Memory::new(&shares, clock, BOUNDS), default_policy }
    }

    /// Creates policies for new limits, with state migration: limit n continues limit `from[n]`, if any.
    pub(crate) fn reload(
        &self,
        limits: &[(Limit, FailurePolicy)],
        from: &[Option<usize>],
    ) -> Result<Fallback, SettingsError> {
        let (limits, shares) = fallbacks(limits);
        let before = |(number, fallback): (usize, &LimitFallback)| {
            matches!(fallback, LimitFallback::Local(_)).then(|| {
                match self.limits.get((*from.get(number)?)?) {
                    Some(LimitFallback::Local(share)) => Some(*share),
                    _ => None,
                }
            })
        };
        let from: Vec<Option<usize>> = limits.iter().enumerate().filter_map(before).collect();
        let memory =
            self.memory.reload(&shares, &from, &[], BOUNDS).map_err(|_| SettingsError::LocalMemory)?;
        Ok(Fallback { memory, limits, default_policy: self.default_policy })
    }

    /// Decides an inline limit without Redis, by the default policy; `local` decides by this process's share of the limit,
    /// if there is one.
    pub(crate) fn verdict_inline(
        &self,
        limit: InlineLimit<'_>,
        key: Key,
        cost: u32,
        is_peek: bool,
    ) -> Result<Verdict, ChargeError> {
        let full = match limit {
            InlineLimit::Limit(limit) => Cow::Borrowed(limit),
            InlineLimit::Gcra(gcra) => Cow::Owned(gcra.to_limit()),
        };
        let decide = |share: InlineLimit<'_>| self.memory.decide_inline(share, key, cost, is_peek);
        let verdict = match self.default_policy {
            FailurePolicy::Open => Verdict { decisions: smallvec![unlimited(&full)], ..Verdict::default() },
            FailurePolicy::Closed => closed_verdict(&full),
            FailurePolicy::Local { instances } => {
                let local = match limit {
                    InlineLimit::Limit(limit) => {
                        limit.share(instances).map(|share| decide(InlineLimit::Limit(&share)))
                    }
                    InlineLimit::Gcra(gcra) => {
                        gcra.share(instances).map(|share| decide(InlineLimit::Gcra(&share)))
                    }
                };
                local.unwrap_or_else(|| Ok(closed_verdict(&full)))?
            }
        };
        Ok(Verdict { is_degraded: true, ..verdict })
    }

    /// Decides without Redis. The charges must name existing limits.
    pub(crate) fn verdict(&self, charges: &[Charge], is_peek: bool) -> Result<Verdict, ChargeError> {
        let mut local = SmallVec::<[Charge; 4]>::new();
        let mut is_closed = false;
        for charge in charges {
            match self.limits[charge.limit] {
                LimitFallback::Open(_) => {}
                LimitFallback::Closed(_) => is_closed = true,
                LimitFallback::Local(share) => local.push(Charge { limit: share, ..*charge }),
            }
        }
        // If a closed limit denies the request, nothing is charged.
        let local = self.memory.charge_or_peek(&local, is_closed || is_peek)?;
        let mut local = local.decisions.into_iter();
        let decisions = charges.iter().map(|charge| match &self.limits[charge.limit] {
            LimitFallback::Open(limit) => unlimited(limit),
            LimitFallback::Closed(limit) => closed(limit),
            LimitFallback::Local(_) => local.next().unwrap_or(crate::store::NO_LIMIT),
        });
        let at = self.memory.now();
        Ok(Verdict { decisions: decisions.collect(), is_degraded: true, is_closed, at })
    }
}

/// The policies, and the shares of the local limits in the same order.
fn fallbacks(limits: &[(Limit, FailurePolicy)]) -> (Box<[LimitFallback]>, Vec<Limit>) {
    let mut shares = Vec::new();
    let limits = limits.iter().map(|(limit, policy)| match *policy {
        FailurePolicy::Open => LimitFallback::Open(limit.clone()),
        FailurePolicy::Closed => LimitFallback::Closed(limit.clone()),
        FailurePolicy::Local { instances } => match limit.share(instances) {
            Some(share) => {
                shares.push(share);
                LimitFallback::Local(shares.len() - 1)
            }
            // The share of an instance is less than one request, so all are denied.
            None => LimitFallback::Closed(limit.clone()),
        },
    });
    (limits.collect(), shares)
}

/// The decision of a fresh key, for any cost.
fn unlimited(limit: &Limit) -> Decision {
    Decision {
        allowed: true,
        limit: limit.limit(),
        remaining: Decision::UNKNOWN,
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
        retry_after: RetryAfter::After(PROBE_EVERY),
        reset_after: PROBE_EVERY,
        delay: Duration::ZERO,
    }
}
