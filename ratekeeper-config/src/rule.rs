//! A named limit: its algorithm, key, conditions and responses.

use std::time::Duration;

use ratekeeper_core::{FailurePolicy, Lease, Limit, WINDOW_MAX, WINDOW_MIN};
use ratekeeper_rules::key::{Key, KeyPart};
use ratekeeper_rules::response::{DenialResponse, PolicyName};
use ratekeeper_rules::rule::{Ban, Cost, List, Override, OverrideScope, Rule};
use ratekeeper_rules::when::When;

use crate::error::{listed, quoted};
use crate::key::{Values, key};
use crate::limit;
use crate::names;
use crate::quantity::Fault;
use crate::reader::{Entry, Fields, Reader};
use crate::slots::{Slots, slots};
use crate::tree::{Node, Typed};
use crate::when::{cidr, header_name, when};
use crate::{OVERRIDES_MAX, words};

const BAN_EXAMPLE: &str = "write as in `ban: { after: 5, within: 1m, for: 1h }`";
const OVERRIDE_EXAMPLE: &str =
    "write as in `{ key: acme, fixed_window: { limit: 1000 } }`, or `unlimited: true`";
/// Maximum number of denials before a ban. Each denial is logged with its time.
const BAN_AFTER_MAX: u32 = 1_000_000;

/// Settings of the file that apply to all limits.
pub(crate) struct Defaults {
    /// Number of instances that share the limits.
    pub(crate) nodes: u32,
}

/// A named limit.
pub(crate) enum Limited {
    /// A limit with an algorithm, and its response to denied requests.
    Rule(Box<Rule>, DenialResponse),
    /// A concurrency limit.
    Slots(Slots),
}

