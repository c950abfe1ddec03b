//! Upstreams: named ones, and one for each URL written in a route.

use std::collections::HashMap;
use std::time::Duration;

use crate::environment::{Environment, Secret};
use crate::error::{known_help, listed, quoted};
use crate::quantity::ValueError;
use crate::reader::{Entry, Fields, Reader};
use crate::table::{
    Field, ListOf, Mapping, Named, OffOr, Or, Percent, SECTION, SecretText, Section, Short, TextValue, Time,
    Whole, Words, days, hours, ms, secs, string,
};
use crate::tree::{Node, NodeValue};
use crate::{ADDRESSES_MAX, UPSTREAMS_MAX, words};

use super::address::{Address, address};
use super::is_off;

/// An upstream: servers that handle the same requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// The name, or the URL written in a route.
    pub name: String,
    /// The addresses; at least one. Either all use TLS or none does.
    pub addresses: Vec<Address>,
    /// Load balancing.
    pub balance: Balance,
    /// The protocol of the servers.
    pub protocol: Protocol,
    /// Timeouts of connections to the servers.
    pub timeouts: UpstreamTimeouts,
    /// Time without data on an HTTP/2 connection with requests in flight after which the gateway sends a ping.
    pub ping_after: Duration,
    /// Maximum number of connections per address.
    pub max_connections: usize,
    /// The retry budget: maximum share of requests that may be retried, in percent.
    pub retry_percent: u32,
    /// Active health checks, if configured.
    pub health: Option<Health>,
    /// Outlier ejection, unless it is off.
    pub outlier_ejection: Option<OutlierEjection>,
    /// The certificate authority of the servers, in PEM. Default: the authorities of the system.
    pub ca: Option<Secret>,
}

/// Timeouts of connections to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamTimeouts {
    /// Time limit to establish a connection.
    pub connect: Duration,
    /// Maximum time between two parts of a response.
    pub read: Duration,
    /// Time after which an unused connection is closed.
    pub idle: Duration,
}

impl Default for UpstreamTimeouts {
    fn default() -> UpstreamTimeouts {
        UpstreamTimeouts { connect: CONNECT.default(), read: READ.default(), idle: IDLE.default() }
    }
}

/// Load balancing: which address receives the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// The addresses in turn.
    RoundRobin,
    /// The address with the fewest requests in flight.
    LeastRequests,
}

/// The protocol of an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
}

/// Active health checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The path to request, with an optional query.
    pub path: String,
    /// The interval between checks.
    pub every: Duration,
    /// Time limit of a check.
    pub timeout: Duration,
    /// Consecutive successes before an upstream is healthy.
    pub healthy_after: u32,
    /// Consecutive failures before an upstream is unhealthy.
    pub unhealthy_after: u32,
}

/// Outlier ejection: passive health checking by the results of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutlierEjection {
    /// Consecutive failures before an address is ejected.
    pub after: u32,
    /// The duration of an ejection.
    pub lasts: Duration,
}

pub(super) const UPSTREAMS: Field<Named<TextValue, Mapping>> = Field::new(
    "upstreams",
    "Upstreams, by name.",
    Named {
        names: string("name").pattern("^[0-9A-Za-z._-]+$"),
        value: Mapping(&UPSTREAM),
        from: 0,
        to: UPSTREAMS_MAX,
        may_be_empty: false,
    },
);

static UPSTREAM: Section = Section {
    name: "upstream",
    meaning: "Upstream: servers that handle the same requests.",
    example: "write as in `upstreams: { api: { addresses: [http://10.0.0.1:8080] } }`",
    fields: &[&[
        &Field::new(
            "addresses",
            "URLs of the servers, such as `http://10.0.0.1:8080`.",
            ListOf { item: string("URL"), from: 1, to: ADDRESSES_MAX },
        )
        .required(),
        &BALANCE,
        &PROTOCOL,
        &Field::section("timeouts", &UPSTREAM_TIMEOUTS),
        &PING_AFTER,
        &MAX_CONNECTIONS,
        &RETRY_BUDGET,
        &Field::new(HEALTH.name, HEALTH.meaning, Short(HEALTH_PATH, &HEALTH)).otherwise("no checks"),
        &Field::new(OUTLIER_EJECTION.name, OUTLIER_EJECTION.meaning, OffOr(Mapping(&OUTLIER_EJECTION)))
            .otherwise("enabled"),
        &Field::section("tls", &UPSTREAM_TLS),
    ]],
    ..SECTION
};
const BALANCE: Field<Or<Words<Balance>>> = Field::new(
    "balance",
    "Load balancing: `round_robin`, or `least_requests` for the server with the fewest requests in flight.",
    Words(&words::BALANCES),
)
.or(Balance::RoundRobin);
const PROTOCOL: Field<Or<Words<Protocol>>> =
    Field::new("protocol", "Protocol of the servers.", Words(&words::PROTOCOLS)).or(Protocol::Http1);
