//! Test support: a service from a configuration on a manual clock, and a client.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratekeeper::tower::{LayerBuilder, RatekeeperLayer};
use ratekeeper::{ManualClock, Memory, Store};
use ratekeeper_config::envoy::Unit;
use ratekeeper_config::{Config, Environment};
use ratekeeper_server::envoy::messages::{
    Code as Said, DescriptorStatus, Entry, RateLimitDescriptor, RateLimitOverride, RateLimitRequest,
    RateLimitResponse, RateLimitUnit,
};
use ratekeeper_server::envoy::{Counts, Domains, Options, Settings, Snapshot, Source, listen};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::client::Grpc;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

/// Long enough for the busiest machine: only a failed test waits this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// An environment without variables or files.
struct Alone;

impl Environment for Alone {
    fn variable(&self, _: &str) -> Option<String> {
        None
    }

    fn file(&self, path: &str) -> Result<String, String> {
        Err(format!("nobody has {path}"))
    }
}

pub(crate) fn parse(yaml: &str) -> Config {
    ratekeeper_config::parse(yaml, &Alone).unwrap_or_else(|errors| panic!("{errors}\n{yaml}"))
}

pub(crate) fn builder(config: &Config) -> LayerBuilder {
    config.rules.rules().fold(RatekeeperLayer::builder(), |builder, rule| builder.rule(rule.clone()))
}

/// The configuration of the service under test, which tests can replace.
pub(crate) struct Told<S> {
    pub(crate) layer: Mutex<Option<RatekeeperLayer<S>>>,
    pub(crate) domains: Mutex<Arc<Domains>>,
    pub(crate) options: Mutex<Arc<Options>>,
    pub(crate) counts: Arc<Counts>,
}

impl<S> Told<S> {
    pub(crate) fn new(config: &Config, layer: RatekeeperLayer<S>, options: Options) -> Arc<Told<S>> {
        Arc::new(Told {
            layer: Mutex::new(Some(layer)),
            domains: Mutex::new(Arc::new(Domains::new(config.domains.clone()))),
            options: Mutex::new(Arc::new(options)),
            counts: Arc::default(),
        })
    }
}

impl<S: Store + Send + Sync + 'static> Source for Told<S> {
    type Store = S;

    fn snapshot(&self) -> Snapshot<S> {
        Snapshot {
            layer: self.layer.lock().unwrap().clone(),
            domains: self.domains.lock().unwrap().clone(),
            options: self.options.lock().unwrap().clone(),
            counts: self.counts.clone(),
        }
    }
}

/// A running service.
pub(crate) struct Running<S = Memory<ManualClock>> {
    pub(crate) told: Arc<Told<S>>,
    pub(crate) address: SocketAddr,
    pub(crate) drain: watch::Sender<bool>,
    pub(crate) ended: JoinHandle<std::io::Result<()>>,
    pub(crate) clock: ManualClock,
}

/// Runs a service with these domains.
pub(crate) fn run(domains: &str) -> Running {
    run_with(domains, Options::default(), Settings::default())
}

pub(crate) fn run_with(domains: &str, options: Options, settings: Settings) -> Running {
    let config = parse(&format!("domains:\n{domains}"));
    let clock = ManualClock::default();
    let layer = builder(&config).build_on(clock.clone()).unwrap();
    serve(Told::new(&config, layer, options), settings, clock)
}

pub(crate) fn serve<S: Store + Send + Sync + 'static>(
    told: Arc<Told<S>>,
    settings: Settings,
    clock: ManualClock,
) -> Running<S> {
    let (drain, draining) = watch::channel(false);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, serving) = listen(listener, told.clone(), settings, draining).unwrap();
    Running { told, address, drain, ended: tokio::spawn(serving), clock }
}

impl<S> Running<S> {
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

    pub(crate) async fn ask(
        &mut self,
        request: impl tonic::IntoRequest<RateLimitRequest>,
    ) -> Result<RateLimitResponse, tonic::Status> {
        self.0.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static(
            "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
        );
        let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
        let told = self.0.unary(request.into_request(), path, codec).await;
        told.map(tonic::Response::into_inner)
    }

    /// The response to descriptors in the domain `edge`.
    pub(crate) async fn told(&mut self, descriptors: &[RateLimitDescriptor]) -> RateLimitResponse {
        self.ask(edge(descriptors)).await.unwrap()
    }

    /// Whether the domain `edge` allows the descriptors, and what remains by each status.
    pub(crate) async fn passes(&mut self, descriptors: &[RateLimitDescriptor]) -> (bool, Vec<u32>) {
        let told = self.told(descriptors).await;
        let left = told.statuses.iter().map(|status| status.limit_remaining).collect();
        (is_ok(told.overall_code), left)
    }
}

pub(crate) fn edge(descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest { domain: "edge".into(), descriptors: descriptors.to_vec(), hits_addend: 0 }
}

pub(crate) fn of(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry {
        key: key.as_bytes().to_vec().into(),
        value: value.as_bytes().to_vec().into(),
    };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

pub(crate) fn hits(hits: u64, descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor }
}

pub(crate) fn refund(descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..descriptor }
}

pub(crate) fn limited(
    requests_per_unit: u32,
    unit: i32,
    descriptor: RateLimitDescriptor,
) -> RateLimitDescriptor {
    RateLimitDescriptor { limit: Some(RateLimitOverride { requests_per_unit, unit }), ..descriptor }
}

pub(crate) fn is_ok(code: i32) -> bool {
    match Said::try_from(code).unwrap() {
        Said::Ok => true,
        Said::OverLimit => false,
        Said::Unknown => panic!("Envoy lets pass what is unknown"),
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
    assert_eq!(reset.nanos, 0, "Envoy cuts off what is no whole second");
    Some(reset.seconds)
}

/// A body that never arrives and never ends.
pub(crate) struct Endless;

impl http_body::Body for Endless {
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
pub(crate) struct Raw;

impl tonic::codec::Codec for Raw {
    type Encode = &'static [u8];
    type Decode = bytes::Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl tonic::codec::Encoder for Raw {
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

impl tonic::codec::Decoder for Raw {
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
