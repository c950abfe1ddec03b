//! Upstreams: named ones, and one for each URL written in a route.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::environment::{Environment, Secret};
use crate::error::{known_help, listed, quoted};
use crate::quantity::{self, ValueError};
use crate::reader::{Entry, Fields, Reader};
use crate::tree::{Node, NodeValue};
use crate::{ADDRESSES_MAX, UPSTREAMS_MAX, names, words};

use super::address::{Address, address};
use super::{count, is_off, time};

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
        UpstreamTimeouts {
            connect: Duration::from_secs(1),
            read: Duration::from_secs(60),
            idle: Duration::from_secs(60),
        }
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

const EXAMPLE: &str = "write as in `upstreams: { api: { addresses: [http://10.0.0.1:8080] } }`";
const HEALTH_EXAMPLE: &str = "write as in `health: { path: /healthz, every: 5s }`";
const OUTLIER_EJECTION_EXAMPLE: &str =
    "write as in `outlier_ejection: { after: 5, for: 10s }`, or `outlier_ejection: off`";
const TIMEOUTS_EXAMPLE: &str = "write as in `timeouts: { connect: 1s, read: 60s, idle: 60s }`";
const TLS_EXAMPLE: &str = "write a file, as in `tls: { ca: { file: ca.pem } }`";

const CONNECTIONS_DEFAULT: u32 = 1_000;
/// The ports of a client address limit the connections to one server address.
const CONNECTIONS_MAX: u32 = 60_000;
const RETRY_PERCENT_DEFAULT: u32 = 20;
/// Upper bound of consecutive successes or failures.
const ROWS: RangeInclusive<u32> = 1..=1_000;
const CONNECT_TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60);
/// Events of a stream may be hours apart.
const READ_TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(86_400);
/// gRPC servers close connections that are pinged more often than every five minutes, unless configured otherwise.
const PINGS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(86_400);
const IDLE_TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3_600);
const HEALTH_TIMES: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(3_600);
const EJECTIONS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(86_400);
const HEALTH_PATH_BYTES_MAX: usize = 1_024;

impl Upstream {
    /// An upstream with default settings.
    fn defaults(name: &str, addresses: Vec<Address>) -> Upstream {
        Upstream {
            name: name.to_owned(),
            addresses,
            balance: Balance::RoundRobin,
            protocol: Protocol::Http1,
            timeouts: UpstreamTimeouts::default(),
            ping_after: Duration::from_secs(600),
            max_connections: CONNECTIONS_DEFAULT as usize,
            retry_percent: RETRY_PERCENT_DEFAULT,
            health: None,
            outlier_ejection: Some(OUTLIER_EJECTION_DEFAULT),
            ca: None,
        }
    }
}

const OUTLIER_EJECTION_DEFAULT: OutlierEjection =
    OutlierEjection { after: 5, lasts: Duration::from_secs(10) };

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
        let Some(fields) = reader.named(node, "`upstreams`", EXAMPLE) else {
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
    let mut fields = reader.fields(node, &owner, names::UPSTREAM, EXAMPLE)?;
    fields.position = position;
    let addresses = addresses(reader, &fields);
    let is_tls = addresses.first().is_some_and(|address| address.is_tls);
    let defaults = Upstream::defaults(name, addresses);
    let max_connections = count(reader, &fields, "max_connections", CONNECTIONS_DEFAULT, 1..=CONNECTIONS_MAX);
    let ca = fields.get("tls").and_then(|node| {
        if !is_tls && !defaults.addresses.is_empty() {
            let help = "write `https://` addresses, or remove `tls`";
            reader.error(node.position, "`tls` has no effect on `http://` addresses", help);
        }
        ca(reader, node, environment)
    });
    let upstream = Upstream {
        balance: reader.or(fields.get("balance"), defaults.balance, |reader, node| {
            reader.choice(node, "balance", &words::BALANCES)
        }),
        protocol: reader.or(fields.get("protocol"), defaults.protocol, |reader, node| {
            reader.choice(node, "protocol", &words::PROTOCOLS)
        }),
        timeouts: reader.or(fields.get("timeouts"), defaults.timeouts, timeouts),
        ping_after: time(reader, &fields, "ping_after", "a time", defaults.ping_after, PINGS),
        max_connections: max_connections as usize,
        retry_percent: reader.or(fields.get("retry_budget"), defaults.retry_percent, |reader, node| {
            reader.parsed(node, |word| quantity::percent("retry_budget", word))
        }),
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
    let fields = reader.fields(node, "`timeouts`", names::UPSTREAM_TIMEOUTS, TIMEOUTS_EXAMPLE)?;
    let defaults = UpstreamTimeouts::default();
    Some(UpstreamTimeouts {
        connect: time(reader, &fields, "connect", "a timeout", defaults.connect, CONNECT_TIMEOUTS),
        read: time(reader, &fields, "read", "a timeout", defaults.read, READ_TIMEOUTS),
        idle: time(reader, &fields, "idle", "a timeout", defaults.idle, IDLE_TIMEOUTS),
    })
}

fn addresses(reader: &mut Reader, fields: &Fields<'_>) -> Vec<Address> {
    reader.require(fields, &["addresses"], EXAMPLE);
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
    let fields = reader.fields(node, "`tls`", names::UPSTREAM_TLS, TLS_EXAMPLE)?;
    fields.get("ca").and_then(|node| reader.pem(node, "ca", environment))
}

fn health(reader: &mut Reader, node: &Node) -> Option<Health> {
    let mut health = Health {
        path: String::new(),
        every: Duration::from_secs(5),
        timeout: Duration::from_secs(1),
        healthy_after: 2,
        unhealthy_after: 3,
    };
    if let NodeValue::Word(_) = node.value {
        health.path = reader.parsed(node, health_path)?;
        return Some(health);
    }
    let fields = reader.fields(node, "`health`", names::HEALTH, HEALTH_EXAMPLE)?;
    reader.require(&fields, &["path"], HEALTH_EXAMPLE);
    let path = fields.get("path").and_then(|node| reader.parsed(node, health_path));
    health.every = time(reader, &fields, "every", "a wait", health.every, HEALTH_TIMES);
    health.timeout =
        time(reader, &fields, "timeout", "a timeout", health.timeout.min(health.every), HEALTH_TIMES);
    if health.timeout > health.every {
        let position = fields.entry("timeout").map_or(node.position, |entry| entry.node.position);
        let message = "the timeout of a health check is longer than its interval";
        reader.error(position, message, "write a timeout of at most `every`");
    }
    health.healthy_after = count(reader, &fields, "healthy_after", health.healthy_after, ROWS);
    health.unhealthy_after = count(reader, &fields, "unhealthy_after", health.unhealthy_after, ROWS);
    Some(Health { path: path?, ..health })
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
    let fields =
        reader.fields(node, "`outlier_ejection`", names::OUTLIER_EJECTION, OUTLIER_EJECTION_EXAMPLE)?;
    Some(Some(OutlierEjection {
        after: count(reader, &fields, "after", OUTLIER_EJECTION_DEFAULT.after, ROWS),
        lasts: time(reader, &fields, "for", "an ejection", OUTLIER_EJECTION_DEFAULT.lasts, EJECTIONS),
    }))
}
