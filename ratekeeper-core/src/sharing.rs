//! Settings of a limit that several processes share through a store.

use std::time::Duration;

/// What decides while the store is unavailable.
///
/// ```
/// use ratekeeper_core::FailurePolicy;
///
/// // Four processes: each enforces a quarter of the limit locally.
/// let failure = FailurePolicy::Local { instances: 4 };
/// assert_ne!(failure, FailurePolicy::default(), "the default assumes a single process");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailurePolicy {
    /// Every request is allowed.
    Open,
    /// Every request is denied.
    Closed,
    /// Each process enforces its share of the limit in memory: the limit divided by the number of processes. Counting
    /// starts at zero with the first failure.
    Local {
        /// Number of processes that share the limit.
        instances: u32,
    },
}

impl FailurePolicy {
    /// How long a decision may take before the policy decides, unless configured otherwise.
    pub const DEADLINE_DEFAULT: Duration = Duration::from_millis(20);
}

impl Default for FailurePolicy {
    /// [`Local`](FailurePolicy::Local) with a single process.
    fn default() -> FailurePolicy {
        FailurePolicy::Local { instances: 1 }
    }
}

/// How a process leases budget of a limit, to spend it without calling the shared store.
///
/// ```
/// use std::time::Duration;
/// use ratekeeper_core::Lease;
///
/// let lease = Lease { hold: Duration::from_millis(50), ..Lease::new(20) };
/// assert!(lease.hold <= Lease::HOLD_MAX);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Maximum units per lease of one key.
    pub max: u32,
    /// How long a lease is held.
    pub hold: Duration,
}

impl Lease {
    /// Leases at most `max` units, for [`HOLD_DEFAULT`](Lease::HOLD_DEFAULT).
    pub fn new(max: u32) -> Lease {
        Lease { max, hold: Lease::HOLD_DEFAULT }
    }

    /// How long a lease is held unless configured otherwise.
    pub const HOLD_DEFAULT: Duration = Duration::from_millis(100);

    /// The longest that a lease may be held.
    pub const HOLD_MAX: Duration = Duration::from_secs(1);
}
