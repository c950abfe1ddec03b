//! How many requests may be under way at once, counted in memory.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::{Semaphore, mpsc};
use tollgate::tower::key::{Key, Otherwise, Part};
use tollgate::tower::path::{Pattern, Spelling};
use tollgate::tower::rule::Rule;
use tollgate::tower::slots::Slots;
use tollgate::tower::when::When;
use tollgate::tower::{Builder, ChosenSlots, LayerError, RateLimitLayer, ResponseBody};
use tollgate::{Limit, Mode, Rate, Store};
use tower::{Layer, Service, ServiceExt, service_fn};

use super::{Got, HOUR, get, hourly, ip, per_client, plain, send, statuses, with};

pub(crate) fn by_user(most: u32) -> Slots {
    Slots::new("at-once", most).key(Key::of(Part::header("x-user")))
}

pub(crate) fn builder(most: u32) -> Builder {
    RateLimitLayer::builder().slots(by_user(most))
}

pub(crate) fn of(user: &str) -> Request<String> {
    with("x-user", user)
}

/// How many are under way, by rule.
pub(crate) fn held<S>(layer: &RateLimitLayer<S>) -> Vec<usize> {
    layer.slots_held().map(|(_, held)| held).collect()
}

/// The response to a request, with its body unread: as long as that is there, the request is under way.
pub(crate) async fn under_way<S: Store + Send + Sync + 'static>(
    layer: &RateLimitLayer<S>,
    request: Request<String>,
) -> Response<ResponseBody<String>> {
    let echo = |_: Request<String>| async { Ok::<_, Infallible>(Response::new("body".to_owned())) };
    layer.layer(service_fn(echo)).oneshot(request).await.unwrap()
}

/// 64 tasks want the same slots, again and again until they get one. Returns the most that were under way at once.
pub(crate) async fn crowd<S: Store + Send + Sync + 'static>(layers: &[RateLimitLayer<S>]) -> usize {
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
async fn never_more_are_under_way_and_all_get_through() {
    let layer = builder(3).build().unwrap();
    let most = crowd(std::slice::from_ref(&layer)).await;
    assert!((1..=3).contains(&most), "{most}");
    assert_eq!(held(&layer), [0]);
}

