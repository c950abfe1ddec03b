//! How often the middleware asks for memory on the way of a request that is let in. In a program of its own, because the
//! allocator that counts is the whole program's.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use tollgate::tower::key::{Key, Part};
use tollgate::tower::rule::Rule;
use tollgate::tower::slots::Slots;
use tollgate::tower::{Peer, RateLimitLayer};
use tollgate::{Align, Limit};
use tower::{Layer, Service, service_fn};

/// How often memory is asked for between a request that is there and its response that is there. The service behind
/// answers with headers that have room for more, as a server's usually have, so that only what we ask for counts.
fn allocations(layer: &RateLimitLayer) -> u64 {
    let respond = |_: Request<String>| {
        let mut response = Response::new(());
        *response.headers_mut() = HeaderMap::with_capacity(8);
        ready(Ok::<_, Infallible>(response))
    };
    let mut service = layer.layer(service_fn(respond));
    let mut once = || {
        let request = Request::get("/users/7?x=y").header("x-user", "alice").header("host", "example.com");
        let request = request.extension(Peer([192, 0, 2, 7].into())).body(String::new()).unwrap();
        let mut polled = Poll::Pending;
        let counted = allocation_counter::measure(|| {
            let mut response = pin!(service.call(request));
            polled = response.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        });
        assert!(matches!(&polled, Poll::Ready(Ok(response)) if response.headers().contains_key("ratelimit")));
        counted.count_total
    };
    // What a thread asks for once is not what a request asks for.
    once();
    let theirs = allocation_counter::measure(|| drop(HeaderMap::<()>::with_capacity(8))).count_total;
    let counts = [once(), once(), once()];
    assert_eq!(counts, [counts[0]; 3]);
    counts[0] - theirs
}

#[test]
fn an_allowed_request_asks_for_little_memory() {
    let limit = || Limit::fixed_window(100, Duration::from_secs(3600), Align::FirstRequest).unwrap();
    let one = || RateLimitLayer::builder().per_client("per-client", limit());
    // The values of the two headers.
    assert_eq!(allocations(&one().build().unwrap()), 2);
    let user = Rule::new("per-user", limit()).key(Key::of(Part::header("x-user")));
    let three = one().rule(user).rule(Rule::new("all", limit())).build().unwrap();
    assert_eq!(allocations(&three), 2);
    // Slots are counted in memory that is there.
    let slots = one().slots(Slots::new("at-once", 9).key(Key::of(Part::header("x-user"))));
    assert_eq!(allocations(&slots.build().unwrap()), 2);
}
