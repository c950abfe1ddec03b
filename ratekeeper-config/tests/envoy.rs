//! Lookup of descriptors by entries, and the keys of their budgets.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use proptest::prelude::*;
use ratekeeper_config::envoy::{
    Data, Descriptor, DescriptorLimit, Descriptors, Domain, Unit, Value, Wildcard,
};
use ratekeeper_config::{Config, to_yaml};

fn config(yaml: &str) -> Config {
    crate::common::read(yaml).unwrap_or_else(|errors| panic!("{errors}"))
}

fn descriptor(key: &str, value: &str, descriptors: Vec<Descriptor>) -> Descriptor {
    Descriptor {
        key: key.to_owned(),
        value: match (value, Wildcard::new(value)) {
            ("", _) => Value::Any,
            (_, Some(pattern)) => Value::Pattern(pattern),
            (value, None) => Value::Exact(value.to_owned()),
        },
        limit: DescriptorLimit::Unlimited,
        name: None,
        replaces: Vec::new(),
        unit: None,
        requests_per_unit: 0,
        is_shadow: false,
        is_quota: false,
        shares: false,
        metadata: None,
        descriptors: Descriptors::new(descriptors),
    }
}

fn domain(name: &str, descriptors: Vec<Descriptor>) -> Domain {
    Domain { name: name.to_owned(), descriptors: Descriptors::new(descriptors) }
}

#[test]
fn lookup_prefers_exact_values_then_patterns_then_any() {
    let domain = domain(
        "d",
        vec![
            descriptor("a", "", vec![descriptor("b", "", vec![])]),
            descriptor("a", "x*", vec![]),
            descriptor("a", "xy*", vec![]),
            descriptor("a", "xyz", vec![descriptor("c", "", vec![])]),
        ],
    );
    let found = |entries: &[(&str, &str)]| {
        let found = domain.find(entries)?;
        Some((found.descriptor.key.clone(), found.descriptor.value.clone()))
    };
    let pattern = |text| Value::Pattern(Wildcard::new(text).unwrap());
    assert_eq!(found(&[("a", "xyz")]), Some(("a".into(), Value::Exact("xyz".into()))));
    // The first matching pattern is found, even if a later one is more specific.
    assert_eq!(found(&[("a", "xyx")]), Some(("a".into(), pattern("x*"))));
    assert_eq!(found(&[("a", "y")]), Some(("a".into(), Value::Any)));
    assert_eq!(found(&[("a", "")]), Some(("a".into(), Value::Any)));
    assert_eq!(found(&[("a", "y"), ("b", "1")]), Some(("b".into(), Value::Any)));
    // A lookup does not fall back from an exact value to the key without a value.
    assert_eq!(found(&[("a", "xyz"), ("b", "1")]), None);
    // The entries must match the descriptors in number and order.
    for none in [&[][..], &[("b", "1")], &[("b", "1"), ("a", "y")], &[("a", "y"), ("b", "1"), ("b", "1")]] {
        assert_eq!(found(none), None, "{none:?}");
    }
    assert_eq!(found(&[("a", "y"); 1_000]), None);
}

#[test]
fn values_with_a_shared_budget_have_one_key() {
    let mut shared = descriptor("path", "/files/*", vec![]);
    let key = |descriptor: &Descriptor, value| {
        domain("d", vec![descriptor.clone()]).find(&[("path", value)]).unwrap().key
    };
    assert_ne!(key(&shared, "/files/a"), key(&shared, "/files/b"));
    shared.shares = true;
    assert_eq!(key(&shared, "/files/a"), key(&shared, "/files/b"));
}

