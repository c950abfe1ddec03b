//! The JSON Schema and the reference page, which are generated from the field table.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeSet;

use ratekeeper_config::{reference_page, schema};
use serde_json::{Map, Value, json};

use crate::common::read;

#[test]
fn reference_page_is_generated() {
    testbed::assert_generated("docs/reference/configuration.md", &reference_page());
}

fn root() -> Value {
    serde_json::from_str(&schema()).unwrap()
}

/// The fields of a section that have a default.
fn defaults(root: &Value, section: &str) -> Map<String, Value> {
    let properties = root.pointer(&format!("{section}/properties")).and_then(Value::as_object).unwrap();
    let with_default =
        properties.iter().filter_map(|(name, field)| Some((name.clone(), field.get("default")?.clone())));
    with_default.collect()
}

/// Each default that the schema and the page show is valid, and is what the reader uses.
#[test]
fn written_defaults_mean_the_same_as_no_settings() {
    let root = root();
    let filled = |section: &str, more: Value| {
        let mut fields = defaults(&root, &format!("/$defs/{section}"));
        assert!(!fields.is_empty(), "{section}");
        fields.extend(more.as_object().unwrap().clone());
        Value::Object(fields)
    };
    let algorithms =
        ["token_bucket", "leaky_bucket", "fixed_window", "sliding_window_log", "sliding_window_counter"];
    let limits = |write: bool| -> Value {
        let limit = |name: &&str| {
            let written = if write { filled(name, json!({})) } else { json!({}) };
            let lease = if write { filled("lease", json!({ "max": 5 })) } else { json!(5) };
            let routes = json!({ "routes": { "a": 2 } });
            let cost = if write { filled("cost", routes) } else { routes };
            let mut limit = json!({ *name: written, "cost": cost });
            if *name == "token_bucket" {
                limit["lease"] = lease;
            }
            if write { filled("limit", limit) } else { limit }
        };
        let named = algorithms.iter().map(|name| (name.replace('_', "-"), limit(name)));
        Value::Object(named.collect())
    };
    let route = json!({ "id": "a", "limits": "all", "upstream": "b" });
    let upstream = json!({ "addresses": "http://127.0.0.1:8081" });
    let api = |port: u16| json!({ "listen": format!("127.0.0.1:{port}") });
    let keys = "{ \"keys\": [] }";
    let plain = json!({
        "jwt": { "keys": keys },
        "limits": limits(false),
        "domains": { "edge": [{ "key": "a*", "value": "x*", "fixed_window": {} }] },
        "gateway": {
            "routes": route,
            "upstreams": { "b": { "addresses": upstream["addresses"], "health": "/healthz" } },
        },
        "apis": { "http": "127.0.0.1:1", "envoy": "127.0.0.1:2", "resp": "127.0.0.1:3" },
    });
    let mut health = filled("health", json!({ "path": "/healthz" }));
    health["timeout"] = defaults(&root, "/$defs/health")["timeout"].clone();
    let written = json!({
        "store": { "memory": filled("memory", json!({})) },
        "client": { "ipv6_prefix": defaults(&root, "/$defs/client")["ipv6_prefix"] },
        "paths": filled("paths", json!({})),
        "responses": filled("responses", json!({})),
        "jwt": filled("jwt", json!({ "keys": keys })),
        "limits": limits(true),
        "domains": { "edge": [filled("descriptor", json!({ "key": "a*", "value": "x*", "fixed_window": {} }))] },
        "gateway": filled("gateway", json!({
            "routes": filled("route", route),
            "upstreams": { "b": filled("upstream", json!({
                "addresses": upstream["addresses"],
                "health": health,
                "timeouts": filled("upstream_timeouts", json!({})),
                "outlier_ejection": filled("outlier_ejection", json!({})),
            })) },
            "timeouts": filled("timeouts", json!({})),
        })),
        "apis": {
            "http": filled("http", {
                let mut http = api(1);
                http["authorize"] = filled("authorize", json!({}));
                http
            }),
            "envoy": filled("envoy", api(2)),
            "resp": filled("resp", api(3)),
        },
        "admin": defaults(&root, "")["admin"],
        "log": filled("log", json!({})),
    });
    let understood = |file: &Value| {
        let mut config = read(&file.to_string()).unwrap_or_else(|errors| panic!("{file:#}\n{errors}"));
        config.warnings.clear();
        // Positions differ.
        let text = format!("{config:#?}");
        let lines = text.lines().filter(|line| {
            !["line:", "column:", "byte:", "chars:"].iter().any(|it| line.trim().starts_with(it))
        });
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let (plain, written) = (understood(&plain), understood(&written));
    for (plain, written) in plain.iter().zip(&written) {
        assert_eq!(plain, written);
    }
    assert_eq!(plain.len(), written.len());
}

/// Fields are described, so that editors and the reference page explain them.
#[test]
fn every_field_and_section_is_described() {
    let root = root();
    let mut count = 0;
    let sections = root["$defs"].as_object().unwrap().values().chain([&root]);
    for section in sections {
        assert!(section["description"].as_str().is_some_and(|it| it.ends_with('.')), "{section:#}");
        for (name, field) in section.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let description = field["description"].as_str().unwrap();
            assert!(
                description.ends_with('.') && !description.contains(['|', '\n']),
                "{name}: {description}"
            );
            count += 1;
        }
    }
    assert!(count > 150, "{count} fields");
}

/// Each definition is used, and each reference is defined.
#[test]
fn schema_references_are_complete() {
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let root = root();
    let mut found = BTreeSet::new();
    references(&root, &mut found);
    let defined = root["$defs"].as_object().unwrap().keys().map(|name| format!("#/$defs/{name}"));
    assert_eq!(found, defined.collect());
}
