//! Options of rules: shadow, overrides, allow and deny lists, and bans.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Request;
use ratekeeper::ManualClock;
use ratekeeper::tower::client::parse_cidr;
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::{Ban, List, Override, OverrideScope, Rule};
use ratekeeper::tower::when::{ValueCondition, When};
use ratekeeper::tower::{Peer, RatekeeperLayer};

use super::{HOUR, get, hourly, ip, plain, send, statuses, with};

fn by_user(limit: u32) -> Rule {
    Rule::new("user", hourly(limit)).key(Key::of(KeyPart::header("x-user")))
}

fn of(user: &str) -> Request<String> {
    with("x-user", user)
}

fn layer(rule: Rule) -> RatekeeperLayer {
    RatekeeperLayer::builder().rule(rule).build().unwrap()
}

/// What an observer received: name, allowed, remaining and shadow of each rule, and whether the request was allowed.
type SeenEvent = (Vec<(String, bool, u32, bool)>, bool);

#[tokio::test]
async fn a_shadow_rule_counts_and_reports_and_never_denies() {
    let seen = Arc::new(Mutex::new(Vec::<SeenEvent>::new()));
    let sink = seen.clone();
    let layer = RatekeeperLayer::builder()
        .rule(Rule::new("planned", hourly(1)).key(ip()).shadow())
        .rule(Rule::new("other", hourly(1)).key(ip()).shadow())
        .rule(Rule::new("real", hourly(3)).key(ip()))
        .observe(move |observed, names| {
            let rules = observed.rules.iter();
            let name = |index| names.get(index).to_owned();
            let rules =
                rules.map(|it| (name(it.index), it.decision.allowed, it.decision.remaining, it.is_shadow));
            assert!(!observed.is_degraded);
            sink.lock().unwrap().push((rules.collect(), observed.is_allowed()));
        })
        .build()
        .unwrap();

    let got = send(&layer, plain("/")).await;
    assert_eq!(got.header("ratelimit-policy"), Some(r#""real";q=3;w=3600"#), "clients do not see it");
    assert_eq!(statuses(&layer, [plain("/"), plain("/"), plain("/")]).await, [200, 200, 429]);

    let rule = |name: &str, allowed, remaining, is_shadow| (name.to_owned(), allowed, remaining, is_shadow);
    let expected = |real_allowed, real_left, shadows_allow| {
        let rules = vec![
            rule("real", real_allowed, real_left, false),
            rule("planned", shadows_allow, 0, true),
            rule("other", shadows_allow, 0, true),
        ];
        (rules, real_allowed)
    };
    let expected = [
        expected(true, 2, true),
        expected(true, 1, false),
        expected(true, 0, false),
        expected(false, 0, false),
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
}

#[tokio::test]
async fn denied_request_charges_no_shadow_rule() {
    let planned = Rule::new("planned", hourly(9)).key(Key::global()).shadow();
    let left = Arc::new(Mutex::new(Vec::new()));
    let sink = left.clone();
    let layer = RatekeeperLayer::builder().rule(by_user(1)).rule(planned).observe(move |observed, _| {
        sink.lock().unwrap().push(observed.rules.last().unwrap().decision.remaining);
    });
    let layer = layer.build().unwrap();
    assert_eq!(statuses(&layer, [of("a"), of("a"), of("a"), of("b")]).await, [200, 429, 429, 200]);
    // A peek reports what would remain after the charge.
    let left = left.lock().unwrap();
    assert_eq!((left[0], left[3]), (8, 7), "{left:?}");
}

#[tokio::test]
async fn deny_list_of_a_shadow_rule_is_not_enforced() {
    let mut rule = Rule::new("planned", hourly(1)).key(ip()).shadow();
    rule.deny.clients.push(parse_cidr("192.0.2.0/24").unwrap());
    assert_eq!(statuses(&layer(rule), [plain("/"), plain("/")]).await, [200, 200]);
}

#[tokio::test]
async fn overrides_replace_the_limit() {
    let mut rule = by_user(1);
    let gold = When {
        headers: vec![("x-plan".to_owned(), ValueCondition::OneOf(vec!["gold".to_owned()]))],
        ..When::default()
    };
    rule.overrides = vec![
        Override { scope: OverrideScope::Keys(vec!["root".to_owned()]), limit: None },
        Override {
            scope: OverrideScope::Keys(vec!["big".to_owned(), "bigger".to_owned()]),
            limit: Some(hourly(3)),
        },
        Override { scope: OverrideScope::When(gold), limit: Some(hourly(2)) },
    ];
    let layer = layer(rule);
    assert_eq!(statuses(&layer, [of("a"), of("a")]).await, [200, 429]);
    assert_eq!(statuses(&layer, ["big"; 4].map(of)).await, [200, 200, 200, 429]);
    assert_eq!(statuses(&layer, ["bigger"; 4].map(of)).await, [200, 200, 200, 429]);
    let got = send(&layer, of("big")).await;
    assert_eq!(got.header("ratelimit-policy"), Some(r#""user";q=3;w=3600"#));
    let golden = || get("/").header("x-user", "g").header("x-plan", "gold").body(String::new()).unwrap();
    assert_eq!(statuses(&layer, [golden(), golden(), golden()]).await, [200, 200, 429]);
    for _ in 0..5 {
        let got = send(&layer, of("root")).await;
        assert_eq!((got.status, got.header("ratelimit")), (200, None), "no limit at all");
    }
}

#[tokio::test]
async fn allow_and_deny_lists_are_enforced() {
    let at =
        |last: u8| Request::get("/").extension(Peer([192, 0, 2, last].into())).body(String::new()).unwrap();
    let mut rule = Rule::new("clients", hourly(1)).key(ip());
    rule.allow = List { clients: vec![parse_cidr("192.0.2.1/32").unwrap()], keys: vec![] };
    rule.deny = List { clients: vec![parse_cidr("192.0.2.0/28").unwrap()], keys: vec![] };
    let clients = layer(rule);
    assert_eq!(statuses(&clients, [at(1), at(1), at(2), at(99), at(99)]).await, [200, 200, 403, 200, 429]);
    let got = send(&clients, at(2)).await;
    assert_eq!(got.header("content-type"), Some("application/problem+json"));
    assert!(got.body.contains(r#""status":403"#), "{}", got.body);

    let mut rule = by_user(1);
    rule.allow.keys.push("friend".to_owned());
    rule.deny.keys.push("foe".to_owned());
    let users = layer(rule);
    let requests = [of("friend"), of("friend"), of("foe"), of("a"), of("a")];
    assert_eq!(statuses(&users, requests).await, [200, 200, 403, 200, 429]);
    let call = get("/").header("x-user", "foe").header("content-type", "application/grpc");
    let got = send(&users, call.body(String::new()).unwrap()).await;
    assert_eq!((got.status, got.header("grpc-status")), (200, Some("7")));
}

#[tokio::test]
async fn key_denied_too_often_is_banned() {
    let mut rule = by_user(1);
    rule.ban = Some(Ban { after: 2, within: HOUR, lasts: Duration::from_secs(86_400) });
    let banned = Arc::new(Mutex::new(Vec::new()));
    let sink = banned.clone();
    let layer = RatekeeperLayer::builder().rule(rule).observe(move |observed, _| {
        sink.lock().unwrap().push(observed.rules[0].is_banned);
    });
    let layer = layer.build().unwrap();
    let wait = async |user: &str| {
        let got = send(&layer, of(user)).await;
        got.header("retry-after").map_or(0, |wait| wait.parse::<u64>().unwrap())
    };
    assert_eq!(wait("a").await, 0);
    for denial in 1..=2 {
        let wait = wait("a").await;
        assert!((3590..=3600).contains(&wait), "denial {denial} states the wait of the limit: {wait}");
    }
    for _ in 0..2 {
        let wait = wait("a").await;
        assert!((86_390..=86_400).contains(&wait), "then the response states the wait of the ban: {wait}");
    }
    assert_eq!(wait("b").await, 0, "no other key is banned");
    assert_eq!(*banned.lock().unwrap(), [false, false, false, true, true, false]);
}

#[tokio::test]
async fn banned_request_charges_no_other_limit() {
    let mut rule = Rule::new("user", hourly(1)).key(Key::of(KeyPart::header("x-user")));
    rule.ban = Some(Ban { after: 1, within: HOUR, lasts: 2 * HOUR });
    let other = Rule::new("all", hourly(9));
    let layer = RatekeeperLayer::builder().rule(rule).rule(other).build().unwrap();
    assert_eq!(statuses(&layer, ["a", "a", "a", "a"].map(of)).await, [200, 429, 429, 429]);
    // A banned request charges no other rule.
    let got = send(&layer, of("b")).await;
    assert!(got.header("ratelimit").unwrap().contains(r#""all";r=7;"#), "{got:?}");
}

#[tokio::test]
async fn ban_ends_after_its_duration() {
    let day = 24 * HOUR;
    let mut rule = by_user(1);
    rule.ban = Some(Ban { after: 2, within: HOUR, lasts: day });
    let clock = ManualClock::default();
    let layer = RatekeeperLayer::builder().rule(rule).build_on(clock.clone()).unwrap();
    let status_and_wait = async || {
        let got = send(&layer, of("a")).await;
        (got.status, got.header("retry-after").map_or(0, |wait| wait.parse::<u64>().unwrap()))
    };
    assert_eq!(
        [status_and_wait().await, status_and_wait().await, status_and_wait().await],
        [(200, 0), (429, 3600), (429, 3600)]
    );
    assert_eq!(status_and_wait().await, (429, 86_400), "banned");
    // The limit alone would allow the request again by now.
    clock.advance(HOUR);
    assert_eq!(status_and_wait().await, (429, 82_800), "denied requests do not extend the ban");
    clock.advance(day - HOUR - Duration::from_nanos(1));
    assert_eq!(status_and_wait().await, (429, 1), "to the last nanosecond");
    clock.advance(Duration::from_nanos(1));
    assert_eq!(
        [status_and_wait().await, status_and_wait().await],
        [(200, 0), (429, 3600)],
        "its denials are counted from zero again"
    );
    assert_eq!(
        [status_and_wait().await, status_and_wait().await],
        [(429, 3600), (429, 86_400)],
        "and ban it again"
    );
}
