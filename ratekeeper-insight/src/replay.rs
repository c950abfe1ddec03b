//! Replays a trace and passes each decision to the caller.

use std::io::{self, Read};

use ratekeeper::{BuildError, Decision, Limit, Limiter, ManualClock, Memory, Time};

use crate::batch::KeyHash;
use crate::{Batch, Request, Trace, TraceError};

/// Memory limit for logs and keys. A simulation that exceeds it reports that it is not exact.
const BYTES_MAX: usize = 16 << 30;

/// The production limiter on a manual clock set from the trace.
#[derive(Debug)]
pub struct Simulator {
    clock: ManualClock,
    limiter: Limiter<Memory<ManualClock>>,
}

impl Simulator {
    /// Creates a limiter with capacity for `max_keys` active keys.
    ///
    /// # Errors
    /// Returns an error if `max_keys` is zero or too large.
    pub fn new(limit: Limit, max_keys: usize) -> Result<Simulator, BuildError> {
        let clock = ManualClock::new(Time::EPOCH);
        let limiter =
            Limiter::builder(limit).clock(clock.clone()).max_keys(max_keys).max_bytes(BYTES_MAX).build()?;
        Ok(Simulator { clock, limiter })
    }

    /// Decides a request at the request's time.
    #[inline]
    pub fn decide(&self, request: &Request<'_>) -> Decision {
        self.decide_at(request.time, KeyHash::of(request.key), request.cost)
    }

    #[inline]
    fn decide_at(&self, time: Time, key: KeyHash, cost: u32) -> Decision {
        self.clock.set(time);
        self.limiter.check_n(&key, cost)
    }

    /// Replaces `decisions` with those of the batch's requests, each decided at its own time and in order.
    #[inline]
    pub fn decide_batch(&self, batch: &Batch, decisions: &mut Vec<Decision>) {
        self.limiter.prefetch_many(batch.lines().iter().map(|line| &line.key));
        decisions.clear();
        decisions.extend(batch.lines().iter().map(|line| self.decide_at(line.time, line.key, line.cost)));
    }

    /// Returns the number of requests whose key did not fit into memory. If it is not zero, the simulation is not
    /// exact.
    pub fn overflowed(&self) -> u64 {
        self.limiter.overflowed()
    }
}

/// Decides every request of a trace in order and passes each decision to `hand_on`.
///
/// # Errors
/// Returns an error if the trace cannot be read or `hand_on` fails.
#[inline]
pub fn replay<R: Read>(
    trace: &mut Trace<R>,
    mut decide: impl FnMut(&Request<'_>) -> Decision,
    mut hand_on: impl FnMut(&Request<'_>, &Decision) -> io::Result<()>,
) -> Result<(), ReplayError> {
    replay_batches(trace, |batch| {
        batch.requests().try_for_each(|request| hand_on(&request, &decide(&request)))
    })
}

/// Passes the requests of a trace to `hand_on` in batches, in order. Faster than [`replay`].
///
/// # Errors
/// Returns an error if `hand_on` fails, or if the trace cannot be read; the requests before the unreadable line are
/// passed on first.
#[inline]
pub fn replay_batches<R: Read>(
    trace: &mut Trace<R>,
    mut hand_on: impl FnMut(&Batch) -> io::Result<()>,
) -> Result<(), ReplayError> {
    let mut batch = Batch::default();
    loop {
        let read = trace.next_batch(&mut batch);
        hand_on(&batch).map_err(ReplayError::Output)?;
        read?;
        if batch.is_empty() {
            return Ok(());
        }
    }
}

/// Why a replay stopped early.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The decisions cannot be written.
    #[error("cannot write the decisions: {0}")]
    Output(#[source] io::Error),
}
