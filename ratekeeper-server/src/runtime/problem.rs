//! Problem Details responses for APIs that use axum.

use axum::body::Body;
use axum::http::{Response, StatusCode};

/// Builds a Problem Details response (RFC 9457). Caches must not store it.
pub(crate) fn problem(status: StatusCode, detail: &str) -> Response<Body> {
    ratekeeper::tower::problem(status, detail).map(Body::from)
}
