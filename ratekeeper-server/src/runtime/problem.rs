//! Problem Details responses for APIs that use axum.

use axum::body::Body;
use axum::http::Response;
use ratekeeper_rules::response::ResponseStatus;

/// Builds a Problem Details response (RFC 9457). Caches must not store it.
pub(crate) fn problem(status: ResponseStatus, detail: &str) -> Response<Body> {
    ratekeeper::tower::problem(status, detail).map(Body::from)
}
