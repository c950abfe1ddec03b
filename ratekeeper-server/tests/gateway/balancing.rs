//! Load balancing, health checks and outlier ejection.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::http::{get, status};
use testbed::wait_until;
use tokio::io::{AsyncRead, AsyncWrite};

use super::peers::{ConfigFile, Identity, TempDir, scripted};
use super::support::{TestGateway, Upstream, run};

async fn three() -> (Vec<Upstream>, Vec<SocketAddr>) {
    let all = vec![Upstream::start().await, Upstream::start().await, Upstream::start().await];
    let addresses = all.iter().map(|upstream| upstream.address).collect();
    (all, addresses)
}

fn counts(upstreams: &[Upstream]) -> Vec<usize> {
    upstreams.iter().map(|upstream| upstream.requests().len()).collect()
}

/// Whether an address receives requests, according to the metrics.
pub(crate) fn is_up(gateway: &TestGateway, address: SocketAddr) -> bool {
    let line = format!("ratekeeper_upstream_up{{upstream=\"pool\",address=\"{address}\"}} ");
    let metrics = gateway.gateway.status().metrics();
    metrics.lines().find_map(|it| it.strip_prefix(&line)).expect("the address is not in the metrics") == "1"
}

#[tokio::test]
async fn round_robin_spreads_requests_evenly() {
    let (upstreams, addresses) = three().await;
    let gateway = run(&ConfigFile::default().to(&addresses)).await;
    for _ in 0..30 {
        assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    }
    assert_eq!(counts(&upstreams), [10, 10, 10]);
}

#[tokio::test]
async fn least_requests_prefers_idle_servers() {
    let (upstreams, addresses) = three().await;
    let gateway =
        run(&ConfigFile { upstream: ", balance: least_requests", ..ConfigFile::default() }.to(&addresses))
            .await;
    let address = gateway.address;
    let held: Vec<_> = (0..2).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
    let waiting = || upstreams.iter().filter(|it| *it.waiting.lock().unwrap() == 1).count();
    wait_until(|| waiting() == 2).await;
    let busy: Vec<bool> = upstreams.iter().map(|it| *it.waiting.lock().unwrap() == 1).collect();
    for _ in 0..10 {
        assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    }
    for (upstream, is_busy) in upstreams.iter().zip(busy) {
        assert_eq!(upstream.requests().len(), if is_busy { 1 } else { 10 });
        upstream.release(1);
    }
    for sent in held {
        assert_eq!(status(&sent.await.unwrap()), 200);
    }
    // Finished requests no longer count.
    for _ in 0..30 {
        assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    }
    assert!(counts(&upstreams).iter().all(|count| *count >= 11), "{:?}", counts(&upstreams));
}

/// A server with an adjustable status that counts health checks and requests.
struct TestServer {
    address: SocketAddr,
    state: ServerState,
}

#[derive(Clone)]
struct ServerState {
    status: Arc<AtomicU16>,
    checks: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl Deref for TestServer {
    type Target = ServerState;

    fn deref(&self) -> &ServerState {
        &self.state
    }
}

async fn test_server() -> TestServer {
    test_server_with("http1", None).await
}

/// With the given protocol, with or without TLS.
async fn test_server_with(protocol: &'static str, identity: Option<&Identity>) -> TestServer {
    let status = Arc::new(AtomicU16::new(200));
    let state = ServerState { status, checks: Arc::default(), requests: Arc::default() };
    let acceptor =
        identity.map(|identity| identity.acceptor(if protocol == "http2" { "h2" } else { "http/1.1" }));
    let served_state = state.clone();
    let address = scripted(move |stream, _| {
        let (state, acceptor) = (served_state.clone(), acceptor.clone());
        async move {
            let Some(acceptor) = acceptor else { return state.serve(protocol, stream).await };
            // A client that does not trust the certificate disconnects.
            if let Ok(stream) = acceptor.accept(stream).await {
                state.serve(protocol, stream).await;
            }
        }
    })
    .await;
    TestServer { address, state }
}

impl ServerState {
    async fn serve(self, protocol: &str, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let service = service_fn(move |request: Request<Incoming>| {
            let is_check = request.uri().path() == "/healthz";
            let count = if is_check { &self.checks } else { &self.requests };
            count.fetch_add(1, Ordering::Relaxed);
            let status = StatusCode::from_u16(self.status.load(Ordering::Relaxed)).unwrap();
            let response = Response::builder().status(status).body(Empty::<Bytes>::new()).unwrap();
            async { Ok::<_, Infallible>(response) }
        });
        let io = TokioIo::new(io);
        // A health check closes its connection.
        let _ = match protocol {
            "http2" => http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await,
            _ => http1::Builder::new().serve_connection(io, service).await,
        };
    }
}

#[tokio::test]
async fn health_checks_remove_and_restore_a_server() {
    let (one, other) = (test_server().await, test_server().await);
    one.status.store(500, Ordering::Relaxed);
    let upstream =
        ", health: { path: /healthz, every: 500ms, timeout: 500ms, unhealthy_after: 2, healthy_after: 2 }";
    let gateway =
        run(&ConfigFile { upstream, ..ConfigFile::default() }.to(&[one.address, other.address])).await;
    assert!(is_up(&gateway, one.address), "a server is healthy until checks fail");
    wait_until(|| !is_up(&gateway, one.address)).await;
    assert!(one.checks.load(Ordering::Relaxed) >= 2, "one failed check is not enough");
    wait_until(|| is_up(&gateway, other.address)).await;
    for _ in 0..6 {
        assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    }
    assert_eq!(one.requests.load(Ordering::Relaxed), 0);
    assert_eq!(other.requests.load(Ordering::Relaxed), 6);

    let before = one.checks.load(Ordering::Relaxed);
    one.status.store(200, Ordering::Relaxed);
    wait_until(|| is_up(&gateway, one.address)).await;
    assert!(one.checks.load(Ordering::Relaxed) >= before + 2, "one successful check is not enough");
    for _ in 0..6 {
        assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    }
    assert_eq!(one.requests.load(Ordering::Relaxed), 3);
}

/// For each protocol: one server that is unhealthy at first, and one with an untrusted certificate.
#[tokio::test]
async fn health_checks_use_the_protocol_of_the_upstream() {
    let (directory, right, wrong) = (TempDir::new(), Identity::new(), Identity::new());
    let authority = directory.write("authority.pem", &right.certificate);
    let trusting = format!(", tls: {{ ca: {{ file: {authority} }} }}");
    let check = async |protocol: &'static str, is_tls: bool| {
        let server = test_server_with(protocol, is_tls.then_some(&right)).await;
        let untrusted = test_server_with(protocol, Some(&wrong)).await;
        server.status.store(503, Ordering::Relaxed);
        let health = ", health: { path: /healthz, every: 500ms, timeout: 500ms, unhealthy_after: 1, healthy_after: 1 }";
        let tls = if is_tls { trusting.as_str() } else { "" };
        let upstream = format!(", protocol: {protocol}{tls}{health}");
        let scheme = if is_tls { "https" } else { "http" };
        let urls = [&server, &untrusted].map(|it| format!("{scheme}://{}", it.address));
        let gateway = run(&ConfigFile { upstream: &upstream, ..ConfigFile::default() }.to_urls(&urls)).await;
        wait_until(|| !is_up(&gateway, server.address) && !is_up(&gateway, untrusted.address)).await;
        server.status.store(204, Ordering::Relaxed);
        wait_until(|| is_up(&gateway, server.address)).await;
        assert!(server.checks.load(Ordering::Relaxed) >= 2);
        assert!(!is_up(&gateway, untrusted.address), "{protocol} {is_tls}");
        assert_eq!(untrusted.checks.load(Ordering::Relaxed), 0, "{protocol} {is_tls}");
        // Healthy servers receive the requests.
        for _ in 0..4 {
            assert_eq!(status(&get(gateway.address, "/", "").await), 204, "{protocol} {is_tls}");
        }
        assert_eq!(server.requests.load(Ordering::Relaxed), 4);
    };
    tokio::join!(check("http1", true), check("http2", false), check("http2", true));
}

