//! The listener: authentication, reloads, health, reflection and graceful shutdown.

use std::sync::Arc;
use std::time::Duration;

use ratekeeper::ManualClock;
use ratekeeper::redis::{FailurePolicy, Redis};
use ratekeeper_server::Exposition;
use ratekeeper_server::envoy::{Domains, EnvoyApiSettings, EnvoyListenerSettings, EnvoySnapshot, json};
use testbed::http2::kind::{DATA, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE};
use testbed::http2::{END_HEADERS, END_STREAM, block, frame, get, request_head};
use testbed::{RedisServer, TEST_TIMEOUT, wait_for, wait_until};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::gateway::peers::RawHttp2;

use super::support::{
    Client, TestService, change, current, descriptor, edge_request, is_ok, run, run_with, serve,
};
use crate::support::{layer_builder, parse};

const USERS: &str = "  edge: [{ key: user, fixed_window: { limit: 3, window: 1m } }]\n";
const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

pub(crate) fn metrics<S>(service: &TestService<S>) -> String {
    let mut out = Exposition::default();
    service.current.load().metrics.write(&mut out);
    out.into_text()
}

#[tokio::test]
async fn reload_applies_from_the_next_call() {
    let file = |limit: u32, more: &str| {
        let window = format!("{{ limit: {limit}, window: 1h, align: first_request }}");
        parse(&format!("domains: {{ edge: [{{ key: user, fixed_window: {window} }}{more}] }}"))
    };
    let config = file(3, "");
    let before = layer_builder(&config).build().unwrap();
    let context = current(&config, before.clone(), EnvoyApiSettings::default());
    let service = serve(context.clone(), EnvoyListenerSettings::default(), ManualClock::default());
    let mut client = service.client().await;
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![2]));
    let config = file(9, ", { key: path, unlimited: true }");
    change(&context, |snapshot| EnvoySnapshot {
        layer: Some(layer_builder(&config).reload_from(&before).unwrap()),
        domains: Arc::new(Domains::new(config.domains.clone())),
        ..snapshot
    });
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await.1, [7], "the counters migrate");
    assert_eq!(client.remaining(&[descriptor(&[("path", "/")])]).await, (true, vec![u32::MAX]));
    let settings = Arc::new(EnvoyApiSettings { refunds: true, ..EnvoyApiSettings::default() });
    change(&context, |snapshot| EnvoySnapshot { settings, ..snapshot });
    let refund = super::support::as_refund(descriptor(&[("user", "ann")]));
    assert_eq!(client.remaining(&[refund]).await, (true, vec![8]));
}

#[tokio::test]
async fn calls_require_the_token() {
    let token = parse("admin: { listen: 127.0.0.1:0, token: open-sesame-please }").admin.unwrap().token;
    let service = run_with(
        USERS,
        EnvoyApiSettings { token, ..EnvoyApiSettings::default() },
        EnvoyListenerSettings::default(),
    );
    let mut client = Client::new(service.channel().await);
    for wrong in [
        None,
        Some("Bearer open-sesame-pleas"),
        Some("Basic open-sesame-please"),
        Some("open-sesame-please"),
        Some(""),
    ] {
        let mut request = Request::new(edge_request(&[descriptor(&[("user", "ann")])]));
        if let Some(wrong) = wrong {
            request.metadata_mut().insert("authorization", wrong.parse().unwrap());
        }
        let status = client.call(request).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{wrong:?}");
    }
    let mut request = Request::new(edge_request(&[descriptor(&[("user", "ann")])]));
    request.metadata_mut().insert("authorization", "bearer open-sesame-please".parse().unwrap());
    let response = client.call(request).await.unwrap();
    assert_eq!(response.statuses[0].limit_remaining, 2, "rejected calls charge nothing");
    // Health checks need no token.
    assert_eq!(health(&service, "ratelimit").await, Ok(SERVING));
    assert!(metrics(&service).contains("{result=\"error\"} 5\n"));
}

