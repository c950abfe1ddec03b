//! Trace -> decisions -> wherever they go.

use std::fmt;
use std::io::{self, Read};

use tollgate::{BuildError, Decision, Limit, Limiter, ManualClock, Memory, Time};

use crate::batch::KeyHash;
use crate::{Batch, Request, Trace, TraceError};

/// The most memory for logs and keys. A simulation is exact, or says that it is not.
const BYTES_MAX: usize = 16 << 30;

/// The production limiter on a clock that the trace cranks.
#[derive(Debug)]
pub struct Simulator {
    clock: ManualClock,
    limiter: Limiter<Memory<ManualClock>>,
}

impl Simulator {
    /// A limiter with room for `max_keys` keys in use.
    ///
    /// # Errors
    /// If that is no room at all.
    pub fn new(limit: Limit, max_keys: usize) -> Result<Simulator, BuildError> {
        let clock = ManualClock::new(Time::EPOCH);
        let limiter =
            Limiter::builder(limit).clock(clock.clone()).max_keys(max_keys).max_bytes(BYTES_MAX).build()?;
        Ok(Simulator { clock, limiter })
    }

    /// Decides a request at its own time.
    #[inline]
    pub fn decide(&self, request: &Request<'_>) -> Decision {
        self.decide_at(request.time, KeyHash::of(request.key), request.cost)
    }

    #[inline]
    fn decide_at(&self, time: Time, key: KeyHash, cost: u32) -> Decision {
        self.clock.set(time);
        self.limiter.check_n(&key, cost)
    }

    /// Decides the requests of a batch, each at its own time and in order. `decisions` becomes theirs.
    #[inline]
    pub fn decide_batch(&self, batch: &Batch, decisions: &mut Vec<Decision>) {
        for line in batch.lines() {
            self.limiter.prefetch(&line.key);
        }
        decisions.clear();
        decisions.extend(batch.lines().iter().map(|line| self.decide_at(line.time, line.key, line.cost)));
    }

    /// How many requests found no room for their key: if any did, the simulation is not exact.
    pub fn overflowed(&self) -> u64 {
        self.limiter.overflowed()
    }
}

/// Has every request of a trace decided, in order, and hands each decision on.
///
/// # Errors
/// If the trace cannot be read, or what was decided cannot be handed on.
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

/// The same, faster, for those who can do with some requests at a time: hands on all that there are, in order.
///
/// # Errors
/// If the trace cannot be read, once all before that is handed on; or if it cannot be handed on.
#[inline]
pub fn replay_batches<R: Read>(
    trace: &mut Trace<R>,
    mut hand_on: impl FnMut(&Batch) -> io::Result<()>,
) -> Result<(), ReplayError> {
    let mut batch = Batch::default();
    loop {
        let read = trace.next_batch(&mut batch);
        hand_on(&batch).map_err(ReplayError::Output)?;
        read.map_err(ReplayError::Trace)?;
        if batch.is_empty() {
            return Ok(());
        }
    }
}

/// Why a replay ended early.
#[derive(Debug)]
pub enum ReplayError {
    /// The trace cannot be read.
    Trace(TraceError),
    /// The decisions cannot be written.
    Output(io::Error),
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplayError::Trace(error) => error.fmt(f),
            ReplayError::Output(error) => write!(f, "cannot write the decisions: {error}"),
        }
    }
}

impl std::error::Error for ReplayError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ReplayError::Trace(error) => Some(error),
            ReplayError::Output(error) => Some(error),
        }
    }
}
