//! Conditions: which requests a rule applies to.
#![allow(
    clippy::cloned_ref_to_slice_refs,
    reason = "a list of one reads like the lists of several beside it"
)]

use ratekeeper_rules::client::{IpNet, parse_cidr};
use ratekeeper_rules::path::Pattern;
use ratekeeper_rules::when::{ValueCondition, When};

use crate::rules::request_builder::{SyntheticRequest, test_request};

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn methods(methods: &[&str]) -> When {
    When { methods: strings(methods), ..When::default() }
}

fn paths(paths: &[&str]) -> When {
    When { paths: paths.iter().map(|path| Pattern::parse(path).unwrap()).collect(), ..When::default() }
}

fn hosts(hosts: &[&str]) -> When {
    When { hosts: strings(hosts), ..When::default() }
}

fn clients(networks: &[&str]) -> When {
    When { clients: networks.iter().map(|network| parse_cidr(network).unwrap()).collect(), ..When::default() }
}

fn headers(wanted: &[(&str, ValueCondition)]) -> When {
    let headers = wanted.iter().map(|(name, wanted)| ((*name).to_owned(), wanted.clone())).collect();
    When { headers, ..When::default() }
}

fn claims(wanted: &[(&str, ValueCondition)]) -> When {
    let claims = wanted.iter().map(|(name, wanted)| ((*name).to_owned(), wanted.clone())).collect();
    When { claims, ..When::default() }
}

fn one_of(values: &[&str]) -> ValueCondition {
    ValueCondition::OneOf(strings(values))
}

fn assert_fits(when: &When, fitting: &[SyntheticRequest], others: &[SyntheticRequest]) {
    for request in fitting {
        assert!(when.fits(request), "{when:?} does not fit {request:?}");
    }
    for request in others {
        assert!(!when.fits(request), "{when:?} fits {request:?}");
    }
}

#[test]
fn empty_conditions_fit_every_request() {
    assert_fits(
        &When::default(),
        &[test_request(), test_request().for_host("").with_client("::1").with_method("")],
        &[],
    );
}

#[test]
fn methods_are_case_insensitive() {
    let by = |method: &str| test_request().with_method(method);
    assert_fits(
        &methods(&["POST", "PUT"]),
        &[by("POST"), by("PUT"), by("post")],
        &[by("GET"), by("POSTS"), by("")],
    );
    assert_fits(&methods(&["post"]), &[by("POST")], &[by("GET")]);
}

#[test]
fn one_of_the_paths_must_match() {
    let when = paths(&["/api/**", "/login"]);
    let to = |path: &str| test_request().target(path);
    assert_fits(
        &when,
        &[to("/api"), to("/api/x"), to("//login"), to("/x/../login")],
        &[to("/"), to("/loginx")],
    );
}

#[test]
fn host_matches_in_any_form_and_no_other_host() {
    let to = |host: &str| test_request().for_host(host);
    let spellings =
        ["example.com", "EXAMPLE.com", "example.com.", "example.com:8080", "example.com.:1", "example.com:"];
    for typed in ["example.com", "Example.COM", "example.com."] {
        let others = ["api.example.com", "evilexample.com", "example.com.evil.test", "example.co", "", "com"];
        assert_fits(&hosts(&[typed]), &spellings.map(to), &others.map(to));
    }
}

#[test]
fn host_wildcard_matches_only_names_below_the_domain() {
    let to = |host: &str| test_request().for_host(host);
    let below =
        ["api.example.com", "a.b.example.com", "API.EXAMPLE.COM", "api.example.com.", "api.example.com:443"];
    let others = [
        "example.com",
        "evilexample.com",
        ".example.com",
        "example.com.",
        "api.example.com.evil.test",
        "api.example.org",
        "apixexample.com",
        "*",
        "",
    ];
    for typed in ["*.example.com", "*.EXAMPLE.com", "*.example.com."] {
        assert_fits(&hosts(&[typed]), &below.map(to), &others.map(to));
    }
    assert_fits(
        &hosts(&["*.com", "localhost"]),
        &["a.com", "localhost"].map(to),
        &["com", "a.localhost"].map(to),
    );
    // A star that is not a whole label is not a wildcard.
    assert_fits(&hosts(&["*example.com"]), &[], &["evilexample.com", "a.example.com"].map(to));
    // Hosts shorter than the pattern, or whose split falls inside a character.
    assert_fits(&hosts(&["*.é.test"]), &["a.é.test"].map(to), &["é.test", "aé.test", "ŝ.test"].map(to));
}

