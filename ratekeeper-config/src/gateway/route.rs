//! Routes of the gateway.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use ratekeeper_rules::response::PolicyName;
use ratekeeper_rules::when::When;

use crate::error::{listed, quoted};
use crate::outside::Environment;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};
use crate::when::when_of;
use crate::{IN_FLIGHT_MAX, ROUTES_MAX, names};

use super::edit::{HeaderEdits, PathEdit, header_edits, path_edit};
use super::time;
use super::upstream::Upstreams;

/// A route: matching requests, their upstream and their limits.
#[derive(Clone, Debug)]
pub struct Route {
    /// The name of the route.
    pub id: String,
    /// The conditions of the route.
    pub when: When,
    /// The upstream, as an index of [`Gateway::upstreams`](crate::Gateway::upstreams).
    pub upstream: usize,
    /// The limits, as indices of [`Config::rules`](crate::Config::rules). Default: all limits of the file.
    pub limits: Vec<usize>,
    /// The concurrency limits, as indices of [`Config::slots`](crate::Config::slots). They are listed in `limits` as
    /// well. Default: all of the file.
    pub slots: Vec<usize>,
    /// Maximum number of requests of the route in flight.
    pub max_in_flight: Option<u32>,
    /// Whether requests of the route are shed last under overload.
    pub is_critical: bool,
    /// Time limit for the upstream to send its response headers.
    pub timeout: Duration,
    /// The edit of the path.
    pub path: PathEdit,
    /// The edits of the request headers sent to the upstream.
    pub request_headers: HeaderEdits,
    /// The edits of the response headers sent to the client.
    pub response_headers: HeaderEdits,
}

/// The kind of a limit in `limits`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A limit with an algorithm, by its index.
    Rule(usize),
    /// A concurrency limit, by its index.
    Slots(usize),
    /// An invalid limit, whose error has been recorded.
    Wrong,
}

/// The names of all limits of a file.
pub(crate) struct LimitNames<'n> {
    names: Vec<&'n str>,
    kinds: HashMap<&'n str, Kind>,
}

impl<'n> LimitNames<'n> {
    pub(crate) fn new(all: &[(&'n str, Kind)]) -> LimitNames<'n> {
        LimitNames {
            // Invalid names have been reported where they are defined.
            names: all.iter().map(|(name, _)| *name).filter(|name| PolicyName::new(name).is_ok()).collect(),
            kinds: all.iter().copied().collect(),
        }
    }
}

/// The same maximum as for the name of a limit.
const ID_CHARS_MAX: usize = PolicyName::LENGTH_MAX;
/// Maximum number of names in a message, and of their characters in total: more than the longest name has.
const TOLD_MAX: usize = 20;
const TOLD_CHARS_MAX: usize = 300;

const EXAMPLE: &str =
    "write as in `{ id: api, path: /api/**, upstream: http://127.0.0.1:8081, limits: [per-user] }`";
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3_600);

/// `gateway` is the node that contains the routes.
pub(super) fn routes(
    reader: &mut Reader,
    gateway: &Node,
    nodes: Vec<&Node>,
    limits: &LimitNames<'_>,
    upstreams: &mut Upstreams<'_>,
    outside: &dyn Environment,
) -> Option<Vec<Route>> {
    if nodes.len() > ROUTES_MAX {
        let what = format!("there are {} routes, and a gateway has at most {ROUTES_MAX}", nodes.len());
        reader.wrong(gateway.place, what, "join routes by patterns, as in `/api/**`");
        return None;
    }
    let mut ids = HashSet::new();
    let mut routes: Vec<Route> = Vec::new();
    for node in nodes {
        let Some(fields) = reader.fields(node, "a route", names::ROUTE, EXAMPLE) else { continue };
        let id = needed(reader, &fields, "id").and_then(|node| route_id(reader, node));
        if let (Some(id), Some(entry)) = (id, fields.entry("id"))
            && !ids.insert(id)
        {
            let what = format!("a second route is called {}", quoted(id));
            reader.wrong(entry.node.place, what, "give each route a name of its own");
        }
        if let Some(route) = route(reader, &fields, id, limits, upstreams, outside) {
            routes.push(route);
        }
    }
    for (name, place) in std::mem::take(&mut reader.routes_named) {
        if !ids.contains(name.as_str()) && !reader.is_full() {
            let known: Vec<&str> = routes.iter().map(|route| route.id.as_str()).collect();
            let choice = format!("the routes are {}", told(&known));
            let what = format!("{} is not a route of the gateway", quoted(&name));
            let instead = reader.given_instead(&name, &known, &choice);
            reader.wrong(place, what, instead);
        }
    }
    Some(routes)
}

fn route(
    reader: &mut Reader,
    fields: &Fields<'_>,
    id: Option<&str>,
    limits: &LimitNames<'_>,
    upstreams: &mut Upstreams<'_>,
    outside: &dyn Environment,
) -> Option<Route> {
    // Each field is read even if another is invalid, so that all errors are reported together.
    let upstream = needed(reader, fields, "upstream").and_then(|node| upstreams.number(reader, node));
    let when = when_of(reader, fields);
    if let Some(entry) = fields.entry("limits")
        && matches!(entry.node.typed, Typed::Nothing)
    {
        let instead = "write limits of this file, `[]` for none of them, or remove `limits` for all";
        reader.wrong(entry.place, "there is nothing behind `limits`", instead);
    }
    let (limits, slots) = named_limits(reader, fields.get("limits"), limits);
    let max_in_flight =
        fields.get("max_in_flight").and_then(|node| reader.whole(node, "max_in_flight", IN_FLIGHT_MAX));
    let is_critical =
        reader.or(fields.get("critical"), false, |reader, node| reader.yes_or_no(node, "critical"));
    let timeout = time(reader, fields, "timeout", "a timeout", TIMEOUT_DEFAULT, TIMEOUTS);
    let path = path_edit(reader, fields, &when);
    let mut headers = |name| fields.get(name).map(|node| header_edits(reader, node, name, outside));
    let (request_headers, response_headers) = (headers("request_headers"), headers("response_headers"));
    Some(Route {
        id: id?.to_owned(),
        when,
        upstream: upstream?,
        limits,
        slots,
        max_in_flight,
        is_critical,
        timeout,
        path,
        request_headers: request_headers.unwrap_or_default(),
        response_headers: response_headers.unwrap_or_default(),
    })
}

/// The name of a route, which appears in messages and logs.
fn route_id<'n>(reader: &mut Reader, node: &'n Node) -> Option<&'n str> {
    let id = reader.name(node, EXAMPLE)?;
    let length = id.chars().count();
    let what = if length > ID_CHARS_MAX {
        format!("the name {} has {length} characters, and {ID_CHARS_MAX} are the most", quoted(id))
    } else if id.contains(char::is_control) {
        format!("the name {} has a character that cannot be seen", quoted(id))
    } else {
        return Some(id);
    };
    reader.wrong(node.place, what, "write letters, digits and dashes, as in `api`");
    None
}

