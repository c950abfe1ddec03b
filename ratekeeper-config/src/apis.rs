//! The HTTP API, the Envoy API and the Redis API; and the admin listener.

use std::net::SocketAddr;

use crate::environment::{Environment, Secret};
use crate::error::{Position, quoted};
use crate::gateway::{LimitNames, RouteLimits, is_off, listen_address, named_limits};
use crate::quantity::ValueError;
use crate::reader::{Fields, Reader};
use crate::tree::{Node, NodeValue};
use crate::{names, words};

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
    /// Whether Ratekeeper adds rate limit headers to responses.
    pub headers: bool,
    /// The names of these headers.
    pub header_names: EnvoyHeaderNames,
}

/// The names of the headers in responses to Envoy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EnvoyHeaderNames {
    /// `x-ratelimit-limit`, `-remaining`, `-reset`: those of Envoy's own filter.
    #[default]
    XRateLimit,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset`: those of envoyproxy/ratelimit.
    RateLimit,
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
struct ApiKind {
    name: &'static str,
    names: &'static [&'static str],
    example: &'static str,
    /// What a client without a token could do.
    danger: &'static str,
}

const ADMIN: ApiKind = ApiKind {
    name: "admin",
    names: names::ADMIN,
    example: "write as in `admin: 127.0.0.1:9180`, or `admin: off`",
    danger: "could read all metrics",
};
const HTTP: ApiKind = ApiKind {
    name: "http",
    names: names::HTTP,
    example: "write as in `http: 127.0.0.1:9181`",
    danger: "could use up the budget of any key",
};
const ENVOY: ApiKind = ApiKind {
    name: "envoy",
    names: names::ENVOY,
    example: "write as in `envoy: 127.0.0.1:9182`",
    danger: "could use up the budget of any key",
};
const RESP: ApiKind = ApiKind {
    name: "resp",
    names: names::RESP,
    example: "write as in `resp: 127.0.0.1:6380`",
    danger: "could use up the budget of any key",
};

const EXAMPLE: &str =
    "write as in `apis: { http: 127.0.0.1:9181, envoy: 127.0.0.1:9182, resp: 127.0.0.1:6380 }`";
const AUTHORIZE_EXAMPLE: &str = "write as in `authorize: { deny_status: 403, limits: [per-user] }`";
const TOKEN_EXAMPLE: &str = "create one with `openssl rand -hex 32`, and write `token: { file: admin-token }` or `\"${ADMIN_TOKEN}\"`";
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
    environment: &dyn Environment,
) -> Apis {
    let fields = node.and_then(|node| reader.fields(node, "`apis`", names::APIS, EXAMPLE));
    let Some(fields) = fields else { return Apis::default() };
    let http = fields.get("http").and_then(|node| {
        let (api, fields) = api(reader, node, &HTTP, environment);
        let fields = fields.as_ref();
        let refunds = yes_or_no(reader, fields, "refunds", false);
        let resets = yes_or_no(reader, fields, "resets", false);
        let authorize = authorize(reader, fields.and_then(|fields| fields.get("authorize")), limits);
        Some(HttpApi { api: api?, refunds, resets, authorize })
    });
    let envoy = fields.get("envoy").and_then(|node| {
        let (api, fields) = api(reader, node, &ENVOY, environment);
        let refunds = yes_or_no(reader, fields.as_ref(), "refunds", false);
        let headers = yes_or_no(reader, fields.as_ref(), "headers", false);
        let names = fields.as_ref().and_then(|fields| fields.get("header_names"));
        let header_names = reader.or(names, EnvoyHeaderNames::default(), |reader, node| {
            reader.choice(node, "header_names", &words::ENVOY_HEADER_NAMES)
        });
        Some(EnvoyApi { api: api?, refunds, headers, header_names })
    });
    let resp = fields.get("resp").and_then(|node| {
        let (api, fields) = api(reader, node, &RESP, environment);
        let most = fields.as_ref().and_then(|fields| fields.get("max_connections"));
        let max_connections = reader.or(most, CONNECTIONS_DEFAULT, |reader, node| {
            reader.number(node, "max_connections", 1..=CONNECTIONS_MAX)
        });
        Some(RespApi { api: api?, max_connections: max_connections as usize })
    });
    Apis { http, envoy, resp }
}

fn yes_or_no(reader: &mut Reader, fields: Option<&Fields<'_>>, name: &str, defaults: bool) -> bool {
    let node = fields.and_then(|fields| fields.get(name));
    reader.or(node, defaults, |reader, node| reader.yes_or_no(node, name))
}

