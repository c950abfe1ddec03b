//! What a configuration means: which limits apply to which requests, and the settings in effect.

use std::fmt;
use std::time::Duration;

use ratekeeper_core::{FailurePolicy, Limit};
use ratekeeper_rules::key::{Key, KeyFallback, KeyPart};
use ratekeeper_rules::rule::{Cost, OverrideScope, Rule};
use ratekeeper_rules::when::{ValueCondition, When};

use crate::file::LogKeys;
use crate::gateway::{Gateway, Route, Upstream};
use crate::print::to_yaml;
use crate::quantity::{bytes_text, duration_text};
use crate::store::{self, Store, WhenFull};
use crate::{Api, ConcurrencyLimit, Config, words};

/// A table of an explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// What the rows are, in plural.
    pub name: &'static str,
    /// The names of the columns.
    pub columns: &'static [&'static str],
    /// The rows; each has a cell for each column.
    pub rows: Vec<Vec<TableCell>>,
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableCell {
    /// One value.
    Text(String),
    /// Several values, joined by the separator in a text.
    List(Vec<String>, &'static str),
}

impl fmt::Display for TableCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TableCell::Text(text) => f.write_str(text),
            TableCell::List(values, separator) => f.write_str(&values.join(separator)),
        }
    }
}

impl From<String> for TableCell {
    fn from(text: String) -> TableCell {
        TableCell::Text(text)
    }
}

impl From<&str> for TableCell {
    fn from(text: &str) -> TableCell {
        TableCell::Text(text.to_owned())
    }
}

/// A list that is shown with commas.
fn list(values: Vec<String>) -> TableCell {
    TableCell::List(values, ", ")
}

/// Explains a configuration. Secrets are not part of the explanation.
pub fn explain(config: &Config) -> Vec<Table> {
    let mut tables = vec![listeners(config), routes(config), limits(config)];
    if let Some(gateway) = &config.gateway {
        tables.push(upstreams(gateway));
    }
    tables.push(settings(config));
    tables.retain(|table| !table.rows.is_empty());
    tables
}

fn listeners(config: &Config) -> Table {
    let mut rows = Vec::new();
    for listener in config.gateway.iter().flat_map(|gateway| &gateway.listeners) {
        let scheme = if listener.tls.is_some() { "https" } else { "http" };
        let access = if listener.proxy_protocol { "PROXY protocol from trusted proxies" } else { "" };
        rows.push(vec!["gateway".into(), format!("{scheme}://{}", listener.address).into(), access.into()]);
    }
    let mut add = |name: &str, scheme: &str, api: &Api| {
        let access = if api.token.is_some() { "token required" } else { "loopback only, no token" };
        rows.push(vec![name.into(), format!("{scheme}://{}", api.listen).into(), access.into()]);
    };
    for (name, scheme, api) in config.apis.all() {
        add(name, scheme, api);
    }
    if let Some(admin) = &config.admin {
        add("admin", "http", admin);
    }
    Table { name: "listeners", columns: &["service", "address", "access"], rows }
}

/// Who is checked against which limits: routes, callers of the APIs and Envoy's domains.
fn routes(config: &Config) -> Table {
    let mut rows = Vec::new();
    let row = |route: &str, matches: String, upstream: &str, limits: TableCell| {
        vec![route.into(), matches.into(), upstream.into(), limits]
    };
    for (gateway, route) in
        config.gateway.iter().flat_map(|it| it.routes.iter().map(move |route| (it, route)))
    {
        let mut limits = route.limit_names.clone();
        limits.extend(route.max_in_flight.map(|max| format!("max_in_flight: {max}")));
        let limits = if limits.is_empty() { "none".into() } else { list(limits) };
        rows.push(row(&route.id, conditions(&route.when), &gateway.upstreams[route.upstream].name, limits));
    }
    if let Some(http) = &config.apis.http {
        rows.push(row("(HTTP API)", "/v1/check and others".to_owned(), "", "any, by name".into()));
        let named = http.authorize.limits.iter().filter_map(|number| config.rules.rules().nth(*number));
        let limits = named.map(|rule| rule.name.clone()).collect();
        rows.push(row("(HTTP API)", "/v1/authorize".to_owned(), "", list(limits)));
    }
    if config.apis.resp.is_some() {
        rows.push(row("(Redis API)", "RK.CHECK".to_owned(), "", "any, by name".into()));
    }
    for domain in config.domains.iter().filter(|_| config.apis.envoy.is_some()) {
        rows.push(row("(Envoy API)", format!("domain {}", domain.name), "", "by descriptors".into()));
    }
    Table { name: "routes", columns: &["route", "matches", "upstream", "limits"], rows }
}