#[test]
fn ipv6_host_has_a_port_only_after_brackets() {
    let to = |host: &str| test_request().for_host(host);
    assert_fits(&hosts(&["[::1]"]), &["[::1]", "[::1]:80"].map(to), &["::1", "[::2]"].map(to));
    assert_fits(&hosts(&["::1"]), &["::1"].map(to), &["::1:80", "::"].map(to));
    assert_fits(&hosts(&["127.0.0.1"]), &["127.0.0.1", "127.0.0.1:80"].map(to), &["127.0.0.10"].map(to));
}

#[test]
fn all_header_conditions_must_fit() {
    let plain = test_request();
    let empty = test_request().header("x-plan", "");
    let gold = test_request().header("x-plan", " gold ");
    let both = test_request().header("x-plan", "silver").header("x-plan", "gold");
    let upper = test_request().header("x-plan", "GOLD");
    let with = |wanted: ValueCondition| headers(&[("x-plan", wanted)]);
    assert_fits(
        &with(ValueCondition::Present),
        &[empty.clone(), gold.clone(), both.clone()],
        &[plain.clone()],
    );
    assert_fits(&with(ValueCondition::Absent), &[plain.clone()], &[empty.clone(), gold.clone()]);
    assert_fits(&with(one_of(&["gold", "x"])), &[gold.clone(), both], &[plain.clone(), empty.clone(), upper]);
    assert_fits(&with(one_of(&[""])), &[empty], &[plain, gold.clone()]);
    assert_fits(&with(one_of(&[])), &[], &[test_request(), gold.clone()]);
    let two = headers(&[("x-plan", one_of(&["gold"])), ("x-beta", ValueCondition::Present)]);
    assert_fits(&two, &[gold.clone().header("x-beta", "1")], &[gold, test_request().header("x-beta", "1")]);
    let bytes = test_request().header("x-plan", b"\xff");
    assert_fits(&with(ValueCondition::Present), &[bytes.clone()], &[]);
    assert_fits(&with(one_of(&["\u{fffd}"])), &[], &[bytes]);
}

#[test]
fn all_claim_conditions_must_fit() {
    let gold = test_request().claim("plan", "gold");
    let with = |wanted: ValueCondition| claims(&[("plan", wanted)]);
    assert_fits(
        &with(ValueCondition::Present),
        &[gold.clone()],
        &[test_request(), test_request().header("plan", "gold")],
    );
    assert_fits(&with(ValueCondition::Absent), &[test_request()], &[gold.clone()]);
    assert_fits(
        &with(one_of(&["gold"])),
        &[gold.clone()],
        &[test_request(), test_request().claim("plan", "silver")],
    );
    let two = claims(&[("plan", one_of(&["gold"])), ("admin", ValueCondition::Absent)]);
    assert_fits(&two, &[gold.clone()], &[gold.claim("admin", "true")]);
}

#[test]
fn client_networks_match_in_any_address_form() {
    let from = |client: &str| test_request().with_client(client);
    let ours = ["10.1.2.3", "::ffff:10.1.2.3"].map(from);
    // A translated address is not the IPv4 address in it: no client enters a network that way.
    let others = ["11.1.2.3", "::a01:203", "64:ff9b::10.1.2.3", "2001:db8::1"].map(from);
    assert_fits(&clients(&["10.0.0.0/8"]), &ours, &others);
    // Parsed without `parse_cidr`.
    let mapped: IpNet = "::ffff:10.0.0.0/104".parse().unwrap();
    assert_fits(&When { clients: vec![mapped], ..When::default() }, &ours, &others);
    assert_fits(&clients(&["::/0"]), &[from("2001:db8::1")], &ours);
    assert_fits(
        &clients(&["2001:db8::/32", "10.0.0.0/8"]),
        &[from("2001:db8::1"), from("10.0.0.1")],
        &[from("::1")],
    );
}

#[test]
fn all_conditions_must_fit() {
    let when = When {
        paths: paths(&["/login"]).paths,
        hosts: strings(&["example.com"]),
        clients: clients(&["10.0.0.0/8"]).clients,
        ..methods(&["POST"])
    };
    let right = test_request().with_method("POST").target("/login").with_client("10.0.0.1");
    let wrong = [
        right.clone().with_method("GET"),
        right.clone().target("/"),
        right.clone().for_host("example.org"),
        right.clone().with_client("11.0.0.1"),
    ];
    assert_fits(&when, &[right], &wrong);
}
