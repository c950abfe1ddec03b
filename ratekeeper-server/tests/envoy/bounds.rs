//! Hostile clients: each request gets a response or a typed error, and the next request is served.

use std::net::SocketAddr;
use std::time::Duration;

use ratekeeper_server::envoy::messages::RateLimitRequest;
use ratekeeper_server::envoy::{
    CALL_BYTES_MAX, DESCRIPTORS_MAX, ENTRIES_MAX, EnvoyApiSettings, EnvoyListenerSettings, TEXT_BYTES_MAX,
};
use testbed::http2::kind::{DATA, HEADERS, PING, RST_STREAM, SETTINGS};
use testbed::http2::{ACK, END_HEADERS, END_STREAM, PREFACE, block, frame, request_head};
use testbed::{TEST_TIMEOUT, wait_for};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::Code;

use crate::gateway::peers::RawHttp2;

use super::support::{
    Client, EndlessBody, RawCodec, as_refund, descriptor, edge_request, is_ok, run, run_with, with_hits,
    with_inline_limit,
};

const USERS: &str = "  edge: [{ key: user, fixed_window: { limit: 1000, window: 1m } }]\n";

/// Asserts that a request is rejected with this code and reason, and that the client is served afterwards.
async fn assert_rejected(client: &mut Client, request: RateLimitRequest, code: Code, reason: &str) {
    let status = client.call(request).await.unwrap_err();
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(reason), "{status}");
    assert!(is_ok(client.check(&[descriptor(&[("user", "good")])]).await.overall_code));
}

#[tokio::test]
async fn unknown_units_are_rejected() {
    let service = run(USERS);
    let mut client = service.client().await;
    for unit in [0, 7, 99, -1, i32::MAX, i32::MIN] {
        let descriptors =
            [descriptor(&[("user", "ann")]), with_inline_limit(5, unit, descriptor(&[("user", "ann")]))];
        let reason = format!("descriptors[1].limit.unit is {unit}: send 1 to 6");
        assert_rejected(&mut client, edge_request(&descriptors), Code::InvalidArgument, &reason).await;
    }
    // The rejected requests charged nothing.
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![999]));
    assert_eq!(
        client.remaining(&[with_inline_limit(u32::MAX, 6, descriptor(&[]))]).await,
        (true, vec![u32::MAX - 1])
    );
}

#[tokio::test]
async fn oversized_requests_are_rejected() {
    let service = run(USERS);
    let mut client = service.client().await;
    let many = |count: usize| edge_request(&vec![descriptor(&[("user", "ann")]); count]);
    let response = client.call(many(DESCRIPTORS_MAX)).await.unwrap();
    assert_eq!(response.statuses.len(), DESCRIPTORS_MAX);
    let reason = "send at most 100";
    assert_rejected(&mut client, many(DESCRIPTORS_MAX + 1), Code::InvalidArgument, reason).await;
    assert_rejected(&mut client, many(10_000), Code::InvalidArgument, "more than 100 descriptors").await;

    let response = client.check(&[descriptor(&vec![("user", "ann"); ENTRIES_MAX])]).await;
    assert!(is_ok(response.overall_code) && response.statuses[0].current_limit.is_none());
    let deep = edge_request(&[descriptor(&vec![("user", "ann"); ENTRIES_MAX + 1])]);
    assert_rejected(&mut client, deep, Code::InvalidArgument, "descriptors[0] has more than 32 entries")
        .await;

    let long = "x".repeat(TEXT_BYTES_MAX);
    assert_eq!(client.remaining(&[descriptor(&[("user", &long)])]).await, (true, vec![999]));
    for longer in ["x".repeat(TEXT_BYTES_MAX + 1), "x".repeat(1_000_000)] {
        let reason = "longer than 196608 bytes";
        assert_rejected(
            &mut client,
            edge_request(&[descriptor(&[("user", &longer)])]),
            Code::InvalidArgument,
            reason,
        )
        .await;
        assert_rejected(
            &mut client,
            edge_request(&[descriptor(&[(&longer, "")])]),
            Code::InvalidArgument,
            reason,
        )
        .await;
        let domain =
            RateLimitRequest { domain: longer.into(), ..edge_request(&[descriptor(&[("user", "ann")])]) };
        assert_rejected(&mut client, domain, Code::InvalidArgument, reason).await;
    }
    let oversized = edge_request(&[descriptor(&[("user", &"x".repeat(CALL_BYTES_MAX))])]);
    assert_rejected(&mut client, oversized, Code::OutOfRange, "").await;
}

/// Envoy's clients could bypass a limit if they could exceed a bound: a long header in every descriptor, and long
/// tracing headers, must be decided.
#[tokio::test]
async fn longest_client_input_is_decided() {
    let service = run(USERS);
    let mut client = service.client().await;
    let long = "x".repeat(60 << 10);
    let response = client.check(&vec![descriptor(&[("user", &long)]); DESCRIPTORS_MAX]).await;
    assert_eq!(response.statuses.len(), DESCRIPTORS_MAX);
    let mut request = tonic::Request::new(edge_request(&[descriptor(&[("user", "ann")])]));
    request.metadata_mut().insert("tracestate", long.parse().unwrap());
    let response = client.call(request).await.unwrap();
    assert_eq!(response.statuses[0].limit_remaining, 999);
}

