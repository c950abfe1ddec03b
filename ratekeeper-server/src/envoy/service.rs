//! The gRPC method that Envoy calls.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ratekeeper::Store;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

use super::bounds::CALL_BYTES_MAX;
use super::error::EnvoyApiError;
use super::messages::{RateLimitRequest, RateLimitResponse};
use super::{EnvoySnapshot, decide};
use crate::runtime::current::Current;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

type BoxFuture<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

/// The rate limit service.
#[derive(Debug)]
pub(super) struct RateLimitService<S>(pub(super) Arc<Current<EnvoySnapshot<S>>>);

impl<S> Clone for RateLimitService<S> {
    fn clone(&self) -> RateLimitService<S> {
        RateLimitService(self.0.clone())
    }
}

impl<S> NamedService for RateLimitService<S> {
    const NAME: &'static str = "envoy.service.ratelimit.v3.RateLimitService";
}

impl<S: Store + Send + Sync + 'static> tower_service::Service<http::Request<Body>> for RateLimitService<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            if request.uri().path() != SHOULD_RATE_LIMIT {
                return Ok(Status::from(EnvoyApiError::UnknownMethod).into_http());
            }
            let mut grpc = Grpc::new(RateLimitCodec).max_decoding_message_size(CALL_BYTES_MAX);
            Ok(grpc.unary(service, request).await)
        })
    }
}

/// The codec of a call's messages.
struct RateLimitCodec;

/// Decodes requests. A malformed message is the caller's error; tonic's codec would report an internal one.
struct RequestDecoder(ProstDecoder<RateLimitRequest>);

impl Codec for RateLimitCodec {
    type Encode = RateLimitResponse;
    type Decode = RateLimitRequest;
    type Encoder = ProstEncoder<RateLimitResponse>;
    type Decoder = RequestDecoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<RateLimitResponse, RateLimitRequest>::default().encoder()
    }

    fn decoder(&mut self) -> RequestDecoder {
        RequestDecoder(ProstCodec::<RateLimitResponse, RateLimitRequest>::default().decoder())
    }
}

impl Decoder for RequestDecoder {
    type Item = RateLimitRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<RateLimitRequest>, Status> {
        self.0
            .decode(buffer)
            .map_err(|status| EnvoyApiError::InvalidMessage(status.message().to_owned()).into())
    }
}

impl<S: Store + Send + Sync + 'static> UnaryService<RateLimitRequest> for RateLimitService<S> {
    type Response = RateLimitResponse;
    type Future = BoxFuture<Response<RateLimitResponse>, Status>;

    fn call(&mut self, request: Request<RateLimitRequest>) -> Self::Future {
        let current = self.0.clone();
        Box::pin(async move {
            let snapshot = current.load();
            // Errors are counted in `CallGuard`, which also sees calls that do not reach this method.
            let (response, outcome) = decide(&snapshot, request.get_ref()).await?;
            snapshot.metrics.count(outcome);
            Ok(Response::new(response))
        })
    }
}
