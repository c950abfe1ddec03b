//! Which descriptor a list of entries finds, and whose budget it uses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use proptest::prelude::*;
use tollgate_config::envoy::{Descriptor, DescriptorLimit, Descriptors, Domain, Value, Wildcard};

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
fn the_most_specific_is_found_first_and_gone_into() {
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
    // Of two patterns the first, even if the second says more.
    assert_eq!(found(&[("a", "xyx")]), Some(("a".into(), pattern("x*"))));
    assert_eq!(found(&[("a", "y")]), Some(("a".into(), Value::Any)));
    assert_eq!(found(&[("a", "")]), Some(("a".into(), Value::Any)));
    assert_eq!(found(&[("a", "y"), ("b", "1")]), Some(("b".into(), Value::Any)));
    // There is no way back from a value to the key without one.
    assert_eq!(found(&[("a", "xyz"), ("b", "1")]), None);
    // As many entries as descriptors, in their order.
    for none in [&[][..], &[("b", "1")], &[("b", "1"), ("a", "y")], &[("a", "y"), ("b", "1"), ("b", "1")]] {
        assert_eq!(found(none), None, "{none:?}");
    }
    assert_eq!(found(&[("a", "y"); 1_000]), None);
}

#[test]
fn values_that_share_have_one_key() {
    let mut shared = descriptor("path", "/files/*", vec![]);
    let key = |descriptor: &Descriptor, value| {
        domain("d", vec![descriptor.clone()]).find(&[("path", value)]).unwrap().key
    };
    assert_ne!(key(&shared, "/files/a"), key(&shared, "/files/b"));
    shared.shares = true;
    assert_eq!(key(&shared, "/files/a"), key(&shared, "/files/b"));
}

/// Texts that would be mistaken for each other if they were only put together.
fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[ab_.|{}\u{0}\u{1}]{0,4}", "[a\u{80}]{0,3}", "a{126,130}"]
}

fn entries() -> impl Strategy<Value = Vec<(String, String)>> {
    proptest::collection::vec((text(), text()), 1..4)
}

/// The key of a list of entries in a domain that knows any of them.
fn key(name: &str, entries: &[(String, String)]) -> Vec<u8> {
    let descriptors = entries.iter().rev().fold(vec![], |inner, (key, _)| vec![descriptor(key, "", inner)]);
    let entries: Vec<_> = entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    domain(name, descriptors).find(&entries).unwrap().key
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_000) })]

    #[test]
    fn no_two_lists_of_entries_have_one_key(one in (text(), entries()), other in (text(), entries())) {
        prop_assert_eq!(key(&one.0, &one.1) == key(&other.0, &other.1), one == other);
    }

    /// The same texts, cut in other places: this is how keys that are put together go wrong.
    #[test]
    fn no_two_ways_to_cut_a_text_have_one_key(text in "[a_]{2,6}", cuts in (0_usize..6, 0_usize..6)) {
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