/// The limits: a row for each override in order, then one for the limit itself.
fn limits(config: &Config) -> Table {
    let mut rows = Vec::new();
    for (number, rule) in config.rules.rules().enumerate() {
        let is_descriptor = number >= config.named_limits;
        let key = if is_descriptor { "entries of the descriptor".into() } else { key_cell(&rule.key) };
        let mut add = |tier: String, limit: Option<&Limit>| {
            let amount = limit.map_or("unlimited".to_owned(), to_yaml);
            rows.push(vec![rule.name.clone().into(), key.clone(), tier.into(), amount.into(), options(rule)]);
        };
        for one in &rule.overrides {
            let tier = match &one.scope {
                OverrideScope::Keys(keys) => format!("key {}", keys.join("|")),
                OverrideScope::When(when) => conditions(when),
            };
            add(tier, one.limit.as_ref());
        }
        let tier = if rule.overrides.is_empty() { "all" } else { "all others" };
        add(tier.to_owned(), Some(&rule.limit));
    }
    rows.extend(config.concurrency.iter().map(concurrency));
    Table { name: "limits", columns: &["limit", "key", "tier", "amount", "options"], rows }
}

/// The other settings of a rule: conditions, cost, shadow, ban, lease and failure policy.
fn options(rule: &Rule) -> TableCell {
    let mut all = Vec::new();
    if !is_empty(&rule.when) {
        all.push(format!("when {}", conditions(&rule.when)));
    }
    match &rule.cost {
        Cost::Fixed(1) => {}
        Cost::Fixed(cost) => all.push(format!("cost {cost}")),
        Cost::Header { name, default, .. } => all.push(format!("cost by header {name}, default {default}")),
        Cost::Routes { .. } => all.push("cost by route".to_owned()),
    }
    if rule.is_shadow {
        all.push(SHADOW.to_owned());
    }
    for (name, list) in [("allow", &rule.allow), ("deny", &rule.deny)] {
        match list.clients.len() + list.keys.len() {
            0 => {}
            1 => all.push(format!("{name} 1 client or key")),
            count => all.push(format!("{name} {count} clients or keys")),
        }
    }
    if let Some(ban) = &rule.ban {
        all.push(format!(
            "ban for {} after {} denials within {}",
            duration_text(ban.lasts),
            ban.after,
            duration_text(ban.within)
        ));
    }
    if let Some(lease) = &rule.lease {
        all.push(format!("lease up to {} for {}", lease.max, duration_text(lease.hold)));
    }
    if let Some(policy) = rule.on_store_failure {
        all.push(format!("on_store_failure {}", policy_text(policy)));
    }
    TableCell::List(all, OPTION_SEPARATOR)
}

fn concurrency(limit: &ConcurrencyLimit) -> Vec<TableCell> {
    let mut options = Vec::new();
    if !is_empty(&limit.when) {
        options.push(format!("when {}", conditions(&limit.when)));
    }
    if limit.is_shadow {
        options.push(SHADOW.to_owned());
    }
    let amount = format!("concurrency: {{ limit: {} }}", limit.max);
    vec![
        limit.name.clone().into(),
        key_cell(&limit.key),
        "all".into(),
        amount.into(),
        TableCell::List(options, OPTION_SEPARATOR),
    ]
}

const OPTION_SEPARATOR: &str = "; ";
const SHADOW: &str = "shadow: never denies";

