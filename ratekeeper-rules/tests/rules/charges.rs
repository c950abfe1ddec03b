//! Charges: which limits a request is charged, and how much.

use std::error::Error;
use std::time::Duration;

use ratekeeper_core::{FailurePolicy, Lease, Limit, LimitError, LogPolicy, WindowAlign};
use ratekeeper_rules::client::parse_cidr;
use ratekeeper_rules::key::{Key, KeyFallback, KeyPart, NoKey};
use ratekeeper_rules::rule::{
    Ban, BanLimits, Cost, ForbiddenReason, List, Override, OverrideScope, Rejection, Rule, Rules, RulesError,
};
use ratekeeper_rules::when::{ValueCondition, When};

use crate::rules::request_builder::{SyntheticRequest, test_request};

fn limit(of: u32) -> Limit {
    Limit::fixed_window(of, Duration::from_secs(60), WindowAlign::Clock).unwrap()
}

fn per_user(name: &str) -> Rule {
    Rule::new(name, limit(10)).key(Key::of(KeyPart::header("X-User")))
}

fn user(name: &str) -> SyntheticRequest {
    test_request().header("x-user", name)
}

/// The indices of the limits that a request is charged, and the costs.
fn charged(rules: &Rules, request: &SyntheticRequest) -> Result<Vec<(usize, u32)>, Rejection> {
    let list = rules.charges_for(request, 0..rules.rules().len())?;
    Ok(list.charges.iter().map(|charge| (charge.limit, charge.cost)).collect())
}

/// The size of the limit that one rule charges; 10 is the rule's own limit, others are overrides.
fn limits_of(rule: &Rule, request: &SyntheticRequest) -> Result<Option<u32>, Rejection> {
    let rules = Rules::new([rule.clone()]).unwrap();
    let charges = charged(&rules, request)?;
    assert!(charges.len() <= 1, "{charges:?}");
    Ok(charges.first().map(|(number, _)| rules.limits()[*number].limit.limit()))
}

