//! What goes where.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use tollgate_rules::answer::PolicyName;
use tollgate_rules::when::When;

use crate::error::{listed, quoted};
use crate::outside::Outside;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};
use crate::when::when_of;
use crate::{IN_FLIGHT_MAX, ROUTES_MAX, names};

use super::edit::{HeaderEdits, PathEdit, header_edits, path_edit};
use super::time;
use super::upstream::Upstreams;

/// What goes where.
#[derive(Clone, Debug)]
pub struct Route {
    /// Its name.
    pub id: String,
    /// Which requests.
    pub when: When,
    /// To where, as a number of [`Gateway::upstreams`](crate::Gateway::upstreams).
    pub upstream: usize,
    /// By which limits, as numbers of [`Config::rules`](crate::Config::rules): all of them if the route names none.
    pub limits: Vec<usize>,
    /// By which bounds on requests under way, as numbers of [`Config::slots`](crate::Config::slots): those that `limits`
    /// names too, and all of them if it is not there.
    pub slots: Vec<usize>,
    /// How many requests of the whole route may be under way at once.
    pub in_flight: Option<u32>,
    /// Whether it is the last to be refused when the gateway has more to do than it can bear.
    pub is_critical: bool,
    /// How long the upstream may take until the head of its answer is there.
    pub timeout: Duration,
    /// What becomes of the path.
    pub path: PathEdit,
    /// What becomes of the headers that the upstream gets.
    pub request_headers: HeaderEdits,
    /// What becomes of the headers that the client gets.
    pub response_headers: HeaderEdits,
}

/// What a name under `limits` is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A limit with an algorithm, by its number.
    Rule(usize),
    /// A bound on requests under way, by its number.
    Slots(usize),
    /// Something that is wrong, of which the reader knows.
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
            // What is wrong with the others has been told where they stand.
            names: all.iter().map(|(name, _)| *name).filter(|name| PolicyName::new(name).is_ok()).collect(),
            kinds: all.iter().copied().collect(),
        }
    }
}

/// As long as the name of a limit.
const ID_CHARS_MAX: usize = PolicyName::LENGTH_MAX;
/// Names of which a line is told, and how many characters they may have together: more than the longest one.
const TOLD_MAX: usize = 20;
const TOLD_CHARS_MAX: usize = 300;

const EXAMPLE: &str =
    "write as in `{ id: api, path: /api/**, upstream: http://127.0.0.1:8081, limits: [per-user] }`";
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3_600);

/// `gateway` is where the routes stand.
pub(super) fn routes(
    reader: &mut Reader,
    gateway: &Node,
    nodes: Vec<&Node>,
    limits: &LimitNames<'_>,
    upstreams: &mut Upstreams<'_>,
    outside: &dyn Outside,
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
    outside: &dyn Outside,
) -> Option<Route> {
    // Each part is read even if another is wrong, so that everything is told at once.
    let upstream = needed(reader, fields, "upstream").and_then(|node| upstreams.number(reader, node));
    let when = when_of(reader, fields);
    if let Some(entry) = fields.entry("limits")
        && matches!(entry.node.typed, Typed::Nothing)
    {
        let instead = "write limits of this file, `[]` for none of them, or remove `limits` for all";
        reader.wrong(entry.place, "there is nothing behind `limits`", instead);
    }
    let (limits, slots) = named_limits(reader, fields.get("limits"), limits);
    let in_flight = fields.get("in_flight").and_then(|node| reader.whole(node, "in_flight", IN_FLIGHT_MAX));
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
        in_flight,
        is_critical,
        timeout,
        path,
        request_headers: request_headers.unwrap_or_default(),
        response_headers: response_headers.unwrap_or_default(),
    })
}

/// A route's name: people read it in messages and logs.
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

/// The names of a file's own things, or as many as a line has room for.
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

/// The numbers of limits and of bounds on requests under way.
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
