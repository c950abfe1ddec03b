//! The gateway: listeners, routes, upstreams and bounds.

mod address;
mod edit;
mod listener;
mod route;
mod upstream;

use std::time::Duration;

use crate::ROUTES_MAX;
use crate::environment::Environment;
use crate::reader::Reader;
use crate::table::{Field, Flag, ListOf, Mapping, Or, SECTION, Section, Time, Whole, days, hours, ms, secs};
use crate::tree::{Node, NodeValue};

pub use address::Address;
pub use address::is_link_local;
pub use edit::{HeaderEdits, PathEdit};
use listener::LISTEN;
pub(crate) use listener::listen_address;
pub use listener::{Listener, Tls};
use route::ROUTE;
pub use route::Route;
pub(crate) use route::{ALL, LimitKind, LimitNames, NONE, RouteLimits, named_limits};
use upstream::UPSTREAMS;
pub use upstream::{Balance, Health, OutlierEjection, Protocol, Upstream, UpstreamTimeouts};

/// The gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// The listeners; at least one.
    pub listeners: Vec<Listener>,
    /// The routes. The first match applies.
    pub routes: Vec<Route>,
    /// The named upstreams, then one for each URL written in a route.
    pub upstreams: Vec<Upstream>,
    /// Timeouts of client connections.
    pub timeouts: Timeouts,
    /// Maximum number of client connections.
    pub max_connections: usize,
    /// Maximum number of connections of one client address; an IPv6 /64 counts as one address.
    pub max_connections_per_client: usize,
    /// Maximum number of requests in flight over all routes.
    pub max_in_flight: usize,
    /// Whether each request is logged.
    pub access_log: bool,
}

/// Timeouts of client connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Time limit to receive the headers of a request.
    pub header: Duration,
    /// Maximum time between two parts of a request body.
    pub body: Duration,
    /// Maximum time between two requests of a connection, and for which a client reads nothing of a response.
    pub idle: Duration,
    /// Minimum rate of a client in bytes per second: data sent or read restores the `body` or `idle` time only at this rate.
    /// With 0, any data restores the whole time.
    pub min_rate: u32,
    /// Maximum time without data in either direction of a tunnel: a WebSocket or another upgraded connection.
    pub tunnel: Duration,
    /// Time limit for requests in flight during a graceful shutdown.
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            header: HEADER.default(),
            body: BODY.default(),
            idle: IDLE.default(),
            min_rate: MIN_RATE.default(),
            tunnel: TUNNEL.default(),
            drain: DRAIN.default(),
        }
    }
}

pub(crate) static GATEWAY: Section = Section {
    name: "gateway",
    meaning: "Gateway: a reverse proxy that enforces the limits.",
    example: "write as in `gateway: { listen: 127.0.0.1:8080, routes: [...] }`",
    fields: &[&[
        &LISTEN,
        &Field::new(
            "routes",
            "Routes. The first match applies.",
            ListOf { item: Mapping(&ROUTE), from: 1, to: ROUTES_MAX },
        )
        .required(),
        &UPSTREAMS,
        &Field::section("timeouts", &TIMEOUTS),
        &MAX_CONNECTIONS,
        &MAX_CONNECTIONS_PER_CLIENT,
        &MAX_IN_FLIGHT,
        &ACCESS_LOG,
    ]],
    ..SECTION
};
/// Each connection and each request in flight uses memory.
const CAPACITY: Whole = Whole { from: 1, to: 1_000_000 };
const MAX_CONNECTIONS: Field<Or<Whole>> =
    Field::new("max_connections", "Maximum number of client connections.", CAPACITY).or(10_000);
const MAX_CONNECTIONS_PER_CLIENT: Field<Whole> = Field::new(
    "max_connections_per_client",
    "Maximum number of connections of one client address. An IPv6 /64 counts as one address; trusted proxies have no such bound.",
    CAPACITY,
)
.otherwise("half of `max_connections`, at least 64");
const MAX_IN_FLIGHT: Field<Or<Whole>> =
    Field::new("max_in_flight", "Maximum number of requests in flight over all routes.", CAPACITY).or(2_000);
const ACCESS_LOG: Field<Or<Flag>> =
    Field::new("access_log", "Whether each request is logged.", Flag).or(true);

