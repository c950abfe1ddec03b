//! The request context that a router in front passes beside the request.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Request, Response, StatusCode};
use ratekeeper::tower::concurrency::InFlightLimit;
use ratekeeper::tower::key::{Key, KeyPart, shown};
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::{
    Claims, ConcurrencySet, Outcome, Peer, RatekeeperLayer, RequestContext, Route, RuleSet,
};
use tower::service_fn;

use super::{CLIENT, hourly, ip, once};

async fn hello(_: Request<()>) -> Result<Response<String>, Infallible> {
    Ok(Response::new("hello".to_owned()))
}

/// The status of one request.
async fn status(layer: &RatekeeperLayer, request: Request<()>, about: RequestContext<'_>) -> u16 {
    let mut answering = layer.call_with(service_fn(hello), request, about).response;
    match answering.take_local_response() {
        Some(response) => response.status().as_u16(),
        None => answering.await.unwrap().status().as_u16(),
    }
}

#[tokio::test]
async fn client_in_context_overrides_the_extensions() {
    let layer = RatekeeperLayer::builder().rule(once(ip())).build().unwrap();
    let request = || Request::get("/").extension(Peer([203, 0, 113, 1].into())).body(()).unwrap();
    let from =
        |last: u8| RequestContext { client: Some([192, 0, 2, last].into()), ..RequestContext::default() };
    for last in [1, 2] {
        assert_eq!(status(&layer, request(), from(last)).await, 200);
        assert_eq!(status(&layer, request(), from(last)).await, 429);
    }
    // Without a client in the context, the request's extensions apply.
    assert_eq!(status(&layer, request(), RequestContext::default()).await, 200);
    assert_eq!(status(&layer, request(), RequestContext::default()).await, 429);
}

#[tokio::test]
async fn context_selects_rules_concurrency_limits_and_route() {
    let layer = RatekeeperLayer::builder()
        .rule(Rule::new("first", hourly(1)))
        .rule(Rule::new("second", hourly(1)).key(Key::of(KeyPart::Route)))
        .in_flight_limit(InFlightLimit::new("none", 0))
        .build()
        .unwrap();
    let (first, second) = (RuleSet([0].into()), RuleSet([1].into()));
    let (one, other) = (Route("one".into()), Route("other".into()));
    let no_concurrency = ConcurrencySet([].into());
    let about = |rules, route| RequestContext {
        client: Some(CLIENT),
        rules: Some(rules),
        route: Some(route),
        concurrency: Some(&no_concurrency),
        ..RequestContext::default()
    };
    for (rules, route, wanted) in [
        (&first, &one, 200),
        (&first, &other, 429),
        (&second, &one, 200),
        (&second, &other, 200),
        (&second, &one, 429),
    ] {
        assert_eq!(
            status(&layer, Request::new(()), about(rules, route)).await,
            wanted,
            "{rules:?} {route:?}"
        );
    }
    // Without a selection, the concurrency limit of 0 applies.
    let about = RequestContext { concurrency: None, ..about(&second, &other) };
    assert_eq!(status(&layer, Request::new(()), about).await, 429);
}

/// Token verification costs more than all other steps together.
#[tokio::test]
async fn claims_in_context_are_not_verified_again() {
    let verified = Arc::new(AtomicUsize::new(0));
    let count = verified.clone();
    let layer = RatekeeperLayer::builder()
        .rule(once(Key::of(KeyPart::Claim("sub".to_owned()))))
        .claims(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            None
        })
        .build()
        .unwrap();
    let alice = Claims([("sub".to_owned(), "alice".to_owned())].into());
    let about =
        || RequestContext { client: Some(CLIENT), claims: Some(Some(&alice)), ..RequestContext::default() };
    assert_eq!(status(&layer, Request::new(()), about()).await, 200);
    assert_eq!(status(&layer, Request::new(()), about()).await, 429);
    let no_claims = RequestContext { claims: Some(None), ..about() };
    assert_eq!(
        status(&layer, Request::new(()), no_claims).await,
        200,
        "there is no key, so the rule is left out"
    );
    assert_eq!(verified.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn call_returns_its_decision_and_denial_is_immediate() {
    let layer = RatekeeperLayer::builder().rule(once(ip())).build().unwrap();
    let call = || {
        let context = RequestContext { client: Some(CLIENT), ..RequestContext::default() };
        layer.call_with(service_fn(hello), Request::new(()), context)
    };
    let mut allowed = call();
    assert!(allowed.response.take_local_response().is_none());
    assert_eq!(allowed.event.unwrap().outcome, Outcome::Allowed);
    let mut denied = call();
    let event = denied.event.unwrap();
    assert_eq!((event.outcome, event.rules.len()), (Outcome::Denied, 1));
    assert_eq!(shown(event.key(&event.rules[0])), CLIENT.to_string());
    let response = denied.response.take_local_response().unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.headers().contains_key("retry-after"));
    assert!(denied.response.take_local_response().is_none(), "the response is taken once");
}
