//! A named limit: its algorithm, key, conditions and responses.

use ratekeeper_core::{FailurePolicy, Lease, Limit, WINDOW_MAX, WINDOW_MIN};
use ratekeeper_rules::key::{Key, KeyPart};
use ratekeeper_rules::response::{DenialResponse, PolicyName};
use ratekeeper_rules::rule::{Ban, Cost, List, Override, OverrideScope, Rule};
use ratekeeper_rules::when::When;

use crate::concurrency::{CONCURRENCY, ConcurrencyLimit, UNSUPPORTED_NAMES, concurrency};
use crate::error::{quoted, subject};
use crate::key::{KEY_VALUE, Values, forgeable, key};
use crate::limit::{self, ALGORITHM_FIELDS, ALGORITHM_NAMES};
use crate::quantity::ValueError;
use crate::reader::{Entry, Fields, Reader};
use crate::store::FAILURE_POLICY;
use crate::table::{
    Constraint, Field, Flag, HeaderName, ListOf, Mapping, Named, Or, Parsed, SECTION, Section, Short,
    TextValue, Time, WORD, Whole, Words, ms, network, string,
};
use crate::tree::{Node, NodeValue};
use crate::when::{WHEN, cidr, header_name, when};
use crate::{OVERRIDES_MAX, words};

pub(crate) static LIMIT: Section = Section {
    name: "limit",
    meaning: "Limit: an algorithm or a concurrency limit, with its key, conditions and responses.",
    example: limit::EXAMPLE,
    fields: &[
        &[
            &Field::of(&CONCURRENCY),
            &Field::new("key", "Key whose budget a request uses.", KEY_VALUE)
                .otherwise("`ip`, the address of the client"),
            &Field::new("cost", COST.meaning, Short(UNITS, &COST)).otherwise("1"),
            &Field::of(&WHEN),
            &SHADOW,
            &Field::new("on_store_failure", FAILURE_POLICY, Words(&words::FAILURES))
                .otherwise("that of the store"),
            &Field::new(LEASE.name, LEASE.meaning, Short(UNITS, &LEASE)),
            &Field::new(
                "overrides",
                "Different limits for some requests. The first match applies.",
                ListOf { item: Mapping(&OVERRIDE), from: 0, to: OVERRIDES_MAX },
            ),
            &Field::new(
                "allow",
                "Clients and keys that are exempt from the limit: addresses, networks or keys.",
                ListOf::any(LISTED_VALUE),
            ),
            &Field::new(
                "deny",
                "Clients and keys that are always denied: addresses, networks or keys.",
                ListOf::any(LISTED_VALUE),
            ),
            &Field::of(&BAN),
            &Field::of(&DENY_RESPONSE),
        ],
        &ALGORITHM_FIELDS,
    ],
    constraints: &[
        Constraint::ExactlyOne(&[&ALGORITHM_NAMES, &["concurrency"]]),
        Constraint::Excludes("concurrency", &UNSUPPORTED_NAMES),
    ],
    ..SECTION
};
pub(crate) const SHADOW: Field<Or<Flag>> =
    Field::new("shadow", "Evaluates and reports the limit, but never enforces it.", Flag).or(false);
/// A number of units. Zero is rejected with messages of its own.
const UNITS: Whole = Whole { from: 1, to: u32::MAX };

static COST: Section = Section {
    name: "cost",
    meaning: "Units that a request costs: a number, or by header or by route.",
    example: "write a number, `{ header: X-Cost, default: 1, max: 100 }` or `{ routes: { upload: 10 } }`",
    fields: &[&[
        &Field::new("header", "Header that contains the cost.", HeaderName),
        &Field::new("routes", "Costs by route id.", Named::any(WORD.named("route id"), UNITS)),
        &COST_DEFAULT,
        &Field::new("max", "Maximum cost. Larger values are reduced to it.", UNITS),
    ]],
    constraints: &[
        Constraint::ExactlyOne(&[&["header", "routes"]]),
        Constraint::Excludes("routes", &["max"]),
    ],
    ..SECTION
};
const COST_DEFAULT: Field<Or<Whole>> = Field::new(
    "default",
    "Cost if the header is missing or not a number, or the route is not listed.",
    UNITS,
)
.or(1);

