//! Why a request is rejected before its limits are checked.

use std::fmt;

use crate::key::NoKey;

/// Why a rule forbids a request whatever its limit decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForbiddenReason {
    /// The client or the key is on the rule's deny list.
    DenyList,
    /// The request lacks a part of the key that the rule requires.
    MissingKey,
}

impl ForbiddenReason {
    /// Its name in logs.
    pub fn name(self) -> &'static str {
        match self {
            ForbiddenReason::DenyList => "deny_list",
            ForbiddenReason::MissingKey => "missing_key",
        }
    }
}

impl fmt::Display for ForbiddenReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ForbiddenReason::DenyList => "this client is on a deny list",
            ForbiddenReason::MissingKey => "the request lacks a key that a limit requires",
        })
    }
}

/// Why a request is denied or rejected before its limits are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// The request is on a rule's deny list, or lacks a required part of its key.
    Forbidden {
        /// Index of the rule.
        rule: usize,
        /// Which of the two.
        reason: ForbiddenReason,
    },
    /// The request's key is ambiguous.
    Ambiguous(NoKey),
}
