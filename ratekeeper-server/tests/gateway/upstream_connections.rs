//! Upstream connections: lifetime, sharing and limits.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http2 as server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::http::{get, read_head, read_response, send_raw, status};
use testbed::wait_until;
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;

use super::peers::{ConfigFile, Identity, TempDir, connect_http2, request_http2, scripted};
use super::support::{Upstream, run};
use crate::support::parse;

/// Sends a request on an open connection and returns the status.
async fn request_status(client: &mut TcpStream, path: &str) -> u16 {
    client.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).await.unwrap();
    status(&read_response(client).await)
}

/// An upstream that answers every request and counts opened and open connections.
struct CountingUpstream {
    address: SocketAddr,
    opened: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
}

async fn counting_upstream() -> CountingUpstream {
    let (opened, open) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let counts = (opened.clone(), open.clone());
    let address = scripted(move |mut stream, _| {
        let (opened, open) = counts.clone();
        async move {
            opened.fetch_add(1, Ordering::Relaxed);
            open.fetch_add(1, Ordering::Relaxed);
            while !read_head(&mut stream).await.is_empty() {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
            }
            open.fetch_sub(1, Ordering::Relaxed);
        }
    })
    .await;
    CountingUpstream { address, opened, open }
}

/// Regression: a connection's task kept the connection alive, and with it the upstream that a reload had replaced, so
/// each reload left its connections open forever.
#[tokio::test]
async fn reload_closes_the_connections_of_replaced_upstreams() {
    let upstream = counting_upstream().await;
    let file = |idle: usize| {
        let setting = format!(", timeouts: {{ idle: {idle}s }}");
        ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])
    };
    let gateway = run(&file(3_000)).await;
    // Client connections that stay open do not keep the old upstream alive.
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    for number in 1..=5 {
        assert_eq!(request_status(&mut client, "/").await, 200);
        assert_eq!(upstream.opened.load(Ordering::Relaxed), number);
        gateway.gateway.reload(&parse(&file(3_000 + number))).unwrap();
        wait_until(|| upstream.open.load(Ordering::Relaxed) == 0).await;
    }
}

/// A link to an upstream that can be cut without notice to either side, as in a power failure.
struct CuttableLink {
    address: SocketAddr,
    cut: Arc<Notify>,
    open: Arc<AtomicUsize>,
}

impl CuttableLink {
    async fn to(upstream: &Upstream) -> CuttableLink {
        let (to, cut, open) = (upstream.address, Arc::new(Notify::new()), Arc::<AtomicUsize>::default());
        let shared = (cut.clone(), open.clone());
        let address = scripted(move |mut near, _| {
            let (cut, open) = shared.clone();
            async move {
                open.fetch_add(1, Ordering::Relaxed);
                let mut far = TcpStream::connect(to).await.unwrap();
                tokio::select! {
                    _ = copy_bidirectional(&mut near, &mut far) => {}
                    // Both ends stay open.
                    () = cut.notified() => std::future::pending().await,
                }
                open.fetch_sub(1, Ordering::Relaxed);
            }
        })
        .await;
        CuttableLink { address, cut, open }
    }

    /// No more bytes pass on the existing connections.
    fn cut(&self) {
        self.cut.notify_waiters();
    }

    fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

/// A server that disappears without closing: the kernel reports it only after about 15 minutes.
#[tokio::test]
async fn dead_shared_connection_is_replaced_after_timeouts() {
    let upstream = Upstream::start().await;
    let link = CuttableLink::to(&upstream).await;
    let file = ConfigFile {
        upstream: ", protocol: http2, timeouts: { idle: 1h }, outlier_ejection: off",
        route: ", timeout: 200ms",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[link.address])).await;
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    assert_eq!(request_status(&mut client, "/").await, 200);
    link.cut();
    let mut lost = 0;
    while request_status(&mut client, "/").await != 200 {
        lost += 1;
        // The clock for the last received data is coarse.
        assert!(lost <= 2, "the dead connection is still in use");
    }
    assert!(lost >= 1);
}

