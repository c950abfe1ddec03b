//! What the gateway says itself.

use http::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use super::body::UpstreamBody;

/// A problem (RFC 9457) with a status and a sentence of ours.
pub(crate) fn problem(status: StatusCode, detail: &str) -> Response<UpstreamBody> {
    let title = status.canonical_reason().unwrap_or("Refused");
    let number = status.as_u16();
    // Sentences of ours have no quotes; what comes from elsewhere might.
    let detail: String = detail.chars().filter(|c| !c.is_control() && *c != '"' && *c != '\\').collect();
    let body = format!(r#"{{"type":"about:blank","title":"{title}","status":{number},"detail":"{detail}"}}"#);
    let mut response = Response::new(UpstreamBody::told(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The same, for a client that should try again.
pub(crate) fn try_again(status: StatusCode, detail: &str) -> Response<UpstreamBody> {
    let mut response = problem(status, detail);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Tells the client that this was the last response on its connection.
pub(crate) fn close<B>(response: &mut Response<B>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}