/// A call without the token is rejected before its body arrives, and its connection is closed.
#[tokio::test]
async fn unauthenticated_connection_is_closed() {
    let token = parse("admin: { listen: 127.0.0.1:0, token: open-sesame-please }").admin.unwrap().token;
    let settings = EnvoyListenerSettings {
        client_timeout: Duration::from_millis(300),
        ..EnvoyListenerSettings::default()
    };
    let service = run_with(USERS, EnvoyApiSettings { token, ..EnvoyApiSettings::default() }, settings);
    let mut unauthenticated = super::bounds::h2_client(service.address).await;
    let call = unauthenticated.send_request(super::bounds::endless_call(service.address));
    let response = timeout(TEST_TIMEOUT, call).await.unwrap().unwrap();
    assert_eq!(response.headers()["grpc-status"], "16", "{response:?}");
    // Reflection requires the token as well.
    let mut reflection = ServerReflectionClient::new(service.channel().await);
    let nothing = tokio_stream::empty::<ServerReflectionRequest>();
    let status = reflection.server_reflection_info(nothing).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);

    let mut authenticated = Client::new(service.channel().await);
    let mut request = Request::new(edge_request(&[descriptor(&[("user", "ann")])]));
    request.metadata_mut().insert("authorization", "Bearer open-sesame-please".parse().unwrap());
    authenticated.call(request).await.unwrap();
    let mut authenticated_h2 = super::bounds::h2_client(service.address).await;
    let mut call = super::bounds::endless_call(service.address);
    call.headers_mut().insert("authorization", "Bearer open-sesame-please".parse().unwrap());
    let ended = timeout(TEST_TIMEOUT, authenticated_h2.send_request(call)).await.unwrap().unwrap();
    assert_eq!(ended.headers()["grpc-status"], "4", "the call timed out");
    wait_until(|| unauthenticated.is_closed()).await;
    assert!(!authenticated_h2.is_closed());
}

/// Health checks have short messages, and a bounded number of watchers.
#[tokio::test]
async fn health_checks_are_bounded() {
    const WATCHERS_MAX: usize = 1024;
    let service = run(USERS);
    let long = health(&service, &"x".repeat(5 << 10)).await;
    assert_eq!(long, Err(Code::OutOfRange));
    let (mut one, mut other) =
        (HealthClient::new(service.channel().await), HealthClient::new(service.channel().await));
    let mut watched = Vec::new();
    for number in 0..WATCHERS_MAX {
        let watcher = if number % 2 == 0 { &mut one } else { &mut other };
        watched.push(watcher.watch(HealthCheckRequest::default()).await.unwrap());
    }
    let rejected = one.watch(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(rejected.code(), Code::ResourceExhausted);
    // Watchers leave the checks of load balancers alone.
    assert_eq!(health(&service, "").await, Ok(SERVING));
    drop(watched);
    wait_for(async || one.watch(HealthCheckRequest::default()).await.ok()).await;
}

async fn health<S>(service: &TestService<S>, name: &str) -> Result<i32, Code> {
    let mut client = HealthClient::new(service.channel().await);
    let response = client.check(HealthCheckRequest { service: name.to_owned() }).await;
    response.map(|response| response.into_inner().status).map_err(|status| status.code())
}

#[tokio::test]
async fn health_reports_not_serving_before_shutdown() {
    let settings =
        EnvoyListenerSettings { drain_delay: Duration::from_millis(300), ..EnvoyListenerSettings::default() };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut client = service.client().await;
    for name in ["", "ratelimit"] {
        assert_eq!(health(&service, name).await, Ok(SERVING));
    }
    assert_eq!(health(&service, "other").await, Err(Code::NotFound));
    // A watcher that does not end its stream.
    let mut watcher = HealthClient::new(service.channel().await);
    let request = HealthCheckRequest { service: "ratelimit".to_owned() };
    let mut watched = watcher.watch(request).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status, SERVING);

    service.drain.send_replace(true);
    assert_eq!(watched.message().await.unwrap().unwrap().status, NOT_SERVING);
    // Calls are still accepted until `drain_delay` is over.
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![2]));
    drop(watched);
    drop(watcher);
    timeout(TEST_TIMEOUT, service.ended).await.unwrap().unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(service.address).await.is_err());
}

/// An endless watcher does not delay the shutdown.
#[tokio::test]
async fn health_watcher_does_not_delay_shutdown() {
    let short = Duration::from_millis(50);
    let settings = EnvoyListenerSettings {
        drain_delay: short,
        client_timeout: short,
        ..EnvoyListenerSettings::default()
    };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut watcher = HealthClient::new(service.channel().await);
    let mut watched = watcher.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status, SERVING);
    service.drain.send_replace(true);
    timeout(TEST_TIMEOUT, service.ended).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn reflection_describes_the_service() {
    let service = run(USERS);
    let mut client = ServerReflectionClient::new(service.channel().await);
    let mut reflect = async |message_request| {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(message_request) };
        let mut response =
            client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
        response.message().await.unwrap().unwrap().message_response.unwrap()
    };
    let MessageResponse::ListServicesResponse(services) =
        reflect(MessageRequest::ListServices(String::new())).await
    else {
        panic!("not a list of services")
    };
    let names: Vec<_> = services.service.iter().map(|service| service.name.as_str()).collect();
    for name in ["envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    // All dependencies of these symbols are available.
    for symbol in [
        "envoy.service.ratelimit.v3.RateLimitService",
        "envoy.service.ratelimit.v3.RateLimitResponse.DescriptorStatus",
        "envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.RateLimitOverride",
        "envoy.type.v3.RateLimitUnit",
        "envoy.config.core.v3.HeaderValue",
        "google.protobuf.Struct",
        "google.protobuf.UInt64Value",
        "google.protobuf.Duration",
    ] {
        let response = reflect(MessageRequest::FileContainingSymbol(symbol.to_owned())).await;
        let MessageResponse::FileDescriptorResponse(files) = response else {
            panic!("{symbol}: {response:?}")
        };
        for file in files.file_descriptor_proto {
            let file = <prost_types::FileDescriptorProto as prost::Message>::decode(&file[..]).unwrap();
            for needed in file.dependency {
                let response = reflect(MessageRequest::FileByFilename(needed.clone())).await;
                assert!(matches!(response, MessageResponse::FileDescriptorResponse(_)), "{needed}");
            }
        }
    }
}

