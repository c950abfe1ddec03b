//! The HTTP API, the Envoy API and the Redis API; and the admin listener.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ratekeeper_rules::response::ResponseStatus;
use serde_json::{Value, json};

use crate::environment::{Environment, Secret};
use crate::error::{Position, quoted};
use crate::gateway::{ALL, LimitNames, RouteLimits, is_off, listen_address, named_limits};
use crate::quantity::ValueError;
use crate::reader::{Fields, Reader};
use crate::table::{
    Definitions, Field, Flag, Kind, ListOf, Listen, OffOr, Or, Page, Parsed, SECTION, SecretText, Section,
    Short, Typed, WORD, Whole, Words, as_code,
};
use crate::tree::{Node, NodeValue};
use crate::words;

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
    /// The configured APIs: what each is called, the scheme of its address, and its settings.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, &Api)> {
        let Apis { http, envoy, resp } = self;
        let all = [
            ("HTTP API", "http", http.as_ref().map(|it| &it.api)),
            ("Envoy API", "grpc", envoy.as_ref().map(|it| &it.api)),
            ("Redis API", "redis", resp.as_ref().map(|it| &it.api)),
        ];
        all.into_iter().filter_map(|(name, scheme, api)| Some((name, scheme, api?)))
    }

    /// Whether no API is configured.
    pub fn are_none(&self) -> bool {
        self.all().next().is_none()
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

impl Authorize {
    /// The statuses of a denied request that may be configured.
    pub const DENY_STATUSES: [u16; 3] = [
        ResponseStatus::Unauthorized.code(),
        ResponseStatus::Forbidden.code(),
        ResponseStatus::TooManyRequests.code(),
    ];

    /// The status of a denied request unless configured otherwise: every proxy takes it for a denial.
    pub const DENY_STATUS_DEFAULT: ResponseStatus = ResponseStatus::Forbidden;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnvoyHeaderNames {
    /// `x-ratelimit-limit`, `-remaining`, `-reset`: those of Envoy's own filter.
    XRateLimit,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset`: those of envoyproxy/ratelimit.
    RateLimit,
}

impl Default for EnvoyHeaderNames {
    fn default() -> EnvoyHeaderNames {
        HEADER_NAMES.default()
    }
}

/// The Redis API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RespApi {
    /// Its address and token.
    pub api: Api,
    /// Maximum number of connections.
    pub max_connections: usize,
}

/// An API, and how error messages describe it.
struct ApiKind {
    section: &'static Section,
    /// What a client without a token could do.
    danger: &'static str,
}

const ADMIN_API: ApiKind = ApiKind { section: &ADMIN, danger: "could read all metrics" };
const HTTP_API: ApiKind = ApiKind { section: &HTTP, danger: USES_BUDGETS };
const ENVOY_API: ApiKind = ApiKind { section: &ENVOY, danger: USES_BUDGETS };
const RESP_API: ApiKind = ApiKind { section: &RESP, danger: USES_BUDGETS };
const USES_BUDGETS: &str = "could use up the budget of any key";

/// The admin listener.
pub(crate) const ADMIN_FIELD: Field<Or<OffOr<Short<Listen>>>> =
    Field::new(ADMIN.name, ADMIN.meaning, OffOr(Short(Listen, &ADMIN)))
        .or(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9180));
static ADMIN: Section = Section {
    name: "admin",
    meaning: "Admin listener for metrics and health checks.",
    example: "write as in `admin: 127.0.0.1:9180`, or `admin: off`",
    fields: &[&[
        &LISTEN,
        &Field::new(
            "token",
            "Bearer token that clients must send for metrics (`Authorization: Bearer`). Required unless the address is a loopback address.",
            SecretText,
        ),
    ]],
    ..SECTION
};

pub(crate) static APIS: Section = Section {
    name: "apis",
    meaning: "APIs for other services. Each is disabled unless it is configured.",
    example: "write as in `apis: { http: 127.0.0.1:9181, envoy: 127.0.0.1:9182, resp: 127.0.0.1:6380 }`",
    fields: &[&[
        &Field::new(HTTP.name, HTTP.meaning, Short(Listen, &HTTP)).otherwise("disabled"),
        &Field::new(ENVOY.name, ENVOY.meaning, Short(Listen, &ENVOY)).otherwise("disabled"),
        &Field::new(RESP.name, RESP.meaning, Short(Listen, &RESP)).otherwise("disabled"),
    ]],
    ..SECTION
};

static HTTP: Section = Section {
    name: "http",
    meaning: "HTTP API: checks for any language, and forward auth for nginx, Traefik and Caddy.",
    example: "write as in `http: 127.0.0.1:9181`",
    fields: &[&[&LISTEN, &TOKEN, &HTTP_REFUNDS, &RESETS, &Field::of(&AUTHORIZE)]],
    ..SECTION
};
const LISTEN: Field<Listen> = Field::new("listen", "Address to listen on.", Listen).required();
const TOKEN: Field<SecretText> = Field::new(
    "token",
    "Token that clients must send, as `Authorization: Bearer` or `AUTH`. Required unless the address is a loopback address.",
    SecretText,
);
const HTTP_REFUNDS: Field<Or<Flag>> =
    Field::new("refunds", "Whether callers may refund units without proof of a charge.", Flag).or(false);
const RESETS: Field<Or<Flag>> =
    Field::new("resets", "Whether callers may reset keys. A reset also lifts bans.", Flag).or(false);

static AUTHORIZE: Section = Section {
    name: "authorize",
    meaning: "Forward auth at `/v1/authorize`.",
    example: "write as in `authorize: { deny_status: 403, limits: [per-user] }`",
    fields: &[&[
        &DENY_STATUS,
        &Field::new(
            "limits",
            "Limits that apply to forward auth: a list of names, `all` or `none`.",
            ListOf::any(WORD.named("limit name")),
        )
        .or(ALL),
    ]],
    ..SECTION
};
/// Proxies that forward any status may request 429.
const DENY_STATUS: Field<Or<DenyStatus>> = Field::new(
    "deny_status",
    "Status of a denied request: 401 or 403, which nginx requires, or 429. `?deny_status=429` overrides it per request.",
    DenyStatus,
)
.or(Authorize::DENY_STATUS_DEFAULT.code());

static ENVOY: Section = Section {
    name: "envoy",
    meaning: "Envoy API: the rate limit service (RLS).",
    example: "write as in `envoy: 127.0.0.1:9182`",
    fields: &[&[&LISTEN, &TOKEN, &ENVOY_REFUNDS, &HEADERS, &HEADER_NAMES]],
    ..SECTION
};
const ENVOY_REFUNDS: Field<Or<Flag>> =
    Field::new("refunds", "Whether negative hits refund units.", Flag).or(false);
const HEADERS: Field<Or<Flag>> =
    Field::new("headers", "Whether Ratekeeper adds rate limit headers to responses.", Flag).or(false);
const HEADER_NAMES: Field<Or<Words<EnvoyHeaderNames>>> = Field::new(
    "header_names",
    "Names of these headers: `x-ratelimit-limit`, `-remaining` and `-reset`, or `RateLimit-Limit`, `-Remaining` and `-Reset` as in envoyproxy/ratelimit.",
    Words(&words::ENVOY_HEADER_NAMES),
)
.or(EnvoyHeaderNames::XRateLimit);

static RESP: Section = Section {
    name: "resp",
    meaning: "Redis API: `CL.THROTTLE`, `THROTTLE` and `RK.CHECK`.",
    example: "write as in `resp: 127.0.0.1:6380`",
    fields: &[&[&LISTEN, &TOKEN, &MAX_CONNECTIONS]],
    ..SECTION
};
const MAX_CONNECTIONS: Field<Or<Whole>> =
    Field::new("max_connections", "Maximum number of connections.", Whole { from: 1, to: 1_000_000 })
        .or(10_000);

const TOKEN_EXAMPLE: &str = "create one with `openssl rand -hex 32`, and write `token: { file: admin-token }` or `\"${ADMIN_TOKEN}\"`";
/// Shorter tokens can be guessed.
const TOKEN_BYTES_MIN: usize = 16;

/// A status that proxies accept as a denial.
#[derive(Clone, Copy)]
struct DenyStatus;

impl Kind for DenyStatus {
    fn schema(&self, _: &mut Definitions) -> Value {
        json!({ "enum": Authorize::DENY_STATUSES })
    }

    fn text(&self, _: &Page) -> String {
        as_code(Authorize::DENY_STATUSES)
    }
}

impl Typed for DenyStatus {
    type Value = u16;

    fn typed(&self, value: u16) -> Value {
        json!(value)
    }
}

impl Parsed for DenyStatus {
    fn parse(&self, reader: &mut Reader, node: &Node, _: &str) -> Option<u16> {
        reader.parsed(node, |word| {
            let known = Authorize::DENY_STATUSES.into_iter().find(|status| status.to_string() == word);
            known.ok_or_else(|| ValueError {
                message: format!(
                    "`deny_status` is {}, which proxies do not accept as a denial",
                    quoted(word)
                ),
                help: "write 403, which all proxies accept, or 401 or 429".to_owned(),
            })
        })
    }
}

/// Reads the APIs.
pub(crate) fn apis(
    reader: &mut Reader,
    node: Option<&Node>,
    limits: &LimitNames<'_>,
    environment: &dyn Environment,
) -> Apis {
    let fields = node.and_then(|node| reader.fields(node, "`apis`", &APIS));
    let Some(fields) = fields else { return Apis::default() };
    let http = fields.get(HTTP.name).and_then(|node| {
        let (api, fields) = api(reader, node, &HTTP_API, environment);
        let refunds = HTTP_REFUNDS.read(reader, &fields);
        let resets = RESETS.read(reader, &fields);
        let authorize = authorize(reader, fields.get("authorize"), limits);
        Some(HttpApi { api: api?, refunds, resets, authorize })
    });
    let envoy = fields.get(ENVOY.name).and_then(|node| {
        let (api, fields) = api(reader, node, &ENVOY_API, environment);
        let refunds = ENVOY_REFUNDS.read(reader, &fields);
        let headers = HEADERS.read(reader, &fields);
        let header_names = HEADER_NAMES.read(reader, &fields);
        Some(EnvoyApi { api: api?, refunds, headers, header_names })
    });
    let resp = fields.get(RESP.name).and_then(|node| {
        let (api, fields) = api(reader, node, &RESP_API, environment);
        let max_connections = MAX_CONNECTIONS.read(reader, &fields) as usize;
        Some(RespApi { api: api?, max_connections })
    });
    Apis { http, envoy, resp }
}

fn authorize(reader: &mut Reader, node: Option<&Node>, known: &LimitNames<'_>) -> Authorize {
    let fields = node.and_then(|node| reader.fields(node, "`authorize`", &AUTHORIZE));
    let fields = fields.unwrap_or_else(|| Fields::none(&AUTHORIZE));
    let deny_status = DENY_STATUS.read(reader, &fields);
    let named = fields.get("limits");
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
        let defaults = ADMIN_FIELD.default();
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
    api(reader, node, &ADMIN_API, environment).0
}

/// Reads the address and token of an API, and returns its other fields.
fn api<'n>(
    reader: &mut Reader,
    node: &'n Node,
    kind_of_api: &ApiKind,
    environment: &dyn Environment,
) -> (Option<Api>, Fields<'n>) {
    let section = kind_of_api.section;
    let parse = |word: &str| {
        word.parse::<SocketAddr>().map_err(|_| ValueError {
            message: format!("invalid listen address {}", quoted(word)),
            help: section.example.to_owned(),
        })
    };
    if !matches!(node.value, NodeValue::Map(_)) {
        let listen = listen_address(reader, node, parse);
        if let Some(listen) = listen {
            require_token(reader, node, listen, kind_of_api, false);
        }
        return (listen.map(|listen| Api { listen, token: None }), Fields::none(section));
    }
    let Some(fields) = reader.fields(node, &quoted(section.name), section) else {
        return (None, Fields::none(section));
    };
    reader.require(&fields);
    let token = fields.get("token").and_then(|node| token(reader, node, environment));
    let listen = fields.get("listen").and_then(|node| {
        let listen = listen_address(reader, node, parse)?;
        require_token(reader, node, listen, kind_of_api, !fields.lacks("token"));
        Some(listen)
    });
    (listen.map(|listen| Api { listen, token }), fields)
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
    let ApiKind { section: Section { name, .. }, danger } = kind_of_api;
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
