//! Routes of the gateway.

use std::collections::HashMap;
use std::time::Duration;

use ratekeeper_rules::response::PolicyName;
use ratekeeper_rules::when::When;

use crate::environment::Environment;
use crate::error::{Position, listed, quoted};
use crate::reader::{Fields, Reader};
use crate::table::{
    Constraint, Count, Field, Flag, ListOf, Mapping, Or, SECTION, Section, TextValue, Time, WORD, hours, ms,
    secs, string,
};
use crate::tree::{Node, NodeValue};
use crate::when::{CONDITIONS, when_of};
use crate::{IN_FLIGHT_MAX, ROUTES_MAX};

use super::edit::{HEADERS, HeaderEdits, PathEdit, header_edits, path_edit};
use super::upstream::Upstreams;

/// A route: matching requests, their upstream and their limits.
#[derive(Clone, Debug)]
pub struct Route {
    /// The name of the route.
    pub id: String,
    /// Where the file defines the route.
    pub(crate) position: Position,
    /// The names of its limits and concurrency limits.
    pub limit_names: Vec<String>,
    /// The conditions of the route.
    pub when: When,
    /// The upstream, as an index of [`Gateway::upstreams`](crate::Gateway::upstreams).
    pub upstream: usize,
    /// The limits, as indices of [`Config::rules`](crate::Config::rules).
    pub limits: Vec<usize>,
    /// The concurrency limits, as indices of [`Config::concurrency`](crate::Config::concurrency). They are listed in `limits` as
    /// well. Default: all of the file.
    pub concurrency: Vec<usize>,
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
pub(crate) enum LimitKind {
    /// A limit with an algorithm, by its index.
    Rule(usize),
    /// A concurrency limit, by its index.
    ConcurrencyLimit(usize),
    /// An invalid limit, whose error has been recorded.
    Wrong,
}

/// The names of all limits of a file.
pub(crate) struct LimitNames<'n> {
    /// Whether `limits` could not be read, so that names cannot be checked.
    pub(crate) is_incomplete: bool,
    names: Vec<&'n str>,
    kinds: HashMap<&'n str, LimitKind>,
}

