//! Concurrency limits counted in memory.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use ratekeeper::tower::concurrency::InFlightLimit;
use ratekeeper::tower::key::{Key, KeyFallback, KeyPart};
use ratekeeper::tower::path::{PathNormalization, Pattern};
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::when::When;
use ratekeeper::tower::{ConcurrencySet, LayerBuilder, LayerError, RatekeeperLayer, ResponseBody};
use ratekeeper::{LeakyMode, Limit, Rate, Store};
use tokio::sync::{Semaphore, mpsc};
use tower::{Layer, Service, ServiceExt, service_fn};

use super::{HOUR, TestResponse, get, hourly, ip, per_client, plain, send, statuses, with};

pub(crate) fn by_user(most: u32) -> InFlightLimit {
    InFlightLimit::new("at-once", most).key(Key::of(KeyPart::header("x-user")))
}

pub(crate) fn builder(most: u32) -> LayerBuilder {
    RatekeeperLayer::builder().in_flight_limit(by_user(most))
}

pub(crate) fn of(user: &str) -> Request<String> {
    with("x-user", user)
}

/// The number of requests in flight, by concurrency limit.
pub(crate) fn held<S>(layer: &RatekeeperLayer<S>) -> Vec<usize> {
    layer.in_flight().map(|(_, held)| held).collect()
}

/// The response to a request with its body unread: while it exists, the request is in flight.
pub(crate) async fn under_way<S: Store + Send + Sync + 'static>(
    layer: &RatekeeperLayer<S>,
    request: Request<String>,
) -> Response<ResponseBody<String>> {
    let echo = |_: Request<String>| async { Ok::<_, Infallible>(Response::new("body".to_owned())) };
    layer.layer(service_fn(echo)).oneshot(request).await.unwrap()
}

