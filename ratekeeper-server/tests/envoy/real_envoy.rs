//! A real Envoy in front of a small upstream, with its rate limit filter calling the service.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use ratekeeper_server::envoy::messages::{RateLimitCode, RateLimitRequest, RateLimitResponse};
use ratekeeper_server::envoy::{EnvoyApiSettings, EnvoyListenerSettings, EnvoySnapshot};
use testbed::process::free_port;
use testbed::{Envoy, TEST_TIMEOUT};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout_at};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_prost::ProstCodec;

use super::support::{TestService, change, run_with};

const DOMAINS: &str = "  edge:
    - { key: user, fixed_window: { limit: 2, window: 1m }, name: per-user }
    - { key: cost, fixed_window: { limit: 7, window: 1h } }
    - { key: plan, fixed_window: { limit: 1000, window: 1h } }
    - { key: load, fixed_window: { limit: 1000000000, window: 1h } }
";

/// An Envoy and the ports of its listeners, by rate limit service: the service under test, one that allows
/// everything, and unreachable ones that fail open and closed.
struct TestEnvoy {
    _envoy: Envoy,
    limited: u16,
    reference: u16,
    fails_open: u16,
    fails_closed: u16,
    admin: u16,
}

async fn start(service: &TestService, timeout: &str) -> TestEnvoy {
    let upstream = upstream().await;
    let other = allow_all_service().await;
    let [limited, reference, fails_open, fails_closed, admin, unreachable] =
        [(); 6].map(|()| free_port().unwrap());
    let listeners = [
        listener(limited, "upstream", "limits", false, timeout),
        listener(reference, "upstream_reference", "other", false, timeout),
        listener(fails_open, "upstream", "unreachable", false, timeout),
        listener(fails_closed, "upstream", "unreachable", true, timeout),
    ];
    let clusters = [
        cluster("upstream", upstream.port(), ""),
        cluster("upstream_reference", upstream.port(), ""),
        cluster("limits", service.address.port(), HTTP2),
        cluster("other", other.port(), HTTP2),
        cluster("unreachable", unreachable, HTTP2),
    ];
    let (listeners, clusters) = (listeners.concat(), clusters.concat());
    let config = format!(
        "admin: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {admin} }} }} }}
static_resources:
  listeners:
{listeners}
  clusters:
{clusters}"
    );
    let envoy = tokio::task::spawn_blocking(move || Envoy::start(&config, limited)).await.unwrap().unwrap();
    TestEnvoy { _envoy: envoy, limited, reference, fails_open, fails_closed, admin }
}

/// The timeout of the filter: Envoy's default of 20 ms, or one that does not matter on a busy machine.
const DEFAULT_TIMEOUT: &str = "";
const LONG_TIMEOUT: &str = "              timeout: 10s\n";

const HTTP2: &str = "
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        '@type': type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: { http2_protocol_options: {} }";

fn cluster(name: &str, port: u16, protocol: &str) -> String {
    format!(
        "  - name: {name}
    type: STATIC
    connect_timeout: 1s{protocol}
    circuit_breakers: {{ thresholds: [{{ max_connections: 4096, max_pending_requests: 4096, max_requests: 4096 }}] }}
    load_assignment:
      cluster_name: {name}
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }} }}
"
    )
}

fn listener(port: u16, upstream: &str, limits: &str, denies_on_failure: bool, timeout: &str) -> String {
    format!(
        "  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          '@type': type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          route_config:
            virtual_hosts:
            - name: all
              domains: ['*']
              routes:
              - match: {{ prefix: /user }}
                route:
                  cluster: {upstream}
                  rate_limits:
                  - actions: [{{ request_headers: {{ header_name: x-user, descriptor_key: user }} }}]
              - match: {{ prefix: /cost }}
                route: {{ cluster: {upstream} }}
                typed_per_filter_config:
                  envoy.filters.http.ratelimit:
                    '@type': type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute
                    rate_limits:
                    - actions: [{{ generic_key: {{ descriptor_key: cost, descriptor_value: all }} }}]
                      hits_addend: {{ number: 3 }}
              - match: {{ prefix: /plan }}
                route:
                  cluster: {upstream}
                  rate_limits:
                  - actions: [{{ generic_key: {{ descriptor_key: plan, descriptor_value: small }} }}]
                    limit: {{ dynamic_metadata: {{ metadata_key: {{ key: limits.of.clients, path: [{{ key: limit }}] }} }} }}
              - match: {{ prefix: /load }}
                route:
                  cluster: {upstream}
                  rate_limits:
                  - actions: [{{ generic_key: {{ descriptor_key: load, descriptor_value: all }} }}]
          http_filters:
          - name: envoy.filters.http.set_metadata
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: limits.of.clients
                value: {{ limit: {{ requests_per_unit: 1, unit: HOUR }} }}
          - name: envoy.filters.http.ratelimit
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
              domain: edge
{timeout}              failure_mode_deny: {denies_on_failure}
              enable_x_ratelimit_headers: DRAFT_VERSION_03
              rate_limit_service:
                transport_api_version: V3
                grpc_service: {{ envoy_grpc: {{ cluster_name: {limits} }} }}
          - name: envoy.filters.http.router
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
"
    )
}

