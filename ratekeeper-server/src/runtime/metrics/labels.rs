//! Labels, with the values of those whose values are fixed. The other values are names from the configuration, never
//! text from clients, so the number of series is bounded.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

/// A label of a metric family.
#[derive(Debug)]
pub(crate) struct Label {
    pub(super) name: &'static str,
    pub(super) values: LabelValues,
}

/// The values that a label can have.
#[derive(Debug)]
pub(super) enum LabelValues {
    /// Names from the configuration; the text describes them.
    Configured(#[cfg_attr(not(test), expect(dead_code, reason = "only the reference has it"))] &'static str),
    /// These, each with its meaning.
    Fixed(&'static [(&'static str, &'static str)]),
}

impl Label {
    const fn configured(name: &'static str, values: &'static str) -> Label {
        Label { name, values: LabelValues::Configured(values) }
    }

    const fn fixed(name: &'static str, values: &'static [(&'static str, &'static str)]) -> Label {
        Label { name, values: LabelValues::Fixed(values) }
    }

    /// Whether the label can have this value.
    pub(super) fn allows(&self, value: &str) -> bool {
        match self.values {
            LabelValues::Configured(_) => true,
            LabelValues::Fixed(values) => values.iter().any(|(name, _)| *name == value),
        }
    }
}

pub(super) const ROUTE: Label =
    Label::configured("route", "id of a route; empty if no route matches the request");
pub(super) const LIMIT: Label =
    Label::configured("limit", "name of a limit; `route ID` for `max_in_flight` of the route `ID`");
pub(super) const UPSTREAM: Label = Label::configured("upstream", "name of an upstream");
pub(super) const ADDRESS: Label = Label::configured("address", "address of an upstream, as configured");
pub(super) const REQUEST_DECISION: Label = Label::fixed("decision", RequestDecision::VALUES);
pub(super) const LIMIT_DECISION: Label = Label::fixed("decision", LimitDecision::VALUES);
pub(super) const STATUS_CLASS: Label = Label::fixed("code", STATUS_CLASSES);
pub(super) const RELOAD_RESULT: Label = Label::fixed("result", ReloadResult::VALUES);
pub(super) const CONNECTION_REJECTION: Label = Label::fixed("reason", ConnectionRejection::VALUES);
pub(super) const REDIS_FAILURE: Label = Label::fixed("reason", REDIS_FAILURES);
pub(super) const ENDPOINT: Label = Label::fixed("endpoint", Endpoint::VALUES);
pub(super) const ENDPOINT_RESULT: Label = Label::fixed("result", EndpointResult::VALUES);
pub(super) const CALL_OUTCOME: Label = Label::fixed("result", CallOutcome::VALUES);
pub(super) const COMMAND_OUTCOME: Label = Label::fixed("result", CommandOutcome::VALUES);
pub(super) const API_CONNECTION_REJECTION: Label = Label::fixed("reason", ApiConnectionRejection::VALUES);

/// The status classes, in order.
pub(super) const STATUS_CLASSES: &[(&str, &str)] = &[
    ("1xx", "the connection changed its protocol"),
    ("2xx", "success"),
    ("3xx", "redirection"),
    ("4xx", "denied, rejected, or an error of the client"),
    ("5xx", "shed, or an error of the gateway, the store or the upstream"),
];

/// The names of `FailureCause`.
const REDIS_FAILURES: &[(&str, &str)] = &[
    ("timeout", "no answer in time"),
    ("unreachable", "no connection"),
    ("overloaded", "too many requests wait for Redis"),
    ("out_of_memory", "`OOM`: Redis has reached its `maxmemory`"),
    ("read_only", "`READONLY`: the server is a replica"),
    ("no_permission", "`NOPERM`: the user may not do what Ratekeeper needs"),
    ("no_authentication", "`NOAUTH` or `WRONGPASS`: the password is missing or wrong"),
    ("wrong_type", "`WRONGTYPE`, or a value that no version of Ratekeeper has written"),
    ("other", "another error reply"),
];

/// A type whose values are the values of a label.
pub(crate) trait LabelType: Copy + 'static {
    const ALL: &'static [Self];

    fn index(self) -> usize;

    fn name(self) -> &'static str;
}

/// Defines a type whose values are those of a label, each with its name and its meaning.
macro_rules! label_types {
    ($(
        $(#[$meta:meta])*
        enum $Type:ident {
            $(#[doc = $meaning:literal] $(#[$default:ident])? $Variant:ident = $name:literal,)*
        }
    )*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $Type {
            $(#[doc = $meaning] $(#[$default])? $Variant,)*
        }

        impl $Type {
            const VALUES: &[(&str, &str)] = &[$(($name, $meaning)),*];
        }

        impl LabelType for $Type {
            const ALL: &'static [$Type] = &[$($Type::$Variant),*];

            fn index(self) -> usize {
                self as usize
            }

            fn name(self) -> &'static str {
                match self {
                    $($Type::$Variant => $name,)*
                }
            }
        }
    )*};
}

label_types! {
    /// The outcome of a request.
    #[derive(Default)]
    enum RequestDecision {
        /// all limits allowed it, or none applied
        Allowed = "allowed",
        /// the store was unavailable, and the failure policy allowed it
        DegradedAllowed = "degraded_allowed",
        /// a limit denied it
        Denied = "denied",
        /// the store was unavailable, and the failure policy is `closed`
        Closed = "closed",
        /// rejected before any limit: malformed, forbidden, or without a route
        Rejected = "rejected",
        /// shed, because the gateway is overloaded
        Shed = "shed",
        /// the client disconnected before a decision
        #[default]
        Undecided = "undecided",
    }

    /// The decision of one limit.
    enum LimitDecision {
        /// within the limit
        Allowed = "allowed",
        /// over the limit
        Denied = "denied",
        /// the key is banned
        Banned = "banned",
        /// a shadow limit would have denied it
        WouldDeny = "would_deny",
        /// the store was unavailable, and the failure policy allowed it
        DegradedAllowed = "degraded_allowed",
        /// the store was unavailable, and the failure policy denied it
        DegradedDenied = "degraded_denied",
    }

    /// The result of a reload.
    enum ReloadResult {
        /// the new configuration is invalid, and the old one stays in effect
        Failure = "failure",
        /// the new configuration is in effect
        Success = "success",
    }

    /// Why the gateway closes a connection on accept.
    enum ConnectionRejection {
        /// `max_connections` is reached
        MaxConnections = "max_connections",
        /// the client has `max_connections_per_client`
        MaxConnectionsPerClient = "max_connections_per_client",
        /// with the PROXY protocol: the peer is not a trusted proxy, so its header does not count
        UntrustedProxy = "untrusted_proxy",
    }

    /// The endpoints of the HTTP API.
    enum Endpoint {
        /// `POST /v1/check`
        Check = "check",
        /// `POST /v1/peek`
        Peek = "peek",
        /// `POST /v1/reset`
        Reset = "reset",
        /// `POST /v1/refund`
        Refund = "refund",
        /// `POST /v1/reserve`
        Reserve = "reserve",
        /// `POST /v1/settle`
        Settle = "settle",
        /// `/v1/authorize`, for proxies
        Authorize = "authorize",
    }

    /// The result of a request of the HTTP API.
    enum EndpointResult {
        /// it was executed, or a peek found that it would be allowed
        Allowed = "allowed",
        /// a limit denies it; of `authorize`, any request that is not allowed
        Denied = "denied",
        /// a 4xx status of another reason
        Rejected = "rejected",
        /// a 5xx status
        Error = "error",
    }

    /// The outcome of a call of the Envoy API.
    enum CallOutcome {
        /// all limits allowed it
        Allowed = "allowed",
        /// a limit denied it
        Denied = "denied",
        /// allowed only because the limit that would deny it is a shadow limit
        WouldDeny = "would_deny",
        /// the call failed or was rejected
        Error = "error",
    }

    /// The outcome of a command of the Redis API.
    enum CommandOutcome {
        /// its limit allowed it
        Allowed = "allowed",
        /// its limit denied it
        Denied = "denied",
        /// there were no limits, or the store was unavailable and the failure policy is `closed`
        Unavailable = "unavailable",
        /// it was answered with another error
        Error = "error",
        /// it checked no limit
        Other = "other",
    }

    /// Why the Redis API closes a connection on accept.
    enum ApiConnectionRejection {
        /// the maximum number of connections is reached
        MaxConnections = "max_connections",
    }
}

/// Counters, one for each value of a label.
#[derive(Debug)]
pub(crate) struct Counters<L>(Box<[AtomicU64]>, PhantomData<L>);

impl<L: LabelType> Default for Counters<L> {
    fn default() -> Counters<L> {
        Counters(L::ALL.iter().map(|_| AtomicU64::new(0)).collect(), PhantomData)
    }
}

impl<L: LabelType> Counters<L> {
    pub(crate) fn count(&self, value: L) {
        self.add(value, 1);
    }

    pub(crate) fn add(&self, value: L, count: u64) {
        self.0[value.index()].fetch_add(count, Ordering::Relaxed);
    }

    /// The counts, with the names of the values.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        L::ALL.iter().zip(&self.0).map(|(value, count)| (value.name(), count.load(Ordering::Relaxed)))
    }
}

impl EndpointResult {
    /// The result of a request that got an error with this status.
    pub(crate) fn of_error(status: u16) -> EndpointResult {
        if status < 500 { EndpointResult::Rejected } else { EndpointResult::Error }
    }
}

#[cfg(test)]
mod tests {
    use ratekeeper::redis::FailureCause;

    use super::*;

    #[test]
    fn failures_of_redis_are_values_of_their_label() {
        let names: Vec<_> = REDIS_FAILURES.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, FailureCause::ALL.map(FailureCause::name));
    }
}
