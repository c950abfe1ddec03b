use std::convert::Infallible;
use std::future::Future;
use std::hash::Hash;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response};
use ratekeeper_core::{Time, WindowAlign};
use tower_layer::Layer;
use tower_service::Service;

use super::*;
use crate::store::{Charge, InlineLimit, Store, StoreUnavailable, Verdict};

/// A store without usable decisions: it returns an error, or fewer decisions than charges.
struct Broken(Result<Verdict, ()>);

impl Store for Broken {
    type Error = ();

    fn key<K: Hash + ?Sized>(&self, _: &K) -> crate::Key {
        crate::Key(0)
    }

    async fn charge(&self, _: &[Charge]) -> Result<Verdict, ()> {
        self.0.clone()
    }

    async fn peek(&self, _: &[Charge]) -> Result<Verdict, ()> {
        self.0.clone()
    }

    async fn refund(&self, _: &[Charge], _: Option<Time>) -> Result<(), StoreUnavailable> {
        Err(StoreUnavailable("broken".to_owned()))
    }

    async fn reset(&self, _: &[Charge]) -> Result<(), StoreUnavailable> {
        Err(StoreUnavailable("broken".to_owned()))
    }

    async fn charge_inline(&self, _: InlineLimit<'_>, _: crate::Key, _: u32, _: bool) -> Result<Verdict, ()> {
        self.0.clone()
    }

    async fn refund_inline(
        &self,
        _: &Limit,
        _: crate::Key,
        _: u32,
        _: Option<Time>,
    ) -> Result<(), StoreUnavailable> {
        Err(StoreUnavailable("broken".to_owned()))
    }
}

/// A verdict without decisions counts as allowed by every limit; a store error must not become one.
#[test]
fn store_error_denies_all_requests() {
    let ban = ratekeeper_rules::rule::Ban {
        after: 1,
        within: Duration::from_secs(60),
        lasts: Duration::from_secs(60),
    };
    for result in [Err(()), Ok(Verdict::default())] {
        let limit = Limit::fixed_window(9, Duration::from_secs(60), WindowAlign::Clock).unwrap();
        let mut rule = Rule::new("a", limit.clone()).key(Key::global());
        rule.ban = Some(ban);
        let builder = LayerBuilder::default().rule(rule).rule(Rule::new("b", limit).shadow());
        let rules = Rules::new(builder.rules.clone()).unwrap();
        let limiter = Limiter { store: Broken(result) };
        let layer = builder.with(rules, limiter, None, SystemClock::new()).unwrap();
        let mut service = layer.layer(Hello);
        let mut response = pin!(service.call(Request::new(())));
        let Poll::Ready(Ok(response)) = response.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        else {
            unreachable!("no check waits in this store")
        };
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "1");
    }
}

#[derive(Clone)]
struct Hello;

impl Service<Request<()>> for Hello {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        std::future::ready(Ok(Response::new(String::new())))
    }
}