/// 64 tasks compete for the same permits and retry until they get one. Returns the maximum number in flight.
pub(crate) async fn crowd<S: Store + Send + Sync + 'static>(layers: &[RatekeeperLayer<S>]) -> usize {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tasks = (0..64).map(|task| {
        let (now, most, layer) = (now.clone(), most.clone(), layers[task % layers.len()].clone());
        tokio::spawn(async move {
            let work = service_fn(move |_: Request<String>| {
                let (now, most) = (now.clone(), most.clone());
                async move {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    for _ in 0..10 {
                        tokio::task::yield_now().await;
                    }
                    now.fetch_sub(1, Ordering::SeqCst);
                    Ok::<_, Infallible>(Response::new(String::new()))
                }
            });
            let service = layer.layer(work);
            for _ in 0..5 {
                while service.clone().oneshot(of("a")).await.unwrap().status() != 200 {
                    tokio::task::yield_now().await;
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    most.load(Ordering::SeqCst)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrency_stays_within_the_limit_and_all_requests_complete() {
    let layer = builder(3).build().unwrap();
    let most = crowd(std::slice::from_ref(&layer)).await;
    assert!((1..=3).contains(&most), "{most}");
    assert_eq!(held(&layer), [0]);
}

/// Checks the response to a request without a permit.
pub(crate) fn check_denial(got: &TestResponse) {
    assert_eq!((got.status, got.header("retry-after")), (429, Some("1")), "{got:?}");
    assert_eq!(got.header("ratelimit"), Some(r#""at-once";r=0;t=1"#));
    let policy = got.header("ratelimit-policy").unwrap();
    assert!(
        policy.starts_with(r#""at-once";q="#) && policy.ends_with(r#";qu="concurrent-requests""#),
        "{policy}"
    );
    assert_eq!(got.header("content-type"), Some("application/problem+json"));
    assert_eq!(got.header("cache-control"), Some("no-store"));
    assert!(got.body.contains("http-problem-types#quota-exceeded"), "{}", got.body);
    assert!(got.body.ends_with(r#""violated-policies":["at-once"]}"#), "{}", got.body);
}

#[tokio::test]
async fn denied_request_gets_429_with_headers_or_grpc_status() {
    let layer = builder(1).build().unwrap();
    let first = under_way(&layer, of("a")).await;
    check_denial(&send(&layer, of("a")).await);
    assert_eq!(send(&layer, of("b")).await.status, 200, "other keys have their own permits");
    let call = get("/").header("x-user", "a").header("content-type", "application/grpc+proto");
    let got = send(&layer, call.body(String::new()).unwrap()).await;
    assert_eq!(
        (got.status, got.header("grpc-status"), got.header("retry-after")),
        (200, Some("8"), Some("1"))
    );
    drop(first);
    let got = send(&layer, of("a")).await;
    assert_eq!((got.status, got.header("ratelimit")), (200, None));
}

#[tokio::test]
async fn response_body_holds_the_permit_until_its_end_or_drop() {
    let layer = builder(1).build().unwrap();
    let (sender, mut frames) = mpsc::channel::<Result<Frame<Bytes>, Infallible>>(1);
    let stream = StreamBody::new(futures_util::stream::poll_fn(move |context| frames.poll_recv(context)));
    let stream = Arc::new(Mutex::new(Some(stream)));
    let service = service_fn(move |_: Request<String>| {
        let stream = stream.lock().unwrap().take().unwrap();
        async move { Ok::<_, Infallible>(Response::new(stream)) }
    });
    let mut response = layer.layer(service).oneshot(of("a")).await.unwrap();
    sender.send(Ok(Frame::data("half".into()))).await.unwrap();
    assert!(response.body_mut().frame().await.unwrap().unwrap().is_data());
    assert_eq!((held(&layer), send(&layer, of("a")).await.status), (vec![1], 429));
    // The body has ended and is not dropped yet.
    drop(sender);
    assert!(response.body_mut().frame().await.is_none());
    assert_eq!(held(&layer), [0]);
    let half_read = under_way(&layer, of("a")).await;
    assert_eq!(send(&layer, of("a")).await.status, 429);
    drop(half_read);
    assert_eq!(send(&layer, of("a")).await.status, 200);
    drop(response);
    assert_eq!(held(&layer), [0], "no permit is released twice");
}

#[tokio::test]
async fn disconnected_client_releases_its_permit() {
    let layer = builder(1).build().unwrap();
    let api = Arc::new(Semaphore::new(0));
    let inside = service_fn(move |_: Request<String>| {
        let api = api.clone();
        async move {
            api.acquire().await.unwrap().forget();
            Ok::<_, Infallible>(Response::new(String::new()))
        }
    });
    let waits = tokio::spawn(layer.layer(inside).oneshot(of("a")));
    tokio::task::yield_now().await;
    assert_eq!((held(&layer), send(&layer, of("a")).await.status), (vec![1], 429));
    waits.abort();
    assert!(waits.await.unwrap_err().is_cancelled());
    assert_eq!((held(&layer), send(&layer, of("a")).await.status), (vec![0], 200));
}

#[tokio::test]
async fn service_error_releases_the_permit() {
    let layer = builder(1).build().unwrap();
    let fails = service_fn(|_: Request<String>| async { Err::<Response<String>, _>("no") });
    let mut service = layer.layer(fails);
    for _ in 0..3 {
        assert!(service.ready().await.unwrap().call(of("a")).await.is_err());
    }
    assert_eq!(held(&layer), [0]);
}

/// One request per hour; a second one is delayed.
fn queue() -> Rule {
    let limit = Limit::leaky_bucket(2, Rate::new(1, HOUR).unwrap(), LeakyMode::Shape).unwrap();
    Rule::new("queue", limit).key(ip())
}

#[tokio::test(start_paused = true)]
async fn delayed_request_holds_its_permit_until_dropped() {
    let layer = builder(1).rule(queue()).build().unwrap();
    assert_eq!(send(&layer, of("a")).await.status, 200);
    let echo = |_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) };
    let mut service = layer.layer(service_fn(echo));
    let waits = service.ready().await.unwrap().call(of("a"));
    assert!(format!("{waits:?}").contains("delayed"), "{waits:?}");
    assert_eq!((held(&layer), send(&layer, of("a")).await.status), (vec![1], 429));
    drop(waits);
    assert_eq!(held(&layer), [0]);
}

#[tokio::test]
async fn request_denied_by_a_rate_limit_releases_its_permits() {
    let layer = builder(2).rule(Rule::new("hourly", hourly(1)).key(ip())).build().unwrap();
    let first = under_way(&layer, of("a")).await;
    let got = send(&layer, of("a")).await;
    assert_eq!((got.status, held(&layer)), (429, vec![1]));
    assert!(got.header("ratelimit").unwrap().starts_with(r#""hourly""#));
    drop(first);
    assert_eq!(held(&layer), [0]);
}

#[tokio::test]
async fn request_without_permit_charges_no_rate_limit() {
    let layer = per_client(3).in_flight_limit(by_user(1)).build().unwrap();
    let first = under_way(&layer, of("a")).await;
    for _ in 0..5 {
        assert_eq!(send(&layer, of("a")).await.status, 429);
    }
    drop(first);
    let got = send(&layer, of("a")).await;
    assert_eq!(got.status, 200);
    assert!(got.header("ratelimit").unwrap().starts_with(r#""per-client";r=1;"#), "{got:?}");
}

#[tokio::test]
async fn all_permits_are_taken_or_none() {
    let layer = RatekeeperLayer::builder()
        .in_flight_limit(InFlightLimit::new("all", 2))
        .in_flight_limit(by_user(1))
        .build()
        .unwrap();
    let first = under_way(&layer, of("a")).await;
    for _ in 0..5 {
        let got = send(&layer, of("a")).await;
        assert!(got.status == 429 && got.body.ends_with(r#"["at-once"]}"#), "{got:?}");
    }
    assert_eq!(held(&layer), [1, 1], "the denied have left nothing behind");
    let second = under_way(&layer, of("b")).await;
    let got = send(&layer, of("b")).await;
    assert!(got.body.ends_with(r#"["all","at-once"]}"#), "{}", got.body);
    assert_eq!(layer.in_flight().collect::<Vec<_>>(), [("all", 2), ("at-once", 2)]);
    drop((first, second));
    assert_eq!(held(&layer), [0, 0]);
}

/// What an observer received: name, allowed, remaining and shadow of each limit, and whether the request was allowed.
type SeenEvents = Arc<Mutex<Vec<(Vec<(String, bool, u32, bool)>, bool)>>>;

pub(crate) fn observed(builder: LayerBuilder) -> (LayerBuilder, SeenEvents) {
    let seen = SeenEvents::default();
    let sink = seen.clone();
    let builder = builder.observe(move |observed, names| {
        let rule = |it: &ratekeeper::tower::RuleOutcome| {
            (names.get(it.index).to_owned(), it.decision.allowed, it.decision.remaining, it.is_shadow)
        };
        sink.lock().unwrap().push((observed.rules.iter().map(rule).collect(), observed.is_allowed()));
    });
    (builder, seen)
}

#[tokio::test]
async fn shadow_limits_are_reported_and_never_deny() {
    let (builder, seen) = observed(builder(2).in_flight_limit(InFlightLimit::new("planned", 1).shadow()));
    let layer = builder.build().unwrap();
    let (first, second) = (under_way(&layer, of("a")).await, under_way(&layer, of("a")).await);
    assert_eq!((first.status(), second.status()), (200.try_into().unwrap(), 200.try_into().unwrap()));
    assert_eq!(held(&layer), [2, 1], "what it would have denied, it does not count");
    assert_eq!(send(&layer, of("a")).await.status, 429);
    let event = |at_once, left, planned| {
        vec![("at-once".to_owned(), at_once, left, false), ("planned".to_owned(), planned, 0, true)]
    };
    assert_eq!(
        *seen.lock().unwrap(),
        [(event(true, 1, true), true), (event(true, 0, false), true), (event(false, 0, false), false)]
    );
    drop((first, second));
    assert_eq!(held(&layer), [0, 0]);
}

#[tokio::test]
async fn observer_receives_rate_and_concurrency_limits_together() {
    let (builder, seen) = observed(per_client(9).in_flight_limit(by_user(1)));
    assert_eq!(send(&builder.build().unwrap(), of("a")).await.status, 200);
    let all: Vec<_> = seen.lock().unwrap().iter().map(|(rules, _)| rules.clone()).collect();
    let expected = [("per-client".to_owned(), true, 8, false), ("at-once".to_owned(), true, 0, false)];
    assert_eq!(all, [expected]);
}

#[tokio::test]
async fn router_selects_concurrency_limits() {
    let concurrency = |name| InFlightLimit::new(name, 1);
    let layer = RatekeeperLayer::builder()
        .in_flight_limit(concurrency("a"))
        .in_flight_limit(concurrency("b"))
        .build()
        .unwrap();
    let rules = |numbers: &[usize]| {
        get("/").extension(ConcurrencySet(Arc::from(numbers))).body(String::new()).unwrap()
    };
    // The selection contains a duplicate and an unknown index.
    let first = under_way(&layer, rules(&[1, 7, 1])).await;
    assert_eq!(held(&layer), [0, 1]);
    assert_eq!(
        statuses(&layer, [rules(&[0]), rules(&[]), rules(&[1]), plain("/")]).await,
        [200, 200, 429, 429]
    );
    drop(first);
}

#[tokio::test]
async fn request_without_valid_key_is_rejected() {
    let key = Key::of(KeyPart::header("x-user")).fallback(KeyFallback::Deny);
    let layer =
        RatekeeperLayer::builder().in_flight_limit(InFlightLimit::new("strict", 1).key(key)).build().unwrap();
    let twice = get("/").header("x-user", "a").header("x-user", "b").body(String::new()).unwrap();
    assert_eq!(statuses(&layer, [plain("/"), twice, of("a")]).await, [403, 400, 200]);
    // The key is the address, and the peer is unknown.
    let layer =
        RatekeeperLayer::builder().in_flight_limit(InFlightLimit::new("ip", 1).key(ip())).build().unwrap();
    assert_eq!(send(&layer, Request::new(String::new())).await.status, 500);
}

#[test]
fn duplicate_or_invalid_names_are_errors() {
    let same = |builder: LayerBuilder| matches!(builder.build(), Err(LayerError::Rules(_)));
    assert!(same(per_client(1).in_flight_limit(InFlightLimit::new("per-client", 1))));
    assert!(same(builder(1).in_flight_limit(by_user(1))));
    assert!(matches!(
        builder(1).in_flight_limit(InFlightLimit::new("ä", 1)).build(),
        Err(LayerError::Name(..))
    ));
    assert!(matches!(RatekeeperLayer::builder().build(), Err(LayerError::NoRules)));
}

/// As for rules: a pattern of another path normalization or a part without extractor would silently match nothing.
#[tokio::test]
async fn concurrency_limits_are_validated_like_rules() {
    let normalization = PathNormalization { ignore_case: true, ..PathNormalization::default() };
    let upper = When { paths: vec![Pattern::parse("/Files/**").unwrap()], ..When::default() };
    let concurrency = InFlightLimit::new("files", 0).when(upper);
    let layer = RatekeeperLayer::builder()
        .path_normalization(normalization)
        .in_flight_limit(concurrency)
        .build()
        .unwrap();
    for (path, wanted) in [("/files/7", 429), ("/FILES/7", 429), ("/other", 200)] {
        assert_eq!(send(&layer, plain(path)).await.status, wanted, "{path}");
    }

    let custom = InFlightLimit::new("owners", 1).key(Key::of(KeyPart::Custom("owner".to_owned())));
    let unknown = RatekeeperLayer::builder().in_flight_limit(custom).build().unwrap_err();
    assert!(
        matches!(unknown, LayerError::UnknownExtractor(rule, part) if rule == "owners" && part == "owner")
    );
}

/// Raised, lowered, in another order, beside a new limit, removed and added again: requests in flight stay counted.
#[tokio::test]
async fn permits_stay_held_through_any_change_of_the_limits() {
    let mut layers = vec![builder(2).build().unwrap()];
    let first = under_way(&layers[0], of("a")).await;
    let second = under_way(&layers[0], of("a")).await;
    let all = |max| InFlightLimit::new("all", max);
    let rule = || Rule::new("per-client", hourly(1_000));
    let changes: [(LayerBuilder, u16); 7] = [
        (RatekeeperLayer::builder().in_flight_limit(all(50)).in_flight_limit(by_user(3)), 200),
        (builder(1), 429),
        (builder(2).in_flight_limit(all(2)), 429),
        (RatekeeperLayer::builder().rule(rule()), 200),
        (RatekeeperLayer::builder().rule(rule()).in_flight_limit(all(9)), 200),
        (builder(2).rule(rule()), 429),
        (builder(3), 200),
    ];
    for (number, (change, wanted)) in changes.into_iter().enumerate() {
        let next = change.reload_from(layers.last().unwrap()).unwrap();
        assert_eq!(send(&next, of("a")).await.status, wanted, "change {number}");
        layers.push(next);
    }
    let last = layers.last().unwrap();
    assert_eq!(held(last), [2]);
    drop(first);
    assert_eq!(held(last), [1]);
    // A permit of the first layer and one of the last.
    let third = under_way(last, of("a")).await;
    let fourth = under_way(&layers[0], of("a")).await;
    assert_eq!(fourth.status(), 429, "the first layer counts the same requests");
    drop((second, third, fourth));
    assert_eq!(held(last), [0]);
}
