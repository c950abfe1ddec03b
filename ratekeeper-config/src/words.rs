//! Enumeration values and their meanings.

use ratekeeper_core::{EdgePolicy, FailurePolicy, LeakyMode, LogPolicy, RefillStyle, WindowAlign};
use ratekeeper_rules::client::Source;
use ratekeeper_rules::key::KeyPart;
use ratekeeper_rules::path::AmbiguousPathPolicy;

use crate::apis::EnvoyHeaderNames;
use crate::envoy::Unit;
use crate::file::LogKeys;
use crate::gateway::{Balance, Protocol};
use crate::store::WhenFull;

pub(crate) const STYLES: [(&str, RefillStyle); 2] =
    [("smooth", RefillStyle::Smooth), ("stepped", RefillStyle::Stepped)];
pub(crate) const MODES: [(&str, LeakyMode); 2] = [("police", LeakyMode::Police), ("shape", LeakyMode::Shape)];
pub(crate) const ALIGNS: [(&str, WindowAlign); 2] =
    [("clock", WindowAlign::Clock), ("first_request", WindowAlign::FirstRequest)];
pub(crate) const COUNTS: [(&str, LogPolicy); 2] =
    [("admitted", LogPolicy::Admitted), ("all", LogPolicy::All)];
pub(crate) const EDGES: [(&str, EdgePolicy); 3] =
    [("weigh", EdgePolicy::Weigh), ("drop", EdgePolicy::Drop), ("keep", EdgePolicy::Keep)];

pub(crate) const WHEN_FULL: [(&str, WhenFull); 3] =
    [("share", WhenFull::Share), ("deny", WhenFull::Deny), ("allow", WhenFull::Allow)];
/// The number of instances is configured separately.
pub(crate) const FAILURES: [(&str, FailurePolicy); 3] = [
    ("local", FailurePolicy::Local { instances: 1 }),
    ("open", FailurePolicy::Open),
    ("closed", FailurePolicy::Closed),
];
/// Schemes of Redis addresses.
pub(crate) const SCHEMES: [&str; 6] =
    ["redis", "rediss", "unix", "redis+sentinel", "redis+cluster", "rediss+cluster"];

pub(crate) const SOURCES: [(&str, Source); 2] =
    [("x_forwarded_for", Source::XForwardedFor), ("forwarded", Source::Forwarded)];
pub(crate) const AMBIGUOUS: [(&str, AmbiguousPathPolicy); 2] =
    [("reject", AmbiguousPathPolicy::Reject), ("keep", AmbiguousPathPolicy::Keep)];
/// Whether a difference is ignored.
pub(crate) const CASE: [(&str, bool); 2] = [("exact", false), ("ignore", true)];
pub(crate) const TRAILING_SLASH: [(&str, bool); 2] = [("ignore", true), ("exact", false)];

pub(crate) const LOG_KEYS: [(&str, LogKeys); 3] =
    [("hash", LogKeys::Hash), ("off", LogKeys::Off), ("text", LogKeys::Text)];

/// Signature algorithms of tokens.
pub(crate) const SIGNATURES: [(&str, ()); 12] = [
    ("RS256", ()),
    ("RS384", ()),
    ("RS512", ()),
    ("PS256", ()),
    ("PS384", ()),
    ("PS512", ()),
    ("ES256", ()),
    ("ES384", ()),
    ("EdDSA", ()),
    ("HS256", ()),
    ("HS384", ()),
    ("HS512", ()),
];

/// Attributes of a request that need no name.
pub(crate) const PLAIN_PARTS: [(&str, KeyPart); 4] =
    [("ip", KeyPart::Ip), ("method", KeyPart::Method), ("host", KeyPart::Host), ("route", KeyPart::Route)];

pub(crate) const BALANCES: [(&str, Balance); 2] =
    [("round_robin", Balance::RoundRobin), ("least_requests", Balance::LeastRequests)];
pub(crate) const UNITS: [(&str, Unit); 7] = [
    ("second", Unit::Second),
    ("minute", Unit::Minute),
    ("hour", Unit::Hour),
    ("day", Unit::Day),
    ("week", Unit::Week),
    ("month", Unit::Month),
    ("year", Unit::Year),
];
pub(crate) const ENVOY_HEADER_NAMES: [(&str, EnvoyHeaderNames); 2] =
    [("x-ratelimit", EnvoyHeaderNames::XRateLimit), ("ratelimit", EnvoyHeaderNames::RateLimit)];
pub(crate) const PROTOCOLS: [(&str, Protocol); 2] = [("http1", Protocol::Http1), ("http2", Protocol::Http2)];

/// The word of a value.
pub(crate) fn name<T: PartialEq>(words: &[(&'static str, T)], value: &T) -> &'static str {
    words.iter().find(|(_, it)| it == value).map_or("", |(word, _)| word)
}