/// gRPC servers close connections that are pinged more often than every five minutes, unless configured otherwise.
const PING_AFTER: Field<Or<Time>> = Field::new(
    "ping_after",
    "Time without data on an HTTP/2 connection with requests in flight after which the gateway sends a ping.",
    Time { subject: "a time", from: ms(100), to: days(1) },
)
.or(secs(600));
/// The ports of a client address limit the connections to one server address.
const MAX_CONNECTIONS: Field<Or<Whole>> = Field::new(
    "max_connections",
    "Maximum number of connections per address.",
    Whole { from: 1, to: 60_000 },
)
.or(1_000);
const RETRY_BUDGET: Field<Or<Percent>> =
    Field::new("retry_budget", "Maximum share of requests that may be retried.", Percent).or(20);

static UPSTREAM_TIMEOUTS: Section = Section {
    name: "upstream_timeouts",
    meaning: "Timeouts of connections to the servers.",
    example: "write as in `timeouts: { connect: 1s, read: 60s, idle: 60s }`",
    fields: &[&[&CONNECT, &READ, &IDLE]],
    ..SECTION
};
const CONNECT: Field<Or<Time>> = Field::new(
    "connect",
    "Time limit to establish a connection.",
    Time { subject: "a timeout", from: ms(1), to: secs(60) },
)
.or(secs(1));
/// Events of a stream may be hours apart.
const READ: Field<Or<Time>> = Field::new(
    "read",
    "Maximum time between two parts of a response.",
    Time { subject: "a timeout", from: ms(100), to: days(1) },
)
.or(secs(60));
const IDLE: Field<Or<Time>> = Field::new(
    "idle",
    "Time after which an unused connection is closed.",
    Time { subject: "a timeout", from: ms(100), to: hours(1) },
)
.or(secs(60));

static HEALTH: Section = Section {
    name: "health",
    meaning: "Active health checks.",
    example: "write as in `health: { path: /healthz, every: 5s }`",
    fields: &[&[
        &Field::new("path", "Path to request.", HEALTH_PATH).required(),
        &EVERY,
        &CHECK_TIMEOUT,
        &HEALTHY_AFTER,
        &UNHEALTHY_AFTER,
    ]],
    ..SECTION
};
const HEALTH_PATH: TextValue = string("path").pattern("^/");
const EVERY: Field<Or<Time>> =
    Field::new("every", "Interval between checks.", Time { subject: "a wait", from: ms(10), to: hours(1) })
        .or(secs(5));
const CHECK_TIMEOUT: Field<Or<Time>> = Field::new(
    "timeout",
    "Time limit of a check, at most `every`.",
    Time { subject: "a timeout", from: ms(10), to: hours(1) },
)
.or(secs(1));
/// Consecutive successes or failures.
const IN_A_ROW: Whole = Whole { from: 1, to: 1_000 };
const HEALTHY_AFTER: Field<Or<Whole>> =
    Field::new("healthy_after", "Consecutive successes before an upstream is healthy.", IN_A_ROW).or(2);
const UNHEALTHY_AFTER: Field<Or<Whole>> =
    Field::new("unhealthy_after", "Consecutive failures before an upstream is unhealthy.", IN_A_ROW).or(3);

static OUTLIER_EJECTION: Section = Section {
    name: "outlier_ejection",
    meaning: "Outlier ejection: an address that fails receives no requests for a while.",
    example: "write as in `outlier_ejection: { after: 5, for: 10s }`, or `outlier_ejection: off`",
    fields: &[&[&EJECT_AFTER, &EJECT_FOR]],
    ..SECTION
};
const EJECT_AFTER: Field<Or<Whole>> =
    Field::new("after", "Consecutive failures before an address is ejected.", IN_A_ROW).or(5);
const EJECT_FOR: Field<Or<Time>> = Field::new(
    "for",
    "Duration of the ejection.",
    Time { subject: "an ejection", from: ms(100), to: days(1) },
)
.or(secs(10));

static UPSTREAM_TLS: Section = Section {
    name: "upstream_tls",
    meaning: "Verification of https upstreams.",
    example: "write a file, as in `tls: { ca: { file: ca.pem } }`",
    fields: &[&[&Field::new("ca", "Certificate authority of the servers, in PEM.", SecretText)
        .otherwise("the authorities of the system")]],
    ..SECTION
};

