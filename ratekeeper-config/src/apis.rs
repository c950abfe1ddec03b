//! The HTTP API, the Envoy API and the Redis API; and the admin listener.

use std::net::SocketAddr;

use crate::error::quoted;
use crate::gateway::{LimitNames, address_taken, is_off, named_limits};
use crate::names;
use crate::outside::{Environment, Secret};
use crate::quantity::Fault;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};

/// The address of an API and its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Api {
    /// The address. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The token that clients must send. Always present unless the address is a loopback address.
    pub token: Option<Secret>,
}

/// The APIs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Apis {
    /// The HTTP API, for any client and for proxies with forward auth.
    pub http: Option<HttpApi>,
    /// The Envoy API.
    pub envoy: Option<EnvoyApi>,
    /// The Redis API.
    pub resp: Option<RespApi>,
}

impl Apis {
    /// Whether no API is configured.
    pub fn are_none(&self) -> bool {
        self.http.is_none() && self.envoy.is_none() && self.resp.is_none()
    }
}

/// The HTTP API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpApi {
    /// Its address and token.
    pub api: Api,
    /// Whether callers may refund units without proof of a charge.
    pub refunds: bool,
    /// Whether callers may reset keys. A reset also lifts bans.
    pub resets: bool,
    /// Forward auth for proxies.
    pub authorize: Authorize,
}

/// Forward auth for proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorize {
    /// The status of a denied request.
    pub deny_status: u16,
    /// The indices of the limits that apply to forward auth.
    pub limits: Vec<usize>,
}

/// The Envoy API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvoyApi {
    /// Its address and token.
    pub api: Api,
    /// Whether negative hits refund units.
    pub refunds: bool,
    /// Whether Ratekeeper adds `x-ratelimit-*` headers to responses.
    pub headers: bool,
}

/// The Redis API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RespApi {
    /// Its address and token.
    pub api: Api,
    /// Maximum number of connections.
    pub max_connections: usize,
}

/// How error messages describe a kind of API.
struct Sort {
    name: &'static str,
    names: &'static [&'static str],
    example: &'static str,
    /// What a client without a token could do.
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
const ENVOY: Sort = Sort {
    name: "envoy",
    names: names::ENVOY,
    example: "write as in `envoy: 127.0.0.1:8081`",
    danger: "could use up anybody's limits",
};
const RESP: Sort = Sort {
    name: "resp",
    names: names::RESP,
    example: "write as in `resp: 127.0.0.1:6380`",
    danger: "could use up anybody's limits",
};

const EXAMPLE: &str =
    "write as in `apis: { http: 127.0.0.1:9181, envoy: 127.0.0.1:8081, resp: 127.0.0.1:6380 }`";
const AUTHORIZE_EXAMPLE: &str = "write as in `authorize: { deny_status: 403, limits: [per-user] }`";
const TOKEN_EXAMPLE: &str =
    "write one as `openssl rand -hex 32` makes it: `token: { file: admin-token }`, or `\"${ADMIN_TOKEN}\"`";
/// Shorter tokens can be guessed.
const TOKEN_BYTES_MIN: usize = 16;
const ADMIN_DEFAULT: ([u8; 4], u16) = ([127, 0, 0, 1], 9180);
/// All proxies take this status for a denial. Those that forward any status may request 429.
const DENY_STATUS_DEFAULT: u16 = 403;
/// The statuses that may be configured.
const DENY_STATUSES: [(&str, u16); 3] = [("401", 401), ("403", 403), ("429", 429)];
const CONNECTIONS_DEFAULT: u32 = 10_000;
const CONNECTIONS_MAX: u32 = 1_000_000;

/// Reads the APIs.
pub(crate) fn apis(
    reader: &mut Reader,
    node: Option<&Node>,
    limits: &LimitNames<'_>,
    outside: &dyn Environment,
) -> Apis {
    let fields = node.and_then(|node| reader.fields(node, "apis", names::APIS, EXAMPLE));
    let Some(fields) = fields else { return Apis::default() };
    let http = fields.get("http").and_then(|node| {
        let (api, fields) = api(reader, node, &HTTP, outside);
        let fields = fields.as_ref();
        let refunds = yes_or_no(reader, fields, "refunds", false);
        let resets = yes_or_no(reader, fields, "resets", false);
        let authorize = authorize(reader, fields.and_then(|fields| fields.get("authorize")), limits);
        Some(HttpApi { api: api?, refunds, resets, authorize })
    });
    let envoy = fields.get("envoy").and_then(|node| {
        let (api, fields) = api(reader, node, &ENVOY, outside);
        let refunds = yes_or_no(reader, fields.as_ref(), "refunds", false);
        let headers = yes_or_no(reader, fields.as_ref(), "headers", false);
        Some(EnvoyApi { api: api?, refunds, headers })
    });
    let resp = fields.get("resp").and_then(|node| {
        let (api, fields) = api(reader, node, &RESP, outside);
        let most = fields.as_ref().and_then(|fields| fields.get("max_connections"));
        let max_connections = reader.or(most, CONNECTIONS_DEFAULT, |reader, node| {
            reader.number(node, "max_connections", 1..=CONNECTIONS_MAX)
        });
        Some(RespApi { api: api?, max_connections: max_connections as usize })
    });
    Apis { http, envoy, resp }
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
        let what = "a concurrency limit cannot be checked for a request that has not begun";
        reader.wrong(node.place, what, "write limits that have an algorithm");
    }
    Authorize { deny_status, limits }
}

/// Reads the admin listener, unless it is off. It is read last, so that other listeners claim their addresses first.
pub(crate) fn admin(reader: &mut Reader, node: Option<&Node>, outside: &dyn Environment) -> Option<Api> {
    let Some(node) = node else {
        let usual = SocketAddr::from(ADMIN_DEFAULT);
        if let Some((_, place)) = reader.listening.iter().find(|(other, _)| *other == usual).copied() {
            let what = format!("{} is where metrics and health are", quoted(&usual.to_string()));
            reader.wrong(place, what, "write another port, or `admin: off` at the top of the file");
        }
        return Some(Api { listen: usual, token: None });
    };
    if is_off(node) {
        return None;
    }
    api(reader, node, &ADMIN, outside).0
}

/// Reads the address and token of an API, and returns its other fields.
fn api<'n>(
    reader: &mut Reader,
    node: &'n Node,
    sort: &Sort,
    outside: &dyn Environment,
) -> (Option<Api>, Option<Fields<'n>>) {
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
        return (listen.map(|listen| Api { listen, token: None }), None);
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
    (listen.map(|listen| Api { listen, token }), Some(fields))
}

/// An API that is not on a loopback address requires a token.
fn is_guarded(reader: &mut Reader, node: &Node, listen: SocketAddr, sort: &Sort, has_token: bool) {
    if has_token || listen.ip().to_canonical().is_loopback() {
        return;
    }
    let Sort { name, danger, .. } = sort;
    let what = format!("others can reach {}, and {danger}", quoted(&listen.to_string()));
    // YAML reads an unquoted bracket as a list.
    let here = if listen.is_ipv6() { format!("\"{listen}\"") } else { listen.to_string() };
    let instead = format!(
        "write `{name}: 127.0.0.1:{}`, or give it a token: `{name}: {{ listen: {here}, token: {{ file: {name}-token }} }}`",
        listen.port()
    );
    reader.wrong(node.place, what, instead);
}

fn token(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> Option<Secret> {
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
