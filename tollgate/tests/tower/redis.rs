//! The same layer with its states in a real Redis.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use http::{Request, Response};
use testbed::RedisServer;
use tollgate::redis::{Failure, Redis, Settings};
use tollgate::tower::key::{Key, Part};
use tollgate::tower::rule::{Ban, Rule};
use tollgate::tower::{Builder, Outcome, RateLimitLayer};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};

use super::{HOUR, get, hourly, per_client, plain, send, statuses, with};

/// Settings that wait long enough for a busy test machine.
fn settings(server: &RedisServer) -> Settings {
    Settings::new(&server.url()).deadline(Duration::from_secs(10))
}

fn by_user(limit: u32) -> Rule {
    Rule::new("user", hourly(limit)).key(Key::of(Part::header("x-user")))
}

fn of(user: &str) -> Request<String> {
    with("x-user", user)
}

#[tokio::test]
async fn requests_are_allowed_and_denied() {
    let server = RedisServer::start().unwrap();
    let rules = || RateLimitLayer::builder().rule(by_user(2)).rule(Rule::new("all", hourly(4)));
    let (one, other) =
        (rules().redis(&settings(&server)).unwrap(), rules().redis(&settings(&server)).unwrap());
    let got = send(&one, of("a")).await;
    assert_eq!((got.status, got.body.as_str()), (200, "/"));
    assert!(got.header("ratelimit").unwrap().starts_with(r#""user";r=1;t="#), "{got:?}");
    // Another layer, as in another process, shares the limits.
    assert_eq!(statuses(&other, [of("a"), of("a")]).await, [200, 429]);
    let got = send(&one, of("a")).await;
    assert_eq!((got.status, got.header("content-type")), (429, Some("application/problem+json")));
    assert!((3590..=3600).contains(&got.header("retry-after").unwrap().parse::<u64>().unwrap()));
    assert_eq!(statuses(&one, [of("b"), of("c"), of("d")]).await, [200, 200, 429]);
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn shadows_and_bans_work_the_same() {
    let server = RedisServer::start().unwrap();
    let mut rule = by_user(1);
    rule.ban = Some(Ban { after: 2, within: HOUR, lasts: Duration::from_secs(86_400) });
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let layer = RateLimitLayer::builder()
        .rule(rule)
        .rule(Rule::new("planned", hourly(2)).shadow())
        .observe(move |observed| {
            let [user, planned] = observed.rules else { panic!("{observed:?}") };
            sink.lock().unwrap().push((user.is_banned, planned.decision.allowed));
        })
        .redis(&settings(&server))
        .unwrap();
    let requests = [of("a"), of("a"), of("a"), of("a"), of("b"), of("c")];
    assert_eq!(statuses(&layer, requests).await, [200, 429, 429, 429, 200, 200]);
    let [first, second, third, fourth, fifth, sixth] = seen.lock().unwrap()[..] else { panic!() };
    assert_eq!([first.0, second.0, third.0, fourth.0], [false, false, false, true]);
    assert_eq!([first.1, fifth.1, sixth.1], [true, true, false], "what was denied took nothing from it");
    let got = send(&layer, of("a")).await;
    assert!(got.header("retry-after").unwrap().parse::<u64>().unwrap() > 86_000, "{got:?}");
}

#[tokio::test]
async fn a_request_that_no_rule_concerns_does_not_wait_for_the_server() {
    let server = RedisServer::start().unwrap();
    let rule = by_user(1).when(super::concerns::methods(&["POST"]));
    let layer = RateLimitLayer::builder().rule(rule).redis(&settings(&server)).unwrap();
    server.pause().unwrap();
    let hello = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let mut response = Box::pin(layer.layer(hello).oneshot(plain("/")));
    assert!(response.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
}

/// A layer whose server has gone.
async fn orphaned(builder: Builder, settings: impl FnOnce(Settings) -> Settings) -> RateLimitLayer<Redis> {
    let mut server = RedisServer::start().unwrap();
    let layer = builder.redis(&settings(super::redis::settings(&server))).unwrap();
    assert_eq!(send(&layer, plain("/")).await.status, 200);
    server.kill().unwrap();
    layer
}

#[tokio::test]
async fn without_its_server_a_closed_limit_says_that_it_is_not_the_clients_fault() {
    let layer = orphaned(per_client(9), |settings| settings.failure(Failure::Closed)).await;
    let got = send(&layer, plain("/")).await;
    assert_eq!(got.status, 503);
    assert!(got.body.contains("http-problem-types#temporary-reduced-capacity"), "{}", got.body);
    assert_eq!(got.header("cache-control"), Some("no-store"));
    let call = get("/").header("content-type", "application/grpc").body(String::new()).unwrap();
    let got = send(&layer, call).await;
    assert_eq!((got.status, got.header("grpc-status")), (200, Some("14")));
}

#[tokio::test]
async fn without_its_server_a_rules_own_policy_counts() {
    let mut rule = Rule::new("per-client", hourly(9)).key(super::ip());
    rule.failure = Some(Failure::Closed);
    // Nobody is banned because a server is away.
    rule.ban = Some(Ban { after: 1, within: HOUR, lasts: HOUR });
    let banned = Arc::new(Mutex::new(Vec::new()));
    let sink = banned.clone();
    let builder = RateLimitLayer::builder().rule(rule).observe(move |observed| {
        sink.lock().unwrap().push((
            observed.is_degraded,
            observed.rules[0].is_banned,
            observed.outcome == Outcome::Closed,
        ));
    });
    let layer = orphaned(builder, |settings| settings.failure(Failure::Open)).await;
    assert_eq!(statuses(&layer, [plain("/"), plain("/")]).await, [503, 503]);
    assert_eq!(*banned.lock().unwrap(), [(false, false, false), (true, false, true), (true, false, true)]);
}

#[tokio::test]
async fn without_its_server_a_local_limit_counts_by_itself() {
    let local = |settings: Settings| settings.failure(Failure::Local { nodes: 2 });
    let layer = orphaned(per_client(4), local).await;
    assert_eq!(statuses(&layer, [plain("/"), plain("/"), plain("/")]).await, [200, 200, 429]);
    let open = orphaned(per_client(1), |settings| settings.failure(Failure::Open)).await;
    assert_eq!(statuses(&open, [plain("/"), plain("/")]).await, [200, 200]);
}

#[tokio::test]
async fn a_request_that_is_given_up_while_it_is_decided_leaks_nothing() {
    let server = RedisServer::start().unwrap();
    let layer = per_client(9).redis(&settings(&server)).unwrap();
    let hello = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let mut one = layer.layer(ConcurrencyLimit::new(hello, 1));
    let mut other = one.clone();
    server.pause().unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut deciding = Box::pin(one.ready().await.unwrap().call(plain("/")));
    assert!(deciding.as_mut().poll(&mut context).is_pending());
    assert!(format!("{deciding:?}").contains("being decided"));
    // It holds the only service that is ready.
    assert!(other.poll_ready(&mut context).is_pending());
    drop(deciding);
    assert!(other.poll_ready(&mut context).is_ready());
    server.resume().unwrap();
    assert_eq!(other.call(plain("/")).await.unwrap().status(), 200);
}
