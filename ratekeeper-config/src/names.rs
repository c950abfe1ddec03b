//! The known names of each mapping. Tests compare the schema with them.

use crate::limit;

pub(crate) const FILE: &[&str] =
    &["store", "client", "paths", "responses", "jwt", "limits", "domains", "gateway", "apis", "admin", "log"];

pub(crate) const STORE: &[&str] = &["memory", "redis"];
pub(crate) const MEMORY: &[&str] = &["max_keys", "max_bytes", "when_full"];
pub(crate) const REDIS: &[&str] =
    &["address", "secret", "namespace", "deadline", "on_store_failure", "instances", "connections", "tls"];
pub(crate) const TLS: &[&str] = &["ca", "certificate", "key"];

pub(crate) const SECRET: &[&str] = &["file"];

pub(crate) const CLIENT: &[&str] = &["trusted_proxies", "source", "ipv6_prefix"];
pub(crate) const PATHS: &[&str] = &["ambiguous", "case", "trailing_slash"];
pub(crate) const RESPONSES: &[&str] = &["header_set", "jitter"];
pub(crate) const JWT: &[&str] = &["keys", "header", "issuer", "audience", "algorithms"];

/// Of a limit, in addition to its algorithm. A concurrency limit has no algorithm.
pub(crate) const LIMIT: &[&str] = &[
    "concurrency",
    "key",
    "cost",
    "when",
    "shadow",
    "on_store_failure",
    "lease",
    "overrides",
    "allow",
    "deny",
    "ban",
    "deny_response",
];
pub(crate) const CONCURRENCY: &[&str] = &["limit"];
pub(crate) const KEY: &[&str] = &["header", "cookie", "query", "path", "claim", "fallback"];
/// Of the fallback of a missing attribute.
pub(crate) const FALLBACK: &[&str] = &["header", "cookie", "query", "path", "claim", "literal"];
pub(crate) const WHEN: &[&str] = &["method", "path", "host", "header", "claim", "client"];
pub(crate) const COST: &[&str] = &["header", "routes", "default", "max"];
pub(crate) const LEASE: &[&str] = &["max", "hold"];
/// Of an override, in addition to its algorithm.
pub(crate) const OVERRIDE: &[&str] = &["key", "when", "unlimited"];
/// Of an entry of `allow` and `deny`.
pub(crate) const LISTED: &[&str] = &["client", "key"];
pub(crate) const BAN: &[&str] = &["after", "within", "for"];
pub(crate) const DENY_RESPONSE: &[&str] = &["status", "body", "content_type"];

/// Of a descriptor, in addition to its algorithm.
pub(crate) const DESCRIPTOR: &[&str] = &[
    "key",
    "value",
    "unlimited",
    "blocked",
    "unit",
    "name",
    "replaces",
    "shadow",
    "quota",
    "share",
    "metadata",
    "descriptors",
];

pub(crate) const GATEWAY: &[&str] = &[
    "listen",
    "routes",
    "upstreams",
    "timeouts",
    "max_connections",
    "max_connections_per_client",
    "max_in_flight",
    "access_log",
];
pub(crate) const LISTENER: &[&str] = &["address", "tls", "proxy_protocol"];
pub(crate) const LISTENER_TLS: &[&str] = &["certificate", "key"];
pub(crate) const TIMEOUTS: &[&str] = &["header", "body", "idle", "min_rate", "tunnel", "drain"];
/// Of a route: its conditions, as in `when`, and its settings.
pub(crate) const ROUTE: &[&str] = &[
    "id",
    "method",
    "path",
    "host",
    "header",
    "claim",
    "client",
    "upstream",
    "limits",
    "max_in_flight",
    "critical",
    "timeout",
    "strip_prefix",
    "rewrite",
    "request_headers",
    "response_headers",
];
pub(crate) const HEADERS: &[&str] = &["set", "add", "remove"];
pub(crate) const UPSTREAM: &[&str] = &[
    "addresses",
    "balance",
    "protocol",
    "timeouts",
    "ping_after",
    "max_connections",
    "retry_budget",
    "health",
    "outlier_ejection",
    "tls",
];
pub(crate) const UPSTREAM_TIMEOUTS: &[&str] = &["connect", "read", "idle"];
pub(crate) const UPSTREAM_TLS: &[&str] = &["ca"];
pub(crate) const HEALTH: &[&str] = &["path", "every", "timeout", "healthy_after", "unhealthy_after"];
pub(crate) const OUTLIER_EJECTION: &[&str] = &["after", "for"];
pub(crate) const APIS: &[&str] = &["http", "envoy", "resp"];
pub(crate) const HTTP: &[&str] = &["listen", "token", "refunds", "resets", "authorize"];
pub(crate) const AUTHORIZE: &[&str] = &["deny_status", "limits"];
pub(crate) const ENVOY: &[&str] = &["listen", "token", "refunds", "headers", "header_names"];
pub(crate) const RESP: &[&str] = &["listen", "token", "max_connections"];
pub(crate) const ADMIN: &[&str] = &["listen", "token"];
pub(crate) const LOG: &[&str] = &["keys"];

