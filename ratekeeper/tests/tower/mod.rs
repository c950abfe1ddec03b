//! The tower middleware with real services: mostly in front of a function, to test the middleware in isolation, and
//! on real sockets in front of axum, tonic and hyper.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod allocations;
mod charges;
mod check;
mod concurrency;
#[cfg(feature = "redis")]
mod concurrency_redis;
mod conditions;
mod events;
mod examples;
mod headers;
mod keys;
mod ready;
#[cfg(feature = "redis")]
mod redis;
mod reload;
mod request_context;
mod rules;
mod sockets;
mod waiting;

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::{LayerBuilder, Peer, RatekeeperLayer};
use ratekeeper::{Limit, Store, WindowAlign};
use tower::{Layer, ServiceExt, service_fn};

const HOUR: Duration = Duration::from_secs(3600);
/// The default peer address of requests.
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

/// A limit per hour that starts with the first request, so that nothing is restored while a test runs.
fn hourly(limit: u32) -> Limit {
    Limit::fixed_window(limit, HOUR, WindowAlign::FirstRequest).unwrap()
}

/// A rule of one request per hour: the second request of the same key is denied.
fn once(key: Key) -> Rule {
    Rule::new("once", hourly(1)).key(key)
}

/// One budget per client, under the rule name that most tests use.
fn per_client(limit: u32) -> LayerBuilder {
    RatekeeperLayer::builder().per_client("per-client", hourly(limit))
}

fn ip() -> Key {
    Key::of(KeyPart::Ip)
}

fn get(target: &str) -> http::request::Builder {
    Request::get(target).extension(Peer(CLIENT))
}

/// A request with this header.
fn with(name: &str, value: &str) -> Request<String> {
    get("/").header(name, value).body(String::new()).unwrap()
}

fn plain(target: &str) -> Request<String> {
    get(target).body(String::new()).unwrap()
}

/// A received response.
#[derive(Debug)]
struct TestResponse {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl TestResponse {
    /// The only value of a header.
    fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter().map(|value| value.to_str().unwrap());
        let only = values.next();
        assert_eq!(values.next(), None, "{name} is there twice");
        only
    }
}

/// Sends a request to a function behind the layer, which responds with the target it received.
async fn send<S: Store + Send + Sync + 'static>(
    layer: &RatekeeperLayer<S>,
    request: Request<String>,
) -> TestResponse {
    let echo = |request: Request<String>| async move {
        Ok::<_, Infallible>(Response::new(request.uri().to_string()))
    };
    let response = layer.layer(service_fn(echo)).oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    TestResponse {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// The statuses of several sequential requests.
async fn statuses<S: Store + Send + Sync + 'static>(
    layer: &RatekeeperLayer<S>,
    requests: impl IntoIterator<Item = Request<String>>,
) -> Vec<u16> {
    let mut statuses = Vec::new();
    for request in requests {
        statuses.push(send(layer, request).await.status);
    }
    statuses
}

/// Sends a request line and header lines over a new connection, with `Connection: close` added, and returns the
/// response.
async fn talk(address: SocketAddr, lines: &str) -> TestResponse {
    let request = format!("{}\r\nConnection: close\r\n\r\n", lines.replace('\n', "\r\n"));
    let text = testbed::http::send_raw(address, request).await;
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let mut headers = HeaderMap::new();
    for (name, value) in head.split("\r\n").skip(1).map(|line| line.split_once(": ").unwrap()) {
        headers.append(http::HeaderName::try_from(name).unwrap(), value.parse().unwrap());
    }
    TestResponse { status: testbed::http::status(head), headers, body: body.to_owned() }
}
