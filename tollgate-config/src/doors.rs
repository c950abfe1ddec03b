//! Where else limits are asked than by the gateway: over HTTP, gRPC and the protocol of Redis; and the listener beside
//! them for those who watch.

use std::net::SocketAddr;

use crate::error::quoted;
use crate::gateway::{LimitNames, address_taken, is_off, named_limits};
use crate::names;
use crate::outside::{Outside, Secret};
use crate::quantity::Fault;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};

/// Where a door is, and what those have to know who come to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Door {
    /// The address; with port 0 it is any that is free.
    pub listen: SocketAddr,
    /// What they have to know. There is one wherever others can reach the address.
    pub token: Option<Secret>,
}

/// Where limits are asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Doors {
    /// By anybody who speaks HTTP, and by proxies before they let a request through.
    pub http: Option<HttpDoor>,
    /// By Envoy.
    pub grpc: Option<GrpcDoor>,
    /// By clients of Redis.
    pub resp: Option<RespDoor>,
}

impl Doors {
    /// Whether there is none.
    pub fn are_none(&self) -> bool {
        self.http.is_none() && self.grpc.is_none() && self.resp.is_none()
    }
}

/// The door for HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpDoor {
    /// Where it is.
    pub door: Door,
    /// Whether callers may give back what they do not prove to have taken.
    pub refunds: bool,
    /// Whether callers may forget keys, bans included.
    pub resets: bool,
    /// What proxies are told that ask before they let a request through.
    pub authorize: Authorize,
}

/// What proxies are told that ask before they let a request through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorize {
    /// The status of a request that is denied.
    pub deny_status: u16,
    /// The numbers of the limits that concern such requests.
    pub limits: Vec<usize>,
}

/// The door for Envoy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcDoor {
    /// Where it is.
    pub door: Door,
    /// Whether negative hits give back.
    pub refunds: bool,
    /// Whether responses get `x-ratelimit-*` headers from here.
    pub headers: bool,
}

/// The door for clients of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RespDoor {
    /// Where it is.
    pub door: Door,
    /// The most connections.
    pub max_connections: usize,
}

/// What is said of a kind of door where something is wrong.
struct Sort {
    name: &'static str,
    names: &'static [&'static str],
    example: &'static str,
    /// What others could do who can reach it.
    danger: &'static str,
}

const ADMIN: Sort = Sort {
    name: "admin",
    names: names::ADMIN,
    example: "write as in `admin: 127.0.0.1:9180`, or `admin: off`",
    danger: "would be told everything",
};
const HTTP: Sort = Sort {
    name: "http",
    names: names::HTTP,
    example: "write as in `http: 127.0.0.1:9181`",
    danger: "could use up anybody's limits",
};
const GRPC: Sort = Sort {
    name: "grpc",
    names: names::GRPC,
    example: "write as in `grpc: 127.0.0.1:8081`",
    danger: "could use up anybody's limits",
};
const RESP: Sort = Sort {
    name: "resp",
    names: names::RESP,
    example: "write as in `resp: 127.0.0.1:6380`",
    danger: "could use up anybody's limits",
};

const EXAMPLE: &str =
    "write as in `doors: { http: 127.0.0.1:9181, grpc: 127.0.0.1:8081, resp: 127.0.0.1:6380 }`";
const AUTHORIZE_EXAMPLE: &str = "write as in `authorize: { deny_status: 403, limits: [per-user] }`";
const TOKEN_EXAMPLE: &str =
    "write one as `openssl rand -hex 32` makes it: `token: { file: admin-token }`, or `\"${ADMIN_TOKEN}\"`";
/// Shorter ones can be guessed.
const TOKEN_BYTES_MIN: usize = 16;
const ADMIN_DEFAULT: ([u8; 4], u16) = ([127, 0, 0, 1], 9180);
/// What every proxy takes for a denial. Those that pass on any status may ask for 429.
const DENY_STATUS_DEFAULT: u16 = 403;
/// What proxies may be told, as it is written.
const DENY_STATUSES: [(&str, u16); 3] = [("401", 401), ("403", 403), ("429", 429)];
const CONNECTIONS_DEFAULT: u32 = 10_000;
const CONNECTIONS_MAX: u32 = 1_000_000;

/// Where limits are asked.
pub(crate) fn doors(
    reader: &mut Reader,
    node: Option<&Node>,
    limits: &LimitNames<'_>,
    outside: &dyn Outside,
) -> Doors {
    let fields = node.and_then(|node| reader.fields(node, "doors", names::DOORS, EXAMPLE));
    let Some(fields) = fields else { return Doors::default() };
    let http = fields.get("http").and_then(|node| {
        let (door, fields) = door(reader, node, &HTTP, outside);
        let fields = fields.as_ref();
        let refunds = yes_or_no(reader, fields, "refunds", false);
        let resets = yes_or_no(reader, fields, "resets", false);
        let authorize = authorize(reader, fields.and_then(|fields| fields.get("authorize")), limits);
        Some(HttpDoor { door: door?, refunds, resets, authorize })
    });
    let grpc = fields.get("grpc").and_then(|node| {
        let (door, fields) = door(reader, node, &GRPC, outside);
        let refunds = yes_or_no(reader, fields.as_ref(), "refunds", false);
        let headers = yes_or_no(reader, fields.as_ref(), "headers", false);
        Some(GrpcDoor { door: door?, refunds, headers })
    });
    let resp = fields.get("resp").and_then(|node| {
        let (door, fields) = door(reader, node, &RESP, outside);
        let most = fields.as_ref().and_then(|fields| fields.get("max_connections"));
        let max_connections = reader.or(most, CONNECTIONS_DEFAULT, |reader, node| {
            reader.number(node, "max_connections", 1..=CONNECTIONS_MAX)
        });
        Some(RespDoor { door: door?, max_connections: max_connections as usize })
    });
    Doors { http, grpc, resp }
}