static LEASE: Section = Section {
    name: "lease",
    meaning: "Leases: budget that an instance takes from the store ahead of use.",
    example: "write the maximum, as in `lease: 100` or `lease: { max: 100, hold: 100ms }`",
    fields: &[&[&LEASE_MAX, &HOLD]],
    ..SECTION
};
const LEASE_MAX: Field<Whole> = Field::new("max", "Maximum number of units per lease.", UNITS).required();
const HOLD: Field<Or<Time>> = Field::new(
    "hold",
    "Time after which a lease expires.",
    Time { subject: "a hold", from: ms(1), to: Lease::HOLD_MAX },
)
.or(Lease::HOLD_DEFAULT);

static OVERRIDE: Section = Section {
    name: "override",
    meaning: "Different limit for some requests.",
    example: "write as in `{ key: acme, fixed_window: { limit: 1000 } }`, or `unlimited: true`",
    fields: &[
        &[
            &Field::new("key", "Keys to which the override applies.", ListOf::some(WORD.named("key"))),
            &Field::of(&WHEN),
            &UNLIMITED,
        ],
        &ALGORITHM_FIELDS,
    ],
    constraints: &[
        Constraint::ExactlyOne(&[&["key", "when"]]),
        Constraint::ExactlyOne(&[&ALGORITHM_NAMES, &["unlimited"]]),
    ],
    ..SECTION
};
const UNLIMITED: Field<Or<Flag>> =
    Field::new("unlimited", "Exempts matching requests from the limit.", Flag).or(false);

/// An entry of `allow` and `deny`.
const LISTED_VALUE: Short<TextValue> = Short(WORD.named("address, network or key"), &LISTED);
static LISTED: Section = Section {
    name: "list_entry",
    meaning: "Clients or keys.",
    example: "write `{ client: 10.0.0.0/8 }` or `{ key: name }`",
    fields: &[&[
        &Field::new("client", "Addresses and networks.", ListOf::any(network())),
        &Field::new("key", "Values of the key.", ListOf::any(WORD.named("key"))),
    ]],
    constraints: &[Constraint::AtLeastOne],
    ..SECTION
};

static BAN: Section = Section {
    name: "ban",
    meaning: "Bans a key that is denied too often.",
    example: "write as in `ban: { after: 5, within: 1m, for: 1h }`",
    fields: &[&[&BAN_AFTER, &BAN_WITHIN, &BAN_FOR]],
    ..SECTION
};
/// Each denial is logged with its time.
const BAN_AFTER: Field<Whole> =
    Field::new("after", "Number of denials that starts a ban.", Whole { from: 1, to: 1_000_000 }).required();
const BAN_WITHIN: Field<Time> = Field::new(
    "within",
    "Period in which denials are counted.",
    Time { subject: "a window", from: WINDOW_MIN, to: WINDOW_MAX },
)
.required();
const BAN_FOR: Field<Time> =
    Field::new("for", "Duration of the ban.", Time { subject: "a ban", from: WINDOW_MIN, to: WINDOW_MAX })
        .required();

static DENY_RESPONSE: Section = Section {
    name: "deny_response",
    meaning: "Response to a denied request.",
    example: "write as in `deny_response: { status: 429, body: Too many requests, content_type: text/plain }`",
    fields: &[&[
        &STATUS,
        &Field::new("body", "Response body.", WORD).otherwise("a Problem Details body"),
        &Field::new("content_type", "Content-Type of the body.", string("media type").filled()),
    ]],
    ..SECTION
};
const STATUS: Field<Whole> = Field::new("status", "HTTP status.", Whole { from: 200, to: 599 })
    .otherwise("429, or 503 if the failure policy denies");

/// Settings of the file that apply to all limits.
pub(crate) struct Defaults {
    /// Number of instances that share the limits, if it is known.
    pub(crate) instances: Option<u32>,
}

/// A named limit.
pub(crate) enum NamedLimit {
    /// A limit with an algorithm, and its response to denied requests.
    Rule(Box<Rule>, DenialResponse),
    /// A concurrency limit.
    ConcurrencyLimit(ConcurrencyLimit),
}