fn keys(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

fn list(clients: &[&str], names: &[&str]) -> List {
    List { clients: clients.iter().map(|it| parse_cidr(it).unwrap()).collect(), keys: keys(names) }
}

const DENIED: Rejection = Rejection::Forbidden { rule: 0, reason: ForbiddenReason::DenyList };

#[test]
fn cost_is_at_least_one_and_header_costs_are_bounded() {
    let by_header = |default, max| Cost::Header { name: "x-cost".to_owned(), default, max };
    let cost = |cost: &Cost, request: &SyntheticRequest| {
        let rules = Rules::new([Rule::new("a", limit(10)).cost(cost.clone())]).unwrap();
        charged(&rules, request).unwrap()[0].1
    };
    assert_eq!(cost(&Cost::Fixed(3), &test_request()), 3);
    assert_eq!(cost(&Cost::Fixed(0), &test_request()), 1);

    let usual = by_header(2, 100);
    for (value, expected) in [
        ("5", 5),
        (" 7\t", 7),
        ("007", 7),
        ("100", 100),
        ("101", 100),
        ("4294967296", 100),
        ("99999999999999999999999999999999999999999", 100),
        ("0", 1),
        ("000", 1),
        ("", 2),
        (" ", 2),
        ("-5", 2),
        ("+5", 2),
        ("5.5", 2),
        ("5,6", 2),
        ("0x10", 2),
        ("1e3", 2),
        ("ten", 2),
        ("٣", 2),
    ] {
        assert_eq!(cost(&usual, &test_request().header("x-cost", value)), expected, "{value:?}");
    }
    assert_eq!(cost(&usual, &test_request().header("x-cost", b"\xff5")), 2);
    assert_eq!(cost(&usual, &test_request()), 2, "no header");
    assert_eq!(cost(&by_header(0, 100), &test_request()), 1);
    assert_eq!(cost(&by_header(2, 0), &test_request().header("x-cost", "5")), 1);
    assert_eq!(cost(&by_header(2, u32::MAX), &test_request().header("x-cost", "4294967295")), u32::MAX);
    // A client that adds another line does not lower its cost.
    for lines in [["1", "50"], ["50", "1"], ["x", "50"], ["50", ""]] {
        let request = lines.iter().fold(test_request(), |request, line| request.header("x-cost", line));
        assert_eq!(cost(&usual, &request), 50, "{lines:?}");
    }

    let by_route =
        Cost::Routes { costs: vec![("upload".to_owned(), 10), ("free".to_owned(), 0)], default: 3 };
    for (route, expected) in [("upload", 10), ("free", 1), ("other", 3), ("", 3), ("Upload", 3)] {
        assert_eq!(cost(&by_route, &test_request().on_route(route)), expected, "{route}");
    }
}

#[test]
fn first_matching_override_applies() {
    let gold =
        When { claims: vec![("plan".to_owned(), ValueCondition::OneOf(keys(&["gold"])))], ..When::default() };
    let rule = Rule {
        overrides: vec![
            Override { scope: OverrideScope::Keys(keys(&["acme", "initech"])), limit: Some(limit(100)) },
            Override { scope: OverrideScope::When(gold), limit: Some(limit(50)) },
            Override { scope: OverrideScope::Keys(keys(&["acme", "root"])), limit: None },
        ],
        ..per_user("a")
    };
    for (request, expected) in [
        (user("ann"), Some(10)),
        (user("acme"), Some(100)),
        (user("initech"), Some(100)),
        (user("ann").claim("plan", "gold"), Some(50)),
        (user("acme").claim("plan", "gold"), Some(100)),
        (user("root").claim("plan", "gold"), Some(50)),
        (user("root"), None),
        (user("ACME"), Some(10)),
        (test_request(), Some(10)),
        // Without the header the key is the address, which never matches a user name with the same bytes.
        (test_request().with_client("97.99.109.101"), Some(10)),
    ] {
        assert_eq!(limits_of(&rule, &request), Ok(expected), "{request:?}");
    }
}

#[test]
fn address_overrides_match_any_form_or_network() {
    let rule = Rule {
        overrides: vec![
            Override { scope: OverrideScope::Keys(keys(&["198.51.100.7"])), limit: Some(limit(100)) },
            Override { scope: OverrideScope::Keys(keys(&["10.0.0.0/8", "2001:db8::1"])), limit: None },
        ],
        ..Rule::new("a", limit(10)).key(Key::of(KeyPart::Ip))
    };
    for (client, expected) in [
        ("203.0.113.7", Some(10)),
        ("198.51.100.7", Some(100)),
        ("::ffff:198.51.100.7", Some(100)),
        ("10.9.8.7", None),
        ("2001:db8::ffff", None),
        ("2001:db8:0:1::1", Some(10)),
    ] {
        assert_eq!(limits_of(&rule, &test_request().with_client(client)), Ok(expected), "{client}");
    }
}

#[test]
fn client_lists_precede_key_lists_and_allow_precedes_deny() {
    let rule = Rule {
        allow: list(&["10.1.0.0/16"], &["root", "both"]),
        deny: list(&["10.0.0.0/8", "6.6.6.6"], &["eve", "both"]),
        ..per_user("a")
    };
    for (request, expected) in [
        (user("ann"), Ok(Some(10))),
        (user("root"), Ok(None)),
        (user("eve"), Err(DENIED)),
        (user("both"), Ok(None)),
        (user("ann").with_client("6.6.6.6"), Err(DENIED)),
        (user("ann").with_client("::ffff:6.6.6.6"), Err(DENIED)),
        (user("ann").with_client("10.2.0.1"), Err(DENIED)),
        (user("ann").with_client("10.1.0.1"), Ok(None)),
        // An allowed client may use any key, and a denied one cannot get around it with an allowed key.
        (user("eve").with_client("10.1.0.1"), Ok(None)),
        (user("root").with_client("6.6.6.6"), Err(DENIED)),
        // The client lists apply even to a request without a valid key.
        (user("a").header("x-user", "b").with_client("6.6.6.6"), Err(DENIED)),
        (user("a").header("x-user", "b").with_client("10.1.0.1"), Ok(None)),
    ] {
        assert_eq!(limits_of(&rule, &request), expected, "{request:?}");
    }
}

#[test]
fn lists_apply_only_where_the_rule_applies() {
    let posts = When { methods: keys(&["POST"]), ..When::default() };
    let rule = Rule { deny: list(&["6.6.6.6"], &["eve"]), ..per_user("a") }.when(posts);
    let request = user("eve").with_client("6.6.6.6");
    assert_eq!(limits_of(&rule, &request), Ok(None));
    assert_eq!(limits_of(&rule, &request.with_method("POST")), Err(DENIED));
}

#[test]
fn request_without_a_key_is_denied_skipped_or_rejected() {
    let with = |default| Rule::new("a", limit(10)).key(Key::of(KeyPart::header("X-User")).fallback(default));
    let missing = Rejection::Forbidden { rule: 0, reason: ForbiddenReason::MissingKey };
    assert_eq!(limits_of(&with(KeyFallback::Deny), &test_request()), Err(missing));
    assert_eq!(limits_of(&with(KeyFallback::Skip), &test_request()), Ok(None));
    let twice = user("a").header("x-user", "b");
    let rejection = Rejection::Ambiguous(NoKey::Twice("header x-user".to_owned()));
    assert_eq!(limits_of(&with(KeyFallback::Skip), &twice), Err(rejection));
    // Denied clients are denied even if the request has no key and the rule would be skipped.
    let rule = Rule { deny: list(&["6.6.6.6"], &[]), ..with(KeyFallback::Skip) };
    assert_eq!(limits_of(&rule, &test_request().with_client("6.6.6.6")), Err(DENIED));
}

#[test]
fn shadow_rule_charges_and_never_denies() {
    let deny = list(&["6.6.6.6"], &["eve"]);
    let strict = Key::of(KeyPart::header("X-User")).fallback(KeyFallback::Deny);
    let shadow = Rule { deny, ..Rule::new("a", limit(10)).key(strict).shadow() };
    for (request, expected) in [
        (user("ann"), Some(10)),
        (user("eve"), Some(10)),
        (user("ann").with_client("6.6.6.6"), Some(10)),
        (test_request(), None),
        (user("a").header("x-user", "b"), None),
    ] {
        assert_eq!(limits_of(&shadow, &request), Ok(expected), "{request:?}");
    }
    // Later rules are still checked, and the key of the omitted charge is removed.
    let rules = Rules::new([shadow, per_user("b")]).unwrap();
    let list = rules.charges_for(&test_request(), [0, 1]).unwrap();
    assert_eq!(list.charges.len(), 1);
    let mut key = Vec::new();
    per_user("b").key.write(&test_request(), &mut key).unwrap();
    assert_eq!(list.key(&list.charges[0]), key);
}

#[test]
fn all_rules_charge_and_each_charge_has_its_key() {
    let posts = When { methods: keys(&["POST"]), ..When::default() };
    let rules = Rules::new([
        Rule::new("all", limit(10)),
        per_user("users"),
        Rule::new("posts", limit(10)).when(posts).cost(Cost::Fixed(5)),
        Rule::new("clients", limit(10)).key(Key::of(KeyPart::Ip)),
    ])
    .unwrap();
    assert_eq!(charged(&rules, &user("ann")), Ok(vec![(0, 1), (1, 1), (3, 1)]));
    let post = user("ann").with_method("POST");
    assert_eq!(charged(&rules, &post), Ok(vec![(0, 1), (1, 1), (2, 5), (3, 1)]));
    let list = rules.charges_for(&post, 0..4).unwrap();
    for charge in &list.charges {
        let mut expected = Vec::new();
        rules.rule(charge.rule).key.write(&post, &mut expected).unwrap();
        assert_eq!(list.key(charge), expected, "{}", rules.rule(charge.rule).name);
    }
}

#[test]
fn rules_are_selected_by_index_and_charged_once() {
    let rules = Rules::new([per_user("a"), per_user("b"), per_user("c")]).unwrap();
    let list = |numbers: &[usize]| {
        let list = rules.charges_for(&user("ann"), numbers.iter().copied()).unwrap();
        list.charges.iter().map(|charge| charge.rule).collect::<Vec<_>>()
    };
    assert_eq!(list(&[2, 0]), [2, 0]);
    assert_eq!(list(&[]), [0; 0]);
    // A store rejects a check that charges one limit twice, and then nothing would be limited.
    assert_eq!(list(&[1, 1, 0, 1]), [1, 0]);
    assert_eq!(list(&[7, 1, usize::MAX]), [1]);
}

#[test]
fn limits_of_rules_overrides_and_bans_are_numbered_in_order() {
    let ban = Ban { after: 5, within: Duration::from_secs(60), lasts: Duration::from_secs(3_600) };
    let (on_store_failure, lease) = (Some(FailurePolicy::Closed), Some(Lease::new(3)));
    let first = Rule {
        overrides: vec![
            Override { scope: OverrideScope::Keys(keys(&["a"])), limit: Some(limit(20)) },
            Override { scope: OverrideScope::Keys(keys(&["b"])), limit: None },
            Override { scope: OverrideScope::Keys(keys(&["c"])), limit: Some(limit(30)) },
        ],
        ban: Some(ban),
        on_store_failure,
        lease,
        ..per_user("first")
    };
    let second = Rule { ban: Some(ban), ..per_user("second") };
    let rules = Rules::new([first, second]).unwrap();

    let denials = Limit::sliding_window_log(5, Duration::from_secs(60), LogPolicy::Admitted).unwrap();
    let lasting = Limit::fixed_window(1, Duration::from_secs(3_600), WindowAlign::FirstRequest).unwrap();
    let expected = [
        ("first", limit(10), on_store_failure, lease),
        // A key has one of these limits, and keeps its usage if a reload gives it another.
        ("first", limit(20), on_store_failure, lease),
        ("first", limit(30), on_store_failure, lease),
        // Denials are counted exactly, so they are never leased.
        ("first/denials", denials.clone(), on_store_failure, None),
        ("first/ban", lasting.clone(), on_store_failure, None),
        ("second", limit(10), None, None),
        ("second/denials", denials, None, None),
        ("second/ban", lasting, None, None),
    ];
    assert_eq!(rules.limits().len(), expected.len());
    for (kept, (name, limit, on_store_failure, lease)) in rules.limits().iter().zip(expected) {
        assert_eq!((kept.name.as_str(), &kept.limit), (name, &limit));
        assert_eq!((kept.on_store_failure, kept.lease), (on_store_failure, lease), "{name}");
    }

    let list = rules.charges_for(&user("c"), [0, 1]).unwrap();
    let charges: Vec<_> = list.charges.iter().map(|charge| (charge.limit, charge.ban)).collect();
    let first_ban = BanLimits { denials: 3, ban: 4 };
    assert_eq!(charges, [(2, Some(first_ban)), (5, Some(BanLimits { denials: 6, ban: 7 }))]);
    let list = rules.charges_for(&user("b"), [0]).unwrap();
    assert!(list.charges.is_empty(), "no limit, no ban");
}

/// Limits continue those of the same rule, conditions or keys, and keys that another limit applies to are moved.
#[test]
fn changed_overrides_continue_by_conditions_and_keys() {
    let of_keys =
        |names: &[&str]| Override { scope: OverrideScope::Keys(keys(names)), limit: Some(limit(20)) };
    let of_methods = |names: &[&str]| {
        let when = When { methods: keys(names), ..When::default() };
        Override { scope: OverrideScope::When(when), limit: Some(limit(30)) }
    };
    let rules = |key: &Key, overrides: &[Override]| {
        let rule = Rule { overrides: overrides.to_vec(), ..Rule::new("a", limit(10)).key(key.clone()) };
        Rules::new([Rule::new("other", limit(1)), rule]).unwrap()
    };
    let moves = |key: &Key, before: &[Override], after: &[Override]| {
        let (before, after) = (rules(key, before), rules(key, after));
        let from = after.predecessors(&before);
        let moved = after.moved_keys(&before, &from);
        let mut moved: Vec<_> =
            moved.iter().map(|it| (ratekeeper_rules::key::shown(&it.key), it.from, it.to)).collect();
        moved.sort();
        (from, moved)
    };
    let moved = |key: &str, from, to| (key.to_owned(), from, to);
    let user = Key::of(KeyPart::header("X-User"));
    let (one, two) = (of_keys(&["a", "b"]), of_keys(&["c"]));
    let (get, post) = (of_methods(&["GET", "HEAD"]), of_methods(&["POST"]));
    for (before, after, expected) in [
        (
            vec![one.clone(), two.clone()],
            vec![two.clone(), one.clone()],
            (vec![Some(0), Some(1), Some(3), Some(2)], vec![]),
        ),
        (vec![], vec![two.clone()], (vec![Some(0), Some(1), None], vec![moved("c", 1, 2)])),
        (vec![one.clone()], vec![], (vec![Some(0), Some(1)], vec![moved("a", 2, 1), moved("b", 2, 1)])),
        (
            vec![one.clone()],
            vec![of_keys(&["b", "c"])],
            (vec![Some(0), Some(1), Some(2)], vec![moved("a", 2, 1), moved("c", 1, 2)]),
        ),
        (
            vec![get.clone()],
            vec![post.clone(), of_methods(&["head", "Get", "GET"])],
            (vec![Some(0), Some(1), None, Some(2)], vec![]),
        ),
        (vec![get.clone(), get.clone()], vec![get.clone()], (vec![Some(0), Some(1), Some(2)], vec![])),
    ] {
        assert_eq!(moves(&user, &before, &after), expected, "{before:?} -> {after:?}");
    }
    // A network before it takes an address from its own override; the literal for a missing key moves, too.
    let ip = Key::of(KeyPart::Ip);
    let (address, network) = (of_keys(&["192.0.2.7"]), of_keys(&["192.0.2.0/24"]));
    assert_eq!(
        moves(&ip, std::slice::from_ref(&address), &[network.clone(), address.clone()]),
        (vec![Some(0), Some(1), None, Some(2)], vec![moved("192.0.2.7", 2, 2)])
    );
    let both = [network, address];
    assert_eq!(moves(&ip, &both, &both), (vec![Some(0), Some(1), Some(2), Some(3)], vec![]));
    let optional = user.clone().fallback(KeyFallback::Literal("c".to_owned()));
    assert_eq!(moves(&optional, &[], &[two]).1, [moved("c", 1, 2), moved("c", 1, 2)]);
}

#[test]
fn conflicting_rules_are_rejected() {
    let same = |name: &str| Some(RulesError::SameName(name.to_owned()));
    assert_eq!(Rules::new([per_user("a"), per_user("b"), per_user("a")]).err(), same("a"));
    assert_eq!(Rules::new([per_user("a"), per_user("A")]).err(), None);
    // A store identifies limits by name, so it would keep both under one name.
    let ban = Ban { after: 5, within: Duration::from_secs(60), lasts: Duration::from_secs(60) };
    let banning = Rule { ban: Some(ban), ..per_user("a") };
    assert_eq!(Rules::new([banning.clone(), per_user("a/ban")]).err(), same("a/ban"));
    assert_eq!(Rules::new([per_user("a/denials"), banning]).err(), same("a/denials"));

    for (ban, why) in [
        (Ban { after: 0, ..ban }, LimitError::Zero("limit")),
        (Ban { within: Duration::ZERO, ..ban }, LimitError::WindowOutOfRange(Duration::ZERO)),
        (Ban { lasts: Duration::ZERO, ..ban }, LimitError::WindowOutOfRange(Duration::ZERO)),
        (Ban { lasts: Duration::MAX, ..ban }, LimitError::WindowOutOfRange(Duration::MAX)),
    ] {
        let error = Rules::new([Rule { ban: Some(ban), ..per_user("a") }]).err();
        assert_eq!(error, Some(RulesError::Ban("a".to_owned(), why)), "{ban:?}");
    }
    let message = RulesError::SameName("a".to_owned()).to_string();
    assert_eq!(message, "two limits are called a; give one another name");
    assert!(Rules::new([]).unwrap().limits().is_empty());
}

#[test]
fn error_of_a_ban_has_the_error_of_its_limit_as_source() {
    let ban = Ban { after: 0, within: Duration::from_secs(60), lasts: Duration::from_secs(60) };
    let error = Rules::new([Rule { ban: Some(ban), ..per_user("a") }]).unwrap_err();
    let source = error.source().and_then(|source| source.downcast_ref());
    assert_eq!(source, Some(&LimitError::Zero("limit")));
}
