//! gRPC through the gateway, with tonic as client and server.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request};
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::server::HealthReporter;

use super::peers::{ConfigFile, closed_address};
use super::support::{TestGateway, run};

async fn server() -> (HealthReporter, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (reporter, service) = tonic_health::server::health_reporter();
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener)));
    (reporter, address)
}

async fn client(gateway: &TestGateway) -> HealthClient<Channel> {
    let channel = Channel::from_shared(format!("http://{}", gateway.address)).unwrap();
    HealthClient::new(channel.connect().await.unwrap())
}

fn about(service: &str, user: &str) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest { service: service.to_owned() });
    request.metadata_mut().insert("x-user-id", user.parse().unwrap());
    request
}

const HTTP2: &str = ", protocol: http2";

#[tokio::test]
async fn calls_and_streams_are_forwarded_with_trailers() {
    let (reporter, address) = server().await;
    let gateway = run(&ConfigFile { upstream: HTTP2, ..ConfigFile::default() }.to(&[address])).await;
    let mut client = client(&gateway).await;
    let received = client.check(about("", "a")).await.unwrap().into_inner();
    assert_eq!(received.status, 1);
    // A nonzero status arrives in a head without a body, or in trailers.
    let unknown = client.check(about("nothing", "a")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);

    // A stream delivers messages as they occur.
    reporter.set_service_status("api", ServingStatus::NotServing).await;
    let mut stream = client.watch(about("api", "a")).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().status, 2);
    for (status, number) in
        [(ServingStatus::Serving, 1), (ServingStatus::NotServing, 2), (ServingStatus::Serving, 1)]
    {
        reporter.set_service_status("api", status).await;
        assert_eq!(stream.message().await.unwrap().unwrap().status, number);
    }
}

#[tokio::test]
async fn denied_call_gets_resource_exhausted() {
    let (_reporter, address) = server().await;
    let limits = "limits: { per-user: { key: { header: X-User-Id }, fixed_window: { limit: 2, window: 1h, align: first_request } } }";
    let gateway = run(&ConfigFile { limits, upstream: HTTP2, ..ConfigFile::default() }.to(&[address])).await;
    let mut client = client(&gateway).await;
    client.check(about("", "a")).await.unwrap();
    client.watch(about("", "a")).await.unwrap();
    let denied = client.check(about("", "a")).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert!(denied.metadata().get("retry-after").is_some());
    assert_eq!(client.watch(about("", "a")).await.unwrap_err().code(), Code::ResourceExhausted);
    client.check(about("", "b")).await.unwrap();
}

#[tokio::test]
async fn unreachable_server_gives_status_unavailable() {
    let gateway = run(&ConfigFile { upstream: HTTP2, ..ConfigFile::default() }.to(&[closed_address()])).await;
    let failed = client(&gateway).await.check(about("", "a")).await.unwrap_err();
    assert_eq!((failed.code(), failed.message()), (Code::Unavailable, "Bad Gateway"));
    // The access log has the HTTP status.
    let line = gateway.log.lines(1).await.remove(0);
    assert!(line.contains(r#""status":502"#), "{line}");
}

#[tokio::test]
async fn method_without_a_route_gives_status_unimplemented() {
    let file = ConfigFile { upstream: HTTP2, route: ", path: /other.Service/**", ..ConfigFile::default() };
    let gateway = run(&file.to(&[closed_address()])).await;
    let failed = client(&gateway).await.check(about("", "a")).await.unwrap_err();
    assert_eq!(failed.code(), Code::Unimplemented);
}
