//! The listener: authentication, reloads, health, reflection and graceful shutdown.

use std::sync::Arc;
use std::time::Duration;

use ratekeeper::ManualClock;
use ratekeeper::redis::{FailurePolicy, Redis};
use ratekeeper_server::Exposition;
use ratekeeper_server::envoy::{Domains, Options, Settings, json};
use testbed::RedisServer;
use tokio::time::timeout;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use super::support::{
    Client, PATIENCE, Running, Told, builder, edge, is_ok, of, parse, run, run_with, serve,
};

const USERS: &str = "  edge: [{ key: user, fixed_window: { limit: 3, window: 1m } }]\n";
const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

pub(crate) fn metrics<S>(service: &Running<S>) -> String {
    let mut out = Exposition::default();
    service.told.counts.write(&mut out);
    out.into_text()
}

#[tokio::test]
async fn reload_applies_from_the_next_call() {
    let file = |limit: u32, more: &str| {
        let window = format!("{{ limit: {limit}, window: 1h, align: first_request }}");
        parse(&format!("domains: {{ edge: [{{ key: user, fixed_window: {window} }}{more}] }}"))
    };
    let config = file(3, "");
    let before = builder(&config).build().unwrap();
    let told = Told::new(&config, before.clone(), Options::default());
    let service = serve(told.clone(), Settings::default(), ManualClock::default());
    let mut client = service.client().await;
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![2]));
    let config = file(9, ", { key: path, unlimited: true }");
    *told.layer.lock().unwrap() = Some(builder(&config).reload_from(&before).unwrap());
    *told.domains.lock().unwrap() = Arc::new(Domains::new(config.domains));
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await.1, [7], "it goes on where it stood");
    assert_eq!(client.passes(&[of(&[("path", "/")])]).await, (true, vec![u32::MAX]));
    *told.options.lock().unwrap() = Arc::new(Options { refunds: true, ..Options::default() });
    let refund = super::support::refund(of(&[("user", "ann")]));
    assert_eq!(client.passes(&[refund]).await, (true, vec![8]));
}

#[tokio::test]
async fn calls_require_the_token() {
    let token = parse("admin: { listen: 127.0.0.1:0, token: open-sesame-please }").admin.unwrap().token;
    let service = run_with(USERS, Options { token, ..Options::default() }, Settings::default());
    let mut client = Client::new(service.channel().await);
    for wrong in [
        None,
        Some("Bearer open-sesame-pleas"),
        Some("Basic open-sesame-please"),
        Some("open-sesame-please"),
        Some(""),
    ] {
        let mut request = Request::new(edge(&[of(&[("user", "ann")])]));
        if let Some(wrong) = wrong {
            request.metadata_mut().insert("authorization", wrong.parse().unwrap());
        }
        let status = client.ask(request).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{wrong:?}");
    }
    let mut request = Request::new(edge(&[of(&[("user", "ann")])]));
    request.metadata_mut().insert("authorization", "bearer open-sesame-please".parse().unwrap());
    let told = client.ask(request).await.unwrap();
    assert_eq!(told.statuses[0].limit_remaining, 2, "nobody was charged for what they were not told");
    // Health checks need no token.
    assert_eq!(health(&service, "ratelimit").await, Ok(SERVING));
    assert!(metrics(&service).contains("{result=\"error\"} 5\n"));
}

