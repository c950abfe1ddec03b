//! Requests that are not gRPC calls.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt;
use ratekeeper_rules::response::ResponseStatus;
use tonic::body::Body;
use tower_service::Service;

use crate::runtime::problem::problem;

/// Bytes of a body that are read before the response; a longer body is left unread.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Responds 415 to requests that are not gRPC calls, as the protocol of gRPC asks. Their bodies are read first: a
/// request whose length is wrong is malformed, and HTTP/2 resets its stream.
#[derive(Clone, Debug)]
pub(super) struct GrpcOnly<T>(T);

impl<T> GrpcOnly<T> {
    pub(super) fn new(inner: T) -> GrpcOnly<T> {
        GrpcOnly(inner)
    }
}

impl<T> Service<Request<Body>> for GrpcOnly<T>
where
    T: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    T::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match is_grpc(&request) {
            true => Box::pin(self.0.call(request)),
            false => Box::pin(async move { Ok(reject(request.into_body()).await) }),
        }
    }
}

fn is_grpc(request: &Request<Body>) -> bool {
    let content_type = request.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let prefix = b"application/grpc";
    content_type.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

async fn reject(body: Body) -> Response<Body> {
    let mut body = pin!(body);
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read > BODY_BYTES_MAX {
            break;
        }
    }
    let detail = "this address serves gRPC; send `Content-Type: application/grpc`";
    problem(ResponseStatus::UnsupportedMediaType, detail).map(Body::new)
}