/// An attempt on an unhealthy server may succeed; a rejection cannot.
#[tokio::test]
async fn all_servers_get_requests_if_none_is_healthy() {
    let (one, other) = (test_server().await, test_server().await);
    for it in [&one, &other] {
        it.status.store(404, Ordering::Relaxed);
    }
    let upstream = ", health: { path: /healthz, every: 500ms, timeout: 500ms, unhealthy_after: 1 }";
    let gateway =
        run(&ConfigFile { upstream, ..ConfigFile::default() }.to(&[one.address, other.address])).await;
    wait_until(|| !is_up(&gateway, one.address) && !is_up(&gateway, other.address)).await;
    for _ in 0..4 {
        assert_eq!(status(&get(gateway.address, "/", "").await), 404);
    }
    assert_eq!(one.requests.load(Ordering::Relaxed), 2);
    assert_eq!(other.requests.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn failing_server_is_ejected() {
    let (one, other) = (test_server().await, test_server().await);
    one.status.store(503, Ordering::Relaxed);
    let upstream = ", outlier_ejection: { after: 3, for: 1h }";
    let gateway =
        run(&ConfigFile { upstream, ..ConfigFile::default() }.to(&[one.address, other.address])).await;
    let mut failed = 0;
    for _ in 0..20 {
        failed += usize::from(status(&get(gateway.address, "/", "").await) == 503);
    }
    assert_eq!((failed, one.requests.load(Ordering::Relaxed)), (3, 3));
    assert!(!is_up(&gateway, one.address) && is_up(&gateway, other.address));
}

#[tokio::test]
async fn ejected_server_gets_requests_after_the_ejection_time() {
    let (one, other) = (test_server().await, test_server().await);
    one.status.store(502, Ordering::Relaxed);
    let upstream = ", outlier_ejection: { after: 1, for: 100ms }";
    let gateway =
        run(&ConfigFile { upstream, ..ConfigFile::default() }.to(&[one.address, other.address])).await;
    for _ in 0..2 {
        get(gateway.address, "/", "").await;
    }
    assert_eq!(one.requests.load(Ordering::Relaxed), 1);
    one.status.store(200, Ordering::Relaxed);
    wait_until(|| is_up(&gateway, one.address)).await;
    for _ in 0..4 {
        assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    }
    assert_eq!(one.requests.load(Ordering::Relaxed), 3);
}

/// Failures that are not consecutive do not add up.
#[tokio::test]
async fn success_resets_the_consecutive_failures() {
    let one = test_server().await;
    let other = test_server().await;
    let upstream = ", outlier_ejection: { after: 2, for: 1h }";
    let gateway =
        run(&ConfigFile { upstream, ..ConfigFile::default() }.to(&[one.address, other.address])).await;
    for response in [503, 200, 503, 200, 503] {
        one.status.store(response, Ordering::Relaxed);
        get(gateway.address, "/", "").await;
        get(gateway.address, "/", "").await;
    }
    assert!(is_up(&gateway, one.address));
    assert_eq!(one.requests.load(Ordering::Relaxed), 5);
}
