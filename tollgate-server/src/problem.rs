//! A refusal in words, for doors that answer with axum.

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use axum::http::{Response, StatusCode};

/// A problem (RFC 9457) with a status and a sentence of ours. No cache may keep it.
pub(crate) fn problem(status: StatusCode, detail: &str) -> Response<Body> {
    let title = status.canonical_reason().unwrap_or("Refused");
    let mut response =
        Response::new(Body::from(tollgate_rules::answer::problem(status.as_u16(), title, detail)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