/// The key as it is written in a file.
fn key_cell(key: &Key) -> TableCell {
    let parts: Vec<String> =
        key.parts_with_fallbacks().map(|(part, fallback)| part_text(part, fallback)).collect();
    match parts.as_slice() {
        [] => "global".into(),
        [one] => one.as_str().into(),
        _ => list(parts),
    }
}

fn part_text(part: &KeyPart, fallback: &KeyFallback) -> String {
    let Some(field) = part_field(part) else { return words::name(&words::PLAIN_PARTS, part).to_owned() };
    let fallback = match fallback {
        KeyFallback::Part(part) => match part_field(part) {
            Some(field) => format!("{{ {field} }}"),
            None => words::name(&words::PLAIN_PARTS, part).to_owned(),
        },
        KeyFallback::Literal(text) => text.clone(),
        KeyFallback::Deny => "deny".to_owned(),
        KeyFallback::Skip => "skip".to_owned(),
    };
    format!("{{ {field}, fallback: {fallback} }}")
}

/// An attribute that has a name, as a field.
fn part_field(part: &KeyPart) -> Option<String> {
    Some(match part {
        KeyPart::Header(name) => format!("header: {name}"),
        KeyPart::Cookie(name) => format!("cookie: {name}"),
        KeyPart::Query(name) => format!("query: {name}"),
        KeyPart::Segment(number) => format!("path: {number}"),
        KeyPart::Path(pattern) => format!("path: {pattern}"),
        KeyPart::Claim(name) => format!("claim: {name}"),
        KeyPart::Custom(name) => format!("custom: {name}"),
        KeyPart::Ip | KeyPart::Method | KeyPart::Host | KeyPart::Route => return None,
    })
}

fn is_empty(when: &When) -> bool {
    when.methods.is_empty()
        && when.paths.is_empty()
        && when.hosts.is_empty()
        && when.headers.is_empty()
        && when.claims.is_empty()
        && when.clients.is_empty()
}

/// Conditions in a short form: `POST /login host shop.example.com`.
fn conditions(when: &When) -> String {
    let mut all = Vec::new();
    if !when.methods.is_empty() {
        all.push(when.methods.join("|"));
    }
    if !when.paths.is_empty() {
        all.push(when.paths.iter().map(ToString::to_string).collect::<Vec<_>>().join("|"));
    }
    if !when.hosts.is_empty() {
        all.push(format!("host {}", when.hosts.join("|")));
    }
    for (kind, values) in [("header", &when.headers), ("claim", &when.claims)] {
        all.extend(values.iter().map(|(name, value)| match value {
            ValueCondition::Present => format!("{kind} {name}"),
            ValueCondition::Absent => format!("no {kind} {name}"),
            ValueCondition::OneOf(values) => format!("{kind} {name}={}", values.join("|")),
        }));
    }
    if !when.clients.is_empty() {
        all.push(format!(
            "client {}",
            when.clients.iter().map(ToString::to_string).collect::<Vec<_>>().join("|")
        ));
    }
    if all.is_empty() { "all requests".to_owned() } else { all.join(" ") }
}

fn upstreams(gateway: &Gateway) -> Table {
    let rows = gateway.upstreams.iter().map(|upstream| {
        let Upstream { name, addresses, balance, max_connections, timeouts, retry_percent, .. } = upstream;
        let Upstream { health, outlier_ejection, .. } = upstream;
        let addresses: Vec<String> = addresses
            .iter()
            .map(|it| {
                let scheme = if it.is_tls { "https" } else { "http" };
                let host = if it.host.contains(':') { format!("[{}]", it.host) } else { it.host.clone() };
                format!("{scheme}://{host}:{}{}", it.port, it.path)
            })
            .collect();
        let times = [("connect", timeouts.connect), ("read", timeouts.read), ("idle", timeouts.idle)];
        let times: Vec<String> =
            times.iter().map(|(name, it)| format!("{name} {}", duration_text(*it))).collect();
        let health = health
            .as_ref()
            .map_or("off".to_owned(), |it| format!("{} every {}", it.path, duration_text(it.every)));
        let ejection = outlier_ejection.map_or("off".to_owned(), |it| {
            format!("after {} failures, for {}", it.after, duration_text(it.lasts))
        });
        vec![
            name.as_str().into(),
            list(addresses),
            words::name(&words::BALANCES, balance).into(),
            max_connections.to_string().into(),
            list(times),
            format!("{retry_percent}%").into(),
            health.into(),
            ejection.into(),
        ]
    });
    Table {
        name: "upstreams",
        columns: &[
            "upstream",
            "addresses",
            "balance",
            "max_connections",
            "timeouts",
            "retry_budget",
            "health",
            "outlier_ejection",
        ],
        rows: rows.collect(),
    }
}