/// The names inside of a field, to find the field that a misplaced name belongs to.
fn inside_of(field: &str) -> &'static [&'static str] {
    let known = [
        ("store", STORE),
        ("redis", REDIS),
        ("memory", MEMORY),
        ("client", CLIENT),
        ("paths", PATHS),
        ("responses", RESPONSES),
        ("jwt", JWT),
        ("gateway", GATEWAY),
        ("apis", APIS),
        ("log", LOG),
        ("http", HTTP),
        ("ban", BAN),
        ("deny_response", DENY_RESPONSE),
        ("health", HEALTH),
        ("outlier_ejection", OUTLIER_EJECTION),
        ("authorize", AUTHORIZE),
        ("concurrency", CONCURRENCY),
    ];
    let algorithm = limit::ALGORITHMS.iter().find(|it| it.name == field).map(|it| it.parameters);
    let field = known.iter().find(|(name, _)| *name == field).map(|(_, names)| *names);
    field.or(algorithm).unwrap_or_default()
}

/// The field, of those in a mapping, that a misplaced name should be indented under.
pub(crate) fn owner_of<'f>(name: &str, fields: impl Iterator<Item = &'f str>) -> Option<&'f str> {
    fields.filter(|field| inside_of(field).contains(&name)).last()
}

/// Whether the name is a field of a limit, or an algorithm.
pub(crate) fn is_limit_field(name: &str) -> bool {
    LIMIT.contains(&name) || limit::algorithm_names().contains(&name)
}

