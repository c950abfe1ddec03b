//! Responses that the gateway itself generates.

use http::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use ratekeeper_rules::response::ResponseStatus;

use super::body::{ClientBody, UpstreamBody};
use crate::runtime::problem::set_retry_soon;

/// A Problem Details response (RFC 9457) with a status and a detail text.
pub(crate) fn problem(status: ResponseStatus, detail: &str) -> Response<UpstreamBody> {
    ratekeeper::tower::problem(status, detail).map(|text| UpstreamBody::generated(status, text))
}

/// Converts a gateway response to gRPC, whose clients parse any body as messages. Upstream responses stay unchanged.
pub(crate) fn into_grpc(response: Response<ClientBody>, content_type: HeaderValue) -> Response<ClientBody> {
    let Some(status) = response.body().generated_status() else { return response };
    let mut response = response.map(|_| ClientBody::unlimited(UpstreamBody::generated(status, "")));
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type);
    headers.insert("grpc-status", HeaderValue::from_static(status.grpc_code().text));
    headers.insert("grpc-message", HeaderValue::from_static(status.title()));
    response
}

/// Like [`problem`], with `Retry-After`.
pub(crate) fn retry_later(status: ResponseStatus, detail: &str) -> Response<UpstreamBody> {
    let mut response = problem(status, detail);
    set_retry_soon(response.headers_mut());
    response
}

/// Announces that the gateway closes the connection after this response.
pub(crate) fn set_connection_close<B>(response: &mut Response<B>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}