pub(crate) fn named_limit(
    reader: &mut Reader,
    entry: Entry<'_>,
    defaults: &Defaults,
    policy: Option<PolicyName>,
) -> Option<NamedLimit> {
    let Entry { name, position, node } = entry;
    let mut fields = reader.fields(node, &format!("the limit {}", quoted(name)), &LIMIT)?;
    fields.position = position;
    if fields.has("concurrency") {
        return concurrency(reader, &fields, name, policy).map(NamedLimit::ConcurrencyLimit);
    }
    let (rule, deny_response) = rule(reader, &fields, name, defaults)?;
    Some(NamedLimit::Rule(Box::new(rule), deny_response))
}

fn rule(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    defaults: &Defaults,
) -> Option<(Rule, DenialResponse)> {
    // Each field is read even if another is invalid, so that all errors are reported together.
    let limit = limit::among(reader, fields);
    let (key, values) = match fields.get("key") {
        Some(node) => key(reader, node),
        None => (Key::of(KeyPart::Ip), Values::Addresses),
    };
    let cost = reader.or(fields.get("cost"), Cost::Fixed(1), cost);
    let when = reader.or(fields.get("when"), When::default(), when);
    let is_shadow = SHADOW.read(reader, fields);
    let failure =
        fields.get("on_store_failure").and_then(|node| failure_policy(reader, node, defaults.instances));
    let overrides = match fields.get("overrides") {
        Some(node) => {
            let is_restricted = !when.clients.is_empty() || !when.claims.is_empty();
            let source = fields.get("key").filter(|_| !is_restricted).and_then(forgeable);
            overrides(reader, name, values, source.as_deref(), node)
        }
        None => Vec::new(),
    };
    let mut listed = |name| match fields.get(name) {
        Some(node) => list(reader, values, node),
        None => List::default(),
    };
    let (allow, deny) = (listed("allow"), listed("deny"));
    let ban = fields.get("ban").and_then(|node| ban(reader, values, node));
    let deny_response = reader.or(fields.get("deny_response"), DenialResponse::default(), deny_response);
    let lease = fields.get("lease").and_then(|node| lease(reader, node));
    let limits = limit.iter().chain(overrides.iter().filter_map(|it| it.limit.as_ref()));
    if let (Some(lease), Some(node)) = (lease, fields.get("lease"))
        && limits.into_iter().any(|limit| limit.lease_limit(lease.hold).is_none())
    {
        let help = "remove the lease: `mode: shape` and `count: all` cannot be leased, and a bucket must hold more than refills during `hold`";
        reader.error(node.position, "the limit or one of its overrides cannot be leased this way", help);
    }
    let limits = limit.iter().chain(overrides.iter().filter_map(|it| it.limit.as_ref()));
    if let (Some(node), Some(most)) = (fields.get("cost"), limits.map(Limit::limit).min())
        && highest_cost(&cost) > most
    {
        let message = format!(
            "a cost of {} exceeds the limit or one of its overrides ({most}), so these requests would always be denied",
            highest_cost(&cost)
        );
        reader.error(node.position, message, format!("write {most} or less, or raise the limit"));
    }
    let rule = Rule {
        key,
        cost,
        when,
        is_shadow,
        overrides,
        allow,
        deny,
        ban,
        on_store_failure: failure,
        lease,
        ..Rule::new(name, limit?)
    };
    Some((rule, deny_response))
}

pub(crate) fn failure_policy(
    reader: &mut Reader,
    node: &Node,
    instances: Option<u32>,
) -> Option<FailurePolicy> {
    match (reader.choice(node, "on_store_failure", &words::FAILURES)?, instances) {
        (FailurePolicy::Local { .. }, Some(instances)) => Some(FailurePolicy::Local { instances }),
        (FailurePolicy::Local { .. }, None) => {
            let message = "`on_store_failure: local` needs `instances`: each instance enforces its share of the limit, \
                           and without the number all of them together would allow several times the limit";
            let help =
                "write how many instances share the limits, as in `redis: { address: ..., instances: 3 }`";
            reader.error(node.position, message, help);
            None
        }
        (other, _) => Some(other),
    }
}

/// Reads a cost. Zero is rejected: `when` and `allow` exempt requests.
fn unit_cost(reader: &mut Reader, node: &Node, name: &str) -> Option<u32> {
    let word = reader.word(node)?;
    if word == "0" {
        let help = "write 1 or more; use `when` or `allow` to exempt requests";
        reader.error(
            node.position,
            format!("{} is 0, so these requests would never be counted", subject(name)),
            help,
        );
        return None;
    }
    UNITS.parse(reader, node, name)
}

