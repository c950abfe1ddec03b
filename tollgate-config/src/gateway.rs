//! The gateway: where it listens, what goes where, and how much it bears.

mod address;
mod edit;
mod listener;
mod route;
mod upstream;

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::names;
use crate::outside::Outside;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};

pub use address::Address;
pub use address::is_link_local;
pub use edit::{HeaderEdits, PathEdit};
pub(crate) use listener::address_taken;
pub use listener::{Listener, Tls};
pub use route::Route;
pub(crate) use route::{Kind, LimitNames, named_limits};
pub use upstream::{Balance, Eject, Health, Protocol, Upstream};

/// The gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// Where it listens: at least one.
    pub listeners: Vec<Listener>,
    /// What goes where. The first that fits counts.
    pub routes: Vec<Route>,
    /// To where: those with a name, then one for each URL that a route has written itself.
    pub upstreams: Vec<Upstream>,
    /// How long it waits for clients.
    pub timeouts: Timeouts,
    /// The most connections of clients.
    pub max_connections: usize,
    /// The most requests under way, of all routes together.
    pub max_in_flight: usize,
    /// Whether each request is logged.
    pub access_log: bool,
}

impl Gateway {
    /// One that listens nowhere: of a file that has only other doors.
    pub fn none() -> Gateway {
        Gateway {
            listeners: Vec::new(),
            routes: Vec::new(),
            upstreams: Vec::new(),
            timeouts: Timeouts::default(),
            max_connections: CONNECTIONS_DEFAULT as usize,
            max_in_flight: IN_FLIGHT_DEFAULT as usize,
            access_log: false,
        }
    }
}

/// How long the gateway waits for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For the head of a request.
    pub header: Duration,
    /// For the next part of a body.
    pub body: Duration,
    /// For the next request of a connection.
    pub idle: Duration,
    /// For the next byte of a tunnel, from either side: a WebSocket, or whatever else a connection has become.
    pub tunnel: Duration,
    /// For requests under way, once it is told to end.
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            header: Duration::from_secs(10),
            body: Duration::from_secs(15),
            idle: Duration::from_secs(60),
            tunnel: Duration::from_secs(3_600),
            drain: Duration::from_secs(30),
        }
    }
}

const EXAMPLE: &str = "write as in `gateway: { listen: 127.0.0.1:8080, routes: [...] }`";
const TIMEOUTS_EXAMPLE: &str =
    "write as in `timeouts: { header: 10s, body: 15s, idle: 60s, tunnel: 1h, drain: 30s }`";
const CONNECTIONS_DEFAULT: u32 = 10_000;
const IN_FLIGHT_DEFAULT: u32 = 2_000;
/// The most that a gateway can be told to bear: sockets and requests are memory, too.
const BORNE_MAX: u32 = 1_000_000;
/// Less than this would cut off clients that are only far away.
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3_600);
/// What is spoken in a tunnel may have long silences.
const TUNNELS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(24 * 3_600);
/// Whoever wants to end at once may.
const DRAINS: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3_600);

pub(crate) fn gateway(
    reader: &mut Reader,
    node: &Node,
    limits: &LimitNames<'_>,
    outside: &dyn Outside,
) -> Option<Gateway> {
    let fields = reader.fields(node, "gateway", names::GATEWAY, EXAMPLE)?;
    let listeners = listener::listeners(reader, fields.get("listen"), outside);
    let timeouts = reader.or(fields.get("timeouts"), Timeouts::default(), timeouts);
    let max_connections = count(reader, &fields, "max_connections", CONNECTIONS_DEFAULT, 1..=BORNE_MAX);
    let max_in_flight = count(reader, &fields, "max_in_flight", IN_FLIGHT_DEFAULT, 1..=BORNE_MAX);
    let access_log =
        reader.or(fields.get("access_log"), true, |reader, node| reader.yes_or_no(node, "access_log"));
    let mut upstreams = upstream::Upstreams::read(reader, fields.get("upstreams"), outside);
    let nodes = fields.get("routes").map_or(Vec::new(), |node| reader.list(node));
    if nodes.is_empty() && !reader.is_full() {
        reader.wrong(node.place, "the gateway has no routes", EXAMPLE);
    }
    let routes = route::routes(reader, node, nodes, limits, &mut upstreams, outside)?;
    Some(Gateway {
        listeners,
        routes,
        upstreams: upstreams.all,
        timeouts,
        max_connections: max_connections as usize,
        max_in_flight: max_in_flight as usize,
        access_log,
    })
}

fn timeouts(reader: &mut Reader, node: &Node) -> Option<Timeouts> {
    let fields = reader.fields(node, "timeouts", names::TIMEOUTS, TIMEOUTS_EXAMPLE)?;
    let usual = Timeouts::default();
    Some(Timeouts {
        header: time(reader, &fields, "header", "a timeout", usual.header, TIMEOUTS),
        body: time(reader, &fields, "body", "a timeout", usual.body, TIMEOUTS),
        idle: time(reader, &fields, "idle", "a timeout", usual.idle, TIMEOUTS),
        tunnel: time(reader, &fields, "tunnel", "a timeout", usual.tunnel, TUNNELS),
        drain: time(reader, &fields, "drain", "a drain", usual.drain, DRAINS),
    })
}

/// A length of time under a name; `what` it is, in words.
fn time(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    what: &str,
    default: Duration,
    range: RangeInclusive<Duration>,
) -> Duration {
    let (from, to) = range.into_inner();
    reader.or(fields.get(name), default, |reader, node| reader.length(node, what, from, to))
}

/// A number under a name.
fn count(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    default: u32,
    range: RangeInclusive<u32>,
) -> u32 {
    reader.or(fields.get(name), default, |reader, node| reader.number(node, name, range))
}

/// Whether `off` stands here, for what there is none of. YAML of old takes that for `false`, and so do some editors.
pub(crate) fn is_off(node: &Node) -> bool {
    matches!(&node.typed, Typed::Word(word) if word == "off" || word == "false")
}
