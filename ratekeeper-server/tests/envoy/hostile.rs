//! Hostile requests: each gets an answer or a typed error, and the next request is served.

use std::net::SocketAddr;
use std::time::Duration;

use ratekeeper_server::envoy::messages::RateLimitRequest;
use ratekeeper_server::envoy::{
    CALL_BYTES_MAX, DESCRIPTORS_MAX, ENTRIES_MAX, Options, Settings, TEXT_BYTES_MAX,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::Code;

use super::support::{Client, Endless, PATIENCE, Raw, edge, hits, is_ok, limited, of, refund, run, run_with};

const USERS: &str = "  edge: [{ key: user, fixed_window: { limit: 1000, window: 1m } }]\n";

/// Asserts that a request is rejected with this code and reason, and that the client is served afterwards.
async fn refused(client: &mut Client, request: RateLimitRequest, code: Code, why: &str) {
    let status = client.ask(request).await.unwrap_err();
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(why), "{status}");
    assert!(is_ok(client.told(&[of(&[("user", "good")])]).await.overall_code));
}

#[tokio::test]
async fn unknown_units_are_rejected() {
    let service = run(USERS);
    let mut client = service.client().await;
    for unit in [0, 7, 99, -1, i32::MAX, i32::MIN] {
        let descriptors = [of(&[("user", "ann")]), limited(5, unit, of(&[("user", "ann")]))];
        let why = format!("descriptors[1].limit.unit is {unit}: send 1 to 6");
        refused(&mut client, edge(&descriptors), Code::InvalidArgument, &why).await;
    }
    // The rejected requests charged nothing.
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![999]));
    assert_eq!(client.passes(&[limited(u32::MAX, 6, of(&[]))]).await, (true, vec![u32::MAX - 1]));
}

#[tokio::test]
async fn oversized_requests_are_rejected() {
    let service = run(USERS);
    let mut client = service.client().await;
    let many = |count: usize| edge(&vec![of(&[("user", "ann")]); count]);
    let told = client.ask(many(DESCRIPTORS_MAX)).await.unwrap();
    assert_eq!(told.statuses.len(), DESCRIPTORS_MAX);
    let why = "send at most 100";
    refused(&mut client, many(DESCRIPTORS_MAX + 1), Code::InvalidArgument, why).await;
    refused(&mut client, many(10_000), Code::InvalidArgument, "there are more than 100 descriptors").await;

    let told = client.told(&[of(&vec![("user", "ann"); ENTRIES_MAX])]).await;
    assert!(is_ok(told.overall_code) && told.statuses[0].current_limit.is_none());
    let deep = edge(&[of(&vec![("user", "ann"); ENTRIES_MAX + 1])]);
    refused(&mut client, deep, Code::InvalidArgument, "descriptors[0] has more than 32 entries").await;

    let long = "x".repeat(TEXT_BYTES_MAX);
    assert_eq!(client.passes(&[of(&[("user", &long)])]).await, (true, vec![999]));
    for longer in ["x".repeat(TEXT_BYTES_MAX + 1), "x".repeat(1_000_000)] {
        let why = "is longer than 196608 bytes";
        refused(&mut client, edge(&[of(&[("user", &longer)])]), Code::InvalidArgument, why).await;
        refused(&mut client, edge(&[of(&[(&longer, "")])]), Code::InvalidArgument, why).await;
        let domain = RateLimitRequest { domain: longer.into(), ..edge(&[of(&[("user", "ann")])]) };
        refused(&mut client, domain, Code::InvalidArgument, why).await;
    }
    let whole = edge(&[of(&[("user", &"x".repeat(CALL_BYTES_MAX))])]);
    refused(&mut client, whole, Code::OutOfRange, "").await;
}

/// Envoy's clients could bypass a limit if they could exceed a bound: a long header in every descriptor, and long
/// tracing headers, must be decided.
#[tokio::test]
async fn longest_client_input_is_decided() {
    let service = run(USERS);
    let mut client = service.client().await;
    let long = "x".repeat(60 << 10);
    let told = client.told(&vec![of(&[("user", &long)]); DESCRIPTORS_MAX]).await;
    assert_eq!(told.statuses.len(), DESCRIPTORS_MAX);
    let mut request = tonic::Request::new(edge(&[of(&[("user", "ann")])]));
    request.metadata_mut().insert("tracestate", long.parse().unwrap());
    let told = client.ask(request).await.unwrap();
    assert_eq!(told.statuses[0].limit_remaining, 999);
}

/// All incomplete messages share one bound on their bytes, and rejected messages release theirs.
#[tokio::test]
async fn incomplete_messages_share_a_byte_bound() {
    let settings = Settings { unread_bytes_max: 1000, ..Settings::default() };
    let service = run_with(USERS, Options::default(), settings);
    let mut client = service.client().await;
    let long = "x".repeat(1000);
    for _ in 0..5 {
        refused(&mut client, edge(&[of(&[("user", &long)])]), Code::ResourceExhausted, "too many").await;
    }
    let text = super::api::metrics(&service);
    assert!(text.contains("{result=\"error\"} 5\n"), "{text}");
}