#[test]
fn domain_is_read_with_all_settings() {
    let config = config(
        "
limits:
  own: { token_bucket: }
  busy: { concurrency: { limit: 3 } }
domains:
  mongo_cps:
    - key: database
      fixed_window: { limit: 500, window: 1s }
      name: per-database
      descriptors:
        - { key: collection, value: 7, shadow: true, sliding_window_counter: { limit: 9, window: 30d } }
        - { key: collection, value: tmp*, share: true, quota: true, leaky_bucket: { capacity: 5, leak: 60/min }, replaces: [per-database, x] }
    - { key: database, value: free, unlimited: true }
    - { key: database, value: gone, blocked: true }
    - key: database
      value: plain
      metadata: { team: a, number: 1, text: '1', list: [true, ~, 0x10], '2': { deep: 1.5 } }
  other: []
gateway: { routes: [{ id: r, limits: all, upstream: http://h }, { id: s, upstream: http://h, limits: [own] }] }",
    );
    let names: Vec<&str> = config.names.iter().map(|name| name.as_str()).collect();
    let inner = ["mongo_cps.database.collection=7", "mongo_cps.database.collection=tmp*"];
    assert_eq!(names, ["own", "mongo_cps.database", inner[0], inner[1]]);
    assert_eq!((config.named_limits, config.rules.rules().len(), config.deny_responses.len()), (1, 4, 4));
    let rules: Vec<_> = config.rules.rules().collect();
    assert_eq!(rules.iter().map(|rule| rule.is_shadow).collect::<Vec<_>>(), [false, false, true, false]);
    // Descriptors do not apply to requests of the gateway.
    let routes = config.gateway.unwrap().routes;
    assert!(routes.iter().all(|route| route.limits == [0]), "{routes:?}");

    let [mongo, other] = config.domains.as_slice() else { panic!("{:?}", config.domains) };
    assert_eq!((&*mongo.name, &*other.name, other.descriptors.len()), ("mongo_cps", "other", 0));
    let find = |entries: &[(&str, &str)]| mongo.find(entries).unwrap().descriptor;
    let database = find(&[("database", "users")]);
    assert_eq!((database.limit, database.name.as_deref()), (DescriptorLimit::Rule(1), Some("per-database")));
    assert_eq!((database.unit, database.requests_per_unit), (Some(Unit::Second), 500));
    assert_eq!(to_yaml(&rules[1].limit), "fixed_window: { limit: 500, window: 1s, align: clock }");
    let seven = find(&[("database", "users"), ("collection", "7")]);
    assert_eq!((seven.limit, seven.is_shadow), (DescriptorLimit::Rule(2), true));
    assert_eq!((seven.unit, seven.requests_per_unit), (Some(Unit::Month), 9));
    let shared = find(&[("database", "users"), ("collection", "tmp-1")]);
    assert_eq!((shared.limit, shared.shares, shared.is_quota), (DescriptorLimit::Rule(3), true, true));
    assert_eq!((shared.unit, shared.requests_per_unit), (Some(Unit::Minute), 60));
    assert_eq!(shared.replaces, ["per-database", "x"]);
    assert_eq!(find(&[("database", "free")]).limit, DescriptorLimit::Unlimited);
    assert_eq!(find(&[("database", "gone")]).limit, DescriptorLimit::Blocked);
    let plain = find(&[("database", "plain")]);
    let text = |text: &str| Data::Text(text.to_owned());
    let expected = [
        ("team", text("a")),
        ("number", Data::Number(1.0)),
        ("text", text("1")),
        ("list", Data::List(vec![Data::Bool(true), Data::Null, Data::Number(16.0)])),
        ("2", Data::Map(vec![("deep".to_owned(), Data::Number(1.5))])),
    ];
    assert_eq!(plain.metadata, Some(expected.map(|(name, data)| (name.to_owned(), data)).to_vec()));
    assert_eq!(plain.limit, DescriptorLimit::None);
}

/// Budgets are stored under these names, so other descriptors must not change them.
#[test]
fn names_do_not_depend_on_other_descriptors() {
    let name = |yaml: &str| {
        let config = config(yaml);
        let found = config.domains[0].find(&[("a", "1"), ("b", "2")]).unwrap();
        let DescriptorLimit::Rule(number) = found.descriptor.limit else { panic!("{found:?}") };
        config.names[number].as_str().to_owned()
    };
    let one = name("domains: { d: { key: a, descriptors: { key: b, fixed_window: } } }");
    let other = name(
        "limits: { x: { token_bucket: } }
domains: { d: [{ key: z, token_bucket: }, { key: a, token_bucket: , descriptors: { key: b, token_bucket: } }] }",
    );
    assert_eq!((&*one, &*one), ("d.a.b", &*other));
}

/// A period that is not one of Envoy's units is reported without a unit.
#[test]
fn only_exact_units_are_reported() {
    for (limit, unit, count) in [
        ("fixed_window: { limit: 7, window: 365d }", Some(Unit::Year), 7),
        ("fixed_window: { limit: 7, window: 7d }", Some(Unit::Week), 7),
        ("sliding_window_log: { limit: 7, window: 24h }", Some(Unit::Day), 7),
        ("fixed_window: { limit: 7, window: 90s }", None, 7),
        ("token_bucket: { capacity: 7, refill: 3/h }", Some(Unit::Hour), 3),
        ("token_bucket: { capacity: 7, refill: 3/2h, style: stepped }", None, 7),
    ] {
        let config = config(&format!("domains: {{ d: {{ key: a, {limit} }} }}"));
        let found = config.domains[0].find(&[("a", "")]).unwrap().descriptor;
        assert_eq!((found.unit, found.requests_per_unit), (unit, count), "{limit}");
    }
}

/// Texts that would collide if they were only concatenated.
fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[ab_.|{}\u{0}\u{1}]{0,4}", "[a\u{80}]{0,3}", "a{126,130}"]
}

fn entries() -> impl Strategy<Value = Vec<(String, String)>> {
    proptest::collection::vec((text(), text()), 1..4)
}

/// The key of a list of entries in a domain that matches all of them.
fn key(name: &str, entries: &[(String, String)]) -> Vec<u8> {
    let descriptors = entries.iter().rev().fold(vec![], |inner, (key, _)| vec![descriptor(key, "", inner)]);
    let entries: Vec<_> = entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    domain(name, descriptors).find(&entries).unwrap().key
}

proptest! {
    #![proptest_config(testbed::property::cases(2_000))]

    #[test]
    fn different_entries_have_different_keys(one in (text(), entries()), other in (text(), entries())) {
        prop_assert_eq!(key(&one.0, &one.1) == key(&other.0, &other.1), one == other);
    }

    /// The same text, split at different positions: concatenated keys would collide.
    #[test]
    fn different_splits_of_a_text_have_different_keys(text in "[a_]{2,6}", cuts in (0_usize..6, 0_usize..6)) {
        let cut = |at: usize| {
            let (key, value) = text.split_at(at.min(text.len()));
            vec![(key.to_owned(), value.to_owned())]
        };
        let (one, other) = (cut(cuts.0), cut(cuts.1));
        prop_assert_eq!(key("d", &one) == key("d", &other), one == other);
        let joined = vec![("a".to_owned(), "b_c_d".to_owned())];
        let apart = vec![("a".to_owned(), "b".to_owned()), ("c".to_owned(), "d".to_owned())];
        prop_assert_ne!(key("d", &joined), key("d", &apart));
    }
}
