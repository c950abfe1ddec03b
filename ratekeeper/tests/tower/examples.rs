//! The examples, run unchanged: each allows ten requests per hour from this machine.

use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::talk;

#[path = "../../examples/axum.rs"]
#[allow(dead_code, reason = "the test starts what `main` starts")]
mod axum_example;
#[path = "../../examples/hyper.rs"]
#[allow(dead_code, reason = "the test starts what `main` starts")]
mod hyper_example;
#[path = "../../examples/tonic.rs"]
#[allow(dead_code, reason = "the test starts what `main` starts")]
mod tonic_example;

#[tokio::test]
async fn axum_example_denies_the_eleventh_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum_example::serve(listener));
    for left in (0..10).rev() {
        let got = talk(address, "GET / HTTP/1.1\nHost: a").await;
        assert_eq!((got.status, got.body.as_str()), (200, "Hello!\n"));
        assert!(
            got.header("ratelimit").unwrap().starts_with(&format!("\"per-client\";r={left};")),
            "{got:?}"
        );
    }
    assert_eq!(talk(address, "GET / HTTP/1.1\nHost: a").await.status, 429);
}

#[tokio::test]
async fn hyper_example_denies_the_eleventh_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(hyper_example::serve(listener));
    // Each request uses a new connection; all share one budget.
    for _ in 0..10 {
        let got = talk(address, "GET / HTTP/1.1\nHost: a").await;
        assert_eq!((got.status, got.body.as_str()), (200, "Hello!\n"));
    }
    let got = talk(address, "GET / HTTP/1.1\nHost: a").await;
    assert_eq!((got.status, got.header("cache-control")), (429, Some("no-store")));
}

#[tokio::test]
async fn tonic_example_denies_the_eleventh_call() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(tonic_example::serve(listener));
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    let mut client = HealthClient::new(channel.connect().await.unwrap());
    for _ in 0..10 {
        client.check(HealthCheckRequest::default()).await.unwrap();
    }
    let status = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
}
