//! What a router in front knows, said beside the request instead of in it.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use http::{Request, Response, StatusCode};
use tollgate::tower::key::{Key, Part};
use tollgate::tower::rule::Rule;
use tollgate::tower::slots::Slots;
use tollgate::tower::{About, Chosen, ChosenSlots, Claims, Peer, RateLimitLayer, Route, Subject};
use tower::service_fn;

use super::{CLIENT, hourly, ip, once};

async fn hello(_: Request<()>) -> Result<Response<String>, Infallible> {
    Ok(Response::new("hello".to_owned()))
}

/// The status of one request.
async fn status(layer: &RateLimitLayer, request: Request<()>, about: About<'_>) -> u16 {
    let mut answering = layer.call_about(service_fn(hello), request, about);
    match answering.told() {
        Some(told) => told.status().as_u16(),
        None => answering.await.unwrap().status().as_u16(),
    }
}

#[tokio::test]
async fn what_is_said_beside_counts_and_not_what_stands_in_the_request() {
    let layer = RateLimitLayer::builder().rule(once(ip())).build().unwrap();
    let request = || Request::get("/").extension(Peer([203, 0, 113, 1].into())).body(()).unwrap();
    let from = |last: u8| About { client: Some([192, 0, 2, last].into()), ..About::default() };
    for last in [1, 2] {
        assert_eq!(status(&layer, request(), from(last)).await, 200);
        assert_eq!(status(&layer, request(), from(last)).await, 429);
    }
    // Where nothing is said, what stands in the request does count.
    assert_eq!(status(&layer, request(), About::default()).await, 200);
    assert_eq!(status(&layer, request(), About::default()).await, 429);
}

#[tokio::test]
async fn rules_slots_and_routes_are_chosen_beside_the_request() {
    let layer = RateLimitLayer::builder()
        .rule(Rule::new("first", hourly(1)))
        .rule(Rule::new("second", hourly(1)).key(Key::of(Part::Route)))
        .slots(Slots::new("none", 0))
        .build()
        .unwrap();
    let (first, second) = (Chosen([0].into()), Chosen([1].into()));
    let (one, other) = (Route("one".into()), Route("other".into()));
    let no_slots = ChosenSlots([].into());
    let about = |chosen, route| About {
        client: Some(CLIENT),
        chosen: Some(chosen),
        route: Some(route),
        slots: Some(&no_slots),
        ..About::default()
    };
    for (chosen, route, wanted) in [
        (&first, &one, 200),
        (&first, &other, 429),
        (&second, &one, 200),
        (&second, &other, 200),
        (&second, &one, 429),
    ] {
        assert_eq!(
            status(&layer, Request::new(()), about(chosen, route)).await,
            wanted,
            "{chosen:?} {route:?}"
        );
    }
    // There are no slots for those who need one.
    let about = About { slots: None, ..about(&second, &other) };
    assert_eq!(status(&layer, Request::new(()), about).await, 429);
}

/// To verify a token takes longer than everything else.
#[tokio::test]
async fn claims_that_are_known_are_not_verified_again() {
    let verified = Arc::new(AtomicUsize::new(0));
    let count = verified.clone();
    let layer = RateLimitLayer::builder()
        .rule(once(Key::of(Part::Claim("sub".to_owned()))))
        .claims(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            None
        })
        .build()
        .unwrap();
    let alice = Claims([("sub".to_owned(), "alice".to_owned())].into());
    let about = || About { client: Some(CLIENT), claims: Some(Some(&alice)), ..About::default() };
    assert_eq!(status(&layer, Request::new(()), about()).await, 200);
    assert_eq!(status(&layer, Request::new(()), about()).await, 429);
    let nobody = About { claims: Some(None), ..about() };
    assert_eq!(
        status(&layer, Request::new(()), nobody).await,
        200,
        "there is no key, so the rule is left out"
    );
    assert_eq!(verified.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_subject_is_told_and_nobody_waits_for_a_denial() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = told.clone();
    let layer = RateLimitLayer::builder()
        .rule(once(ip()))
        .observe(move |observed| {
            let name = observed.subject.and_then(|subject| subject.downcast_ref::<&str>());
            heard.lock().unwrap().push((*name.unwrap(), observed.allowed));
        })
        .build()
        .unwrap();
    let call = |name: &'static str| {
        let about =
            About { client: Some(CLIENT), subject: Some(Subject(Arc::new(name))), ..About::default() };
        layer.call_about(service_fn(hello), Request::new(()), about)
    };
    assert!(call("one").told().is_none());
    let mut denied = call("other");
    let response = denied.told().unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.headers().contains_key("retry-after"));
    assert!(denied.told().is_none(), "it is told once");
    assert_eq!(*told.lock().unwrap(), [("one", true), ("other", false)]);
}
