//! Shared test support: a gateway from a configuration, and a recording upstream.

use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use ratekeeper::Memory;
use ratekeeper_server::Server;
use testbed::{wait_for, wait_until};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::support::parse;

/// Lines written to an access log.
#[derive(Clone, Default)]
pub(crate) struct AccessLogBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for AccessLogBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Write::write(&mut *self.0.lock().unwrap(), bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AccessLogBuffer {
    /// All lines, once there are at least `count`.
    pub(crate) async fn lines(&self, count: usize) -> Vec<String> {
        wait_for(async || {
            let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
            let lines: Vec<String> = text.lines().map(str::to_owned).collect();
            (lines.len() >= count).then_some(lines)
        })
        .await
    }
}

/// A running gateway, its address and its access log.
pub(crate) struct TestGateway {
    pub(crate) gateway: Server<Memory>,
    pub(crate) address: SocketAddr,
    pub(crate) log: AccessLogBuffer,
}

impl TestGateway {
    /// The value of a metric, with its labels if it has some.
    pub(crate) fn metric(&self, name: &str) -> usize {
        let metrics = self.gateway.status().metrics();
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("there is no {name}\n{metrics}")).parse().unwrap()
    }

    /// Waits until this many requests are in flight.
    #[track_caller]
    pub(crate) fn wait_for_in_flight(&self, count: usize) -> impl Future<Output = ()> {
        wait_until(move || self.metric("ratekeeper_requests_in_flight") == count)
    }
}

/// Starts a gateway from a configuration that listens on port 0.
pub(crate) async fn run(yaml: &str) -> TestGateway {
    let log = AccessLogBuffer::default();
    let gateway = Server::start_with_log(&parse(yaml), Box::new(log.clone())).await.unwrap();
    let address = gateway.addresses()[0].address;
    TestGateway { gateway, address, log }
}

/// Starts a gateway in front of one upstream: `route` adds route settings, `above` comes before the gateway section.
pub(crate) async fn in_front_of(upstream: &Upstream, above: &str, route: &str) -> TestGateway {
    run(&one_route(upstream, above, route)).await
}

pub(crate) fn one_route(upstream: &Upstream, above: &str, route: &str) -> String {
    let at = upstream.address;
    format!(
        "{above}\ngateway:\n  listen: 127.0.0.1:0\n  routes:\n    - {{ id: all, limits: all, upstream: http://{at}{route} }}\n"
    )
}

/// A request as the upstream received it.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) version: Version,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl ReceivedRequest {
    /// The only value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next();
        assert!(values.next().is_none(), "duplicate header {name}");
        value.map(|value| value.to_str().unwrap())
    }
}

/// A server that records requests. The path selects the response: `/status/503`, `/header/name/value`, `/hold` (waits
/// until released); any other path gets 200 and `hello`.
#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<ReceivedRequest>>>,
    pub(crate) connections: Arc<Mutex<usize>>,
    held: Arc<Semaphore>,
    /// Number of held requests.
    pub(crate) waiting: Arc<Mutex<usize>>,
}

impl Upstream {
    pub(crate) async fn start() -> Upstream {
        Upstream::start_on("127.0.0.1:0".parse().unwrap()).await
    }

    pub(crate) async fn start_on(address: SocketAddr) -> Upstream {
        let listener = TcpListener::bind(address).await.unwrap();
        let upstream = Upstream {
            address: listener.local_addr().unwrap(),
            seen: Arc::default(),
            connections: Arc::default(),
            held: Arc::new(Semaphore::new(0)),
            waiting: Arc::default(),
        };
        let serving = upstream.clone();
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                *serving.connections.lock().unwrap() += 1;
                tokio::spawn(serving.clone().serve(stream));
            }
        });
        upstream
    }

    async fn serve(self, stream: TcpStream) {
        let mut begin = [0; 4];
        let is_http2 = stream.peek(&mut begin).await.is_ok_and(|read| read == 4 && &begin == b"PRI ");
        let io = TokioIo::new(stream);
        let service = service_fn(move |request| {
            let upstream = self.clone();
            async move { Ok::<_, Infallible>(upstream.respond(request).await) }
        });
        // Some tests close the gateway's connections on purpose.
        let _ = match is_http2 {
            true => http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await,
            false => http1::Builder::new().serve_connection(io, service).with_upgrades().await,
        };
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<BoxBody<Bytes, Infallible>> {
        let (parts, body) = request.into_parts();
        let collected = body.collect().await.unwrap_or_default();
        // Over HTTP/2, hyper does not remove the body of a response to HEAD.
        let is_bodiless = parts.method == Method::HEAD && parts.version == Version::HTTP_2;
        let text = if is_bodiless { "" } else { "hello" };
        let seen = ReceivedRequest {
            method: parts.method,
            uri: parts.uri.clone(),
            version: parts.version,
            headers: parts.headers,
            trailers: collected.trailers().cloned(),
            body: collected.to_bytes(),
        };
        self.seen.lock().unwrap().push(seen);
        let mut response = Response::new(Full::from(text).boxed());
        let path = parts.uri.path().to_owned();
        let segments: Vec<&str> = path.split('/').skip(1).collect();
        match segments.as_slice() {
            ["status", status, ..] => *response.status_mut() = status.parse::<StatusCode>().unwrap(),
            ["header", name, value] => {
                let name: HeaderName = name.parse().unwrap();
                response.headers_mut().insert(name, HeaderValue::from_str(value).unwrap());
            }
            ["hold", ..] => {
                *self.waiting.lock().unwrap() += 1;
                self.held.acquire().await.unwrap().forget();
                *self.waiting.lock().unwrap() -= 1;
            }
            _ => {}
        }
        response
    }

    /// All requests received so far.
    pub(crate) fn requests(&self) -> Vec<ReceivedRequest> {
        self.seen.lock().unwrap().clone()
    }

    /// The only request received so far.
    pub(crate) fn only_request(&self) -> ReceivedRequest {
        let seen = self.requests();
        assert_eq!(seen.len(), 1, "{seen:?}");
        seen[0].clone()
    }

    /// Releases `count` held requests.
    pub(crate) fn release(&self, count: usize) {
        self.held.add_permits(count);
    }

    /// Waits until `count` requests are held.
    pub(crate) async fn wait_for_held(&self, count: usize) {
        wait_until(|| *self.waiting.lock().unwrap() == count).await;
    }
}
