//! Trace -> decisions -> wherever they go.

use std::fmt;
use std::io::{self, Read};

use tollgate::{BuildError, Decision, Limit, Limiter, ManualClock, Memory, Time};

use crate::{Request, Trace, TraceError};

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
        let limiter = Limiter::builder(limit).clock(clock.clone()).max_keys(max_keys).build()?;
        Ok(Simulator { clock, limiter })
    }

    /// Decides a request at its own time.
    #[inline]
    pub fn decide(&self, request: &Request<'_>) -> Decision {
        self.clock.set(request.time);
        self.limiter.check_n(request.key, request.cost)
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
    while let Some(request) = trace.next_request().map_err(ReplayError::Trace)? {
        let decision = decide(&request);
        hand_on(&request, &decision).map_err(ReplayError::Output)?;
    }
    Ok(())
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