/// An unavailable store fails the call, so that Envoy's `failure_mode_deny` decides; descriptors without a limit are
/// allowed.
#[tokio::test]
async fn unavailable_store_fails_the_call() {
    let mut server = RedisServer::start().unwrap();
    let settings = ratekeeper::redis::Settings::new(&server.url())
        .on_store_failure(FailurePolicy::Closed)
        .deadline(TEST_TIMEOUT);
    let config = parse(&format!("domains:\n{USERS}"));
    let layer = layer_builder(&config).redis(&settings).unwrap();
    let context = current::<Redis>(&config, layer, EnvoyApiSettings::default());
    let service = serve(context.clone(), EnvoyListenerSettings::default(), ManualClock::default());
    let mut client = service.client().await;
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![2]));
    server.kill().unwrap();
    for descriptor in
        [descriptor(&[("user", "ann")]), super::support::with_inline_limit(5, 1, descriptor(&[]))]
    {
        let status = client.call(edge_request(&[descriptor])).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
    }
    let body = br#"{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let (status, text) = json(body, &context.load()).await;
    assert_eq!(status, 503);
    assert!(text.starts_with(r#"{"code":14,"message":"the store"#), "{text}");
    assert!(is_ok(client.check(&[descriptor(&[("other", "")])]).await.overall_code));
}

/// Many tools call the older name of the service first, and some call no other.
#[tokio::test]
async fn reflection_answers_by_its_older_name() {
    use tonic_reflection::pb::v1alpha::ServerReflectionRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_response::MessageResponse;

    let service = run(USERS);
    let mut client = ServerReflectionClient::new(service.channel().await);
    let message_request = Some(MessageRequest::ListServices(String::new()));
    let request = ServerReflectionRequest { host: String::new(), message_request };
    let mut response = client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
    let response = response.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(services) = response else { panic!("not a list of services") };
    assert!(services.service.iter().any(|it| it.name == "envoy.service.ratelimit.v3.RateLimitService"));
}

/// The cases of h2spec that need a response with a body, or a request that is read to its end.
#[tokio::test]
async fn requests_that_are_not_grpc_follow_http2() {
    let service = run(USERS);
    // generic/2: a response with a body, also to a stream that got WINDOW_UPDATE.
    let mut client = RawHttp2::connect(service.address).await;
    let frames = [get(1, "/"), frame(WINDOW_UPDATE, 0, 1, &1_u32.to_be_bytes())];
    client.0.write_all(&frames.concat()).await.unwrap();
    let body = client.next_of(DATA).await.unwrap();
    assert!(String::from_utf8_lossy(&body.payload).contains("application/grpc"), "{body:?}");

    // 8.1.2.6: a content length that the data does not have.
    let mut client = RawHttp2::connect(service.address).await;
    let head = request_head("POST", "/").into_iter().chain([("content-length", "1")]);
    let frames = [frame(HEADERS, END_HEADERS, 1, &block(head)), frame(DATA, END_STREAM, 1, b"test")];
    client.0.write_all(&frames.concat()).await.unwrap();
    let reset = client.next_of(RST_STREAM).await.unwrap();
    assert_eq!((reset.stream, &reset.payload[..]), (1, &1_u32.to_be_bytes()[..]), "PROTOCOL_ERROR");

    // 5.1.2: more streams than announced, all kept open by a window of 0.
    let settings = EnvoyListenerSettings { calls_per_connection_max: 10, ..EnvoyListenerSettings::default() };
    let service = run_with(USERS, EnvoyApiSettings::default(), settings);
    let mut client = RawHttp2::connect(service.address).await;
    const INITIAL_WINDOW_SIZE: [u8; 6] = [0, 4, 0, 0, 0, 0];
    let settings = frame(SETTINGS, 0, 0, &INITIAL_WINDOW_SIZE);
    let streams = (0..11).flat_map(|number| get(2 * number + 1, "/"));
    client.0.write_all(&settings.into_iter().chain(streams).collect::<Vec<u8>>()).await.unwrap();
    let refused = client.next_of(RST_STREAM).await.unwrap();
    assert_eq!((refused.stream, &refused.payload[..]), (21, &7_u32.to_be_bytes()[..]), "REFUSED_STREAM");
}
