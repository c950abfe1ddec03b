//! Decision events that observers receive.

use std::sync::{Arc, Mutex};

use http::Request;
use ratekeeper::tower::client::parse_cidr;
use ratekeeper::tower::key::{Key, KeyFallback, KeyPart};
use ratekeeper::tower::rule::{ForbiddenReason, List, Rule};
use ratekeeper::tower::{LayerBuilder, Outcome, RatekeeperLayer};
use ratekeeper::{LeakyMode, Limit, Rate};

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
