//! The gateway: listeners, routes, upstreams and bounds.

mod address;
mod edit;
mod listener;
mod route;
mod upstream;

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::environment::Environment;
use crate::names;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, NodeValue};

pub use address::Address;
pub use address::is_link_local;
pub use edit::{HeaderEdits, PathEdit};
pub(crate) use listener::listen_address;
pub use listener::{Listener, Tls};
pub use route::Route;
pub(crate) use route::{ALL, LimitKind, LimitNames, NONE, RouteLimits, named_limits};
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
            header: Duration::from_secs(10),
            body: Duration::from_secs(15),
            idle: Duration::from_secs(60),
            min_rate: 250,
            tunnel: Duration::from_secs(3_600),
            drain: Duration::from_secs(30),
        }
    }
}

const EXAMPLE: &str = "write as in `gateway: { listen: 127.0.0.1:8080, routes: [...] }`";
const TIMEOUTS_EXAMPLE: &str =
    "write as in `timeouts: { header: 10s, body: 15s, idle: 60s, min_rate: 250, tunnel: 1h, drain: 30s }`";
const CONNECTIONS_DEFAULT: u32 = 10_000;
/// Smallest default of `max_connections_per_client`.
const PER_CLIENT_DEFAULT_MIN: u32 = 64;
const IN_FLIGHT_DEFAULT: u32 = 2_000;
/// Upper bound of connections and requests in flight: each of them uses memory.
const CAPACITY_MAX: u32 = 1_000_000;
/// A lower minimum would disconnect clients with a high latency.
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3_600);
/// A higher minimum rate would disconnect clients on mobile networks.
const MIN_RATE_MAX: u32 = 1 << 20;
/// Protocols in a tunnel may be silent for a long time.
const TUNNELS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(24 * 3_600);
/// Zero is allowed: shutdown without draining.
const DRAINS: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3_600);

pub(crate) fn gateway(
    reader: &mut Reader,
    node: &Node,
    limits: &LimitNames<'_>,
    environment: &dyn Environment,
) -> Option<Gateway> {
    let fields = reader.fields(node, "`gateway`", names::GATEWAY, EXAMPLE)?;
    let listeners = listener::listeners(reader, fields.get("listen"), environment);
    let timeouts = reader.or(fields.get("timeouts"), Timeouts::default(), timeouts);
    let max_connections = count(reader, &fields, "max_connections", CONNECTIONS_DEFAULT, 1..=CAPACITY_MAX);
    let max_connections_per_client = count(
        reader,
        &fields,
        "max_connections_per_client",
        per_client_default(max_connections),
        1..=CAPACITY_MAX,
    );
    let max_in_flight = count(reader, &fields, "max_in_flight", IN_FLIGHT_DEFAULT, 1..=CAPACITY_MAX);
    let access_log =
        reader.or(fields.get("access_log"), true, |reader, node| reader.yes_or_no(node, "access_log"));
    let mut upstreams = upstream::Upstreams::read(reader, fields.get("upstreams"), environment);
    upstreams.is_incomplete |= !fields.has("upstreams") && !fields.lacks("upstreams");
    let nodes = fields.get("routes").map_or(Vec::new(), |node| reader.list(node));
    let is_misspelt = !fields.has("routes") && !fields.lacks("routes");
    if nodes.is_empty() && !is_misspelt && !reader.is_full() {
        reader.error(node.position, "the gateway has no routes", EXAMPLE);
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
    (max_connections / 2).max(PER_CLIENT_DEFAULT_MIN)
}

fn timeouts(reader: &mut Reader, node: &Node) -> Option<Timeouts> {
    let fields = reader.fields(node, "`timeouts`", names::TIMEOUTS, TIMEOUTS_EXAMPLE)?;
    let defaults = Timeouts::default();
    Some(Timeouts {
        header: time(reader, &fields, "header", "a timeout", defaults.header, TIMEOUTS),
        body: time(reader, &fields, "body", "a timeout", defaults.body, TIMEOUTS),
        idle: time(reader, &fields, "idle", "a timeout", defaults.idle, TIMEOUTS),
        min_rate: count(reader, &fields, "min_rate", defaults.min_rate, 0..=MIN_RATE_MAX),
        tunnel: time(reader, &fields, "tunnel", "a timeout", defaults.tunnel, TUNNELS),
        drain: time(reader, &fields, "drain", "a drain", defaults.drain, DRAINS),
    })
}

/// Reads the duration of a field; `what` describes it in messages.
fn time(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    message: &str,
    default: Duration,
    range: RangeInclusive<Duration>,
) -> Duration {
    let (from, to) = range.into_inner();
    reader.or(fields.get(name), default, |reader, node| reader.length(node, message, from, to))
}

/// Reads the number of a field.
fn count(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    default: u32,
    range: RangeInclusive<u32>,
) -> u32 {
    reader.or(fields.get(name), default, |reader, node| reader.number(node, name, range))
}

/// Whether the value is `off`. YAML 1.1 parsers, and some editors, turn it into `false`.
pub(crate) fn is_off(node: &Node) -> bool {
    matches!(&node.value, NodeValue::Word(word) if word == "off" || word == "false")
}