/// The maximum cost that the file defines. The value of a cost header is unknown here.
fn highest_cost(cost: &Cost) -> u32 {
    match cost {
        Cost::Fixed(cost) | Cost::Header { default: cost, .. } => *cost,
        Cost::Routes { costs, default } => costs.iter().map(|(_, cost)| *cost).fold(*default, u32::max),
    }
}

fn cost(reader: &mut Reader, node: &Node) -> Option<Cost> {
    if !matches!(node.value, NodeValue::Map(_)) {
        return unit_cost(reader, node, "cost").map(Cost::Fixed);
    }
    let fields = reader.fields(node, "`cost`", &COST)?;
    let default = COST_DEFAULT.default();
    let default =
        reader.or(fields.get("default"), default, |reader, node| unit_cost(reader, node, "default"));
    match (fields.get("header"), fields.get("routes")) {
        (Some(header), None) => {
            let most = reader.or(fields.get("max"), u32::MAX, |reader, node| unit_cost(reader, node, "max"));
            if most < default {
                let message = format!("the default cost {default} exceeds `max` ({most})");
                reader.error(fields.entry("max")?.position, message, "write a `max` of at least `default`");
            }
            let name = reader.parsed(header, header_name)?;
            Some(Cost::Header { name, default, max: most })
        }
        (None, Some(routes)) => {
            if let Some(most) = fields.entry("max") {
                reader.error(most.position, "`max` applies only to a cost from a header", "remove `max`");
            }
            let routes = reader.named(routes, "`routes`", COST.example)?;
            let mut costs = Vec::new();
            for Entry { name, position, node } in routes.iter() {
                reader.routes_named.push((name.to_owned(), position));
                costs.extend(unit_cost(reader, node, "the cost").map(|cost| (name.to_owned(), cost)));
            }
            Some(Cost::Routes { costs, default })
        }
        // A misspelt field, or one without a value, has been reported.
        (None, None) if !fields.lacks("header") || !fields.lacks("routes") => None,
        _ => {
            reader.error(node.position, "a cost is a number, a header or a list of routes", COST.example);
            None
        }
    }
}

fn lease(reader: &mut Reader, node: &Node) -> Option<Lease> {
    if !matches!(node.value, NodeValue::Map(_)) {
        return UNITS.parse(reader, node, "lease").map(Lease::new);
    }
    let fields = reader.fields(node, "`lease`", &LEASE)?;
    reader.require(&fields);
    let (max, hold) = (LEASE_MAX.optional(reader, &fields), HOLD.read(reader, &fields));
    Some(Lease { max: max?, hold })
}

/// `source` is the attribute of the key, if any client can choose it.
fn overrides(
    reader: &mut Reader,
    name: &str,
    values: Values,
    source: Option<&str>,
    node: &Node,
) -> Vec<Override> {
    let nodes = reader.list(node);
    if nodes.len() > OVERRIDES_MAX {
        let message = format!("too many overrides: {} of at most {OVERRIDES_MAX}", nodes.len());
        reader.error(node.position, message, "write several keys in one override, or remove some of them");
        return Vec::new();
    }
    nodes.into_iter().filter_map(|node| an_override(reader, name, values, source, node)).collect()
}

/// The conditions of an override. Warns if they depend on a header that any client can send.
fn override_conditions(reader: &mut Reader, node: &Node) -> Option<When> {
    let when = when(reader, node)?;
    let mut headers =
        node.entries().filter(|(name, _)| *name == "header").flat_map(|(_, node)| node.entries());
    if let (Some((header, _)), true) = (headers.next(), when.clients.is_empty() && when.claims.is_empty()) {
        let help = "use a `claim` of a verified token, or restrict it to your proxies with `client`";
        reader.warn(node.position, override_risk(&format!("the header {}", quoted(header))), help);
    }
    Some(when)
}

fn override_risk(source: &str) -> String {
    format!("any client can send {source} and choose this override")
}