fn authorize(reader: &mut Reader, node: Option<&Node>, known: &LimitNames<'_>) -> Authorize {
    let fields =
        node.and_then(|node| reader.fields(node, "`authorize`", names::AUTHORIZE, AUTHORIZE_EXAMPLE));
    let deny_status = fields.as_ref().and_then(|fields| fields.get("deny_status"));
    let deny_status = reader.or(deny_status, DENY_STATUS_DEFAULT, |reader, node| {
        reader.parsed(node, |word| {
            let known = DENY_STATUSES.iter().find(|(text, _)| *text == word);
            known.map(|(_, status)| *status).ok_or_else(|| ValueError {
                message: format!(
                    "`deny_status` is {}, which proxies do not accept as a denial",
                    quoted(word)
                ),
                help: "write 403, which all proxies accept, or 401 or 429".to_owned(),
            })
        })
    });
    let named = fields.as_ref().and_then(|fields| fields.get("limits"));
    let limits = match named {
        Some(node) => named_limits(reader, node, known),
        None => RouteLimits::all(known),
    };
    if let (Some(node), false) = (named, limits.concurrency.is_empty()) {
        let message =
            "`authorize` cannot check a concurrency limit: the proxy does not report when a request ends";
        reader.error(node.position, message, "remove it, or write a limit with an algorithm");
    }
    Authorize { deny_status, limits: limits.rules }
}

/// Reads the admin listener, unless it is off. It is read last, so that other listeners claim their addresses first.
pub(crate) fn admin(reader: &mut Reader, node: Option<&Node>, environment: &dyn Environment) -> Option<Api> {
    let Some(node) = node else {
        let defaults = SocketAddr::from(ADMIN_DEFAULT);
        if let Some((_, position)) = reader.listening.iter().find(|(other, _)| *other == defaults).copied() {
            let message =
                format!("{} is the default address of the admin listener", quoted(&defaults.to_string()));
            reader.error(position, message, "write another port, or `admin: off` at the top of the file");
        }
        reader.listening.push((defaults, Position::default()));
        return Some(Api { listen: defaults, token: None });
    };
    if is_off(node) {
        return None;
    }
    api(reader, node, &ADMIN, environment).0
}

/// Reads the address and token of an API, and returns its other fields.
fn api<'n>(
    reader: &mut Reader,
    node: &'n Node,
    kind_of_api: &ApiKind,
    environment: &dyn Environment,
) -> (Option<Api>, Option<Fields<'n>>) {
    let parse = |word: &str| {
        word.parse::<SocketAddr>().map_err(|_| ValueError {
            message: format!("invalid listen address {}", quoted(word)),
            help: kind_of_api.example.to_owned(),
        })
    };
    if !matches!(node.value, NodeValue::Map(_)) {
        let listen = listen_address(reader, node, parse);
        if let Some(listen) = listen {
            require_token(reader, node, listen, kind_of_api, false);
        }
        return (listen.map(|listen| Api { listen, token: None }), None);
    }
    let owner = quoted(kind_of_api.name);
    let Some(fields) = reader.fields(node, &owner, kind_of_api.names, kind_of_api.example) else {
        return (None, None);
    };
    reader.require(&fields, &["listen"], kind_of_api.example);
    let token = fields.get("token").and_then(|node| token(reader, node, environment));
    let listen = fields.get("listen").and_then(|node| {
        let listen = listen_address(reader, node, parse)?;
        require_token(reader, node, listen, kind_of_api, !fields.lacks("token"));
        Some(listen)
    });
    (listen.map(|listen| Api { listen, token }), Some(fields))
}

/// An API that is not on a loopback address requires a token.
fn require_token(
    reader: &mut Reader,
    node: &Node,
    listen: SocketAddr,
    kind_of_api: &ApiKind,
    has_token: bool,
) {
    if has_token || listen.ip().to_canonical().is_loopback() {
        return;
    }
    let ApiKind { name, danger, .. } = kind_of_api;
    let message = format!(
        "{} is not a loopback address: without a token, any client {danger}",
        quoted(&listen.to_string())
    );
    // YAML reads an unquoted bracket as a list.
    let here = if listen.is_ipv6() { format!("\"{listen}\"") } else { listen.to_string() };
    let help = format!(
        "write `{name}: 127.0.0.1:{}`, or add a token: `{name}: {{ listen: {here}, token: {{ file: {name}-token }} }}`",
        listen.port()
    );
    reader.error(node.position, message, help);
}

fn token(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Secret> {
    let token = reader.secret(node, "token", environment)?;
    let message = if token.reveal().bytes().any(|byte| !byte.is_ascii_graphic()) {
        "the token contains characters that are invalid in a header".to_owned()
    } else if token.reveal().len() < TOKEN_BYTES_MIN {
        format!("the token has fewer than {TOKEN_BYTES_MIN} characters and could be guessed")
    } else {
        return Some(token);
    };
    reader.error(node.position, message, TOKEN_EXAMPLE);
    None
}
