//! How a limit is kept that several processes share through a store.

use std::time::Duration;

/// What a limit does while its store does not answer.
///
/// ```
/// use tollgate_core::Failure;
///
/// // Four processes: each enforces a quarter of the limit by itself.
/// let failure = Failure::Local { nodes: 4 };
/// assert_ne!(failure, Failure::default(), "unless this is said, a process takes itself for the only one");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Everything passes.
    Open,
    /// Nothing passes.
    Closed,
    /// Each process enforces its share of the limit by itself, in memory: the limit divided by the number of
    /// processes. Counting begins at zero with the first failure.
    Local {
        /// How many processes share the limit.
        nodes: u32,
    },
}

impl Default for Failure {
    /// [`Local`](Failure::Local), alone.
    fn default() -> Failure {
        Failure::Local { nodes: 1 }
    }
}

/// How a process takes a limit's budget ahead, to spend it without asking the store that it shares with others.
///
/// ```
/// use std::time::Duration;
/// use tollgate_core::Lease;
///
/// let lease = Lease { hold: Duration::from_millis(50), ..Lease::of(20) };
/// assert!(lease.hold <= Lease::HOLD_MAX);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The most units that are taken at once, for one key.
    pub most: u32,
    /// How long they are kept.
    pub hold: Duration,
}

impl Lease {
    /// So many units at most, kept for a tenth of a second.
    pub fn of(most: u32) -> Lease {
        Lease { most, hold: Duration::from_millis(100) }
    }

    /// The longest that units may be kept.
    pub const HOLD_MAX: Duration = Duration::from_secs(1);
}