fn an_override(
    reader: &mut Reader,
    name: &str,
    values: Values,
    source: Option<&str>,
    node: &Node,
) -> Option<Override> {
    let owner = format!("an override of {}", quoted(name));
    let fields = reader.fields(node, &owner, &OVERRIDE)?;
    let scope = match (fields.get("key"), fields.get("when")) {
        (Some(node), None) => {
            if let Some(source) = source {
                let help = "use a `claim` of a verified token as the key, or restrict the limit to your proxies with `when: { client: 10.0.0.0/8 }`";
                reader.warn(node.position, override_risk(source), help);
            }
            Some(OverrideScope::Keys(values.read(reader, node)))
        }
        (None, Some(node)) => override_conditions(reader, node).map(OverrideScope::When),
        (Some(_), Some(_)) => {
            let message = format!("{owner} has both `key` and `when`");
            reader.error(node.position, message, "remove `key` or `when`");
            None
        }
        (None, None) => {
            if fields.lacks("key") && fields.lacks("when") {
                let message = format!("{owner} has neither `key` nor `when`");
                reader.error(node.position, message, OVERRIDE.example);
            }
            None
        }
    };
    let is_unlimited = UNLIMITED.read(reader, &fields);
    let algorithm = fields.iter().find(|entry| ALGORITHM_NAMES.contains(&entry.name));
    let limit = match (is_unlimited, algorithm) {
        (true, None) => None,
        (true, Some(algorithm)) => {
            let message = "the override has `unlimited` and an algorithm";
            reader.error(algorithm.position, message, "remove `unlimited` or the algorithm");
            return None;
        }
        (false, _) => Some(limit::among(reader, &fields)?),
    };
    Some(Override { scope: scope?, limit })
}

/// Addresses and networks are clients; all other values are keys.
fn list(reader: &mut Reader, values: Values, node: &Node) -> List {
    let mut list = List::default();
    for node in reader.list(node) {
        if let NodeValue::Map(_) = &node.value {
            let Some(fields) = reader.fields(node, "an entry", &LISTED) else { continue };
            if fields.iter().len() == 0 {
                reader.error(node.position, "the entry has neither `client` nor `key`", LISTED.example);
            }
            for node in fields.get("client").map_or(Vec::new(), |node| reader.list(node)) {
                list.clients.extend(reader.parsed(node, cidr));
            }
            if let Some(node) = fields.get("key") {
                list.keys.extend(values.read(reader, node));
            }
            continue;
        }
        let Some(word) = reader.word(node) else { continue };
        let is_dotted = word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let is_address = word.contains(['/', ':']) || is_dotted;
        if !is_address && values != Values::Addresses {
            list.keys.extend(values.read(reader, node));
            continue;
        }
        list.clients.extend(reader.parsed(node, |word| {
            cidr(word).map_err(|value_error| match values {
                Values::Texts | Values::Segments => ValueError {
                    help: format!("{}; or write `{{ key: ... }}` for a key", value_error.help),
                    ..value_error
                },
                _ => value_error,
            })
        }));
    }
    list
}

fn ban(reader: &mut Reader, values: Values, node: &Node) -> Option<Ban> {
    let fields = reader.fields(node, "`ban`", &BAN)?;
    if values == Values::None {
        let help = "remove the ban, or set a `key` for the limit";
        reader.error(node.position, "a ban with `key: global` would ban all clients", help);
    }
    reader.require(&fields);
    let after = BAN_AFTER.optional(reader, &fields);
    let (within, lasts) = (BAN_WITHIN.optional(reader, &fields), BAN_FOR.optional(reader, &fields));
    Some(Ban { after: after?, within: within?, lasts: lasts? })
}

fn deny_response(reader: &mut Reader, node: &Node) -> Option<DenialResponse> {
    let fields = reader.fields(node, "`deny_response`", &DENY_RESPONSE)?;
    let mut deny_response = DenialResponse::default();
    if let Some(status) = STATUS.optional(reader, &fields)
        // The status is below 600, so both conversions succeed.
        && let Some(with) = u16::try_from(status).ok().and_then(|it| deny_response.clone().with_status(it).ok())
    {
        deny_response = with;
    }
    if let Some(node) = fields.get("content_type") {
        let with = reader.parsed(node, |word| {
            deny_response.clone().with_content_type(word).map_err(|_| ValueError {
                message: format!("invalid content type {}", quoted(word)),
                help: "write printable ASCII, as in `text/plain` or `application/json`".to_owned(),
            })
        });
        deny_response = with.unwrap_or(deny_response);
    }
    if let Some(node) = fields.get("body")
        && let Some(body) = reader.word(node)
    {
        deny_response = deny_response.with_body(body);
    }
    Some(deny_response)
}