/// Other workers do not keep using the dead connection.
#[tokio::test]
async fn dead_shared_connection_is_replaced_for_all_workers() {
    let upstream = Upstream::start().await;
    let link = CuttableLink::to(&upstream).await;
    let file = ConfigFile {
        upstream: ", protocol: http2, max_connections: 1, timeouts: { idle: 1h }, outlier_ejection: off",
        route: ", timeout: 200ms",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[link.address])).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(TcpStream::connect(gateway.address).await.unwrap());
    }
    for client in &mut clients {
        assert_eq!(request_status(client, "/").await, 200);
    }
    link.cut();
    let mut lost = 0;
    while request_status(&mut clients[0], "/").await != 200 {
        lost += 1;
        assert!(lost <= 3, "the dead connection is still in use");
    }
    for client in &mut clients {
        assert_eq!(request_status(client, "/").await, 200);
    }
    assert_eq!(*upstream.connections.lock().unwrap(), 2);
}

/// A late response does not condemn the connection while other responses arrive in time.
#[tokio::test]
async fn slow_response_does_not_replace_the_shared_connection() {
    let upstream = Upstream::start().await;
    let link = CuttableLink::to(&upstream).await;
    let file = ConfigFile {
        upstream: ", protocol: http2, outlier_ejection: off",
        route: ", timeout: 1s",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[link.address])).await;
    // HTTP/2, so that both requests run on one worker.
    let sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let get = |path: &str| Request::get(format!("http://a{path}")).body(Full::default()).unwrap();
    let (mut slow, mut quick, late) = (sender.clone(), sender, get("/hold"));
    let slow = tokio::spawn(async move { request_http2(&mut slow, late).await.head.status });
    upstream.wait_for_held(1).await;
    while !slow.is_finished() {
        assert_eq!(request_http2(&mut quick, get("/")).await.head.status, 200);
        tokio::task::yield_now().await;
    }
    assert_eq!(slow.await.unwrap(), 504);
    assert_eq!(request_http2(&mut quick, get("/")).await.head.status, 200);
    assert_eq!(*upstream.connections.lock().unwrap(), 1);
}

#[tokio::test]
async fn unanswered_ping_closes_the_upstream_connection() {
    let upstream = Upstream::start().await;
    let link = CuttableLink::to(&upstream).await;
    let file = ConfigFile {
        upstream: ", protocol: http2, ping_after: 200ms, timeouts: { connect: 50ms }",
        route: ", timeout: 1h",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[link.address])).await;
    let address = gateway.address;
    let request = "POST /hold HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let sent = tokio::spawn(async move { send_raw(address, request).await });
    upstream.wait_for_held(1).await;
    link.cut();
    assert_eq!(status(&sent.await.unwrap()), 502);
}

/// While a request waits, the connection stays open and other requests share it.
#[tokio::test]
async fn unused_shared_connection_is_closed() {
    let upstream = Upstream::start().await;
    let link = CuttableLink::to(&upstream).await;
    let setting = ", protocol: http2, timeouts: { idle: 100ms }";
    let gateway = run(&ConfigFile { upstream: setting, ..ConfigFile::default() }.to(&[link.address])).await;
    // HTTP/2, so that both requests run on one worker.
    let sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let get = |path: &str| Request::get(format!("http://a{path}")).body(Full::default()).unwrap();
    let (mut slow, mut quick, late) = (sender.clone(), sender, get("/hold"));
    let slow = tokio::spawn(async move { request_http2(&mut slow, late).await.head.status });
    upstream.wait_for_held(1).await;
    // Longer than the idle timeout and the sweep interval: nothing may happen meanwhile.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(request_http2(&mut quick, get("/")).await.head.status, 200);
    assert_eq!(*upstream.connections.lock().unwrap(), 1);
    upstream.release(1);
    assert_eq!(slow.await.unwrap(), 200);
    wait_until(|| link.open() == 0).await;
    let gauge = || super::overload::upstream_connections(&gateway);
    wait_until(|| gauge() == 0).await;
    assert_eq!(request_http2(&mut quick, get("/")).await.head.status, 200);
    assert_eq!((gauge(), *upstream.connections.lock().unwrap()), (1, 2));
}

