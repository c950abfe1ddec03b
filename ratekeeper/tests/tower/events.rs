//! Decision events that observers receive.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response};
use ratekeeper::tower::client::parse_cidr;
use ratekeeper::tower::key::{Key, KeyFallback, KeyPart};
use ratekeeper::tower::rule::{ForbiddenReason, List, Override, OverrideScope, Rule};
use ratekeeper::tower::{LayerBuilder, Outcome, Peer, RatekeeperLayer, RequestContext, Route};
use ratekeeper::{LeakyMode, Limit, Rate, RetryAfter};

use super::{HOUR, get, hourly, ip, once, per_client, plain, statuses};

/// What an observer received: the outcome, whether the request is allowed, and the number of rules checked.
type SeenEvents = Vec<(String, bool, usize)>;

/// Sends a request twice, and returns both statuses and the events.
async fn twice(builder: LayerBuilder, request: impl Fn() -> Request<String>) -> (Vec<u16>, SeenEvents) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let layer = builder.observe(move |it, _| {
        sink.lock().unwrap().push((format!("{:?}", it.outcome), it.is_allowed(), it.rules.len()));
    });
    let statuses = statuses(&layer.build().unwrap(), [request(), request()]).await;
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (statuses, seen)
}

fn seen(outcome: Outcome, rules: usize) -> (String, bool, usize) {
    (format!("{outcome:?}"), outcome == Outcome::Allowed, rules)
}

#[tokio::test]
async fn observer_receives_decisions() {
    let (statuses, events) = twice(per_client(1), || plain("/")).await;
    assert_eq!(statuses, [200, 429]);
    assert_eq!(events, [seen(Outcome::Allowed, 1), seen(Outcome::Denied, 1)]);
    // A request to which no rule applies is reported, too.
    let posts = once(ip()).when(super::conditions::methods(&["POST"]));
    let (_, events) = twice(RatekeeperLayer::builder().rule(posts), || plain("/")).await;
    assert_eq!(events, [seen(Outcome::Allowed, 0), seen(Outcome::Allowed, 0)]);
}

/// Without these events, counters would show no problem while all clients get 500.
#[tokio::test]
async fn observer_receives_rejected_requests() {
    let check = async |builder: LayerBuilder, request: Request<()>, status: u16, outcome: Outcome| {
        let request = || request.clone().map(|()| String::new());
        let (statuses, events) = twice(builder, request).await;
        assert_eq!(statuses, [status; 2], "{outcome:?}");
        assert_eq!(events, [seen(outcome, 0), seen(outcome, 0)]);
    };
    let at = |target: &str| get(target).body(()).unwrap();

    check(per_client(9), at("/a%2fb"), 400, Outcome::Malformed).await;
    let user = Key::of(KeyPart::header("x-user"));
    let two = get("/").header("x-user", "a").header("x-user", "b").body(()).unwrap();
    check(RatekeeperLayer::builder().rule(once(user.clone())), two, 400, Outcome::Malformed).await;
    let two = get("/").header("host", "a").header("host", "b").body(()).unwrap();
    check(per_client(9), two, 400, Outcome::Malformed).await;

    let mut listed = Rule::new("listed", hourly(9)).key(ip());
    listed.deny = List { clients: vec![parse_cidr("192.0.2.0/24").unwrap()], keys: vec![] };
    let forbidden = Outcome::Forbidden { rule: 1, reason: ForbiddenReason::DenyList };
    check(per_client(9).rule(listed), at("/"), 403, forbidden).await;
    let known = once(user.fallback(KeyFallback::Deny));
    let forbidden = Outcome::Forbidden { rule: 0, reason: ForbiddenReason::MissingKey };
    check(RatekeeperLayer::builder().rule(known), at("/"), 403, forbidden).await;

    check(per_client(9), Request::get("/").body(()).unwrap(), 500, Outcome::NoPeer).await;

    let shape = Limit::leaky_bucket(3, Rate::new(1, HOUR).unwrap(), LeakyMode::Shape).unwrap();
    let full = RatekeeperLayer::builder().per_client("queue", shape).max_waiting(0);
    check(full, at("/"), 503, Outcome::Shed).await;
}

/// What a log line of an event says: route, reason, deciding rule, its tier, delay and wait.
type Summary = (Option<String>, Option<&'static str>, Option<usize>, Option<usize>, Duration, RetryAfter);

#[tokio::test]
async fn an_event_states_route_tier_reason_and_waits() {
    let mut by_user = Rule::new("per-user", hourly(9)).key(Key::of(KeyPart::header("x-user")));
    let scope = OverrideScope::Keys(vec!["small".to_owned()]);
    by_user.overrides = vec![
        Override { scope: OverrideScope::Keys(vec!["other".to_owned()]), limit: None },
        Override { scope, limit: Some(hourly(1)) },
    ];
    by_user.deny = List { clients: Vec::new(), keys: vec!["banned".to_owned()] };
    let queue = Limit::leaky_bucket(3, Rate::new(1, HOUR).unwrap(), LeakyMode::Shape).unwrap();
    let slow = Rule::new("slow", queue).key(ip()).when(super::conditions::methods(&["POST"]));
    let seen = Arc::new(Mutex::new(Vec::<Summary>::new()));
    let sink = seen.clone();
    let builder =
        RatekeeperLayer::builder().rule(Rule::new("all", hourly(99)).key(ip())).rule(by_user).rule(slow);
    let layer = builder.observe(move |it, _| {
        let route = it.route.as_ref().map(|route| route.0.to_string());
        let rule = it.deciding_rule();
        let (index, tier) = (rule.map(|rule| rule.index), rule.and_then(|rule| rule.tier));
        sink.lock().unwrap().push((route, it.reason(), index, tier, it.delay(), it.retry_after()));
    });
    let layer = layer.build().unwrap();
    let request =
        |user: &str| get("/").extension(Route("files".into())).header("x-user", user).body(String::new());
    let requests = ["big", "small", "small", "banned"].map(|user| request(user).unwrap());
    assert_eq!(statuses(&layer, requests).await, [200, 200, 429, 403]);
    for _ in 0..2 {
        let request = Request::post("/").extension(Peer([192, 0, 2, 1].into())).body(String::new()).unwrap();
        let inner = tower::service_fn(|_: Request<String>| async {
            Ok::<_, Infallible>(Response::new(String::new()))
        });
        // The second one is delayed; it need not be waited for.
        drop(layer.call_with(inner, request, RequestContext::default()));
    }
    let files = Some("files".to_owned());
    let (none, now) = (Duration::ZERO, RetryAfter::Now);
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0], (files.clone(), None, Some(1), None, none, now));
    assert_eq!(seen[1], (files.clone(), None, Some(1), Some(1), none, now));
    assert_eq!(seen[2].2, Some(1));
    assert_eq!(seen[2].3, Some(1));
    assert!(matches!(seen[2].5, RetryAfter::After(wait) if wait > HOUR / 2 && wait <= HOUR), "{:?}", seen[2]);
    assert_eq!(seen[3], (files, Some("deny_list"), None, None, none, now));
    let (route, _, rule, _, delay, _) = &seen[5];
    assert_eq!((route, rule), (&None, &Some(2)));
    assert!(*delay > HOUR / 2 && *delay <= HOUR, "{delay:?}");
}