fn yes_or_no(reader: &mut Reader, fields: Option<&Fields<'_>>, name: &str, usual: bool) -> bool {
    let node = fields.and_then(|fields| fields.get(name));
    reader.or(node, usual, |reader, node| reader.yes_or_no(node, name))
}

fn authorize(reader: &mut Reader, node: Option<&Node>, known: &LimitNames<'_>) -> Authorize {
    let fields = node.and_then(|node| reader.fields(node, "authorize", names::AUTHORIZE, AUTHORIZE_EXAMPLE));
    let deny_status = fields.as_ref().and_then(|fields| fields.get("deny_status"));
    let deny_status = reader.or(deny_status, DENY_STATUS_DEFAULT, |reader, node| {
        reader.parsed(node, |word| {
            let known = DENY_STATUSES.iter().find(|(text, _)| *text == word);
            known.map(|(_, status)| *status).ok_or_else(|| Fault {
                what: format!("deny_status is {}, which proxies do not take for a denial", quoted(word)),
                instead: "write 403, which all of them understand, or 401 or 429".to_owned(),
            })
        })
    });
    let named = fields.as_ref().and_then(|fields| fields.get("limits"));
    let (limits, slots) = named_limits(reader, named, known);
    if let (Some(node), false) = (named, slots.is_empty()) {
        let what = "a limit on requests under way cannot be asked for a request that has not begun";
        reader.wrong(node.place, what, "write limits that have an algorithm");
    }
    Authorize { deny_status, limits }
}

/// Where the admin listener is, unless it is off. Read after all others, whose addresses come first.
pub(crate) fn admin(reader: &mut Reader, node: Option<&Node>, outside: &dyn Outside) -> Option<Door> {
    let Some(node) = node else {
        let usual = SocketAddr::from(ADMIN_DEFAULT);
        if let Some((_, place)) = reader.listening.iter().find(|(other, _)| *other == usual).copied() {
            let what = format!("{} is where metrics and health are", quoted(&usual.to_string()));
            reader.wrong(place, what, "write another port, or `admin: off` at the top of the file");
        }
        return Some(Door { listen: usual, token: None });
    };
    if is_off(node) {
        return None;
    }
    door(reader, node, &ADMIN, outside).0
}

/// Where a door is, and what else is said of it.
fn door<'n>(
    reader: &mut Reader,
    node: &'n Node,
    sort: &Sort,
    outside: &dyn Outside,
) -> (Option<Door>, Option<Fields<'n>>) {
    let parse = |word: &str| {
        word.parse::<SocketAddr>().map_err(|_| Fault {
            what: format!("{} is not an address to listen on", quoted(word)),
            instead: sort.example.to_owned(),
        })
    };
    if !matches!(node.typed, Typed::Map(_)) {
        let listen = address_taken(reader, node, parse);
        if let Some(listen) = listen {
            is_guarded(reader, node, listen, sort, false);
        }
        return (listen.map(|listen| Door { listen, token: None }), None);
    }
    let Some(fields) = reader.fields(node, sort.name, sort.names, sort.example) else { return (None, None) };
    if fields.lacks("listen") {
        reader.wrong(node.place, "this does not say where to listen", sort.example);
    }
    let token = fields.get("token").and_then(|node| token(reader, node, outside));
    let listen = fields.get("listen").and_then(|node| {
        let listen = address_taken(reader, node, parse)?;
        is_guarded(reader, node, listen, sort, fields.has("token"));
        Some(listen)
    });
    (listen.map(|listen| Door { listen, token }), Some(fields))
}

/// Off this machine, no door is without a token.
fn is_guarded(reader: &mut Reader, node: &Node, listen: SocketAddr, sort: &Sort, has_token: bool) {
    if has_token || listen.ip().to_canonical().is_loopback() {
        return;
    }
    let Sort { name, danger, .. } = sort;
    let what = format!("others can reach {}, and {danger}", quoted(&listen.to_string()));
    // YAML takes a bracket for a list.
    let here = if listen.is_ipv6() { format!("\"{listen}\"") } else { listen.to_string() };
    let instead = format!(
        "write `{name}: 127.0.0.1:{}`, or give it a token: `{name}: {{ listen: {here}, token: {{ file: {name}-token }} }}`",
        listen.port()
    );
    reader.wrong(node.place, what, instead);
}

fn token(reader: &mut Reader, node: &Node, outside: &dyn Outside) -> Option<Secret> {
    let token = reader.secret(node, "token", outside)?;
    let what = if token.reveal().bytes().any(|byte| !byte.is_ascii_graphic()) {
        "the token has characters in it that cannot stand in a header".to_owned()
    } else if token.reveal().len() < TOKEN_BYTES_MIN {
        format!("the token has fewer than {TOKEN_BYTES_MIN} characters, and could be guessed")
    } else {
        return Some(token);
    };
    reader.wrong(node.place, what, TOKEN_EXAMPLE);
    None
}