#[tokio::test]
async fn largest_numbers_do_not_overflow() {
    let service = run_with(USERS, Options { refunds: true, ..Options::default() }, Settings::default());
    let mut client = service.client().await;
    let most = |sum: u64| hits(sum, of(&[("user", "ann")]));
    let own = || limited(u32::MAX, 1, of(&[("user", "ann")]));
    for descriptors in [
        vec![most(u64::MAX); 3],
        vec![hits(u64::MAX, own()); 3],
        vec![refund(most(u64::MAX)); 3],
        vec![refund(hits(u64::MAX, own())); 3],
        vec![hits(u64::from(u32::MAX), own()); 3],
        vec![most(u64::from(u32::MAX)), refund(most(u64::from(u32::MAX)))],
    ] {
        let request = RateLimitRequest { hits_addend: u32::MAX, ..edge(&descriptors) };
        assert_eq!(client.ask(request).await.unwrap().statuses.len(), descriptors.len());
    }
    assert_eq!(client.passes(&[refund(most(u64::MAX))]).await, (true, vec![1000]));
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![999]));
}

/// Silent and slow connections must not hold their permits for ever.
#[tokio::test]
async fn silent_connection_is_closed() {
    let settings =
        Settings { connections_max: 2, patience: Duration::from_millis(200), ..Settings::default() };
    let service = run_with(USERS, Options::default(), settings);
    let mut silent = TcpStream::connect(service.address).await.unwrap();
    let mut slow = TcpStream::connect(service.address).await.unwrap();
    slow.write_all(b"PRI * HT").await.unwrap();
    // Both permits are held: this client is served when one is released.
    let told = timeout(PATIENCE, async { service.client().await.passes(&[of(&[("user", "ann")])]).await });
    assert_eq!(told.await.unwrap(), (true, vec![999]));
    for stream in [&mut silent, &mut slow] {
        let mut rest = Vec::new();
        // The connection may end with a reset.
        let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap();
    }
}

/// An incomplete call is cancelled after `patience`.
#[tokio::test]
async fn incomplete_call_is_cancelled() {
    let settings = Settings { patience: Duration::from_millis(200), ..Settings::default() };
    let service = run_with(USERS, Options::default(), settings);
    let mut client = h2_client(service.address).await;
    let call = client.send_request(endless_call(service.address));
    let response = timeout(PATIENCE, call).await.unwrap().unwrap();
    let status = response.headers().get("grpc-status").map(|it| it.to_str().unwrap().to_owned());
    assert!(matches!(status.as_deref(), Some("1" | "4")), "{response:?}");
    // A call without an answer counts as an error.
    let text = super::api::metrics(&service);
    assert!(text.contains("{result=\"error\"} 1\n"), "{text}");
    assert_eq!(service.client().await.passes(&[of(&[("user", "ann")])]).await, (true, vec![999]));
}

pub(crate) fn endless_call(address: SocketAddr) -> http::Request<Endless> {
    let path = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    http::Request::post(format!("http://{address}/{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Endless)
        .unwrap()
}

pub(crate) async fn h2_client(address: SocketAddr) -> hyper::client::conn::http2::SendRequest<Endless> {
    let stream = TcpStream::connect(address).await.unwrap();
    let executor = hyper_util::rt::TokioExecutor::new();
    let io = hyper_util::rt::TokioIo::new(stream);
    let (client, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    tokio::spawn(connection);
    client
}

#[tokio::test]
async fn malformed_messages_are_rejected() {
    let service = run(USERS);
    // An overlong field, a field of the wrong type, a truncated field, and an unknown field.
    for (message, code) in [
        (&b"\x0a\xff\xff\xff\xff\x0f"[..], Some(Code::InvalidArgument)),
        (b"\x08\x01", Some(Code::InvalidArgument)),
        (b"\x0a\x04edge\x12\x0d\x0a\x0b\x0a\x04user\x12\x04ann", Some(Code::InvalidArgument)),
        (b"\x0a\x04edge\x12\x0d\x0a\x0b\x0a\x04user\x12\x03ann\xa2\x06\x01x", None),
        // Text that is not UTF-8 must be decided: Envoy would allow the request if the call failed.
        (b"\x0a\x04edge\x12\x0e\x0a\x0c\x0a\x04user\x12\x04ann\xff", None),
    ] {
        let mut grpc = tonic::client::Grpc::new(service.channel().await);
        grpc.ready().await.unwrap();
        let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
        let request = tonic::Request::new(message);
        let answered = grpc.unary(request, path.parse().unwrap(), Raw).await;
        assert_eq!(answered.map_err(|status| status.code()).err(), code, "{message:?}");
    }
    let text = super::api::metrics(&service);
    assert!(text.contains("{result=\"error\"} 3\n"), "{text}");
    let mut client = service.client().await;
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![998]));
    assert_eq!(client.passes(&[of(&[("user", "ann\u{fffd}")])]).await, (true, vec![998]));
}

/// Calls that never complete are bounded, and other calls are served once they end.
#[tokio::test]
async fn calls_in_flight_are_bounded() {
    let settings = Settings { calls_max: 2, ..Settings::default() };
    let service = run_with(USERS, Options::default(), settings);
    let mut endless = h2_client(service.address).await;
    let mut calls = Vec::new();
    for _ in 0..2 {
        let call = endless.send_request(endless_call(service.address));
        calls.push(tokio::spawn(call));
    }
    let mut client = service.client().await;
    // Until both calls have arrived.
    let refused = timeout(PATIENCE, async {
        loop {
            match client.ask(edge(&[of(&[("user", "ann")])])).await {
                Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(status) => return status,
            }
        }
    });
    let refused = refused.await.unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    // Their permits are released when they end.
    calls.into_iter().for_each(|call| call.abort());
    drop(endless);
    let served = timeout(PATIENCE, async {
        while client.ask(edge(&[of(&[("user", "ann")])])).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    served.await.unwrap();
}