/// All incomplete messages share one bound on their bytes, and rejected messages release theirs.
#[tokio::test]
async fn incomplete_messages_share_a_byte_bound() {
    let settings = EnvoyListenerSettings { incomplete_bytes_max: 1000, ..EnvoyListenerSettings::default() };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut client = service.client().await;
    let long = "x".repeat(1000);
    for _ in 0..5 {
        assert_rejected(
            &mut client,
            edge_request(&[descriptor(&[("user", &long)])]),
            Code::ResourceExhausted,
            "too many",
        )
        .await;
    }
    let text = super::listener::metrics(&service);
    assert!(text.contains("{result=\"error\"} 5\n"), "{text}");
}

#[tokio::test]
async fn largest_numbers_do_not_overflow() {
    let service = run_with(
        USERS,
        EnvoyApiSettings { refunds: true, ..EnvoyApiSettings::default() },
        EnvoyListenerSettings::default(),
    );
    let mut client = service.client().await;
    let ann = |sum: u64| with_hits(sum, descriptor(&[("user", "ann")]));
    let inline = || with_inline_limit(u32::MAX, 1, descriptor(&[("user", "ann")]));
    for descriptors in [
        vec![ann(u64::MAX); 3],
        vec![with_hits(u64::MAX, inline()); 3],
        vec![as_refund(ann(u64::MAX)); 3],
        vec![as_refund(with_hits(u64::MAX, inline())); 3],
        vec![with_hits(u64::from(u32::MAX), inline()); 3],
        vec![ann(u64::from(u32::MAX)), as_refund(ann(u64::from(u32::MAX)))],
    ] {
        let request = RateLimitRequest { hits_addend: u32::MAX, ..edge_request(&descriptors) };
        assert_eq!(client.call(request).await.unwrap().statuses.len(), descriptors.len());
    }
    assert_eq!(client.remaining(&[as_refund(ann(u64::MAX))]).await, (true, vec![1000]));
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![999]));
}

/// Silent and slow connections must not hold their permits for ever.
#[tokio::test]
async fn silent_connection_is_closed() {
    let settings = EnvoyListenerSettings {
        connections_max: 2,
        client_timeout: Duration::from_millis(200),
        ..EnvoyListenerSettings::default()
    };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut silent = TcpStream::connect(service.address).await.unwrap();
    let mut slow = TcpStream::connect(service.address).await.unwrap();
    slow.write_all(b"PRI * HT").await.unwrap();
    // Both permits are held: this client is served when one is released.
    let response = timeout(TEST_TIMEOUT, async {
        service.client().await.remaining(&[descriptor(&[("user", "ann")])]).await
    });
    assert_eq!(response.await.unwrap(), (true, vec![999]));
    for stream in [&mut silent, &mut slow] {
        let mut rest = Vec::new();
        // The connection may end with a reset.
        let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut rest)).await.unwrap();
    }
}

/// An incomplete call is cancelled after `client_timeout`.
#[tokio::test]
async fn incomplete_call_is_cancelled() {
    let settings = EnvoyListenerSettings {
        client_timeout: Duration::from_millis(200),
        ..EnvoyListenerSettings::default()
    };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut client = h2_client(service.address).await;
    let call = client.send_request(endless_call(service.address));
    let response = timeout(TEST_TIMEOUT, call).await.unwrap().unwrap();
    let status = response.headers().get("grpc-status").map(|it| it.to_str().unwrap().to_owned());
    assert!(matches!(status.as_deref(), Some("4")), "{response:?}");
    // A call without an answer counts as an error.
    let text = super::listener::metrics(&service);
    assert!(text.contains("{result=\"error\"} 1\n"), "{text}");
    assert_eq!(service.client().await.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![999]));
}

/// The client's own timeout applies if it is shorter.
#[tokio::test]
async fn call_ends_at_the_timeout_of_the_client() {
    let service = run(USERS);
    let mut client = h2_client(service.address).await;
    let mut call = endless_call(service.address);
    call.headers_mut().insert("grpc-timeout", "20m".parse().unwrap());
    let response = timeout(TEST_TIMEOUT, client.send_request(call)).await.unwrap().unwrap();
    assert_eq!(response.headers()["grpc-status"], "4", "{response:?}");
}