/// Most networks of proxies that are listed.
const NETWORKS_SHOWN: usize = 8;

/// The settings in effect, most of them defaults.
fn settings(config: &Config) -> Table {
    let mut rows: Vec<Vec<TableCell>> = Vec::new();
    let trusted: Vec<String> = config.client.networks().iter().map(ToString::to_string).collect();
    let mut add = |name: &str, value: String| rows.push(vec![name.into(), value.into()]);
    match &config.store {
        Store::Memory { max_keys, max_bytes, when_full } => {
            add("store", "memory: limits of this process only, lost at a restart".to_owned());
            add("store.memory.max_keys", format!("{max_keys} per limit"));
            add("store.memory.max_bytes", bytes_text(*max_bytes));
            let when_full = match when_full {
                WhenFull::Share => "share: new keys share one budget",
                WhenFull::Deny => "deny: new keys are denied",
                WhenFull::Allow => "allow: new keys are allowed",
            };
            add("store.memory.when_full", when_full.to_owned());
        }
        Store::Redis(redis) => {
            add("store", "redis: limits shared by all instances".to_owned());
            let secret = if redis.secret.is_some() { "set" } else { "not set: stored keys can be guessed" };
            add("store.redis.secret", secret.to_owned());
            add("store.redis.namespace", redis.namespace.clone().unwrap_or("none".to_owned()));
            add(
                "store.redis.connections",
                redis.connections.map_or(store::CONNECTIONS.fallback.to_owned(), |it| it.to_string()),
            );
            add("store.redis.deadline", duration_text(redis.deadline));
            add("store.redis.on_store_failure", policy_text(redis.failure));
        }
    }
    match trusted.len() {
        0 => add("client.trusted_proxies", "none: forwarding headers are ignored".to_owned()),
        1..=NETWORKS_SHOWN => add("client.trusted_proxies", trusted.join(", ")),
        count => add("client.trusted_proxies", format!("{count} networks")),
    }
    if !trusted.is_empty() {
        add("client.source", words::name(&words::SOURCES, &config.client.source()).to_owned());
    }
    add("paths.ambiguous", words::name(&words::AMBIGUOUS, &config.paths.ambiguous).to_owned());
    let exact = |ignores: bool| if ignores { "ignore" } else { "exact" };
    add("paths.case", exact(config.paths.ignore_case).to_owned());
    add("paths.trailing_slash", exact(config.paths.ignore_trailing_slash).to_owned());
    add("responses.header_set", config.responses.headers.name().to_owned());
    add("responses.jitter", duration_text(Duration::from_secs(config.responses.jitter_secs)));
    if let Some(gateway) = &config.gateway {
        let it = &gateway.timeouts;
        let times = [
            ("header", it.header),
            ("body", it.body),
            ("idle", it.idle),
            ("tunnel", it.tunnel),
            ("drain", it.drain),
        ];
        let times: Vec<String> =
            times.iter().map(|(name, it)| format!("{name} {}", duration_text(*it))).collect();
        add("gateway.timeouts", times.join(", "));
        add("gateway.timeouts.min_rate", it.min_rate.to_string());
        add("gateway.max_connections", gateway.max_connections.to_string());
        add("gateway.max_connections_per_client", gateway.max_connections_per_client.to_string());
        add("gateway.max_in_flight", gateway.max_in_flight.to_string());
        add("gateway.access_log", gateway.access_log.to_string());
        let keys = match config.log_keys {
            LogKeys::Hash => "hash: a keyed hash of each key",
            LogKeys::Off => "off: no keys in the access log",
            LogKeys::Text => "text: keys are readable in the access log",
        };
        add("log.keys", keys.to_owned());
        let route_timeouts: Vec<Duration> =
            gateway.routes.iter().map(|route: &Route| route.timeout).collect();
        if let (Some(min), Some(max)) = (route_timeouts.iter().min(), route_timeouts.iter().max()) {
            let text = if min == max {
                duration_text(*min)
            } else {
                format!("{} to {}", duration_text(*min), duration_text(*max))
            };
            add("gateway.routes.timeout", text);
        }
        let critical = gateway.routes.iter().filter(|it| it.is_critical).map(|it| it.id.clone());
        let critical: Vec<String> = critical.collect();
        if !critical.is_empty() {
            add("gateway.routes.critical", critical.join(", "));
        }
    }
    Table { name: "settings", columns: &["setting", "value"], rows }
}

