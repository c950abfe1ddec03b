//! Responses that the gateway itself generates.

use http::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use super::body::{ClientBody, UpstreamBody};

/// Marks a response that did not come from an upstream.
#[derive(Clone, Copy, Debug)]
struct GatewayGenerated;

/// A Problem Details response (RFC 9457) with a status and a detail text.
pub(crate) fn problem(status: StatusCode, detail: &str) -> Response<UpstreamBody> {
    let title = status.canonical_reason().unwrap_or("Rejected");
    let body = ratekeeper_rules::response::problem(status.as_u16(), title, detail);
    let mut response = Response::new(UpstreamBody::full(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response.extensions_mut().insert(GatewayGenerated);
    response
}

/// Converts a gateway response to gRPC, whose clients parse any body as messages. Upstream responses stay unchanged.
pub(crate) fn into_grpc(
    mut response: Response<ClientBody>,
    content_type: HeaderValue,
) -> Response<ClientBody> {
    if response.extensions_mut().remove::<GatewayGenerated>().is_none() {
        return response;
    }
    let status = response.status();
    let code = match status {
        StatusCode::BAD_REQUEST => "3",
        StatusCode::NOT_FOUND => "12",
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => "14",
        _ => "2",
    };
    let mut response = response.map(|_| ClientBody::unlimited(UpstreamBody::full("")));
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type);
    headers.insert("grpc-status", HeaderValue::from_static(code));
    let message = HeaderValue::from_static(status.canonical_reason().unwrap_or("Rejected"));
    headers.insert("grpc-message", message);
    response
}

/// Like [`problem`], with a `Retry-After` of one second.
pub(crate) fn retry_later(status: StatusCode, detail: &str) -> Response<UpstreamBody> {
    let mut response = problem(status, detail);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Announces that the gateway closes the connection after this response.
pub(crate) fn set_connection_close<B>(response: &mut Response<B>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}
