//! Heap allocations of the middleware for an allowed and for a denied request. The counting allocator is global to the
//! test binary, and its counts are per thread.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{HeaderMap, Request, Response, StatusCode};
use ratekeeper::tower::concurrency::InFlightLimit;
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::{LayerBuilder, Peer, RatekeeperLayer};
use ratekeeper::{Limit, WindowAlign};
use tower::{Layer, Service, service_fn};

/// Allocations between the call and the ready response. The service's header map has spare capacity, as a server's
/// usually has, so that only the middleware's allocations count.
fn allocations(layer: &RatekeeperLayer) -> u64 {
    allocations_of(layer, "/users/7?x=y")
}

fn allocations_of(layer: &RatekeeperLayer, target: &str) -> u64 {
    let theirs = allocation_counter::measure(|| drop(HeaderMap::<()>::with_capacity(8))).count_total;
    allocations_with(layer, target, StatusCode::OK) - theirs
}

/// Allocations between the call and the ready response, with this status, of the middleware and of the service.
fn allocations_with(layer: &RatekeeperLayer, target: &str, status: StatusCode) -> u64 {
    let respond = |_: Request<String>| {
        let mut response = Response::new(());
        *response.headers_mut() = HeaderMap::with_capacity(8);
        ready(Ok::<_, Infallible>(response))
    };
    let mut service = layer.layer(service_fn(respond));
    let mut once = || {
        let request = Request::get(target).header("x-user", "alice").header("host", "example.com");
        let request = request.extension(Peer([192, 0, 2, 7].into())).body(String::new()).unwrap();
        let mut polled = Poll::Pending;
        let counted = allocation_counter::measure(|| {
            let mut response = pin!(service.call(request));
            polled = response.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        });
        let Poll::Ready(Ok(response)) = &polled else { panic!("the response is not ready") };
        assert!(response.headers().contains_key("ratelimit"));
        (response.status(), counted.count_total)
    };
    // The first two calls, of which the second may be denied, also allocate the thread's reused buffers.
    once();
    once();
    let (_, count) = once();
    assert_eq!([once(), once()], [(status, count); 2]);
    count
}

#[test]
fn allowed_request_allocates_only_header_values() {
    let limit = || Limit::fixed_window(100, Duration::from_secs(3600), WindowAlign::FirstRequest).unwrap();
    let one = || RatekeeperLayer::builder().per_client("per-client", limit());
    // The values of the two headers.
    assert_eq!(allocations(&one().build().unwrap()), 2);
    let user = Rule::new("per-user", limit()).key(Key::of(KeyPart::header("x-user")));
    let three = one().rule(user).rule(Rule::new("all", limit())).build().unwrap();
    assert_eq!(allocations(&three), 2);
    // Permits are counted in preallocated memory.
    let concurrency =
        one().in_flight_limit(InFlightLimit::new("at-once", 9).key(Key::of(KeyPart::header("x-user"))));
    assert_eq!(allocations(&concurrency.build().unwrap()), 2);
}

#[test]
fn denied_request_allocates_only_its_response() {
    let limit = || Limit::fixed_window(1, Duration::from_secs(3600), WindowAlign::FirstRequest).unwrap();
    let one = || RatekeeperLayer::builder().per_client("per-client", limit());
    let denied = |builder: LayerBuilder| {
        allocations_with(&builder.build().unwrap(), "/users/7?x=y", StatusCode::TOO_MANY_REQUESTS)
    };
    // The header map (2), the text of all header values and of the body, and its reference count.
    assert_eq!(denied(one()), 2 + 1 + 1);
    let user = Rule::new("per-user", limit()).key(Key::of(KeyPart::header("x-user")));
    assert_eq!(denied(one().rule(user).rule(Rule::new("all", limit()))), 2 + 1 + 1);
}

#[test]
fn escape_in_a_path_allocates_nothing() {
    let limit = Limit::fixed_window(100, Duration::from_secs(3600), WindowAlign::FirstRequest).unwrap();
    let layer = RatekeeperLayer::builder().per_client("per-client", limit).build().unwrap();
    for path in ["/users/a%20b", "/%C3%A9/a.b", "/users/%E2%82%AC"] {
        assert_eq!(allocations_of(&layer, path), 2, "{path}");
    }
}
