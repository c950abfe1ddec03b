//! The words of which one is chosen, and what each means. The first is the default. The schema is checked against these.

use tollgate_core::{Align, Count, Edge, Failure, Mode, Style};
use tollgate_rules::client::Source;
use tollgate_rules::key::Part;
use tollgate_rules::path::WhenAmbiguous;

use crate::gateway::{Balance, Protocol};
use crate::store::WhenFull;

pub(crate) const STYLES: [(&str, Style); 2] = [("smooth", Style::Smooth), ("stepped", Style::Stepped)];
pub(crate) const MODES: [(&str, Mode); 2] = [("police", Mode::Police), ("shape", Mode::Shape)];
pub(crate) const ALIGNS: [(&str, Align); 2] =
    [("clock", Align::Clock), ("first_request", Align::FirstRequest)];
pub(crate) const COUNTS: [(&str, Count); 2] = [("admitted", Count::Admitted), ("all", Count::All)];
pub(crate) const EDGES: [(&str, Edge); 3] =
    [("weigh", Edge::Weigh), ("drop", Edge::Drop), ("keep", Edge::Keep)];

pub(crate) const WHEN_FULL: [(&str, WhenFull); 3] =
    [("share", WhenFull::Share), ("deny", WhenFull::Deny), ("allow", WhenFull::Allow)];
/// By how many processes the limits are shared is said elsewhere.
pub(crate) const FAILURES: [(&str, Failure); 3] =
    [("local", Failure::Local { nodes: 1 }), ("open", Failure::Open), ("closed", Failure::Closed)];
/// How an address of Redis may begin.
pub(crate) const SCHEMES: [&str; 6] =
    ["redis", "rediss", "unix", "redis+sentinel", "redis+cluster", "rediss+cluster"];

pub(crate) const SOURCES: [(&str, Source); 2] =
    [("x_forwarded_for", Source::XForwardedFor), ("forwarded", Source::Forwarded)];
pub(crate) const AMBIGUOUS: [(&str, WhenAmbiguous); 2] =
    [("refuse", WhenAmbiguous::Refuse), ("keep", WhenAmbiguous::Keep)];
/// Whether a difference is ignored.
pub(crate) const SPELLINGS: [(&str, bool); 2] = [("exact", false), ("ignore", true)];

/// By which tokens may be signed.
pub(crate) const SIGNATURES: [&str; 12] = [
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA", "HS256", "HS384",
    "HS512",
];

/// The parts of a request that need nothing else said.
pub(crate) const PLAIN_PARTS: [(&str, Part); 4] =
    [("ip", Part::Ip), ("method", Part::Method), ("host", Part::Host), ("route", Part::Route)];

pub(crate) const BALANCES: [(&str, Balance); 2] =
    [("round_robin", Balance::RoundRobin), ("least_requests", Balance::LeastRequests)];
pub(crate) const PROTOCOLS: [(&str, Protocol); 2] = [("http1", Protocol::Http1), ("http2", Protocol::Http2)];