impl<'n> LimitNames<'n> {
    pub(crate) fn new(all: &[(&'n str, LimitKind)], is_incomplete: bool) -> LimitNames<'n> {
        LimitNames {
            is_incomplete,
            // Invalid names have been reported where they are defined.
            names: all.iter().map(|(name, _)| *name).filter(|name| PolicyName::new(name).is_ok()).collect(),
            kinds: all.iter().copied().collect(),
        }
    }
}

/// The same maximum as for the name of a limit.
const ID_CHARS_MAX: usize = PolicyName::LENGTH_MAX;
/// Maximum number of names in a message, and of their characters in total: more than the longest name has.
const SHOWN_NAMES_MAX: usize = 20;
const SHOWN_NAMES_CHARS_MAX: usize = 300;

/// Words in place of a list of limits. No limit can have one of these names.
pub(crate) const ALL: &str = "all";
pub(crate) const NONE: &str = "none";
const LIMITS_HELP: &str = "write `limits: [per-user]` with names of limits, `limits: all` or `limits: none`";

pub(super) static ROUTE: Section = Section {
    name: "route",
    meaning: "Route: matching requests and their upstream.",
    example: "write as in `{ id: api, path: /api/**, upstream: http://127.0.0.1:8081, limits: [per-user] }`",
    fields: &[
        &[&ID],
        &CONDITIONS,
        &[
            &Field::new(
                "upstream",
                "URL, such as `http://127.0.0.1:8081`, or the name of an upstream.",
                string("URL or name"),
            )
            .required(),
            &Field::new(
                "limits",
                "Limits that apply to the route: a list of names, `all` or `none`.",
                ListOf::any(WORD.named("limit name")),
            )
            .required(),
            &MAX_IN_FLIGHT,
            &CRITICAL,
            &TIMEOUT,
            &Field::new(
                "strip_prefix",
                "Prefix to remove from the path, such as `/api`.",
                string("path").pattern("^/"),
            ),
            &Field::new(
                "rewrite",
                "New path, with the names of the pattern, such as `/v2/{name}/{rest}`.",
                string("path").pattern("^/"),
            ),
            &Field::new(
                "request_headers",
                "Changes to the request headers sent to the upstream.",
                Mapping(&HEADERS),
            ),
            &Field::new(
                "response_headers",
                "Changes to the response headers sent to the client.",
                Mapping(&HEADERS),
            ),
        ],
    ],
    constraints: &[Constraint::AtMostOne(&[&["strip_prefix", "rewrite"]])],
    ..SECTION
};
const ID: Field<TextValue> = Field::new(
    "id",
    "Name of the route.",
    WORD.named("name").chars(1, ID_CHARS_MAX).pattern("^[^\\u0000-\\u001f\\u007f-\\u009f]*$"),
)
.required();
const MAX_IN_FLIGHT: Field<Count> = Field::new(
    "max_in_flight",
    "Maximum number of requests of the route in flight.",
    Count { to: IN_FLIGHT_MAX },
);
const CRITICAL: Field<Or<Flag>> =
    Field::new("critical", "Whether requests of the route are shed last under overload.", Flag).or(false);
const TIMEOUT: Field<Or<Time>> = Field::new(
    "timeout",
    "Time limit for the upstream to send its response headers.",
    Time { subject: "a timeout", from: ms(1), to: hours(1) },
)
.or(secs(30));

/// `gateway` is the node that contains the routes.
pub(super) fn routes(
    reader: &mut Reader,
    gateway: &Node,
    nodes: Vec<&Node>,
    limits: &LimitNames<'_>,
    upstreams: &mut Upstreams<'_>,
    environment: &dyn Environment,
) -> Option<Vec<Route>> {
    if nodes.len() > ROUTES_MAX {
        let message = format!("too many routes: {} of at most {ROUTES_MAX}", nodes.len());
        reader.error(gateway.position, message, "join routes with patterns, as in `/api/**`");
        return None;
    }
    let mut ids = HashMap::new();
    let mut routes: Vec<Route> = Vec::new();
    for node in nodes {
        let Some(fields) = reader.fields(node, "a route", &ROUTE) else { continue };
        let id = needed(reader, &fields, "id").and_then(|node| route_id(reader, node));
        if let (Some(id), Some(entry)) = (id, fields.entry("id")) {
            reader.is_new(&mut ids, id, entry.node.position, |id| format!("duplicate route {}", quoted(id)));
        }
        if let Some(route) = route(reader, &fields, id, limits, upstreams, environment) {
            routes.push(route);
        }
    }
    for (name, position) in std::mem::take(&mut reader.routes_named) {
        if !ids.contains_key(name.as_str()) && !reader.is_full() {
            let known: Vec<&str> = routes.iter().map(|route| route.id.as_str()).collect();
            let choice = format!("Routes: {}", shown_names(&known));
            let message = format!("unknown route {}", quoted(&name));
            let help = reader.file_names_help(&name, &known, &choice);
            reader.error(position, message, help);
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
    environment: &dyn Environment,
) -> Option<Route> {
    // Each field is read even if another is invalid, so that all errors are reported together.
    let upstream = needed(reader, fields, "upstream").and_then(|node| upstreams.number(reader, node));
    let when = when_of(reader, fields);
    let named = limits_of_route(reader, fields, limits);
    let max_in_flight = MAX_IN_FLIGHT.optional(reader, fields);
    let is_critical = CRITICAL.read(reader, fields);
    let timeout = TIMEOUT.read(reader, fields);
    let path = path_edit(reader, fields, &when);
    let mut headers = |name| fields.get(name).map(|node| header_edits(reader, node, name, environment));
    let (request_headers, response_headers) = (headers("request_headers"), headers("response_headers"));
    Some(Route {
        id: id?.to_owned(),
        when,
        upstream: upstream?,
        position: fields.position,
        limit_names: named.names,
        limits: named.rules,
        concurrency: named.concurrency,
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
    let id = reader.name(node, ROUTE.example)?;
    let length = id.chars().count();
    let message = if length > ID_CHARS_MAX {
        format!("the name {} has {length} characters; the maximum is {ID_CHARS_MAX}", quoted(id))
    } else if id.contains(char::is_control) {
        format!("the name {} contains a control character", quoted(id))
    } else {
        return Some(id);
    };
    reader.error(node.position, message, "write letters, digits and dashes, as in `api`");
    None
}

/// The names defined by a file, or as many of them as fit a message.
fn shown_names(names: &[&str]) -> String {
    let mut chars = 0;
    let is_too_long = |name: &&str| {
        chars += name.chars().count();
        chars > SHOWN_NAMES_CHARS_MAX
    };
    match names.iter().take(SHOWN_NAMES_MAX).position(is_too_long) {
        Some(end) => format!("{} and {} more", names[..end].join(", "), names.len() - end),
        None => listed(names),
    }
}

/// The limits of a route or of forward auth: their names and indices.
#[derive(Default)]
pub(crate) struct RouteLimits {
    pub(crate) names: Vec<String>,
    pub(crate) rules: Vec<usize>,
    pub(crate) concurrency: Vec<usize>,
}

impl RouteLimits {
    /// All limits of the file.
    pub(crate) fn all(known: &LimitNames<'_>) -> RouteLimits {
        let mut limits = RouteLimits::default();
        for name in &known.names {
            limits.push(name, known);
        }
        limits
    }

    fn push(&mut self, name: &str, known: &LimitNames<'_>) {
        self.names.push(name.to_owned());
        match known.kinds.get(name) {
            Some(LimitKind::Rule(number)) => self.rules.push(*number),
            Some(LimitKind::ConcurrencyLimit(number)) => self.concurrency.push(*number),
            Some(LimitKind::Wrong) | None => {}
        }
    }
}

/// A route must say which limits apply, so that a limit is never added or left out by accident.
fn limits_of_route(reader: &mut Reader, fields: &Fields<'_>, known: &LimitNames<'_>) -> RouteLimits {
    match fields.get("limits") {
        Some(node) => named_limits(reader, node, known),
        None => {
            if fields.lacks("limits") {
                reader.error(fields.position, "the route does not say which limits apply", LIMITS_HELP);
            }
            RouteLimits::default()
        }
    }
}

/// Reads a list of limits of the file, `all` or `none`.
pub(crate) fn named_limits(reader: &mut Reader, node: &Node, known: &LimitNames<'_>) -> RouteLimits {
    match &node.value {
        NodeValue::Word(word) if word == ALL => return RouteLimits::all(known),
        NodeValue::Word(word) if word == NONE => return RouteLimits::default(),
        _ => {}
    }
    let mut limits = RouteLimits::default();
    let mut seen = HashMap::new();
    for node in reader.list(node) {
        let Some(word) = reader.word(node) else { continue };
        match known.kinds.get(word) {
            Some(_) => {
                let message = |word: &&str| format!("duplicate limit {}", quoted(word));
                if reader.is_new(&mut seen, word, node.position, message) {
                    limits.push(word, known);
                }
            }
            None if known.is_incomplete => {}
            None => {
                let choice = match known.names.as_slice() {
                    [] => "the file has no limits; define it under `limits`".to_owned(),
                    names => format!("Limits: {}", shown_names(names)),
                };
                let message = format!("unknown limit {}", quoted(word));
                let help = reader.file_names_help(word, &known.names, &choice);
                reader.error(node.position, message, help);
            }
        }
    }
    limits
}

fn needed<'n>(reader: &mut Reader, fields: &Fields<'n>, name: &str) -> Option<&'n Node> {
    reader.require_names(fields, &[name]);
    fields.get(name)
}
