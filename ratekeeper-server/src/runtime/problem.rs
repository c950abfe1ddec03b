//! Problem Details responses.

use axum::body::Body;
use axum::http::Response;
use axum::http::header::{HeaderMap, HeaderValue, RETRY_AFTER};
use ratekeeper_rules::response::ResponseStatus;

/// Builds a Problem Details response (RFC 9457) for axum. Caches must not store it.
pub(crate) fn problem(status: ResponseStatus, detail: &str) -> Response<Body> {
    ratekeeper::tower::problem(status, detail).map(Body::from)
}

/// The response of a path to a method that it does not have.
pub(crate) async fn wrong_method() -> Response<Body> {
    problem(ResponseStatus::MethodNotAllowed, "method not allowed; use one that `Allow` lists")
}

/// Adds the `Retry-After` of a response to a failure that may be over soon: one second.
pub(crate) fn set_retry_soon(headers: &mut HeaderMap) {
    headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
}