static TIMEOUTS: Section = Section {
    name: "timeouts",
    meaning: "Timeouts of client connections.",
    example: "write as in `timeouts: { header: 10s, body: 15s, idle: 60s, min_rate: 250, tunnel: 1h, drain: 30s }`",
    fields: &[&[&HEADER, &BODY, &IDLE, &MIN_RATE, &TUNNEL, &DRAIN]],
    ..SECTION
};
/// A lower minimum would disconnect clients with a high latency.
const TIMEOUT: Time = Time { subject: "a timeout", from: ms(100), to: hours(1) };
const HEADER: Field<Or<Time>> =
    Field::new("header", "Time limit to receive the headers of a request.", TIMEOUT).or(secs(10));
const BODY: Field<Or<Time>> =
    Field::new("body", "Maximum time between two parts of a request body.", TIMEOUT).or(secs(15));
const IDLE: Field<Or<Time>> = Field::new(
    "idle",
    "Maximum time between two requests of a connection, and for which a client reads nothing of a response.",
    TIMEOUT,
)
.or(secs(60));
/// A higher maximum would disconnect clients on mobile networks.
const MIN_RATE: Field<Or<Whole>> = Field::new(
    "min_rate",
    "Minimum rate of a client in bytes per second, while the gateway waits for it. A client that sends a body or reads a response more slowly uses up the `body` or `idle` timeout. `0`: any data restores the timeout.",
    Whole { from: 0, to: 1 << 20 },
)
.or(250);
/// Protocols in a tunnel may be silent for a long time.
const TUNNEL: Field<Or<Time>> = Field::new(
    "tunnel",
    "Maximum time without data in either direction of a tunnel, for example a WebSocket.",
    Time { subject: "a timeout", from: ms(100), to: days(1) },
)
.or(hours(1));
/// Zero is allowed: shutdown without draining.
const DRAIN: Field<Or<Time>> = Field::new(
    "drain",
    "Time limit for requests in flight during a graceful shutdown.",
    Time { subject: "a drain", from: secs(0), to: hours(1) },
)
.or(secs(30));

pub(crate) fn gateway(
    reader: &mut Reader,
    node: &Node,
    limits: &LimitNames<'_>,
    environment: &dyn Environment,
) -> Option<Gateway> {
    let fields = reader.fields(node, "`gateway`", &GATEWAY)?;
    let listeners = listener::listeners(reader, fields.get("listen"), environment);
    let timeouts = reader.or(fields.get("timeouts"), Timeouts::default(), timeouts);
    let max_connections = MAX_CONNECTIONS.read(reader, &fields);
    let max_connections_per_client = MAX_CONNECTIONS_PER_CLIENT.optional(reader, &fields);
    let max_connections_per_client =
        max_connections_per_client.unwrap_or_else(|| per_client_default(max_connections));
    let max_in_flight = MAX_IN_FLIGHT.read(reader, &fields);
    let access_log = ACCESS_LOG.read(reader, &fields);
    let mut upstreams = upstream::Upstreams::read(reader, fields.get("upstreams"), environment);
    upstreams.is_incomplete |= !fields.has("upstreams") && !fields.lacks("upstreams");
    let nodes = fields.get("routes").map_or(Vec::new(), |node| reader.list(node));
    let is_misspelt = !fields.has("routes") && !fields.lacks("routes");
    if nodes.is_empty() && !is_misspelt && !reader.is_full() {
        reader.error(node.position, "the gateway has no routes", GATEWAY.example);
    }
    let routes = route::routes(reader, node, nodes, limits, &mut upstreams, environment)?;
    Some(Gateway {
        listeners,
        routes,
        upstreams: upstreams.all,
        timeouts,
        max_connections: max_connections as usize,
        max_connections_per_client: max_connections_per_client as usize,
        max_in_flight: max_in_flight as usize,
        access_log,
    })
}

/// Half of all connections, so that one client cannot take them all; but not few, for clients behind one address.
fn per_client_default(max_connections: u32) -> u32 {
    (max_connections / 2).max(64)
}

fn timeouts(reader: &mut Reader, node: &Node) -> Option<Timeouts> {
    let fields = reader.fields(node, "`timeouts`", &TIMEOUTS)?;
    Some(Timeouts {
        header: HEADER.read(reader, &fields),
        body: BODY.read(reader, &fields),
        idle: IDLE.read(reader, &fields),
        min_rate: MIN_RATE.read(reader, &fields),
        tunnel: TUNNEL.read(reader, &fields),
        drain: DRAIN.read(reader, &fields),
    })
}

/// Whether the value is `off`. YAML 1.1 parsers, and some editors, turn it into `false`.
pub(crate) fn is_off(node: &Node) -> bool {
    matches!(&node.value, NodeValue::Word(word) if word == "off" || word == "false")
}