fn policy_text(policy: FailurePolicy) -> String {
    match policy {
        FailurePolicy::Local { instances: 1 } => {
            "local: each instance enforces the whole limit in memory".to_owned()
        }
        FailurePolicy::Local { instances } => {
            format!("local: each of {instances} instances enforces its share in memory")
        }
        FailurePolicy::Open => "open: all requests are allowed".to_owned(),
        FailurePolicy::Closed => "closed: all requests are denied".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::DOCUMENT;
    use crate::gateway::GATEWAY;
    use crate::table::{Row, Section};
    use crate::{EmptyEnvironment, parse};

    /// The field of a path such as `store.redis.deadline`.
    fn field(section: &'static Section, path: &str) -> Option<Row> {
        match path.split_once('.') {
            Some((name, rest)) => field(section.row(name)?.kind.section()?, rest),
            None => section.row(path),
        }
    }

    /// Checks that each item of a list such as `header 10s, body 15s` begins with the name of a field of the section.
    fn check_names(section: &'static Section, list: &TableCell) {
        for item in list.to_string().split(", ") {
            let name = item.split(' ').next().unwrap_or_default();
            assert!(section.row(name).is_some(), "{name} in {list}");
        }
    }

    #[test]
    fn every_explained_setting_is_a_field() {
        for store in ["memory", "{ redis: { address: 'redis://127.0.0.1:6379' } }"] {
            let text = format!(
                "store: {store}
client: {{ trusted_proxies: [10.0.0.0/8] }}
limits: {{ total: {{ key: global, token_bucket: {{ capacity: 1 }} }} }}
gateway:
  listen: 127.0.0.1:0
  upstreams: {{ one: {{ addresses: [http://127.0.0.1:9] }} }}
  routes: [{{ id: all, limits: all, upstream: one, critical: true }}]
"
            );
            let config = parse(&text, &EmptyEnvironment).unwrap_or_else(|errors| panic!("{errors}"));
            let tables = explain(&config);
            let table = |name: &str| tables.iter().find(|table| table.name == name).unwrap();
            for row in &table("settings").rows {
                let path = row[0].to_string();
                let row_of = field(&DOCUMENT, &path).unwrap_or_else(|| panic!("{path} is no field"));
                if let Some(section) = row_of.kind.section().filter(|_| path == "gateway.timeouts") {
                    check_names(section, &row[1]);
                }
            }
            assert!(table("settings").rows.len() > 15, "{:?}", table("settings"));
            let mut upstream = None;
            GATEWAY.row("upstreams").unwrap().kind.visit("", &mut |_, section| upstream = Some(section));
            let upstream = upstream.unwrap();
            let columns = &table("upstreams").columns;
            for name in columns.iter().filter(|name| **name != "upstream") {
                assert!(upstream.row(name).is_some(), "{name}");
            }
            let timeouts = columns.iter().position(|name| *name == "timeouts").unwrap();
            let section = upstream.row("timeouts").and_then(|row| row.kind.section()).unwrap();
            check_names(section, &table("upstreams").rows[0][timeouts]);
        }
    }
}