/// Whether a name without a value means an empty mapping. For other names the value was probably forgotten.
pub(crate) fn may_be_empty(name: &str) -> bool {
    name == "memory" || name == "limits" || limit::algorithm_names().contains(&name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ratekeeper_rules::response::HeaderSet;
    use serde_json::Value;

    use super::*;
    use crate::{SCHEMA, words};

    /// The names of each mapping, and their location in the schema.
    fn mappings() -> Vec<(&'static str, Vec<&'static str>)> {
        let with_algorithms =
            |names: &[&'static str]| names.iter().copied().chain(limit::algorithm_names()).collect();
        let plain = [
            ("", FILE),
            ("/properties/store/oneOf/1", STORE),
            ("/$defs/memory", MEMORY),
            ("/$defs/redis", REDIS),
            ("/$defs/tls", TLS),
            ("/$defs/file", SECRET),
            ("/$defs/client", CLIENT),
            ("/$defs/paths", PATHS),
            ("/$defs/log", LOG),
            ("/$defs/responses", RESPONSES),
            ("/$defs/jwt", JWT),
            ("/$defs/concurrency", CONCURRENCY),
            ("/$defs/part/oneOf/1", KEY),
            ("/$defs/fallback/oneOf/1", FALLBACK),
            ("/$defs/when", WHEN),
            ("/$defs/cost/oneOf/1", COST),
            ("/$defs/lease/oneOf/1", LEASE),
            ("/$defs/listed/oneOf/1", LISTED),
            ("/$defs/ban", BAN),
            ("/$defs/deny_response", DENY_RESPONSE),
            ("/$defs/gateway", GATEWAY),
            ("/$defs/listener/oneOf/1", LISTENER),
            ("/$defs/listener_tls", LISTENER_TLS),
            ("/$defs/timeouts", TIMEOUTS),
            ("/$defs/route", ROUTE),
            ("/$defs/headers", HEADERS),
            ("/$defs/upstream", UPSTREAM),
            ("/$defs/upstream_timeouts", UPSTREAM_TIMEOUTS),
            ("/$defs/upstream_tls", UPSTREAM_TLS),
            ("/$defs/health/oneOf/1", HEALTH),
            ("/$defs/outlier_ejection/oneOf/1", OUTLIER_EJECTION),
            ("/$defs/apis", APIS),
            ("/$defs/http/oneOf/1", HTTP),
            ("/$defs/authorize", AUTHORIZE),
            ("/$defs/envoy/oneOf/1", ENVOY),
            ("/$defs/resp/oneOf/1", RESP),
            ("/properties/admin/oneOf/1", ADMIN),
        ];
        let mut all: Vec<(&str, Vec<&str>)> = plain.map(|(at, names)| (at, names.to_vec())).to_vec();
        all.push(("/$defs/limit", with_algorithms(LIMIT)));
        all.push(("/$defs/override", with_algorithms(OVERRIDE)));
        all.push(("/$defs/descriptor", with_algorithms(DESCRIPTOR)));
        let algorithms = [
            "/$defs/token_bucket",
            "/$defs/leaky_bucket",
            "/$defs/fixed_window",
            "/$defs/sliding_window_log",
            "/$defs/sliding_window_counter",
        ];
        for (at, limit::Algorithm { name, parameters, .. }) in algorithms.into_iter().zip(limit::ALGORITHMS) {
            assert_eq!(at, format!("/$defs/{name}"));
            all.push((at, parameters.to_vec()));
        }
        all
    }

    /// The values of each enumeration, and their location in the schema.
    fn choices() -> Vec<(&'static str, Vec<&'static str>)> {
        fn of<T>(words: &[(&'static str, T)]) -> Vec<&'static str> {
            words.iter().map(|(word, _)| *word).collect()
        }
        vec![
            ("/$defs/token_bucket/properties/style", of(&words::STYLES)),
            ("/$defs/leaky_bucket/properties/mode", of(&words::MODES)),
            ("/$defs/fixed_window/properties/align", of(&words::ALIGNS)),
            ("/$defs/sliding_window_log/properties/count", of(&words::COUNTS)),
            ("/$defs/sliding_window_counter/properties/edge", of(&words::EDGES)),
            ("/$defs/memory/properties/when_full", of(&words::WHEN_FULL)),
            ("/$defs/on_store_failure", of(&words::FAILURES)),
            ("/$defs/client/properties/source", of(&words::SOURCES)),
            ("/$defs/log/properties/keys", of(&words::LOG_KEYS)),
            ("/$defs/paths/properties/ambiguous", of(&words::AMBIGUOUS)),
            ("/$defs/paths/properties/case", of(&words::CASE)),
            ("/$defs/paths/properties/trailing_slash", of(&words::TRAILING_SLASH)),
            ("/$defs/responses/properties/header_set", HeaderSet::all().map(HeaderSet::name).collect()),
            ("/$defs/signature", words::SIGNATURES.to_vec()),
            ("/$defs/part/oneOf/0", of(&words::PLAIN_PARTS)),
            ("/$defs/upstream/properties/balance", of(&words::BALANCES)),
            ("/$defs/upstream/properties/protocol", of(&words::PROTOCOLS)),
            ("/$defs/descriptor/properties/unit", of(&words::UNITS)),
            ("/$defs/envoy/oneOf/1/properties/header_names", of(&words::ENVOY_HEADER_NAMES)),
        ]
    }

    fn schema() -> Value {
        serde_json::from_str(SCHEMA).unwrap()
    }

    /// All locations in the schema that define a mapping or an enumeration.
    fn paths(value: &Value, at: &str, key: &str, found: &mut BTreeSet<String>) {
        let is_closed = value.get("additionalProperties") == Some(&Value::Bool(false));
        if value.get(key).is_some() && (key == "enum" || is_closed) {
            found.insert(at.to_owned());
        }
        let parts: Vec<(String, &Value)> = match value {
            // A negated schema is not an enumeration.
            Value::Object(map) => {
                map.iter().filter(|(name, _)| *name != "not").map(|(name, it)| (name.clone(), it)).collect()
            }
            Value::Array(list) => list.iter().enumerate().map(|(at, it)| (at.to_string(), it)).collect(),
            _ => Vec::new(),
        };
        for (name, part) in parts {
            paths(part, &format!("{at}/{name}"), key, found);
        }
    }

    fn all_places(key: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        paths(&schema(), "", key, &mut found);
        found
    }

    #[test]
    fn schema_has_exactly_the_names_of_the_reader() {
        let schema = schema();
        for (at, names) in mappings() {
            let properties = schema.pointer(&format!("{at}/properties")).and_then(Value::as_object);
            let in_schema: BTreeSet<&str> = properties.unwrap().keys().map(String::as_str).collect();
            assert_eq!(in_schema, names.into_iter().collect(), "{at}");
        }
        let known: BTreeSet<String> = mappings().into_iter().map(|(at, _)| at.to_owned()).collect();
        assert_eq!(all_places("properties"), known);
    }

    #[test]
    fn every_list_of_names_is_compared() {
        let lists = include_str!("names.rs").matches(concat!("pub(crate)", " const ")).count();
        assert_eq!(mappings().len(), lists + limit::ALGORITHMS.len());
    }

    #[test]
    fn schema_has_the_enumeration_values_and_defaults_of_the_reader() {
        let schema = schema();
        for (at, words) in choices() {
            let choice = schema.pointer(at).unwrap();
            let in_schema: Vec<&str> =
                choice["enum"].as_array().unwrap().iter().flat_map(Value::as_str).collect();
            assert_eq!(in_schema, words, "{at}");
            let default = choice.get("default").and_then(Value::as_str);
            assert!(default.is_none_or(|default| default == words[0]), "{at}");
        }
        let known: BTreeSet<String> = choices().into_iter().map(|(at, _)| at.to_owned()).collect();
        assert_eq!(all_places("enum"), known);
    }

    #[test]
    fn every_name_and_choice_is_described() {
        let schema = schema();
        for (at, _) in mappings() {
            let properties = schema.pointer(&format!("{at}/properties")).and_then(Value::as_object);
            for (name, property) in properties.unwrap() {
                let referred = property.get("$ref").and_then(Value::as_str).map(|it| &it[1..]);
                let is_described = |value: &Value| value.get("description").is_some_and(Value::is_string);
                let there = referred.and_then(|it| schema.pointer(it)).is_some_and(|it| {
                    is_described(it)
                        || it["oneOf"].as_array().is_some_and(|them| them.iter().any(is_described))
                });
                assert!(is_described(property) || there || name == "file", "{at}: {name}");
            }
        }
    }
}
