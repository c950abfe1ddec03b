//! Test support: a service from a configuration on a manual clock, and a client.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::{ManualClock, Memory, Store};
use ratekeeper_config::Config;
use ratekeeper_config::envoy::Unit;
use ratekeeper_server::Current;
use ratekeeper_server::envoy::messages::{
    DescriptorStatus, Entry, RateLimitCode, RateLimitDescriptor, RateLimitOverride, RateLimitRequest,
    RateLimitResponse, RateLimitUnit,
};
use ratekeeper_server::envoy::{Domains, EnvoyApiSettings, EnvoyListenerSettings, EnvoySnapshot, listen};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::client::Grpc;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use crate::support::{layer_builder, parse};

/// The limits and settings of the service under test, which tests can replace.
pub(crate) fn current<S>(
    config: &Config,
    layer: RatekeeperLayer<S>,
    settings: EnvoyApiSettings,
) -> Arc<Current<EnvoySnapshot<S>>> {
    Arc::new(Current::new(EnvoySnapshot {
        layer: Some(layer),
        domains: Arc::new(Domains::new(config.domains.clone())),
        settings: Arc::new(settings),
        metrics: Arc::default(),
    }))
}

/// Replaces a part of the limits and settings, as a reload does.
pub(crate) fn change<S>(
    current: &Current<EnvoySnapshot<S>>,
    change: impl FnOnce(EnvoySnapshot<S>) -> EnvoySnapshot<S>,
) {
    let EnvoySnapshot { layer, domains, settings, metrics } = &*current.load();
    let (layer, domains) = (layer.clone(), domains.clone());
    let copy = EnvoySnapshot { layer, domains, settings: settings.clone(), metrics: metrics.clone() };
    current.replace(change(copy));
}

/// A running service.
pub(crate) struct TestService<S = Memory<ManualClock>> {
    pub(crate) current: Arc<Current<EnvoySnapshot<S>>>,
    pub(crate) address: SocketAddr,
    pub(crate) drain: watch::Sender<bool>,
    pub(crate) ended: JoinHandle<std::io::Result<()>>,
    pub(crate) clock: ManualClock,
}

/// Runs a service with these domains.
pub(crate) fn run(domains: &str) -> TestService {
    run_with(domains, EnvoyApiSettings::default(), EnvoyListenerSettings::default())
}

pub(crate) fn run_with(
    domains: &str,
    settings: EnvoyApiSettings,
    listener: EnvoyListenerSettings,
) -> TestService {
    let config = parse(&format!("domains:\n{domains}"));
    let clock = ManualClock::default();
    let layer = layer_builder(&config).build_on(clock.clone()).unwrap();
    serve(current(&config, layer, settings), listener, clock)
}

pub(crate) fn serve<S: Store + Send + Sync + 'static>(
    current: Arc<Current<EnvoySnapshot<S>>>,
    settings: EnvoyListenerSettings,
    clock: ManualClock,
) -> TestService<S> {
    let (drain, draining) = watch::channel(false);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, serving) = listen(listener, current.clone(), settings, draining).unwrap();
    TestService { current, address, drain, ended: tokio::spawn(serving), clock }
}

impl<S> TestService<S> {
    pub(crate) async fn channel(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.address)).unwrap().connect().await.unwrap()
    }

    pub(crate) async fn client(&self) -> Client {
        Client::new(self.channel().await)
    }
}

/// A gRPC client.
pub(crate) struct Client(Grpc<Channel>);

impl Client {
    pub(crate) fn new(channel: Channel) -> Client {
        Client(Grpc::new(channel).max_encoding_message_size(usize::MAX))
    }

    pub(crate) async fn call(
        &mut self,
        request: impl tonic::IntoRequest<RateLimitRequest>,
    ) -> Result<RateLimitResponse, tonic::Status> {
        self.0.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static(
            "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
        );
        let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
        let response = self.0.unary(request.into_request(), path, codec).await;
        response.map(tonic::Response::into_inner)
    }