/// What a client is told that finds no slot.
pub(crate) fn check_denial(got: &Got) {
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
async fn a_denied_client_is_told_like_any_other() {
    let layer = builder(1).build().unwrap();
    let first = under_way(&layer, of("a")).await;
    check_denial(&send(&layer, of("a")).await);
    assert_eq!(send(&layer, of("b")).await.status, 200, "others have slots of their own");
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
async fn a_body_keeps_the_slot_until_it_has_ended_or_is_dropped() {
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
    // Ended, and not dropped yet.
    drop(sender);
    assert!(response.body_mut().frame().await.is_none());
    assert_eq!(held(&layer), [0]);
    let half_read = under_way(&layer, of("a")).await;
    assert_eq!(send(&layer, of("a")).await.status, 429);
    drop(half_read);
    assert_eq!(send(&layer, of("a")).await.status, 200);
    drop(response);
    assert_eq!(held(&layer), [0], "nothing is given back twice");
}

#[tokio::test]
async fn a_client_that_leaves_gives_its_slot_back() {
    let layer = builder(1).build().unwrap();
    let door = Arc::new(Semaphore::new(0));
    let inside = service_fn(move |_: Request<String>| {
        let door = door.clone();
        async move {
            door.acquire().await.unwrap().forget();
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
async fn a_service_that_fails_gives_the_slot_back() {
    let layer = builder(1).build().unwrap();
    let fails = service_fn(|_: Request<String>| async { Err::<Response<String>, _>("no") });
    let mut service = layer.layer(fails);
    for _ in 0..3 {
        assert!(service.ready().await.unwrap().call(of("a")).await.is_err());
    }
    assert_eq!(held(&layer), [0]);
}

/// One request an hour; a second may wait.
fn queue() -> Rule {
    let limit = Limit::leaky_bucket(2, Rate::new(1, HOUR).unwrap(), Mode::Shape).unwrap();
    Rule::new("queue", limit).key(ip())
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_bucket_holds_the_slot_and_gives_it_back_on_leaving() {
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
async fn what_a_limit_denies_gives_its_slots_back() {
    let layer = builder(2).rule(Rule::new("hourly", hourly(1)).key(ip())).build().unwrap();
    let first = under_way(&layer, of("a")).await;
    let got = send(&layer, of("a")).await;
    assert_eq!((got.status, held(&layer)), (429, vec![1]));
    assert!(got.header("ratelimit").unwrap().starts_with(r#""hourly""#));
    drop(first);
    assert_eq!(held(&layer), [0]);
}

#[tokio::test]
async fn what_finds_no_slot_takes_nothing_from_the_limits() {
    let layer = per_client(3).slots(by_user(1)).build().unwrap();
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
async fn a_request_takes_all_its_slots_or_none() {
    let layer = RateLimitLayer::builder().slots(Slots::new("all", 2)).slots(by_user(1)).build().unwrap();
    let first = under_way(&layer, of("a")).await;
    for _ in 0..5 {
        let got = send(&layer, of("a")).await;
        assert!(got.status == 429 && got.body.ends_with(r#"["at-once"]}"#), "{got:?}");
    }
    assert_eq!(held(&layer), [1, 1], "the denied have left nothing behind");
    let second = under_way(&layer, of("b")).await;
    let got = send(&layer, of("b")).await;
    assert!(got.body.ends_with(r#"["all","at-once"]}"#), "{}", got.body);
    assert_eq!(layer.slots_held().collect::<Vec<_>>(), [("all", 2), ("at-once", 2)]);
    drop((first, second));
    assert_eq!(held(&layer), [0, 0]);
}

/// What `observe` is told: name, whether it was free, what is left, whether it only counts; and whether it passed.
type Seen = Arc<Mutex<Vec<(Vec<(String, bool, u32, bool)>, bool)>>>;

pub(crate) fn observed(builder: Builder) -> (Builder, Seen) {
    let seen = Seen::default();
    let sink = seen.clone();
    let builder = builder.observe(move |observed| {
        let rule = |it: &tollgate::tower::Ruled<'_>| {
            (it.name.to_owned(), it.decision.allowed, it.decision.remaining, it.is_shadow)
        };
        sink.lock().unwrap().push((observed.rules.iter().map(rule).collect(), observed.allowed));
    });
    (builder, seen)
}

#[tokio::test]
async fn shadows_count_and_tell_and_deny_nobody() {
    let (builder, seen) = observed(builder(2).slots(Slots::new("planned", 1).shadow()));
    let layer = builder.build().unwrap();
    let (first, second) = (under_way(&layer, of("a")).await, under_way(&layer, of("a")).await);
    assert_eq!((first.status(), second.status()), (200.try_into().unwrap(), 200.try_into().unwrap()));
    assert_eq!(held(&layer), [2, 1], "what it would have denied, it does not count");
    assert_eq!(send(&layer, of("a")).await.status, 429);
    let said = |at_once, left, planned| {
        vec![("at-once".to_owned(), at_once, left, false), ("planned".to_owned(), planned, 0, true)]
    };
    assert_eq!(
        *seen.lock().unwrap(),
        [(said(true, 1, true), true), (said(true, 0, false), true), (said(false, 0, false), false)]
    );
    drop((first, second));
    assert_eq!(held(&layer), [0, 0]);
}

#[tokio::test]
async fn whoever_observes_sees_limits_and_slots_of_a_request_together() {
    let (builder, seen) = observed(per_client(9).slots(by_user(1)));
    assert_eq!(send(&builder.build().unwrap(), of("a")).await.status, 200);
    let all: Vec<_> = seen.lock().unwrap().iter().map(|(rules, _)| rules.clone()).collect();
    let expected = [("per-client".to_owned(), true, 8, false), ("at-once".to_owned(), true, 0, false)];
    assert_eq!(all, [expected]);
}

#[tokio::test]
async fn a_router_may_choose() {
    let slots = |name| Slots::new(name, 1);
    let layer = RateLimitLayer::builder().slots(slots("a")).slots(slots("b")).build().unwrap();
    let chosen =
        |numbers: &[usize]| get("/").extension(ChosenSlots(Arc::from(numbers))).body(String::new()).unwrap();
    // Some are written down twice, and some there are not.
    let first = under_way(&layer, chosen(&[1, 7, 1])).await;
    assert_eq!(held(&layer), [0, 1]);
    assert_eq!(
        statuses(&layer, [chosen(&[0]), chosen(&[]), chosen(&[1]), plain("/")]).await,
        [200, 200, 429, 429]
    );
    drop(first);
}

#[tokio::test]
async fn who_does_not_say_whose_it_is_is_refused_as_by_a_rule() {
    let key = Key::of(Part::header("x-user")).otherwise(Otherwise::Deny);
    let layer = RateLimitLayer::builder().slots(Slots::new("strict", 1).key(key)).build().unwrap();
    let twice = get("/").header("x-user", "a").header("x-user", "b").body(String::new()).unwrap();
    assert_eq!(statuses(&layer, [plain("/"), twice, of("a")]).await, [403, 400, 200]);
    // By address, and nobody has said where requests come from.
    let layer = RateLimitLayer::builder().slots(Slots::new("ip", 1).key(ip())).build().unwrap();
    assert_eq!(send(&layer, Request::new(String::new())).await.status, 500);
}

#[test]
fn names_are_given_once_and_something_is_there() {
    let same = |builder: Builder| matches!(builder.build(), Err(LayerError::Rules(_)));
    assert!(same(per_client(1).slots(Slots::new("per-client", 1))));
    assert!(same(builder(1).slots(by_user(1))));
    assert!(matches!(builder(1).slots(Slots::new("ä", 1)).build(), Err(LayerError::Name(..))));
    assert!(matches!(RateLimitLayer::builder().build(), Err(LayerError::NoRules)));
}

/// As with limits: a pattern for another spelling, or a part that nobody reads, would silently match nothing.
#[tokio::test]
async fn rules_of_slots_are_looked_at_like_others() {
    let spelling = Spelling { ignore_case: true, ..Spelling::default() };
    let upper = When { paths: vec![Pattern::parse("/Files/**").unwrap()], ..When::default() };
    let slots = Slots::new("files", 0).when(upper);
    let layer = RateLimitLayer::builder().paths(spelling).slots(slots).build().unwrap();
    for (path, wanted) in [("/files/7", 429), ("/FILES/7", 429), ("/other", 200)] {
        assert_eq!(send(&layer, plain(path)).await.status, wanted, "{path}");
    }

    let custom = Slots::new("owners", 1).key(Key::of(Part::Custom("owner".to_owned())));
    let unknown = RateLimitLayer::builder().slots(custom).build().unwrap_err();
    assert!(
        matches!(unknown, LayerError::UnknownExtractor(rule, part) if rule == "owners" && part == "owner")
    );
}
