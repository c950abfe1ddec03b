//! Leaky buckets with delay: the response future waits, and the number of waiting requests is bounded.
//!
//! tokio's time is paused: it advances to the next timer when all tasks wait. The buckets use the system clock, which
//! hardly advances, so delays are slightly shorter than a bucket's rate implies.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response};
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::when::When;
use ratekeeper::tower::{LayerBuilder, RatekeeperLayer};
use ratekeeper::{LeakyMode, Limit, Rate};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};

use super::{HOUR, hourly, ip, plain, send, statuses, with};

/// One request per hour, and two more may queue behind it.
fn shaping() -> Rule {
    let limit = Limit::leaky_bucket(3, Rate::new(1, HOUR).unwrap(), LeakyMode::Shape).unwrap();
    Rule::new("queue", limit).key(ip())
}

fn builder() -> LayerBuilder {
    RatekeeperLayer::builder().rule(shaping())
}

/// Whether a delay is this many hours, except for the time that has passed on the system clock.
fn is_hours(delay: Duration, hours: u32) -> bool {
    delay <= HOUR * hours + Duration::from_millis(2) && delay + Duration::from_secs(60) >= HOUR * hours
}

#[tokio::test(start_paused = true)]
async fn response_future_waits_for_the_delay() {
    let layer = builder().build().unwrap();
    let start = Instant::now();
    let delayed = async || {
        let got = send(&layer, plain("/")).await;
        (got.status, start.elapsed())
    };
    let ((a, first), (b, second), (c, third), (d, fourth)) =
        tokio::join!(delayed(), delayed(), delayed(), delayed());
    assert_eq!([a, b, c, d], [200, 200, 200, 429]);
    assert_eq!(first, Duration::ZERO);
    assert!(is_hours(second, 1) && is_hours(third, 2), "{second:?} {third:?}");
    assert_eq!(fourth, Duration::ZERO, "a denied request is not delayed");
}

#[tokio::test(start_paused = true)]
async fn request_above_max_waiting_gets_503_without_charge() {
    let layer = builder().max_waiting(1).build().unwrap();
    assert_eq!(send(&layer, plain("/")).await.status, 200);
    let waits = tokio::spawn({
        let layer = layer.clone();
        async move { send(&layer, plain("/")).await.status }
    });
    tokio::task::yield_now().await;
    let got = send(&layer, plain("/")).await;
    assert_eq!((got.status, got.header("retry-after")), (503, Some("1")));
    assert_eq!(got.header("content-type"), Some("application/problem+json"));
    assert_eq!(waits.await.unwrap(), 200);
    // No request waits any more, and the bucket still has room.
    assert_eq!(statuses(&layer, [plain("/"), plain("/")]).await, [200, 429]);
}

#[tokio::test(start_paused = true)]
async fn only_requests_that_may_be_delayed_count_as_waiting() {
    let posts = shaping().when(When { methods: vec!["POST".to_owned()], ..When::default() });
    let layer = RatekeeperLayer::builder().rule(posts).rule(Rule::new("all", hourly(9))).max_waiting(0);
    let layer = layer.build().unwrap();
    let post =
        Request::post("/").extension(ratekeeper::tower::Peer(super::CLIENT)).body(String::new()).unwrap();
    assert_eq!(statuses(&layer, [plain("/"), post]).await, [200, 503]);
    // A shadow rule delays no request.
    let layer = RatekeeperLayer::builder().rule(shaping().shadow()).max_waiting(0).build().unwrap();
    let start = Instant::now();
    assert_eq!(statuses(&layer, [plain("/"), plain("/"), plain("/")]).await, [200; 3]);
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn dropped_future_no_longer_counts_as_waiting() {
    let layer = builder().max_waiting(1).build().unwrap();
    let echo = |_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) };
    let mut service = layer.layer(service_fn(echo));
    assert_eq!(service.ready().await.unwrap().call(plain("/")).await.unwrap().status(), 200);
    for _ in 0..2 {
        let waits = service.ready().await.unwrap().call(plain("/"));
        assert!(format!("{waits:?}").contains("delayed"), "{waits:?}");
        let busy = service.ready().await.unwrap().call(plain("/")).await.unwrap();
        assert_eq!(busy.status(), 503);
        drop(waits);
    }
    // The dropped requests stay charged to the bucket, but no longer count as waiting.
    assert_eq!(send(&layer, plain("/")).await.status, 429);
}

#[tokio::test(start_paused = true)]
async fn service_is_called_after_the_delay_unless_the_future_is_dropped() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let count = move |_: Request<String>| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, Infallible>(Response::new(String::new())) }
    };
    let mut service = builder().build().unwrap().layer(service_fn(count));
    service.ready().await.unwrap().call(plain("/")).await.unwrap();
    let gone = tokio::time::timeout(HOUR / 2, service.ready().await.unwrap().call(plain("/"))).await;
    assert!(gone.is_err());
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let waits = service.ready().await.unwrap().call(plain("/"));
    assert_eq!(calls.load(Ordering::SeqCst), 1, "not yet");
    assert_eq!(waits.await.unwrap().status(), 200);
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn longest_of_several_delays_applies() {
    let slower = Limit::leaky_bucket(3, Rate::new(1, 3 * HOUR).unwrap(), LeakyMode::Shape).unwrap();
    let by_user = Rule::new("slower", slower).key(Key::of(KeyPart::header("x-user")));
    let layer = builder().rule(by_user).build().unwrap();
    let start = Instant::now();
    assert_eq!(send(&layer, with("x-user", "a")).await.status, 200);
    let got = send(&layer, with("x-user", "a")).await;
    assert_eq!(got.status, 200);
    assert!(is_hours(start.elapsed(), 3), "{:?}", start.elapsed());
    assert!(got.header("ratelimit").unwrap().contains("\"slower\""));
}