    /// The response to descriptors in the domain `edge`.
    pub(crate) async fn check(&mut self, descriptors: &[RateLimitDescriptor]) -> RateLimitResponse {
        self.call(edge_request(descriptors)).await.unwrap()
    }

    /// Whether the domain `edge` allows the descriptors, and what remains by each status.
    pub(crate) async fn remaining(&mut self, descriptors: &[RateLimitDescriptor]) -> (bool, Vec<u32>) {
        let response = self.check(descriptors).await;
        let remaining = response.statuses.iter().map(|status| status.limit_remaining).collect();
        (is_ok(response.overall_code), remaining)
    }
}

pub(crate) fn edge_request(descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest { domain: "edge".into(), descriptors: descriptors.to_vec(), hits_addend: 0 }
}

pub(crate) fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry {
        key: key.as_bytes().to_vec().into(),
        value: value.as_bytes().to_vec().into(),
    };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

pub(crate) fn with_hits(hits: u64, descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor }
}

pub(crate) fn as_refund(descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..descriptor }
}

pub(crate) fn with_inline_limit(
    requests_per_unit: u32,
    unit: i32,
    descriptor: RateLimitDescriptor,
) -> RateLimitDescriptor {
    RateLimitDescriptor { limit: Some(RateLimitOverride { requests_per_unit, unit }), ..descriptor }
}

pub(crate) fn is_ok(code: i32) -> bool {
    match RateLimitCode::try_from(code).unwrap() {
        RateLimitCode::Ok => true,
        RateLimitCode::OverLimit => false,
        RateLimitCode::Unknown => panic!("Envoy allows an unknown code"),
    }
}

/// The limit in a status: requests per unit, unit and name.
pub(crate) fn limit_of(status: &DescriptorStatus) -> Option<(u32, &'static str, &str)> {
    let limit = status.current_limit.as_ref()?;
    let unit = RateLimitUnit::try_from(limit.unit).unwrap().unit();
    Some((limit.requests_per_unit, unit.map_or("UNKNOWN", Unit::name), limit.name.as_str()))
}

pub(crate) fn reset_of(status: &DescriptorStatus) -> Option<i64> {
    let reset = status.duration_until_reset.as_ref()?;
    assert_eq!(reset.nanos, 0, "Envoy truncates to whole seconds");
    Some(reset.seconds)
}

/// A body that never arrives and never ends.
pub(crate) struct EndlessBody;

impl http_body::Body for EndlessBody {
    type Data = bytes::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, Self::Error>>> {
        std::task::Poll::Pending
    }
}

/// A codec that passes bytes through.
#[derive(Clone, Copy, Default)]
pub(crate) struct RawCodec;

impl tonic::codec::Codec for RawCodec {
    type Encode = &'static [u8];
    type Decode = bytes::Bytes;
    type Encoder = RawCodec;
    type Decoder = RawCodec;

    fn encoder(&mut self) -> RawCodec {
        RawCodec
    }

    fn decoder(&mut self) -> RawCodec {
        RawCodec
    }
}

impl tonic::codec::Encoder for RawCodec {
    type Item = &'static [u8];
    type Error = tonic::Status;

    fn encode(
        &mut self,
        message: &'static [u8],
        buffer: &mut tonic::codec::EncodeBuf<'_>,
    ) -> Result<(), tonic::Status> {
        bytes::BufMut::put_slice(buffer, message);
        Ok(())
    }
}

impl tonic::codec::Decoder for RawCodec {
    type Item = bytes::Bytes;
    type Error = tonic::Status;

    fn decode(
        &mut self,
        buffer: &mut tonic::codec::DecodeBuf<'_>,
    ) -> Result<Option<bytes::Bytes>, tonic::Status> {
        let length = bytes::Buf::remaining(buffer);
        Ok(Some(bytes::Buf::copy_to_bytes(buffer, length)))
    }
}
