//! The gateway: what goes where.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use tollgate_rules::answer::PolicyName;
use tollgate_rules::when::When;

use crate::ROUTES_MAX;
use crate::error::{listed, quoted};
use crate::names;
use crate::quantity::Fault;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};
use crate::when::{is_host, when_of};

/// The gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// Where it listens.
    pub listen: SocketAddr,
    /// What goes where. The first that fits counts.
    pub routes: Vec<Route>,
}

/// What goes where.
#[derive(Clone, Debug)]
pub struct Route {
    /// Its name.
    pub id: String,
    /// Which requests.
    pub when: When,
    /// To where.
    pub upstream: String,
    /// By which limits, as numbers of [`Config::rules`](crate::Config::rules): all of them if the route names none.
    pub limits: Vec<usize>,
}

/// As long as the name of a limit.
const ID_CHARS_MAX: usize = PolicyName::LENGTH_MAX;

/// Names of which a line is told, and how many characters they may have together: more than the longest one.
const TOLD_MAX: usize = 20;
const TOLD_CHARS_MAX: usize = 300;

const ROUTE_EXAMPLE: &str =
    "write as in `{ id: api, path: /api/**, upstream: http://127.0.0.1:8081, limits: [per-user] }`";

/// `limits` are the names of all limits, in order.
pub(crate) fn gateway(reader: &mut Reader, node: &Node, limits: &[&str]) -> Option<Gateway> {
    let example = "write as in `gateway: { listen: 127.0.0.1:8080, routes: [...] }`";
    let fields = reader.fields(node, "gateway", names::GATEWAY, example)?;
    let listen = reader.or(fields.get("listen"), SocketAddr::from(([127, 0, 0, 1], 8080)), |reader, node| {
        reader.parsed(node, listen)
    });
    let nodes = fields.get("routes").map_or(Vec::new(), |node| reader.list(node));
    if nodes.is_empty() && !reader.is_full() {
        reader.wrong(node.place, "the gateway has no routes", example);
    }
    if nodes.len() > ROUTES_MAX {
        let what = format!("there are {} routes, and a gateway has at most {ROUTES_MAX}", nodes.len());
        reader.wrong(node.place, what, "join routes by patterns, as in `/api/**`");
        return None;
    }
    let numbers: HashMap<&str, usize> =
        limits.iter().enumerate().map(|(number, name)| (*name, number)).collect();
    // What is wrong with the others has been told where they stand.
    let tellable: Vec<&str> = limits.iter().copied().filter(|name| PolicyName::new(name).is_ok()).collect();
    let mut ids = HashSet::new();
    let mut routes: Vec<Route> = Vec::new();
    for node in nodes {
        let Some(fields) = reader.fields(node, "a route", names::ROUTE, ROUTE_EXAMPLE) else { continue };
        let id = needed(reader, &fields, "id").and_then(|node| route_id(reader, node));
        if let (Some(id), Some(entry)) = (id, fields.entry("id"))
            && !ids.insert(id)
        {
            let what = format!("a second route is called {}", quoted(id));
            reader.wrong(entry.node.place, what, "give each route a name of its own");
        }
        let upstream = needed(reader, &fields, "upstream").and_then(|node| reader.parsed(node, upstream));
        let when = when_of(reader, &fields);
        if let Some(entry) = fields.entry("limits")
            && matches!(entry.node.typed, Typed::Nothing)
        {
            let instead = "write limits of this file, `[]` for none of them, or remove `limits` for all";
            reader.wrong(entry.place, "there is nothing behind `limits`", instead);
        }
        let limits = match fields.get("limits") {
            Some(node) => named_limits(reader, node, &tellable, &numbers),
            None => (0..limits.len()).collect(),
        };
        if let (Some(id), Some(upstream)) = (id, upstream) {
            routes.push(Route { id: id.to_owned(), when, upstream, limits });
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
    Some(Gateway { listen, routes })
}

/// A route's name: people read it in messages and logs.
fn route_id<'n>(reader: &mut Reader, node: &'n Node) -> Option<&'n str> {
    let id = reader.name(node, ROUTE_EXAMPLE)?;
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

fn named_limits(
    reader: &mut Reader,
    node: &Node,
    known: &[&str],
    numbers: &HashMap<&str, usize>,
) -> Vec<usize> {
    let mut limits = Vec::new();
    let mut seen = HashSet::new();
    for node in reader.list(node) {
        let Some(word) = reader.word(node) else { continue };
        match numbers.get(word) {
            Some(number) if seen.insert(*number) => limits.push(*number),
            Some(_) => {
                let what = format!("{} stands here twice", quoted(word));
                reader.wrong(node.place, what, "remove one of the two");
            }
            None => {
                let choice = match known {
                    [] => "there are no limits in this file; write one under `limits`".to_owned(),
                    known => format!("the limits are {}", told(known)),
                };
                let what = format!("{} is not a limit of this file", quoted(word));
                let instead = reader.given_instead(word, known, &choice);
                reader.wrong(node.place, what, instead);
            }
        }
    }
    limits
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

fn needed<'n>(reader: &mut Reader, fields: &Fields<'n>, name: &str) -> Option<&'n Node> {
    if !fields.has(name) {
        reader.wrong(fields.place, format!("{} has no {name}", fields.owner), ROUTE_EXAMPLE);
    }
    fields.get(name)
}

fn listen(word: &str) -> Result<SocketAddr, Fault> {
    word.parse().map_err(|_| {
        let port = word.rsplit(':').next().filter(|port| port.parse::<u16>().is_ok()).unwrap_or("8080");
        Fault {
            what: format!("{} is not an address to listen on", quoted(word)),
            instead: format!(
                "write an IP address and a port, as in `127.0.0.1:{port}`; `0.0.0.0:{port}` is for everybody"
            ),
        }
    })
}

/// `host`, or `host:port` with a port that there is.
fn is_host_and_port(authority: &str) -> bool {
    match authority.rsplit_once(':').filter(|_| !authority.ends_with(']')) {
        Some((host, port)) => {
            let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
            is_host(host) && is_number && port.parse::<u16>().is_ok_and(|port| port > 0)
        }
        None => is_host(authority),
    }
}

fn upstream(word: &str) -> Result<String, Fault> {
    let rest = word.strip_prefix("http://").or_else(|| word.strip_prefix("https://")).unwrap_or_default();
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let what = if authority.contains('@') {
        "an upstream has no user and no password".to_owned()
    } else if !is_host_and_port(authority) || word.contains(|c: char| !c.is_ascii_graphic()) {
        format!("{} is not the address of an upstream", quoted(word))
    } else {
        return Ok(word.to_owned());
    };
    Err(Fault { what, instead: "write as in `http://127.0.0.1:8081`".to_owned() })
}