/// Calls of unknown methods, and compressed messages, are rejected before their message arrives.
#[tokio::test]
async fn unsupported_calls_are_unimplemented() {
    let service = run(USERS);
    let mut client = h2_client(service.address).await;
    let mut rejected = async |path: &str, encoding: &str| {
        let mut call = endless_call(service.address);
        let uri = format!("http://{}/{path}", service.address);
        *call.uri_mut() = uri.parse().unwrap();
        call.headers_mut().insert("grpc-encoding", encoding.parse().unwrap());
        let response = timeout(TEST_TIMEOUT, client.send_request(call)).await.unwrap().unwrap();
        assert_eq!(response.headers()["grpc-status"], "12", "{path} {encoding}");
        response.headers()["grpc-message"].to_str().unwrap().to_owned()
    };
    let rate_limits = "envoy.service.ratelimit.v3.RateLimitService";
    for path in [&format!("{rate_limits}/Other"), "other.Service/Method", "", "grpc.health.v1.Healthy/Check"]
    {
        assert!(rejected(path, "identity").await.contains("ShouldRateLimit"), "{path}");
    }
    let path = format!("{rate_limits}/ShouldRateLimit");
    assert!(rejected(&path, "gzip").await.contains("without%20compression"));
    // A client without a rate limit call counts nothing.
    let text = super::listener::metrics(&service);
    assert!(text.contains("{result=\"error\"} 2\n"), "{text}");
}

/// A client that reads no response, but keeps its connection active, holds nothing for longer than its timeout.
#[tokio::test]
async fn stream_of_a_client_that_does_not_read_is_reset() {
    const INITIAL_WINDOW_SIZE: [u8; 6] = [0, 4, 0, 0, 0, 0];
    let settings = EnvoyListenerSettings {
        client_timeout: Duration::from_millis(200),
        ..EnvoyListenerSettings::default()
    };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut client = RawHttp2::connect(service.address).await;
    let call = |stream: u32, path: &str, message: &[u8]| {
        let metadata = [("content-type", "application/grpc"), ("te", "trailers")];
        let head = block(request_head("POST", path).into_iter().chain(metadata));
        let body = [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat();
        [frame(HEADERS, END_HEADERS, stream, &head), frame(DATA, END_STREAM, stream, &body)].concat()
    };
    let check = call(
        1,
        "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
        b"\x0a\x04edge\x12\x0d\x0a\x0b\x0a\x04user\x12\x03ann",
    );
    let health = [call(3, "/grpc.health.v1.Health/Check", b""), call(5, "/grpc.health.v1.Health/Watch", b"")];
    let sent = [frame(SETTINGS, 0, 0, &INITIAL_WINDOW_SIZE), check, health.concat()].concat();
    client.0.write_all(&sent).await.unwrap();
    let mut reset = [client.next_of(RST_STREAM).await.unwrap(), client.next_of(RST_STREAM).await.unwrap()]
        .map(|frame| frame.stream);
    reset.sort_unstable();
    // A stream that may never end stays.
    assert_eq!(reset, [1, 3]);
    assert_eq!(service.client().await.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![998]));
}

/// Frames that flow control does not limit would use a core per connection.
#[tokio::test]
async fn floods_of_control_frames_close_the_connection() {
    const BATCH: usize = 1_000;
    let service = run(USERS);
    let floods = [frame(PING, 0, 0, &[7; 8]), frame(PING, ACK, 0, &[7; 8]), frame(SETTINGS, 0, 0, &[])];
    for sent in floods {
        let (mut reading, mut writing) = TcpStream::connect(service.address).await.unwrap().into_split();
        writing.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await.unwrap();
        let answers =
            tokio::spawn(async move { tokio::io::copy(&mut reading, &mut tokio::io::sink()).await });
        let flood = async {
            let batch = sent.repeat(BATCH);
            for _ in 0..500 {
                if writing.write_all(&batch).await.is_err() {
                    return true;
                }
            }
            false
        };
        assert!(timeout(TEST_TIMEOUT, flood).await.unwrap(), "{sent:?} was accepted without end");
        answers.abort();
    }
    assert_eq!(service.client().await.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![999]));
}

pub(crate) fn endless_call(address: SocketAddr) -> http::Request<EndlessBody> {
    let path = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    http::Request::post(format!("http://{address}/{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(EndlessBody)
        .unwrap()
}

pub(crate) async fn h2_client(address: SocketAddr) -> hyper::client::conn::http2::SendRequest<EndlessBody> {
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
        let result = grpc.unary(request, path.parse().unwrap(), RawCodec).await;
        assert_eq!(result.map_err(|status| status.code()).err(), code, "{message:?}");
    }
    let text = super::listener::metrics(&service);
    assert!(text.contains("{result=\"error\"} 3\n"), "{text}");
    let mut client = service.client().await;
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![998]));
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann\u{fffd}")])]).await, (true, vec![998]));
}

/// Calls that never complete are bounded, and other calls are served once they end.
#[tokio::test]
async fn calls_in_flight_are_bounded() {
    let settings = EnvoyListenerSettings { calls_max: 2, ..EnvoyListenerSettings::default() };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut endless = h2_client(service.address).await;
    let mut calls = Vec::new();
    for _ in 0..2 {
        let call = endless.send_request(endless_call(service.address));
        calls.push(tokio::spawn(call));
    }
    let mut client = service.client().await;
    // Until both calls have arrived.
    let request = || edge_request(&[descriptor(&[("user", "ann")])]);
    let rejected = wait_for(async || client.call(request()).await.err()).await;
    assert_eq!(rejected.code(), Code::ResourceExhausted, "{rejected}");
    // Their permits are released when they end.
    calls.into_iter().for_each(|call| call.abort());
    drop(endless);
    wait_for(async || client.call(request()).await.ok()).await;
}