const HEALTH_PATH_BYTES_MAX: usize = 1_024;

impl Upstream {
    /// An upstream with default settings.
    fn defaults(name: &str, addresses: Vec<Address>) -> Upstream {
        Upstream {
            name: name.to_owned(),
            addresses,
            balance: BALANCE.default(),
            protocol: PROTOCOL.default(),
            timeouts: UpstreamTimeouts::default(),
            ping_after: PING_AFTER.default(),
            max_connections: MAX_CONNECTIONS.default() as usize,
            retry_percent: RETRY_BUDGET.default(),
            health: None,
            outlier_ejection: Some(OutlierEjection {
                after: EJECT_AFTER.default(),
                lasts: EJECT_FOR.default(),
            }),
            ca: None,
        }
    }
}

/// The upstreams, while routes are read.
#[derive(Default)]
pub(super) struct Upstreams<'n> {
    pub(super) all: Vec<Upstream>,
    /// The named upstreams, with an index unless they are invalid.
    named: HashMap<&'n str, Option<usize>>,
    /// Their names in file order.
    names: Vec<&'n str>,
    /// Whether `upstreams` could not be read, so that names cannot be checked.
    pub(super) is_incomplete: bool,
    /// The upstreams of URLs written in routes.
    written: HashMap<Address, usize>,
}

impl<'n> Upstreams<'n> {
    pub(super) fn read(
        reader: &mut Reader,
        node: Option<&'n Node>,
        environment: &dyn Environment,
    ) -> Upstreams<'n> {
        let mut upstreams = Upstreams::default();
        let Some(node) = node else { return upstreams };
        let Some(fields) = reader.named(node, "`upstreams`", UPSTREAM.example) else {
            return Upstreams { is_incomplete: true, ..upstreams };
        };
        if fields.iter().len() > UPSTREAMS_MAX {
            let count = fields.iter().len();
            let message = format!("too many upstreams: {count} of at most {UPSTREAMS_MAX}");
            reader.error(node.position, message, "write several `addresses` in one upstream");
            return upstreams;
        }
        for entry in fields.iter() {
            let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            if entry.name.is_empty() || !entry.name.bytes().all(is_good) {
                let message = format!("invalid name of an upstream: {}", quoted(entry.name));
                reader.error(entry.position, message, "write letters, digits and dashes, as in `api`");
            }
            let number = upstream(reader, entry, environment).map(|upstream| {
                upstreams.all.push(upstream);
                upstreams.all.len() - 1
            });
            upstreams.named.insert(entry.name, number);
            upstreams.names.push(entry.name);
        }
        upstreams
    }

    /// The index of the upstream that a route names, or whose URL it contains.
    pub(super) fn number(&mut self, reader: &mut Reader, node: &Node) -> Option<usize> {
        let word = reader.word(node)?;
        if let Some(number) = self.named.get(word) {
            return *number;
        }
        if self.is_incomplete && !word.contains("://") {
            return None;
        }
        if !self.names.is_empty() && !word.contains(['/', ':']) {
            let message = format!("unknown upstream {}", quoted(word));
            let known = listed(&self.names);
            let choice = format!("Upstreams: {known}; or write a URL, as in `http://127.0.0.1:8081`");
            reader.error(node.position, message, known_help(word, &self.names, &choice));
            return None;
        }
        let address = reader.parsed(node, address)?;
        reader.upstream_addresses.push((address.clone(), node.position));
        Some(*self.written.entry(address).or_insert_with_key(|address| {
            self.all.push(Upstream::defaults(word, vec![address.clone()]));
            self.all.len() - 1
        }))
    }
}

fn upstream(reader: &mut Reader, entry: Entry<'_>, environment: &dyn Environment) -> Option<Upstream> {
    let Entry { name, position, node } = entry;
    let owner = format!("the upstream {}", quoted(name));
    let mut fields = reader.fields(node, &owner, &UPSTREAM)?;
    fields.position = position;
    let addresses = addresses(reader, &fields);
    let is_tls = addresses.first().is_some_and(|address| address.is_tls);
    let defaults = Upstream::defaults(name, addresses);
    let max_connections = MAX_CONNECTIONS.read(reader, &fields) as usize;
    let ca = fields.get("tls").and_then(|node| {
        if !is_tls && !defaults.addresses.is_empty() {
            let help = "write `https://` addresses, or remove `tls`";
            reader.error(node.position, "`tls` has no effect on `http://` addresses", help);
        }
        ca(reader, node, environment)
    });
    let upstream = Upstream {
        balance: BALANCE.read(reader, &fields),
        protocol: PROTOCOL.read(reader, &fields),
        timeouts: reader.or(fields.get("timeouts"), defaults.timeouts, timeouts),
        ping_after: PING_AFTER.read(reader, &fields),
        max_connections,
        retry_percent: RETRY_BUDGET.read(reader, &fields),
        health: fields.get("health").and_then(|node| health(reader, node)),
        outlier_ejection: reader.or(
            fields.get("outlier_ejection"),
            defaults.outlier_ejection,
            outlier_ejection,
        ),
        ca,
        ..defaults
    };
    (!upstream.addresses.is_empty()).then_some(upstream)
}