/// Regression: the limit was divided among the workers and rounded up to at least one each, and HTTP/2 ignored it.
#[tokio::test]
async fn connection_limit_below_the_number_of_workers_holds() {
    for protocol in ["http1", "http2"] {
        let upstream = Upstream::start().await;
        let setting = format!(", protocol: {protocol}, max_connections: 1, timeouts: {{ connect: 30s }}");
        let gateway =
            run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])).await;
        let address = gateway.address;
        let all_at_once = || async {
            let sent: Vec<_> =
                (0..20).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
            upstream.release(20);
            for sent in sent {
                assert_eq!(status(&sent.await.unwrap()), 200, "{protocol}");
            }
        };
        // No connection is open yet.
        all_at_once().await;
        // Sequential requests from clients on different workers.
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(TcpStream::connect(address).await.unwrap());
        }
        for _ in 0..5 {
            for client in &mut clients {
                assert_eq!(request_status(client, "/").await, 200, "{protocol}");
            }
        }
        all_at_once().await;
        assert_eq!(*upstream.connections.lock().unwrap(), 1, "{protocol}");
    }
}

/// Other workers need the only allowed connection while one worker is opening it.
#[tokio::test]
async fn waiting_requests_share_a_connection_opened_by_another_worker() {
    let (directory, identity, gate) = (TempDir::new(), Identity::new(), Arc::new(Semaphore::new(0)));
    let (acceptor, closed) = (identity.acceptor("h2"), gate.clone());
    let address = scripted(move |stream, _| {
        let (acceptor, closed) = (acceptor.clone(), closed.clone());
        async move {
            closed.acquire().await.unwrap().forget();
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let response = |_| async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("ok"))) };
            let serving = server::Builder::new(TokioExecutor::new());
            let _ = serving.serve_connection(TokioIo::new(stream), service_fn(response)).await;
        }
    })
    .await;
    let authority = directory.write("authority.pem", &identity.certificate);
    let setting = format!(
        ", protocol: http2, max_connections: 1, timeouts: {{ connect: 10s }}, tls: {{ ca: {{ file: {authority} }} }}"
    );
    let file = ConfigFile { upstream: &setting, ..ConfigFile::default() };
    let gateway = run(&file.to_urls(&[format!("https://{address}")])).await;
    let at = gateway.address;
    let sent: Vec<_> = (0..8).map(|_| tokio::spawn(async move { get(at, "/", "").await })).collect();
    gateway.wait_for_in_flight(8).await;
    // Exactly one: a second connection would never complete its handshake.
    gate.add_permits(1);
    for sent in sent {
        assert_eq!(status(&sent.await.unwrap()), 200);
    }
    assert_eq!(super::overload::upstream_connections(&gateway), 1);
}

#[tokio::test]
async fn connection_limit_not_divisible_by_workers_holds() {
    let max = 2 * std::thread::available_parallelism().unwrap().get() - 1;
    let upstream = Upstream::start().await;
    let setting = format!(", max_connections: {max}, timeouts: {{ connect: 30s }}");
    let gateway =
        run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])).await;
    let address = gateway.address;
    let sent: Vec<_> =
        (0..4 * max).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
    upstream.wait_for_held(max).await;
    gateway.wait_for_in_flight(4 * max).await;
    upstream.release(4 * max);
    for sent in sent {
        assert_eq!(status(&sent.await.unwrap()), 200);
    }
    assert_eq!(*upstream.connections.lock().unwrap(), max);
}

