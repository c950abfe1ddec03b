//! The middleware, through real services: most of it in front of a function, where nothing but the middleware can be
//! wrong, and the rest on real sockets in front of axum, tonic and hyper.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod about;
mod allocations;
mod charges;
mod concerns;
mod direct;
mod examples;
mod headers;
mod keys;
mod observed;
mod ready;
#[cfg(feature = "redis")]
mod redis;
mod renewal;
mod rules;
mod slots;
#[cfg(feature = "redis")]
mod slots_redis;
mod sockets;
mod waiting;

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tollgate::tower::key::{Key, Part};
use tollgate::tower::rule::Rule;
use tollgate::tower::{Builder, Peer, RateLimitLayer};
use tollgate::{Align, Limit, Store};
use tower::{Layer, ServiceExt, service_fn};

const HOUR: Duration = Duration::from_secs(3600);
/// Where requests come from unless a test says otherwise.
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

/// So many in an hour that begins with the first request: nothing comes back while a test runs.
fn hourly(limit: u32) -> Limit {
    Limit::fixed_window(limit, HOUR, Align::FirstRequest).unwrap()
}

/// A rule of one request an hour: the second of the same owner is denied.
fn once(key: Key) -> Rule {
    Rule::new("once", hourly(1)).key(key)
}

/// One budget for each client, under the name that most tests use.
fn per_client(limit: u32) -> Builder {
    RateLimitLayer::builder().per_client("per-client", hourly(limit))
}

fn ip() -> Key {
    Key::of(Part::Ip)
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

/// What a client got.
#[derive(Debug)]
struct Got {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Got {
    /// The only value of a header.
    fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter().map(|value| value.to_str().unwrap());
        let only = values.next();
        assert_eq!(values.next(), None, "{name} is there twice");
        only
    }
}

/// Sends a request to a function behind the layer, which answers with the target that it got.
async fn send<S: Store + Send + Sync + 'static>(layer: &RateLimitLayer<S>, request: Request<String>) -> Got {
    let echo = |request: Request<String>| async move {
        Ok::<_, Infallible>(Response::new(request.uri().to_string()))
    };
    let response = layer.layer(service_fn(echo)).oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Got {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// The statuses of several requests, one after the other.
async fn statuses<S: Store + Send + Sync + 'static>(
    layer: &RateLimitLayer<S>,
    requests: impl IntoIterator<Item = Request<String>>,
) -> Vec<u16> {
    let mut statuses = Vec::new();
    for request in requests {
        statuses.push(send(layer, request).await.status);
    }
    statuses
}

/// Sends text over a connection of its own, and gives what came back until the server closed it. The text is the first
/// line of a request and its other lines; `Connection: close` is added.
async fn talk(address: SocketAddr, lines: &str) -> Got {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{}\r\nConnection: close\r\n\r\n", lines.replace('\n', "\r\n"));
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let mut headers = HeaderMap::new();
    for (name, value) in lines.map(|line| line.split_once(": ").unwrap()) {
        headers.append(http::HeaderName::try_from(name).unwrap(), value.parse().unwrap());
    }
    Got { status, headers, body: body.to_owned() }
}