pub(crate) fn limited(
    reader: &mut Reader,
    entry: Entry<'_>,
    defaults: &Defaults,
    policy: Option<PolicyName>,
) -> Option<Limited> {
    let Entry { name, place, node } = entry;
    let known: Vec<&str> = names::LIMIT.iter().copied().chain(limit::algorithm_names()).collect();
    let owner = format!("the limit {}", quoted(name));
    let mut fields = reader.fields(node, &owner, &known, limit::EXAMPLE)?;
    fields.place = place;
    if fields.has("concurrency") {
        return slots(reader, &fields, name, policy).map(Limited::Slots);
    }
    let (rule, custom) = rule(reader, &fields, name, defaults)?;
    Some(Limited::Rule(Box::new(rule), custom))
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
    let failure = fields.get("on_store_failure").and_then(|node| failure(reader, node, defaults.nodes));
    let overrides = match fields.get("overrides") {
        Some(node) => overrides(reader, name, values, node),
        None => Vec::new(),
    };
    let mut listed = |name| match fields.get(name) {
        Some(node) => list(reader, values, node),
        None => List::default(),
    };
    let (allow, deny) = (listed("allow"), listed("deny"));
    let ban = fields.get("ban").and_then(|node| ban(reader, values, node));
    let custom = reader.or(fields.get("deny_response"), DenialResponse::default(), custom);
    let lease = fields.get("lease").and_then(|node| lease(reader, node));
    let limits = limit.iter().chain(overrides.iter().filter_map(|it| it.limit.as_ref()));
    if let (Some(lease), Some(node)) = (lease, fields.get("lease"))
        && limits.into_iter().any(|limit| limit.lease_limit(lease.hold).is_none())
    {
        let instead = "remove the lease; a leaky bucket that shapes and a log that counts all requests have none, and \
                       a bucket must hold more than refills while the lease is held";
        reader.wrong(node.place, "this limit, or an override of it, cannot be leased like that", instead);
    }
    let limits = limit.iter().chain(overrides.iter().filter_map(|it| it.limit.as_ref()));
    if let (Some(node), Some(most)) = (fields.get("cost"), limits.map(Limit::limit).min())
        && dearest(&cost) > most
    {
        let what = format!(
            "this costs {}, so it would never pass: the limit, or an override of it, has at most {most}",
            dearest(&cost)
        );
        reader.wrong(node.place, what, format!("write {most} or less, or raise the limit"));
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
    Some((rule, custom))
}

pub(crate) fn failure(reader: &mut Reader, node: &Node, nodes: u32) -> Option<FailurePolicy> {
    match reader.choice(node, "failure policy", &words::FAILURES)? {
        FailurePolicy::Local { .. } => Some(FailurePolicy::Local { instances: nodes }),
        other => Some(other),
    }
}

/// Reads a cost. Zero is rejected: `when` and `allow` exempt requests.
fn price(reader: &mut Reader, node: &Node, name: &str) -> Option<u32> {
    let word = reader.word(node)?;
    if word == "0" {
        let instead = "write 1 or more; `when` and `allow` leave requests out";
        reader.wrong(node.place, format!("{name} is 0, so such requests would never count"), instead);
        return None;
    }
    reader.number(node, name, 1..=u32::MAX)
}

/// The maximum cost that the file defines. The value of a cost header is unknown here.
fn dearest(cost: &Cost) -> u32 {
    match cost {
        Cost::Fixed(cost) | Cost::Header { default: cost, .. } => *cost,
        Cost::Routes { costs, default } => costs.iter().map(|(_, cost)| *cost).fold(*default, u32::max),
    }
}

fn cost(reader: &mut Reader, node: &Node) -> Option<Cost> {
    if !matches!(node.typed, Typed::Map(_)) {
        return price(reader, node, "cost").map(Cost::Fixed);
    }
    let example =
        "write a number, `{ header: X-Cost, default: 1, max: 100 }` or `{ routes: { upload: 10 } }`";
    let fields = reader.fields(node, "cost", names::COST, example)?;
    let default = reader.or(fields.get("default"), 1, |reader, node| price(reader, node, "default"));
    match (fields.get("header"), fields.get("routes")) {
        (Some(header), None) => {
            let most = reader.or(fields.get("max"), u32::MAX, |reader, node| price(reader, node, "max"));
            if most < default {
                let what = format!("a request without the header costs {default}, and {most} is the most");
                reader.wrong(
                    fields.entry("max")?.place,
                    what,
                    "write a `max` that is not less than `default`",
                );
            }
            let name = reader.parsed(header, header_name)?;
            Some(Cost::Header { name, default, max: most })
        }
        (None, Some(routes)) => {
            if let Some(most) = fields.entry("max") {
                reader.wrong(most.place, "routes have their costs, and no most", "remove `max`");
            }
            let routes = reader.named(routes, "routes", example)?;
            let mut costs = Vec::new();
            for Entry { name, place, node } in routes.iter() {
                reader.routes_named.push((name.to_owned(), place));
                costs.extend(price(reader, node, "the cost").map(|cost| (name.to_owned(), cost)));
            }
            Some(Cost::Routes { costs, default })
        }
        // A field without a value has been reported.
        _ if fields.has("header") != fields.has("routes") => None,
        _ => {
            reader.wrong(node.place, "a cost is a number, or comes from a header or the route", example);
            None
        }
    }
}

fn lease(reader: &mut Reader, node: &Node) -> Option<Lease> {
    if !matches!(node.typed, Typed::Map(_)) {
        return reader.number(node, "lease", 1..=u32::MAX).map(Lease::new);
    }
    let example = "write how many at most, as in `lease: 100` or `lease: { max: 100, hold: 100ms }`";
    let fields = reader.fields(node, "lease", names::LEASE, example)?;
    if !fields.has("max") {
        reader.wrong(node.place, "the lease does not say how many units are taken at once", example);
    }
    let most = fields.get("max").and_then(|node| reader.number(node, "max", 1..=u32::MAX));
    let (from, to) = (Duration::from_millis(1), Lease::HOLD_MAX);
    let hold = fields.get("hold").and_then(|node| reader.length(node, "a hold", from, to));
    let lease = Lease::new(most?);
    Some(Lease { hold: hold.unwrap_or(lease.hold), ..lease })
}

fn overrides(reader: &mut Reader, name: &str, values: Values, node: &Node) -> Vec<Override> {
    let nodes = reader.list(node);
    if nodes.len() > OVERRIDES_MAX {
        let what = format!("there are {} overrides, and a limit has at most {OVERRIDES_MAX}", nodes.len());
        reader.wrong(node.place, what, "name several keys in one override, or have fewer of them");
        return Vec::new();
    }
    nodes.into_iter().filter_map(|node| an_override(reader, name, values, node)).collect()
}

fn an_override(reader: &mut Reader, name: &str, values: Values, node: &Node) -> Option<Override> {
    let owner = format!("an override of {}", quoted(name));
    let known: Vec<&str> = names::OVERRIDE.iter().copied().chain(limit::algorithm_names()).collect();
    let fields = reader.fields(node, &owner, &known, OVERRIDE_EXAMPLE)?;
    let whose = match (fields.get("key"), fields.get("when")) {
        (Some(node), None) => Some(OverrideScope::Keys(values.read(reader, node))),
        (None, Some(node)) => when(reader, node).map(OverrideScope::When),
        (Some(_), Some(_)) => {
            let what = format!("{owner} is for keys or for requests of a kind, not for both");
            reader.wrong(node.place, what, "remove `key` or `when`");
            None
        }
        (None, None) => {
            if !fields.has("key") && !fields.has("when") {
                let what = format!("{owner} does not say for whom it is: by `key` or by `when`");
                reader.wrong(node.place, what, OVERRIDE_EXAMPLE);
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
            let what = "this override has no limit, and then it has one";
            reader.wrong(algorithm.place, what, "remove `unlimited` or the algorithm");
            return None;
        }
        (false, _) => Some(limit::among(reader, &fields)?),
    };
    Some(Override { scope: whose?, limit })
}

/// Addresses and networks are clients; all other values are keys.
fn list(reader: &mut Reader, values: Values, node: &Node) -> List {
    let mut list = List::default();
    for node in reader.list(node) {
        if let Typed::Map(_) = &node.typed {
            let example = "write `{ client: 10.0.0.0/8 }` or `{ key: name }`";
            let Some(fields) = reader.fields(node, "an entry", names::LISTED, example) else { continue };
            if fields.iter().len() == 0 {
                reader.wrong(node.place, "this entry names nobody", example);
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
            cidr(word).map_err(|fault| match values {
                Values::Texts | Values::Segments => Fault {
                    instead: format!("{}; or `{{ key: ... }}` if it is a key", fault.instead),
                    ..fault
                },
                _ => fault,
            })
        }));
    }
    list
}

fn ban(reader: &mut Reader, values: Values, node: &Node) -> Option<Ban> {
    let fields = reader.fields(node, "ban", names::BAN, BAN_EXAMPLE)?;
    if values == Values::None {
        let instead = "remove the ban, or give the limit a `key`";
        reader.wrong(node.place, "with one budget for all, this would ban everybody", instead);
    }
    let missing: Vec<&str> = names::BAN.iter().copied().filter(|name| !fields.has(name)).collect();
    if !missing.is_empty() {
        reader.wrong(node.place, format!("the ban does not say {}", listed(&missing, "and")), BAN_EXAMPLE);
    }
    let after = fields.get("after").and_then(|node| reader.number(node, "after", 1..=BAN_AFTER_MAX));
    let mut length =
        |name, what| fields.get(name).and_then(|node| reader.length(node, what, WINDOW_MIN, WINDOW_MAX));
    let (within, lasts) = (length("within", "a window"), length("for", "a ban"));
    Some(Ban { after: after?, within: within?, lasts: lasts? })
}

fn custom(reader: &mut Reader, node: &Node) -> Option<DenialResponse> {
    let example =
        "write as in `deny_response: { status: 429, body: Too many requests, content_type: text/plain }`";
    let fields = reader.fields(node, "deny_response", names::ANSWER, example)?;
    let mut custom = DenialResponse::default();
    if let Some(node) = fields.get("status")
        && let Some(status) = reader.number(node, "status", 200..=599)
        // The status is below 600, so both conversions succeed.
        && let Some(with) = u16::try_from(status).ok().and_then(|it| custom.clone().with_status(it).ok())
    {
        custom = with;
    }
    if let Some(node) = fields.get("content_type") {
        let with = reader.parsed(node, |word| {
            custom.clone().with_content_type(word).map_err(|_| Fault {
                what: format!("{} is not a content type", quoted(word)),
                instead: "write printable ASCII, as in `text/plain` or `application/json`".to_owned(),
            })
        });
        custom = with.unwrap_or(custom);
    }
    if let Some(node) = fields.get("body")
        && let Some(body) = reader.word(node)
    {
        custom = custom.with_body(body);
    }
    Some(custom)
}
