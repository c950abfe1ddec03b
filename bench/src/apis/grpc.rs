//! Load generator for gRPC: this program in a separate process, with concurrent calls over a few connections.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::{Args, ValueEnum};
use prost::Message;
use ratekeeper_server::envoy::messages::{
    Entry, RateLimitCode, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Status;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use super::ApiJob;

const CONNECTIONS: usize = 4;
/// Concurrent calls per connection: in total as many as wrk has in flight.
const CALLS: usize = 16;
/// Step from one key to the next. It is prime and divides no round number of keys, so every key is used.
const STRIDE: usize = 7919;

/// The gRPC API to call.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Api {
    /// Envoy's: a descriptor for which the server has a limit.
    Envoy,
    /// throttlecrab's, with inline limits.
    Throttlecrab,
}

/// A load: how many checks to send to which API.
#[derive(Args, Debug)]
pub(crate) struct Load {
    pub(crate) port: u16,
    #[arg(value_enum)]
    pub(crate) api: Api,
    #[arg(value_enum)]
    pub(crate) job: ApiJob,
    pub(crate) decisions: usize,
    pub(crate) keys: usize,
}

#[derive(Clone, PartialEq, Message)]
struct ThrottleRequest {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(int32, tag = "2")]
    max_burst: i32,
    #[prost(int32, tag = "3")]
    count_per_period: i32,
    #[prost(int32, tag = "4")]
    period: i32,
    #[prost(int32, tag = "5")]
    quantity: i32,
}

/// The field of the response that is verified.
#[derive(Clone, PartialEq, Message)]
struct ThrottleResponse {
    #[prost(bool, tag = "1")]
    allowed: bool,
}

impl Load {
    /// Returns the arguments from which clap parses this load.
    pub(super) fn arguments(&self) -> [String; 5] {
        let Load { port, api, job, decisions, keys } = self;
        let name = |value: Option<clap::builder::PossibleValue>| {
            value.map_or(String::new(), |value| value.get_name().to_owned())
        };
        let (api, job) = (name(api.to_possible_value()), name(job.to_possible_value()));
        [port.to_string(), api, job, decisions.to_string(), keys.to_string()]
    }
}

/// Sends the checks and returns decisions per second. Fails unless the decisions match the job.
pub(crate) fn generate_load(load: &Load) -> Result<f64, Box<dyn Error>> {
    Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut channels = Vec::new();
        for _ in 0..CONNECTIONS {
            channels.push(Channel::from_shared(format!("http://127.0.0.1:{}", load.port))?.connect().await?);
        }
        let next = Arc::new(AtomicUsize::new(0));
        let start = Instant::now();
        let mut callers = JoinSet::new();
        for channel in channels.iter().cycle().take(CONNECTIONS * CALLS) {
            let (channel, next) = (channel.clone(), next.clone());
            callers.spawn(caller(channel, next, load.api, load.job, load.decisions, load.keys));
        }
        let mut allowed = 0;
        while let Some(result) = callers.join_next().await {
            allowed += result??;
        }
        let took = start.elapsed();
        let is_right = match load.job {
            ApiJob::Allowed => allowed == load.decisions,
            // Each key has a budget of two.
            ApiJob::Denied => allowed <= 2 * load.keys,
        };
        match is_right {
            true => Ok(load.decisions as f64 / took.as_secs_f64()),
            false => Err(format!("{allowed} of {} are allowed", load.decisions).into()),
        }
    })
}

/// Sends checks one after the other until all are sent; returns the number allowed.
async fn caller(
    channel: Channel,
    next: Arc<AtomicUsize>,
    api: Api,
    job: ApiJob,
    decisions: usize,
    keys: usize,
) -> Result<usize, Status> {
    let mut grpc = Grpc::new(channel);
    let mut allowed = 0;
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= decisions {
            return Ok(allowed);
        }
        let key = format!("user:{:012}", number.wrapping_mul(STRIDE) % keys);
        let is_allowed = match api {
            Api::Envoy => check_envoy(&mut grpc, key).await?,
            Api::Throttlecrab => check_throttlecrab(&mut grpc, key, job).await?,
        };
        allowed += usize::from(is_allowed);
    }
}

async fn check_envoy(grpc: &mut Grpc<Channel>, key: String) -> Result<bool, Status> {
    let entry = Entry { key: "user".into(), value: key.into() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    let request = RateLimitRequest { domain: "edge".into(), descriptors: vec![descriptor], hits_addend: 1 };
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let response: RateLimitResponse = call(grpc, path, request).await?;
    Ok(response.overall_code == i32::from(RateLimitCode::Ok))
}

async fn check_throttlecrab(grpc: &mut Grpc<Channel>, key: String, job: ApiJob) -> Result<bool, Status> {
    let (max_burst, count_per_period, period) = match job {
        ApiJob::Allowed => (1_000_000, 1_000_000, 1),
        ApiJob::Denied => (2, 1, 3600),
    };
    let request = ThrottleRequest { key, max_burst, count_per_period, period, quantity: 1 };
    let response: ThrottleResponse = call(grpc, "/throttlecrab.RateLimiter/Throttle", request).await?;
    Ok(response.allowed)
}

async fn call<Q, A>(grpc: &mut Grpc<Channel>, path: &'static str, request: Q) -> Result<A, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<Q, A>::default();
    let response = grpc.unary(tonic::Request::new(request), PathAndQuery::from_static(path), codec).await?;
    Ok(response.into_inner())
}
