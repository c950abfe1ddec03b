//! The contract of a tower service: the instance polled ready is called, an unused reservation is released, and a
//! completed future is not polled again.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Empty};
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::{RateLimit, RatekeeperLayer, ResponseBody};
use ratekeeper::{LeakyMode, Limit, Rate};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};

use super::{HOUR, ip, per_client, plain};

/// A service that fails if it is called before it is polled ready, as tower permits.
#[derive(Debug)]
struct Strict {
    is_ready: bool,
    clones: Arc<AtomicUsize>,
}

impl Strict {
    fn new() -> Strict {
        Strict { is_ready: false, clones: Arc::default() }
    }
}

impl Clone for Strict {
    fn clone(&self) -> Strict {
        self.clones.fetch_add(1, Ordering::SeqCst);
        Strict { is_ready: false, clones: self.clones.clone() }
    }
}

impl Service<Request<String>> for Strict {
    type Response = Response<String>;
    type Error = &'static str;
    type Future = Ready<Result<Response<String>, &'static str>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<String>) -> Self::Future {
        let was_ready = std::mem::take(&mut self.is_ready);
        let failed = !was_ready || request.uri().path() == "/fail";
        ready(if failed { Err("failed") } else { Ok(Response::new(String::new())) })
    }
}

#[tokio::test(start_paused = true)]
async fn instance_polled_ready_is_called() {
    let shape = Limit::leaky_bucket(3, Rate::new(1, HOUR).unwrap(), LeakyMode::Shape).unwrap();
    let layer = RatekeeperLayer::builder().rule(Rule::new("queue", shape).key(ip())).build().unwrap();
    let strict = Strict::new();
    let clones = strict.clones.clone();
    let mut service = layer.layer(strict);
    let first = service.ready().await.unwrap().call(plain("/"));
    assert_eq!(clones.load(Ordering::SeqCst), 0, "a request that is allowed immediately needs no clone");
    // While these requests are delayed, the service becomes ready for others.
    let second = service.ready().await.unwrap().call(plain("/"));
    let third = service.ready().await.unwrap().call(plain("/"));
    let fourth = service.ready().await.unwrap().call(plain("/"));
    let (first, second, third, fourth) = tokio::join!(first, second, third, fourth);
    for response in [first, second, third] {
        assert_eq!(response.unwrap().status(), 200);
    }
    assert_eq!(fourth.unwrap().status(), 429);
}

#[tokio::test]
async fn denied_request_releases_the_ready_service() {
    let hello = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    // One request at a time, across all clones.
    let mut one = per_client(1).build().unwrap().layer(ConcurrencyLimit::new(hello, 1));
    let mut other = one.clone();
    assert_eq!(one.ready().await.unwrap().call(plain("/")).await.unwrap().status(), 200);
    for target in ["/", "/a%2fb"] {
        let refused = one.ready().await.unwrap().call(plain(target));
        // Neither the denied request nor its service keeps the other from becoming ready.
        let mut ready = pin!(other.ready());
        let polled = ready.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_ready(), "{target}");
        assert_ne!(refused.await.unwrap().status(), 200);
        drop(polled);
        other = one.clone();
    }
}

#[tokio::test]
async fn inner_service_backpressure_is_propagated() {
    let hello = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let mut one = per_client(9).build().unwrap().layer(ConcurrencyLimit::new(hello, 1));
    let mut other = one.clone();
    let running = one.ready().await.unwrap().call(plain("/"));
    let mut context = Context::from_waker(Waker::noop());
    assert!(other.poll_ready(&mut context).is_pending());
    // Completing or dropping the future releases the service.
    drop(running);
    assert!(other.poll_ready(&mut context).is_ready());
}

#[tokio::test]
async fn completed_future_stays_pending() {
    let mut service = per_client(2).build().unwrap().layer(Strict::new());
    for target in ["/", "/fail", "/", "/a%2fb"] {
        let mut response = pin!(service.ready().await.unwrap().call(plain(target)));
        let mut context = Context::from_waker(Waker::noop());
        assert!(response.as_mut().poll(&mut context).is_ready(), "{target}");
        for _ in 0..2 {
            assert!(response.as_mut().poll(&mut context).is_pending(), "{target}");
        }
    }
}

#[tokio::test]
async fn service_errors_are_passed_through() {
    let layer = per_client(1).build().unwrap();
    let failed = layer.layer(Strict::new()).oneshot(plain("/fail")).await;
    assert_eq!(failed.unwrap_err(), "failed");
    // The failed request was charged: the limit counts requests, not successes.
    assert_eq!(layer.layer(Strict::new()).oneshot(plain("/")).await.unwrap().status(), 429);
}

#[tokio::test]
async fn response_body_reports_its_length() {
    let layer = per_client(1).build().unwrap();
    let empty = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    let body = layer.layer(empty).oneshot(plain("/")).await.unwrap().into_body();
    assert!(body.is_end_stream() && body.size_hint().exact() == Some(0));
    let body = layer.layer(empty).oneshot(plain("/")).await.unwrap().into_body();
    let length = body.size_hint().exact().unwrap();
    assert!(length > 0 && !body.is_end_stream());
    assert_eq!(body.collect().await.unwrap().to_bytes().len() as u64, length);
    assert!(ResponseBody::<String>::default().is_end_stream());
}

/// The bounds that axum and tonic require. The test passes if it compiles.
#[test]
fn layers_and_services_are_send_and_clone() {
    fn is_shared<T: Clone + Send + Sync + 'static>(_: &T) {}
    fn is_sent<T: Send + 'static>(_: &T) {}
    fn is_body<T: Body<Data = bytes::Bytes> + Send + 'static>() {}
    let layer = per_client(1).build().unwrap();
    is_shared(&layer);
    let mut service: RateLimit<Strict> = layer.layer(Strict::new());
    is_shared(&service);
    is_sent(&service.call(plain("/")));
    is_body::<ResponseBody<Empty<bytes::Bytes>>>();
}