/// A call without the token is rejected before its body arrives, and its connection is closed.
#[tokio::test]
async fn unauthenticated_connection_to_the_service_is_closed() {
    let token = parse("admin: { listen: 127.0.0.1:0, token: open-sesame-please }").admin.unwrap().token;
    let settings = Settings { patience: Duration::from_millis(300), ..Settings::default() };
    let service = run_with(USERS, Options { token, ..Options::default() }, settings);
    let mut stranger = super::hostile::h2_client(service.address).await;
    let call = stranger.send_request(super::hostile::endless_call(service.address));
    let response = timeout(PATIENCE, call).await.unwrap().unwrap();
    assert_eq!(response.headers()["grpc-status"], "16", "{response:?}");
    // Reflection requires the token as well.
    let mut reflection = ServerReflectionClient::new(service.channel().await);
    let nothing = tokio_stream::empty::<ServerReflectionRequest>();
    let status = reflection.server_reflection_info(nothing).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);

    let mut friend = Client::new(service.channel().await);
    let mut request = Request::new(edge(&[of(&[("user", "ann")])]));
    request.metadata_mut().insert("authorization", "Bearer open-sesame-please".parse().unwrap());
    friend.ask(request).await.unwrap();
    let mut friends = super::hostile::h2_client(service.address).await;
    let mut call = super::hostile::endless_call(service.address);
    call.headers_mut().insert("authorization", "Bearer open-sesame-please".parse().unwrap());
    let ended = timeout(PATIENCE, friends.send_request(call)).await.unwrap().unwrap();
    assert_eq!(ended.headers()["grpc-status"], "1", "it is the call that took too long");
    timeout(PATIENCE, async {
        while !stranger.is_closed() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    assert!(!friends.is_closed());
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
    assert_eq!(health(&service, "").await, Err(Code::ResourceExhausted));
    drop(watched);
    let freed = async {
        while health(&service, "").await != Ok(SERVING) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, freed).await.unwrap();
}

async fn health<S>(service: &Running<S>, name: &str) -> Result<i32, Code> {
    let mut client = HealthClient::new(service.channel().await);
    let told = client.check(HealthCheckRequest { service: name.to_owned() }).await;
    told.map(|told| told.into_inner().status).map_err(|status| status.code())
}

#[tokio::test]
async fn health_reports_not_serving_before_shutdown() {
    let settings = Settings { last_call: Duration::from_millis(300), ..Settings::default() };
    let service = run_with(USERS, Options::default(), settings);
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
    // Calls are still accepted until `last_call` is over.
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![2]));
    drop(watched);
    drop(watcher);
    timeout(PATIENCE, service.ended).await.unwrap().unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(service.address).await.is_err());
}

/// An endless watcher does not delay the shutdown.
#[tokio::test]
async fn health_watcher_does_not_delay_shutdown() {
    let short = Duration::from_millis(50);
    let settings = Settings { last_call: short, patience: short, ..Settings::default() };
    let service = run_with(USERS, Options::default(), settings);
    let mut watcher = HealthClient::new(service.channel().await);
    let mut watched = watcher.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status, SERVING);
    service.drain.send_replace(true);
    timeout(PATIENCE, service.ended).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn reflection_describes_the_service() {
    let service = run(USERS);
    let mut client = ServerReflectionClient::new(service.channel().await);
    let mut ask = async |message_request| {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(message_request) };
        let mut told = client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
        told.message().await.unwrap().unwrap().message_response.unwrap()
    };
    let MessageResponse::ListServicesResponse(services) =
        ask(MessageRequest::ListServices(String::new())).await
    else {
        panic!("no list")
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
        let told = ask(MessageRequest::FileContainingSymbol(symbol.to_owned())).await;
        let MessageResponse::FileDescriptorResponse(files) = told else { panic!("{symbol}: {told:?}") };
        for file in files.file_descriptor_proto {
            let file = <prost_types::FileDescriptorProto as prost::Message>::decode(&file[..]).unwrap();
            for needed in file.dependency {
                let told = ask(MessageRequest::FileByFilename(needed.clone())).await;
                assert!(matches!(told, MessageResponse::FileDescriptorResponse(_)), "{needed}");
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
        .deadline(PATIENCE);
    let config = parse(&format!("domains:\n{USERS}"));
    let layer = builder(&config).redis(&settings).unwrap();
    let told = Told::<Redis>::new(&config, layer, Options::default());
    let service = serve(told.clone(), Settings::default(), ManualClock::default());
    let mut client = service.client().await;
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![2]));
    server.kill().unwrap();
    for descriptor in [of(&[("user", "ann")]), super::support::limited(5, 1, of(&[]))] {
        let status = client.ask(edge(&[descriptor])).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
    }
    let body = br#"{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let snapshot = ratekeeper_server::envoy::Source::snapshot(&*told);
    let (status, text) = json(body, &snapshot).await;
    assert_eq!(status, 503);
    assert!(text.starts_with(r#"{"code":14,"message":"the store"#), "{text}");
    assert!(is_ok(client.told(&[of(&[("other", "")])]).await.overall_code));
}