/// A rate limit service that allows everything immediately.
#[derive(Clone)]
struct AllowAll;

impl NamedService for AllowAll {
    const NAME: &'static str = "envoy.service.ratelimit.v3.RateLimitService";
}

impl UnaryService<RateLimitRequest> for AllowAll {
    type Response = RateLimitResponse;
    type Future = Ready<Result<tonic::Response<RateLimitResponse>, tonic::Status>>;

    fn call(&mut self, _: tonic::Request<RateLimitRequest>) -> Self::Future {
        let response =
            RateLimitResponse { overall_code: RateLimitCode::Ok.into(), ..RateLimitResponse::default() };
        ready(Ok(tonic::Response::new(response)))
    }
}

impl tower_service::Service<Request<tonic::body::Body>> for AllowAll {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let codec = ProstCodec::<RateLimitResponse, RateLimitRequest>::default();
        Box::pin(async { Ok(Grpc::new(codec).unary(AllowAll, request).await) })
    }
}

async fn allow_all_service() -> SocketAddr {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_nodelay(Some(true));
    let address = incoming.local_addr().unwrap();
    let server = Server::builder().add_service(AllowAll);
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

/// An upstream that says hello.
async fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let hello = |_| async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"hello")))) };
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(hello)));
        }
    });
    address
}

async fn connect(port: u16) -> SendRequest<Empty<Bytes>> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let (client, connection) = handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn get(
    client: &mut SendRequest<Empty<Bytes>>,
    path: &str,
    headers: &[(&str, impl AsRef<[u8]>)],
) -> (StatusCode, HeaderMap, Bytes) {
    client.ready().await.unwrap();
    let request = headers.iter().fold(Request::get(path).header("host", "edge"), |request, (name, value)| {
        request.header(*name, value.as_ref())
    });
    let response = client.send_request(request.body(Empty::new()).unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    (head.status, head.headers, body.collect().await.unwrap().to_bytes())
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).map(|value| value.to_str().unwrap())
}

const NO_HEADERS: &[(&str, &str)] = &[];

/// A counter of Envoy's rate limit filter, by the name after `ratelimit.`.
async fn stat(envoy: &TestEnvoy, name: &str) -> u64 {
    stat_of(envoy, "upstream", name).await
}

