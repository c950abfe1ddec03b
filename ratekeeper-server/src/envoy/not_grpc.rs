//! Requests that are not gRPC calls.

use std::pin::pin;

use axum::body::Body;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use ratekeeper_rules::response::ResponseStatus;

use crate::runtime::problem::problem;

/// Bytes of a body that are read before the response; a longer body is left unread.
const BODY_BYTES_MAX: usize = 64 << 10;

pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let prefix = b"application/grpc";
    content_type.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// Responds 415, as the protocol of gRPC asks. The body is read first: a request whose length is wrong is malformed, and
/// HTTP/2 resets its stream.
pub(super) async fn reject(body: Incoming) -> Response<Body> {
    let mut body = pin!(body);
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read > BODY_BYTES_MAX {
            break;
        }
    }
    let detail = "this address serves gRPC; send `Content-Type: application/grpc`";
    problem(ResponseStatus::UnsupportedMediaType, detail)
}
