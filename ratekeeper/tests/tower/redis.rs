//! The layer with its state in a real Redis.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use http::{Request, Response};
use ratekeeper::redis::{FailurePolicy, Redis, Settings};
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::{Ban, Rule};
use ratekeeper::tower::{LayerBuilder, Outcome, RatekeeperLayer};
use testbed::RedisServer;
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};

use super::{HOUR, get, hourly, per_client, plain, send, statuses, with};

/// Settings with a deadline that is long enough for a busy test machine.
fn settings(server: &RedisServer) -> Settings {
    Settings::new(&server.url()).deadline(Duration::from_secs(10))
}

fn by_user(limit: u32) -> Rule {
    Rule::new("user", hourly(limit)).key(Key::of(KeyPart::header("x-user")))
}

fn of(user: &str) -> Request<String> {
    with("x-user", user)
}

#[tokio::test]
async fn layers_share_limits_through_redis() {
    let server = RedisServer::start().unwrap();
    let rules = || RatekeeperLayer::builder().rule(by_user(2)).rule(Rule::new("all", hourly(4)));
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
async fn shadow_rules_and_bans_work_in_redis() {
    let server = RedisServer::start().unwrap();
    let mut rule = by_user(1);
    rule.ban = Some(Ban { after: 2, within: HOUR, lasts: Duration::from_secs(86_400) });
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let layer = RatekeeperLayer::builder()
        .rule(rule)
        .rule(Rule::new("planned", hourly(2)).shadow())
        .observe(move |observed, _| {
            let [user, planned] = &observed.rules[..] else { panic!("{observed:?}") };
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
async fn request_without_applicable_rule_does_not_wait_for_redis() {
    let server = RedisServer::start().unwrap();
    let rule = by_user(1).when(super::conditions::methods(&["POST"]));
    let layer = RatekeeperLayer::builder().rule(rule).redis(&settings(&server)).unwrap();
    server.pause().unwrap();
    let hello = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let mut response = Box::pin(layer.layer(hello).oneshot(plain("/")));
    assert!(response.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
}

/// A layer whose Redis server was killed.
async fn orphaned(
    builder: LayerBuilder,
    settings: impl FnOnce(Settings) -> Settings,
) -> RatekeeperLayer<Redis> {
    let mut server = RedisServer::start().unwrap();
    let layer = builder.redis(&settings(super::redis::settings(&server))).unwrap();
    assert_eq!(send(&layer, plain("/")).await.status, 200);
    server.kill().unwrap();
    layer
}

#[tokio::test]
async fn closed_failure_policy_responds_with_503() {
    let layer = orphaned(per_client(9), |settings| settings.on_store_failure(FailurePolicy::Closed)).await;
    let got = send(&layer, plain("/")).await;
    assert_eq!(got.status, 503);
    assert!(got.body.contains("http-problem-types#temporary-reduced-capacity"), "{}", got.body);
    assert_eq!(got.header("cache-control"), Some("no-store"));
    let call = get("/").header("content-type", "application/grpc").body(String::new()).unwrap();
    let got = send(&layer, call).await;
    assert_eq!((got.status, got.header("grpc-status")), (200, Some("14")));
}

#[tokio::test]
async fn failure_policy_of_a_rule_overrides_the_settings() {
    let mut rule = Rule::new("per-client", hourly(9)).key(super::ip());
    rule.on_store_failure = Some(FailurePolicy::Closed);
    // No key is banned because the store is unavailable.
    rule.ban = Some(Ban { after: 1, within: HOUR, lasts: HOUR });
    let banned = Arc::new(Mutex::new(Vec::new()));
    let sink = banned.clone();
    let builder = RatekeeperLayer::builder().rule(rule).observe(move |observed, _| {
        sink.lock().unwrap().push((
            observed.is_degraded,
            observed.rules[0].is_banned,
            observed.outcome == Outcome::Closed,
        ));
    });
    let layer = orphaned(builder, |settings| settings.on_store_failure(FailurePolicy::Open)).await;
    assert_eq!(statuses(&layer, [plain("/"), plain("/")]).await, [503, 503]);
    assert_eq!(*banned.lock().unwrap(), [(false, false, false), (true, false, true), (true, false, true)]);
}

#[tokio::test]
async fn local_failure_policy_enforces_its_share() {
    let local = |settings: Settings| settings.on_store_failure(FailurePolicy::Local { instances: 2 });
    let layer = orphaned(per_client(4), local).await;
    assert_eq!(statuses(&layer, [plain("/"), plain("/"), plain("/")]).await, [200, 200, 429]);
    let open = orphaned(per_client(1), |settings| settings.on_store_failure(FailurePolicy::Open)).await;
    assert_eq!(statuses(&open, [plain("/"), plain("/")]).await, [200, 200]);
}

#[tokio::test]
async fn request_cancelled_during_decision_releases_the_service() {
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
    // The pending request holds the only ready service.
    assert!(other.poll_ready(&mut context).is_pending());
    drop(deciding);
    assert!(other.poll_ready(&mut context).is_ready());
    server.resume().unwrap();
    assert_eq!(other.call(plain("/")).await.unwrap().status(), 200);
}