async fn stat_of(envoy: &TestEnvoy, upstream: &str, name: &str) -> u64 {
    let (_, _, text) = get(&mut connect(envoy.admin).await, "/stats?filter=ratelimit", NO_HEADERS).await;
    let text = String::from_utf8(text.to_vec()).unwrap();
    let of_name =
        |line: &str| line.strip_prefix(&format!("cluster.{upstream}.ratelimit.{name}: "))?.parse().ok();
    text.lines().find_map(of_name).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_enforces_the_decisions_of_the_service() {
    let options = EnvoyApiSettings { denied_body: "slow down\n".into(), ..EnvoyApiSettings::default() };
    let service = run_with(DOMAINS, options, EnvoyListenerSettings::default());
    let envoy = start(&service, LONG_TIMEOUT).await;
    let mut client = connect(envoy.limited).await;

    for remaining in ["1", "0"] {
        let (status, headers, body) = get(&mut client, "/user", &[("x-user", "ann")]).await;
        assert_eq!((status, &body[..]), (StatusCode::OK, &b"hello"[..]));
        assert_eq!(header(&headers, "x-ratelimit-limit"), Some("2, 2;w=60;name=\"per-user\""));
        assert_eq!(header(&headers, "x-ratelimit-remaining"), Some(remaining));
        assert_eq!(header(&headers, "x-ratelimit-reset"), Some("60"));
    }
    let (status, headers, body) = get(&mut client, "/user", &[("x-user", "ann")]).await;
    assert_eq!((status, &body[..]), (StatusCode::TOO_MANY_REQUESTS, &b"slow down\n"[..]));
    assert_eq!(header(&headers, "x-envoy-ratelimited"), Some("true"));
    assert_eq!(header(&headers, "x-ratelimit-remaining"), Some("0"));
    assert_eq!(header(&headers, "x-ratelimit-reset"), Some("60"));
    assert_eq!(get(&mut client, "/user", &[("x-user", "bob")]).await.0, StatusCode::OK);

    // Without the header there is no descriptor, and the service is not called.
    for _ in 0..5 {
        let (status, headers, _) = get(&mut client, "/user", NO_HEADERS).await;
        assert_eq!((status, header(&headers, "x-ratelimit-limit")), (StatusCode::OK, None));
    }

    // Envoy forwards bytes that are not UTF-8, even a header full of them, and would allow a request that the service
    // rejects.
    let full = vec![0xff; 58 << 10];
    for user in [&b"ann\xff"[..], &full] {
        let user = [("x-user", user)];
        let mut statuses = Vec::new();
        for _ in 0..3 {
            statuses.push(get(&mut client, "/user", &user).await.0.as_u16());
        }
        assert_eq!(statuses, [200, 200, 429]);
    }

    // Three units per request, of seven; the last request charges what remains.
    let mut costs = Vec::new();
    for _ in 0..3 {
        let (status, headers, _) = get(&mut client, "/cost", NO_HEADERS).await;
        costs.push((status.as_u16(), header(&headers, "x-ratelimit-remaining").unwrap().to_owned()));
    }
    assert_eq!(costs, [(200, "4".to_owned()), (200, "1".to_owned()), (429, "0".to_owned())]);

    // The inline limit is one per hour, whatever the configuration has.
    let (status, headers, _) = get(&mut client, "/plan", NO_HEADERS).await;
    assert_eq!((status, header(&headers, "x-ratelimit-limit")), (StatusCode::OK, Some("1, 1;w=3600")));
    assert_eq!(get(&mut client, "/plan", NO_HEADERS).await.0, StatusCode::TOO_MANY_REQUESTS);

    assert_eq!(stat(&envoy, "error").await, 0);
    assert_eq!(stat(&envoy, "over_limit").await, 5);

    // If the service is unreachable, `failure_mode_deny` decides.
    assert_eq!(get(&mut connect(envoy.fails_open).await, "/load", NO_HEADERS).await.0, StatusCode::OK);
    let failed = get(&mut connect(envoy.fails_closed).await, "/load", NO_HEADERS).await;
    assert_eq!(failed.0, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(stat(&envoy, "error").await, 2);
    // The same holds if the service cannot decide: it returns an error, not an unknown code.
    change(&service.current, |snapshot| EnvoySnapshot { layer: None, ..snapshot });
    assert_eq!(get(&mut client, "/load", NO_HEADERS).await.0, StatusCode::OK);
    assert_eq!(stat(&envoy, "error").await, 3);
}

/// Sends requests over many connections, each after the previous response and a pause, so that the service is
/// measured and not the number of processors.
async fn load(port: u16) -> u64 {
    const CONNECTIONS: usize = 200;
    const PAUSE: Duration = Duration::from_millis(100);
    let answered = Arc::new(AtomicU64::new(0));
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(connect(port).await);
    }
    let until = Instant::now() + Duration::from_secs(2);
    let each = clients.into_iter().enumerate().map(|(number, mut client)| {
        let answered = answered.clone();
        tokio::spawn(async move {
            // The connections do not start in the same instant.
            tokio::time::sleep(PAUSE * u32::try_from(number).unwrap() / 200).await;
            while Instant::now() < until {
                let response =
                    timeout_at(until + TEST_TIMEOUT, get(&mut client, "/load", NO_HEADERS)).await.unwrap();
                assert_eq!(response.0, StatusCode::OK);
                answered.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(PAUSE).await;
            }
        })
    });
    for one in each.collect::<Vec<_>>() {
        one.await.unwrap();
    }
    answered.load(Ordering::Relaxed)
}

/// Envoy waits 20 ms and then allows a request. On a busy machine some calls are always late, so a service that does
/// nothing is measured at the same time: the service under test must not be late where that one is not.
#[tokio::test(flavor = "multi_thread")]
async fn no_request_is_allowed_because_of_a_slow_decision() {
    const ROUNDS: usize = 5;
    let service = run_with(DOMAINS, EnvoyApiSettings::default(), EnvoyListenerSettings::default());
    let envoy = start(&service, DEFAULT_TIMEOUT).await;
    let late = async || (stat(&envoy, "error").await, stat_of(&envoy, "upstream_reference", "error").await);
    let (mut answered, mut rounds) = (0, Vec::new());
    for _ in 0..ROUNDS {
        let before = late().await;
        answered += tokio::join!(load(envoy.limited), load(envoy.reference)).0;
        let after = late().await;
        rounds.push((after.0 - before.0, after.1 - before.1));
        if rounds.last().is_some_and(|(ours, other)| *ours <= 2 * other) {
            break;
        }
    }
    let (ours, other) = *rounds.last().unwrap();
    assert!(ours <= 2 * other, "late responses per round (this service, reference service): {rounds:?}");
    let (ok, error) = (stat(&envoy, "ok").await, stat(&envoy, "error").await);
    assert_eq!(ok + error, answered);
    assert!(ok > 0, "no request of {answered} was decided");
}
