//! Failed calls, counted by cause, and what to do about each.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::StoreError;

/// Why a call to Redis failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureCause {
    /// No answer in time.
    TimedOut,
    /// No connection.
    Unreachable,
    /// Too many requests wait for Redis.
    Overloaded,
    /// `OOM`: Redis has reached its `maxmemory`.
    OutOfMemory,
    /// `READONLY`: the server is a replica.
    ReadOnly,
    /// `NOPERM`: the user may not do what Ratekeeper needs.
    NoPermission,
    /// `NOAUTH` or `WRONGPASS`: the password is missing or wrong.
    NoAuthentication,
    /// `WRONGTYPE`, or a value that no version of Ratekeeper has written.
    WrongType,
    /// Another error reply.
    Other,
}

impl FailureCause {
    /// All causes.
    pub const ALL: [FailureCause; 9] = [
        FailureCause::TimedOut,
        FailureCause::Unreachable,
        FailureCause::Overloaded,
        FailureCause::OutOfMemory,
        FailureCause::ReadOnly,
        FailureCause::NoPermission,
        FailureCause::NoAuthentication,
        FailureCause::WrongType,
        FailureCause::Other,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            FailureCause::TimedOut => "timeout",
            FailureCause::Unreachable => "unreachable",
            FailureCause::Overloaded => "overloaded",
            FailureCause::OutOfMemory => "out_of_memory",
            FailureCause::ReadOnly => "read_only",
            FailureCause::NoPermission => "no_permission",
            FailureCause::NoAuthentication => "no_authentication",
            FailureCause::WrongType => "wrong_type",
            FailureCause::Other => "other",
        }
    }

    /// What to do about it.
    pub fn help(self) -> Option<&'static str> {
        match self {
            FailureCause::OutOfMemory => Some(
                "Redis has reached maxmemory: raise it, or set maxmemory-policy to volatile-ttl (all keys of Ratekeeper \
                 have an expiry)",
            ),
            FailureCause::ReadOnly => Some(
                "this server is a replica: write the address of the master, or redis+sentinel:// or redis+cluster:// \
                 to have it found",
            ),
            FailureCause::NoPermission => Some(
                "the user of the address needs the rights that the documentation of the Redis store lists",
            ),
            FailureCause::NoAuthentication => {
                Some("write user and password in the address: redis://USER:PASSWORD@HOST:6379")
            }
            FailureCause::WrongType => Some(
                "another program has written to a key that begins with rate_limit: (WRONGTYPE): delete the key, and \
                 give Ratekeeper a database or a namespace of its own",
            ),
            _ => None,
        }
    }

    /// By the code in the text of an error.
    fn of_text(text: &str) -> Option<FailureCause> {
        let causes = [
            ("OOM", FailureCause::OutOfMemory),
            ("READONLY", FailureCause::ReadOnly),
            ("NOPERM", FailureCause::NoPermission),
            ("ACL failure", FailureCause::NoPermission),
            ("NOAUTH", FailureCause::NoAuthentication),
            ("WRONGPASS", FailureCause::NoAuthentication),
            ("WRONGTYPE", FailureCause::WrongType),
        ];
        causes.into_iter().find_map(|(code, cause)| text.contains(code).then_some(cause))
    }
}

impl StoreError {
    /// Why the call failed; `None` if no call was made, because the circuit breaker is open.
    pub fn cause(&self) -> Option<FailureCause> {
        Some(match self {
            StoreError::CircuitOpen => return None,
            StoreError::TimedOut => FailureCause::TimedOut,
            StoreError::Overloaded => FailureCause::Overloaded,
            StoreError::UnexpectedReply => FailureCause::WrongType,
            StoreError::Unreachable(why) | StoreError::ConnectionLost(why) => {
                FailureCause::of_text(why).unwrap_or(FailureCause::Unreachable)
            }
            StoreError::ErrorReply(why) => FailureCause::of_text(why).unwrap_or(FailureCause::Other),
        })
    }
}

/// The failed calls of a store.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    counts: [AtomicU64; FailureCause::ALL.len()],
    last: Mutex<Option<StoreError>>,
}

impl Failures {
    pub(crate) fn record(&self, error: &StoreError) {
        let Some(cause) = error.cause() else { return };
        self.counts[cause as usize].fetch_add(1, Ordering::Relaxed);
        // One of several concurrent errors is enough.
        if let Ok(mut last) = self.last.try_lock() {
            // A timeout often follows from the error before it, which says more.
            let says_more = cause != FailureCause::TimedOut || last.is_none();
            if says_more {
                *last = Some(error.clone());
            }
        }
    }

    /// The last error since the last call.
    pub(crate) fn take_last(&self) -> Option<StoreError> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn counts(&self) -> [(FailureCause, u64); FailureCause::ALL.len()] {
        FailureCause::ALL.map(|cause| (cause, self.counts[cause as usize].load(Ordering::Relaxed)))
    }
}