/// The names defined by a file, or as many of them as fit a message.
fn told(names: &[&str]) -> String {
    let mut chars = 0;
    let is_too_long = |name: &&str| {
        chars += name.chars().count();
        chars > TOLD_CHARS_MAX
    };
    match names.iter().take(TOLD_MAX).position(is_too_long) {
        Some(end) => format!("{} and {} more", names[..end].join(", "), names.len() - end),
        None => listed(names, "and"),
    }
}

/// The indices of limits and of concurrency limits.
pub(crate) fn named_limits(
    reader: &mut Reader,
    node: Option<&Node>,
    known: &LimitNames<'_>,
) -> (Vec<usize>, Vec<usize>) {
    let (mut limits, mut slots) = (Vec::new(), Vec::new());
    let mut take = |kind: Kind| match kind {
        Kind::Rule(number) => limits.push(number),
        Kind::Slots(number) => slots.push(number),
        Kind::Wrong => {}
    };
    let Some(node) = node else {
        known.names.iter().filter_map(|name| known.kinds.get(name)).for_each(|kind| take(*kind));
        return (limits, slots);
    };
    let mut seen = HashSet::new();
    for node in reader.list(node) {
        let Some(word) = reader.word(node) else { continue };
        match known.kinds.get(word) {
            Some(kind) if seen.insert(word) => take(*kind),
            Some(_) => {
                let what = format!("{} stands here twice", quoted(word));
                reader.wrong(node.place, what, "remove one of the two");
            }
            None => {
                let choice = match known.names.as_slice() {
                    [] => "there are no limits in this file; write one under `limits`".to_owned(),
                    names => format!("the limits are {}", told(names)),
                };
                let what = format!("{} is not a limit of this file", quoted(word));
                let instead = reader.given_instead(word, &known.names, &choice);
                reader.wrong(node.place, what, instead);
            }
        }
    }
    (limits, slots)
}

fn needed<'n>(reader: &mut Reader, fields: &Fields<'n>, name: &str) -> Option<&'n Node> {
    if !fields.has(name) {
        reader.wrong(fields.place, format!("{} has no {name}", fields.owner), EXAMPLE);
    }
    fields.get(name)
}
