//! End to end, on real sockets: axum, tonic and hyper.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::{get, post};
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::path::Pattern;
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::when::When;
use ratekeeper::tower::{NonCanonicalPath, RatekeeperLayer};
use tokio::net::TcpListener;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Server};
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower::Layer;

use super::{hourly, talk};

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Serves a router until the test ends.
async fn serve(app: Router) -> SocketAddr {
    let (listener, address) = listen().await;
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    address
}

fn builder() -> ratekeeper::tower::LayerBuilder {
    RatekeeperLayer::builder()
        .peer(|request| Some(request.extensions.get::<ConnectInfo<SocketAddr>>()?.ip()))
        .per_client("per-client", hourly(3))
}

fn routes() -> Router {
    Router::new().route("/", get(async || "hello")).route("/login", post(async || "welcome"))
}

#[tokio::test]
async fn layer_in_front_of_an_axum_router() {
    let login = When { paths: vec![Pattern::parse("/login").unwrap()], ..When::default() };
    let limits = builder().rule(Rule::new("login", hourly(1)).when(login)).build().unwrap();
    let address = serve(Router::new().fallback_service(limits.layer(routes()))).await;

    // Non-canonical paths are counted and routed as the normalized path.
    let got = talk(address, "POST /x/..//login HTTP/1.1\nHost: a\nContent-Length: 0").await;
    assert_eq!((got.status, got.body.as_str()), (200, "welcome"));
    assert_eq!(got.header("ratelimit"), Some(r#""per-client";r=2;t=3600, "login";r=0;t=3600"#));
    let got = talk(address, "POST /login HTTP/1.1\nHost: a\nContent-Length: 0").await;
    assert_eq!(got.status, 429);
    assert!(got.body.contains(r#""violated-policies":["login"]"#), "{}", got.body);

    // Each request uses a new connection; all share one budget, which rejected requests do not charge.
    assert_eq!(talk(address, "GET /a%2fb HTTP/1.1\nHost: a").await.status, 400);
    assert_eq!(talk(address, "GET / HTTP/1.1\nHost: a\nHost: b").await.status, 400);
    assert_eq!(talk(address, "GET / HTTP/1.1\nHost: a").await.body, "hello");
    let got = talk(address, "HEAD / HTTP/1.1\nHost: a").await;
    assert_eq!((got.status, got.body.as_str()), (200, ""));
    assert!(got.header("ratelimit").unwrap().starts_with(r#""per-client";r=0;"#));
    let got = talk(address, "GET / HTTP/1.1\nHost: a").await;
    assert_eq!(got.status, 429);
    assert_eq!(got.header("content-length"), Some(got.body.len().to_string().as_str()));
    let got = talk(address, "HEAD / HTTP/1.1\nHost: a").await;
    assert_eq!((got.status, got.body.as_str()), (429, ""), "the answer to HEAD has no body");
    assert!(got.header("retry-after").is_some());
    assert_eq!(talk(address, "OPTIONS * HTTP/1.1\nHost: a").await.status, 429);
}

#[tokio::test]
async fn layer_inside_an_axum_router() {
    let limits = builder().non_canonical_paths(NonCanonicalPath::Reject).build().unwrap();
    let routes = Router::new().route("/{*path}", get(async || "hello"));
    let address = serve(routes.layer(limits)).await;
    assert_eq!(talk(address, "GET /a/%2e%2e/b HTTP/1.1\nHost: a").await.status, 400);
    for expected in [200, 200, 200, 429] {
        assert_eq!(talk(address, "GET /a HTTP/1.1\nHost: a").await.status, expected);
    }
}

/// tonic's health service with a limit of two calls per hour and user.
async fn health() -> HealthClient<Channel> {
    let limits = RatekeeperLayer::builder()
        .rule(Rule::new("per-user", hourly(2)).key(Key::of(KeyPart::header("x-user"))))
        .peer(|request| Some(request.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip()))
        .build()
        .unwrap();
    let (listener, address) = listen().await;
    let (_, service) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(limits).add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    HealthClient::new(channel.connect().await.unwrap())
}

fn check(user: Option<&'static str>) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest { service: String::new() });
    if let Some(user) = user {
        request.metadata_mut().insert("x-user", user.parse().unwrap());
    }
    request
}

#[tokio::test]
async fn tonic_calls_are_limited() {
    let mut client = health().await;
    let response = client.check(check(Some("alice"))).await.unwrap();
    assert_eq!(response.metadata().get("ratelimit").unwrap(), r#""per-user";r=1;t=3600"#);
    client.check(check(Some("alice"))).await.unwrap();
    let status = client.check(check(Some("alice"))).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("too many requests; try again in "), "{}", status.message());
    assert!(status.metadata().get("retry-after").is_some());
    assert!(client.check(check(Some("bob"))).await.is_ok());
    // Without a user, the key is the address, which tonic provides.
    client.check(check(None)).await.unwrap();
    client.check(check(None)).await.unwrap();
    assert_eq!(client.check(check(None)).await.unwrap_err().code(), Code::ResourceExhausted);
    // Streaming calls count like others.
    client.watch(check(Some("carol"))).await.unwrap();
    client.watch(check(Some("carol"))).await.unwrap();
    assert_eq!(client.watch(check(Some("carol"))).await.unwrap_err().code(), Code::ResourceExhausted);

    let mut twice = check(Some("dave"));
    twice.metadata_mut().append("x-user", "eve".parse().unwrap());
    let status = client.check(twice).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "the header x-user is there twice; send it once");
}