fn timeouts(reader: &mut Reader, node: &Node) -> Option<UpstreamTimeouts> {
    let fields = reader.fields(node, "`timeouts`", &UPSTREAM_TIMEOUTS)?;
    Some(UpstreamTimeouts {
        connect: CONNECT.read(reader, &fields),
        read: READ.read(reader, &fields),
        idle: IDLE.read(reader, &fields),
    })
}

fn addresses(reader: &mut Reader, fields: &Fields<'_>) -> Vec<Address> {
    reader.require(fields);
    let Some(node) = fields.get("addresses") else { return Vec::new() };
    let nodes = reader.some(node, "write as in `[http://10.0.0.1:8080, http://10.0.0.2:8080]`");
    if nodes.len() > ADDRESSES_MAX {
        let message = format!("too many addresses: {} of at most {ADDRESSES_MAX}", nodes.len());
        reader.error(node.position, message, "write several upstreams");
        return Vec::new();
    }
    let mut all: Vec<Address> = Vec::new();
    let mut seen = HashMap::new();
    for node in nodes {
        let Some(address) = reader.parsed(node, address) else { continue };
        if all.first().is_some_and(|first| first.is_tls != address.is_tls) {
            let message = "an upstream cannot mix http and https addresses";
            reader.error(node.position, message, "write two upstreams, or the same scheme for all addresses");
        }
        reader.is_new(&mut seen, address.clone(), node.position, |_| "duplicate address".to_owned());
        reader.upstream_addresses.push((address.clone(), node.position));
        all.push(address);
    }
    all
}

fn ca(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Secret> {
    let fields = reader.fields(node, "`tls`", &UPSTREAM_TLS)?;
    fields.get("ca").and_then(|node| reader.pem(node, "ca", environment))
}

fn health(reader: &mut Reader, node: &Node) -> Option<Health> {
    let (path, fields) = match node.value {
        NodeValue::Word(_) => (reader.parsed(node, health_path), Fields::none(&HEALTH)),
        _ => {
            let fields = reader.fields(node, "`health`", &HEALTH)?;
            reader.require(&fields);
            (fields.get("path").and_then(|node| reader.parsed(node, health_path)), fields)
        }
    };
    let every = EVERY.read(reader, &fields);
    let timeout = CHECK_TIMEOUT.optional(reader, &fields);
    let timeout = timeout.unwrap_or_else(|| CHECK_TIMEOUT.default().min(every));
    if timeout > every {
        let position = fields.entry("timeout").map_or(node.position, |entry| entry.node.position);
        let message = "the timeout of a health check is longer than its interval";
        reader.error(position, message, "write a timeout of at most `every`");
    }
    let healthy_after = HEALTHY_AFTER.read(reader, &fields);
    let unhealthy_after = UNHEALTHY_AFTER.read(reader, &fields);
    Some(Health { path: path?, every, timeout, healthy_after, unhealthy_after })
}

/// The path of a health check, which is sent unchanged.
fn health_path(word: &str) -> Result<String, ValueError> {
    let is_good = word.starts_with('/')
        && word.len() <= HEALTH_PATH_BYTES_MAX
        && word.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    match is_good {
        true => Ok(word.to_owned()),
        false => Err(ValueError {
            message: format!("invalid path of a health check: {}", quoted(word)),
            help: "write as in `/healthz`, without spaces".to_owned(),
        }),
    }
}

fn outlier_ejection(reader: &mut Reader, node: &Node) -> Option<Option<OutlierEjection>> {
    if is_off(node) {
        return Some(None);
    }
    let fields = reader.fields(node, "`outlier_ejection`", &OUTLIER_EJECTION)?;
    let (after, lasts) = (EJECT_AFTER.read(reader, &fields), EJECT_FOR.read(reader, &fields));
    Some(Some(OutlierEjection { after, lasts }))
}
