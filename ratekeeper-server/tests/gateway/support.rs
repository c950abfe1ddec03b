//! Shared test support: a gateway from a configuration, a recording upstream, and clients.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
use ratekeeper_config::{Config, Environment};
use ratekeeper_server::Server;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Long enough on the busiest machine: only a failing test waits this long.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// An environment with the given variables, and with files from disk.
#[derive(Default)]
pub(crate) struct TestEnvironment(pub(crate) HashMap<String, String>);

impl Environment for TestEnvironment {
    fn variable(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }

    fn file(&self, path: &str) -> Result<String, String> {
        std::fs::read_to_string(path).map_err(|error| error.to_string())
    }
}

pub(crate) fn parse(yaml: &str) -> Config {
    let mut config = ratekeeper_config::parse(yaml, &TestEnvironment::default())
        .unwrap_or_else(|errors| panic!("{errors}\n{yaml}"));
    // Tests run at the same time: each has an admin listener on a free port.
    if let Some(admin) = &mut config.admin {
        admin.listen.set_port(0);
    }
    config
}

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
        let lines = async {
            loop {
                let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
                if text.lines().count() >= count {
                    return text.lines().map(str::to_owned).collect();
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TEST_TIMEOUT, lines).await.unwrap()
    }
}

/// A running gateway, its address and its access log.
pub(crate) struct TestGateway {
    pub(crate) gateway: Server<Memory>,
    pub(crate) address: SocketAddr,
    pub(crate) log: AccessLogBuffer,
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

/// Waits until the condition is true.
pub(crate) async fn wait_until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(TEST_TIMEOUT, waiting).await.expect("the condition never became true");
}

/// Sends bytes on a new connection and reads until the other side closes it.
pub(crate) async fn send_raw(address: SocketAddr, bytes: impl AsRef<[u8]>) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that rejects a request may not read all of it.
    let _ = stream.write_all(bytes.as_ref()).await;
    read_all(&mut stream).await
}

/// Reads until the other side closes the connection.
pub(crate) async fn read_all(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut all)).await.expect("the connection stayed open");
    String::from_utf8_lossy(&all).into_owned()
}

/// The status of a response.
pub(crate) fn status(response: &str) -> u16 {
    response.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

/// Sends an HTTP/1.1 GET request with these headers on a new connection.
pub(crate) async fn get(address: SocketAddr, path: &str, headers: &str) -> String {
    send_raw(address, format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}\r\n"))
        .await
}

/// A header of a response.
pub(crate) fn header<'a>(response: &'a str, name: &str) -> Option<&'a str> {
    let head = response.split("\r\n\r\n").next()?;
    head.lines().skip(1).find_map(|line| {
        let (its, value) = line.split_once(':')?;
        its.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}
