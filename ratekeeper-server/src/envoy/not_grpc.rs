//! Requests that are not gRPC calls.

use std::pin::pin;

use axum::body::Body;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use ratekeeper_rules::response::ResponseStatus;

use crate::runtime::problem::problem;

/// Bytes of a body that are read before the response; a longer body is left unread.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Whether a request is a gRPC call whose messages are protocol buffers.
pub(super) fn is_grpc<B>(request: &Request<B>) -> bool {
    let content_type = request.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let prefix = b"application/grpc";
    let Some((start, rest)) = content_type.split_at_checked(prefix.len()) else { return false };
    let parameters = rest.strip_prefix(b"+proto").unwrap_or(rest);
    request.method() == Method::POST
        && start.eq_ignore_ascii_case(prefix)
        && parameters.first().is_none_or(|next| matches!(next, b';' | b' '))
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
    let detail = "this address serves gRPC; send `POST` with `Content-Type: application/grpc`";
    problem(ResponseStatus::UnsupportedMediaType, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_calls_are_recognized() {
        let is_grpc = |method: &str, content_type: &str| {
            is_grpc(&Request::builder().method(method).header(CONTENT_TYPE, content_type).body(()).unwrap())
        };
        for content_type in [
            "application/grpc",
            "application/grpc+proto",
            "Application/gRPC; charset=utf-8",
            "application/grpc+proto;x",
        ] {
            assert!(is_grpc("POST", content_type), "{content_type}");
            assert!(!is_grpc("GET", content_type), "{content_type}");
        }
        for content_type in
            ["application/grpc-web", "application/grpc+json", "application/grpcs", "application/json", ""]
        {
            assert!(!is_grpc("POST", content_type), "{content_type}");
        }
    }
}
