//! A named limit: its algorithm, key, conditions and responses.

use std::time::Duration;

use ratekeeper_core::{FailurePolicy, Lease, Limit, WINDOW_MAX, WINDOW_MIN};
use ratekeeper_rules::key::{Key, KeyPart};
use ratekeeper_rules::response::{DenialResponse, PolicyName};
use ratekeeper_rules::rule::{Ban, Cost, List, Override, OverrideScope, Rule};
use ratekeeper_rules::when::When;

use crate::concurrency::{ConcurrencyLimit, concurrency};
use crate::error::{quoted, subject};
use crate::key::{Values, forgeable, key};
use crate::limit;
use crate::names;
use crate::quantity::ValueError;
use crate::reader::{Entry, Fields, Reader};
use crate::tree::{Node, NodeValue};
use crate::when::{cidr, header_name, when};
use crate::{OVERRIDES_MAX, words};

const BAN_EXAMPLE: &str = "write as in `ban: { after: 5, within: 1m, for: 1h }`";
const OVERRIDE_EXAMPLE: &str =
    "write as in `{ key: acme, fixed_window: { limit: 1000 } }`, or `unlimited: true`";
/// Maximum number of denials before a ban. Each denial is logged with its time.
const BAN_AFTER_MAX: u32 = 1_000_000;

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
    let known: Vec<&str> = names::LIMIT.iter().copied().chain(limit::algorithm_names()).collect();
    let owner = format!("the limit {}", quoted(name));
    let mut fields = reader.fields(node, &owner, &known, limit::EXAMPLE)?;
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
    let is_shadow = reader.or(fields.get("shadow"), false, |reader, node| reader.yes_or_no(node, "shadow"));
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
    reader.number(node, name, 1..=u32::MAX)
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
    let example =
        "write a number, `{ header: X-Cost, default: 1, max: 100 }` or `{ routes: { upload: 10 } }`";
    let fields = reader.fields(node, "`cost`", names::COST, example)?;
    let default = reader.or(fields.get("default"), 1, |reader, node| unit_cost(reader, node, "default"));
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
            let routes = reader.named(routes, "`routes`", example)?;
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
            reader.error(node.position, "a cost is a number, a header or a list of routes", example);
            None
        }
    }
}

fn lease(reader: &mut Reader, node: &Node) -> Option<Lease> {
    if !matches!(node.value, NodeValue::Map(_)) {
        return reader.number(node, "lease", 1..=u32::MAX).map(Lease::new);
    }
    let example = "write the maximum, as in `lease: 100` or `lease: { max: 100, hold: 100ms }`";
    let fields = reader.fields(node, "`lease`", names::LEASE, example)?;
    reader.require(&fields, &["max"], example);
    let most = fields.get("max").and_then(|node| reader.number(node, "max", 1..=u32::MAX));
    let (from, to) = (Duration::from_millis(1), Lease::HOLD_MAX);
    let hold = fields.get("hold").and_then(|node| reader.length(node, "a hold", from, to));
    let lease = Lease::new(most?);
    Some(Lease { hold: hold.unwrap_or(lease.hold), ..lease })
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
    let known: Vec<&str> = names::OVERRIDE.iter().copied().chain(limit::algorithm_names()).collect();
    let fields = reader.fields(node, &owner, &known, OVERRIDE_EXAMPLE)?;
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
                reader.error(node.position, message, OVERRIDE_EXAMPLE);
            }
            None
        }
    };
    let is_unlimited =
        reader.or(fields.get("unlimited"), false, |reader, node| reader.yes_or_no(node, "unlimited"));
    let algorithm = fields.iter().find(|entry| limit::algorithm_names().contains(&entry.name));
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
            let example = "write `{ client: 10.0.0.0/8 }` or `{ key: name }`";
            let Some(fields) = reader.fields(node, "an entry", names::LISTED, example) else { continue };
            if fields.iter().len() == 0 {
                reader.error(node.position, "the entry has neither `client` nor `key`", example);
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
    let fields = reader.fields(node, "`ban`", names::BAN, BAN_EXAMPLE)?;
    if values == Values::None {
        let help = "remove the ban, or set a `key` for the limit";
        reader.error(node.position, "a ban with `key: global` would ban all clients", help);
    }
    reader.require(&fields, names::BAN, BAN_EXAMPLE);
    let after = fields.get("after").and_then(|node| reader.number(node, "after", 1..=BAN_AFTER_MAX));
    let mut length = |name, message| {
        fields.get(name).and_then(|node| reader.length(node, message, WINDOW_MIN, WINDOW_MAX))
    };
    let (within, lasts) = (length("within", "a window"), length("for", "a ban"));
    Some(Ban { after: after?, within: within?, lasts: lasts? })
}

fn deny_response(reader: &mut Reader, node: &Node) -> Option<DenialResponse> {
    let example =
        "write as in `deny_response: { status: 429, body: Too many requests, content_type: text/plain }`";
    let fields = reader.fields(node, "`deny_response`", names::DENY_RESPONSE, example)?;
    let mut deny_response = DenialResponse::default();
    if let Some(node) = fields.get("status")
        && let Some(status) = reader.number(node, "status", 200..=599)
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