/// A connection counts even after a protocol switch.
#[tokio::test]
async fn websocket_counts_against_the_connection_limit() {
    let address = scripted(|mut stream, _| async move {
        while let head = read_head(&mut stream).await
            && !head.is_empty()
        {
            let response: &[u8] = match head.contains("websocket") {
                true => {
                    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
                }
                false => b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            };
            let _ = stream.write_all(response).await;
        }
    })
    .await;
    let setting = ", max_connections: 1, timeouts: { connect: 100ms }";
    let gateway = run(&ConfigFile { upstream: setting, ..ConfigFile::default() }.to(&[address])).await;
    let mut socket = TcpStream::connect(gateway.address).await.unwrap();
    let request = "GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    socket.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(status(&read_head(&mut socket).await), 101);
    assert_eq!(status(&get(gateway.address, "/", "").await), 503);
    drop(socket);
    wait_until(|| super::overload::upstream_connections(&gateway) == 0).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

/// An HTTP/2 server with few streams per connection. `/hold` is answered once `release` has a permit.
struct FewStreams {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    /// Requests that are held.
    held: Arc<AtomicUsize>,
    release: Arc<Semaphore>,
}

impl FewStreams {
    async fn start(streams_max: u32) -> FewStreams {
        let (connections, held) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let release = Arc::new(Semaphore::new(0));
        let shared = (connections.clone(), held.clone(), release.clone());
        let address = scripted(move |stream, _| {
            let (connections, held, release) = shared.clone();
            async move {
                connections.fetch_add(1, Ordering::Relaxed);
                let respond = service_fn(move |request: Request<Incoming>| {
                    let (held, release) = (held.clone(), release.clone());
                    async move {
                        if request.uri().path() == "/hold" {
                            held.fetch_add(1, Ordering::Relaxed);
                            release.acquire().await.unwrap().forget();
                            held.fetch_sub(1, Ordering::Relaxed);
                        }
                        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("ok")))
                    }
                });
                let mut serving = server::Builder::new(TokioExecutor::new());
                serving.max_concurrent_streams(streams_max);
                let _ = serving.serve_connection(TokioIo::new(stream), respond).await;
            }
        })
        .await;
        FewStreams { address, connections, held, release }
    }
}

/// A client whose requests all run on one worker.
async fn one_worker(gateway: SocketAddr) -> impl Fn(&str) -> JoinHandle<u16> {
    let sender = connect_http2(TcpStream::connect(gateway).await.unwrap()).await;
    move |path: &str| {
        let request = Request::post(format!("http://a{path}")).body(Full::from("body")).unwrap();
        let mut sender = sender.clone();
        tokio::spawn(async move { request_http2(&mut sender, request).await.head.status.as_u16() })
    }
}

#[tokio::test]
async fn more_connections_are_opened_when_streams_run_out() {
    for (streams_max, is_burst) in [(1, false), (2, false), (2, true)] {
        let upstream = FewStreams::start(streams_max).await;
        let file =
            ConfigFile { upstream: ", protocol: http2", route: ", timeout: 10m", ..ConfigFile::default() };
        let gateway = run(&file.to(&[upstream.address])).await;
        let send = one_worker(gateway.address).await;
        let mut held = Vec::new();
        for number in 1..=12 {
            held.push(send("/hold"));
            if !is_burst {
                wait_until(|| upstream.held.load(Ordering::Relaxed) == number).await;
            }
        }
        wait_until(|| upstream.held.load(Ordering::Relaxed) == 12).await;
        assert_eq!(send("/").await.unwrap(), 200, "an unrelated request waits for a stream");
        let connections = upstream.connections.load(Ordering::Relaxed);
        assert!(connections <= 12 / streams_max as usize + 1, "{connections} connections");
        upstream.release.add_permits(12);
        for sent in held {
            assert_eq!(sent.await.unwrap(), 200);
        }
    }
}

#[tokio::test]
async fn requests_wait_for_a_stream_at_the_connection_limit() {
    let upstream = FewStreams::start(2).await;
    let file = ConfigFile {
        upstream: ", protocol: http2, max_connections: 2, timeouts: { connect: 200ms }",
        route: ", timeout: 10m",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[upstream.address])).await;
    let send = one_worker(gateway.address).await;
    let mut held = Vec::new();
    for number in 1..=4 {
        held.push(send("/hold"));
        wait_until(|| upstream.held.load(Ordering::Relaxed) == number).await;
    }
    assert_eq!(send("/").await.unwrap(), 503, "all streams are in use for the whole connect timeout");
    let waiting = send("/");
    upstream.release.add_permits(1);
    assert_eq!(waiting.await.unwrap(), 200, "it gets the stream that ends");
    upstream.release.add_permits(3);
    for sent in held {
        assert_eq!(sent.await.unwrap(), 200);
    }
    assert_eq!(upstream.connections.load(Ordering::Relaxed), 2);
    assert_eq!(super::overload::upstream_connections(&gateway), 2);
}
