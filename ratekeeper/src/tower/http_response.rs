//! Responses to clients: rate limit headers on the service's response, and denials.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use ratekeeper_rules::response::{Header, LimitResponse, MergedHeader, ResponseStatus, merge_header};
use smallvec::SmallVec;

use super::body::ResponseBody;
use super::engine::{RESPONSE, RequestRejection, return_buffer};

/// A header to add to a response.
#[derive(Debug)]
pub(crate) struct ResponseHeader {
    name: &'static str,
    value: HeaderValue,
    /// Whether the header is a list, so that the upstream's members can be kept.
    is_list: bool,
}

/// Inline capacity for the default header set.
pub(crate) type ResponseHeaders = SmallVec<[ResponseHeader; 2]>;

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The default header set, and the headers of a denial.
const HEADERS_USUAL: usize = 6;

/// Parses a header name. Comparing with the names of nearly every response is faster than parsing.
fn header_name(name: &'static str) -> HeaderName {
    match name {
        "ratelimit" => RATELIMIT,
        "ratelimit-policy" => RATELIMIT_POLICY,
        "retry-after" => RETRY_AFTER,
        "cache-control" => CACHE_CONTROL,
        "content-type" => CONTENT_TYPE,
        other => HeaderName::from_static(other),
    }
}

impl ResponseHeader {
    pub(crate) fn new(header: Header<'_>) -> Option<ResponseHeader> {
        let value = HeaderValue::from_str(header.value).ok()?;
        Some(ResponseHeader { name: header.name, value, is_list: header.is_list })
    }
}

/// Adds rate limit headers to a response and merges them with those of the upstream.
pub(crate) fn add_headers(headers: &mut HeaderMap, ours: ResponseHeaders) {
    // If the upstream sends a single value, none of ours is added: a mixture would describe no limit.
    let has_theirs = ours.iter().any(|header| !header.is_list && headers.contains_key(header.name));
    for ResponseHeader { name, value, is_list } in ours {
        let name = header_name(name);
        if is_list && headers.contains_key(&name) {
            join(headers, name, value);
        } else if is_list || !has_theirs {
            // A header map that is full gets none of our headers.
            let _ = headers.try_insert(name, value);
        }
    }
}

/// Merges our list members into the upstream's list.
fn join(headers: &mut HeaderMap, name: HeaderName, ours: HeaderValue) {
    let Ok(text) = ours.to_str() else { return };
    let both = match merge_header(headers.get_all(&name).iter().map(HeaderValue::as_bytes), text) {
        MergedHeader::Joined(both) => HeaderValue::from_str(&both).ok(),
        MergedHeader::Separate(_) => None,
    };
    let _ = match both {
        Some(both) => headers.try_insert(name, both).map(|_| ()),
        None => headers.try_append(name, ours).map(|_| ()),
    };
}

/// A response sent instead of the service's.
#[derive(Debug)]
pub(crate) struct LocalResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl LocalResponse {
    pub(crate) fn into_response<B>(self) -> Response<ResponseBody<B>> {
        let mut response = Response::new(ResponseBody::local(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response
    }

    /// Converts the response for a gRPC call: a trailers-only response with the status in `grpc-status`.
    fn into_grpc(mut self, call: GrpcCall, status: ResponseStatus, message: &str) -> LocalResponse {
        self.headers.insert(CONTENT_TYPE, call.0);
        self.headers.insert("grpc-status", HeaderValue::from_static(status.grpc_code().text));
        // `%` starts an escape in `grpc-message`, and none of our messages contains one.
        let message: String = message.chars().filter(|c| !c.is_control() && *c != '%').collect();
        if let Ok(message) = HeaderValue::from_str(&message) {
            self.headers.insert("grpc-message", message);
        }
        LocalResponse { status: StatusCode::OK, headers: self.headers, body: Bytes::new() }
    }
}

/// A gRPC call, whose client reads the status from a trailer, and the content type of its response.
#[derive(Clone, Debug)]
pub(crate) struct GrpcCall(pub(crate) HeaderValue);

impl GrpcCall {
    /// Returns `None` if the request is not a gRPC call.
    pub(crate) fn of(headers: &HeaderMap) -> Option<GrpcCall> {
        let kind = headers.get(CONTENT_TYPE)?;
        match kind.as_bytes().strip_prefix(b"application/grpc")? {
            [] | [b'+' | b';', ..] => Some(GrpcCall(HeaderValue::from_static("application/grpc"))),
            // gRPC-Web has several content types; the response repeats the request's.
            [b'-', b'w', b'e', b'b', ..] => Some(GrpcCall(kind.clone())),
            _ => None,
        }
    }
}

/// The response to a request that its limits deny; `is_closed` if only because the store is unavailable.
pub(crate) fn denial_response(
    limit_response: LimitResponse,
    is_closed: bool,
    grpc: Option<GrpcCall>,
) -> LocalResponse {
    let status = limit_response.status().and_then(|status| StatusCode::from_u16(status).ok());
    let mut response = LocalResponse {
        status: status.unwrap_or(StatusCode::TOO_MANY_REQUESTS),
        headers: HeaderMap::with_capacity(HEADERS_USUAL),
        body: Bytes::new(),
    };
    // One allocation for all values and the body, which is what is left in the end.
    let mut text = Bytes::copy_from_slice(limit_response.text().as_bytes());
    for header in limit_response.headers() {
        let value = text.split_to(header.value.len());
        let value = match header.value {
            // Comparing is faster than validating, as for names.
            "no-store" => Ok(HeaderValue::from_static("no-store")),
            "application/problem+json" => Ok(HeaderValue::from_static("application/problem+json")),
            _ => HeaderValue::from_maybe_shared(value),
        };
        if let Ok(value) = value {
            response.headers.insert(header_name(header.name), value);
        }
    }
    let response = match grpc {
        None => LocalResponse { body: text, ..response },
        Some(call) => {
            // The status of a denial may be configured; its gRPC code is always the same.
            let (status, why) = match is_closed {
                true => (ResponseStatus::ServiceUnavailable, "the service has reduced capacity"),
                false => (ResponseStatus::TooManyRequests, "too many requests"),
            };
            match limit_response.header(RETRY_AFTER.as_str()) {
                Some(wait) => response.into_grpc(call, status, &format!("{why}; retry in {wait} s")),
                None => response.into_grpc(call, status, why),
            }
        }
    };
    return_buffer(&RESPONSE, limit_response);
    response
}

/// The response to a request that is rejected before any limit is checked.
pub(crate) fn rejection_response(why: &RequestRejection, grpc: Option<GrpcCall>) -> LocalResponse {
    match why {
        RequestRejection::Malformed(why) => local_problem(ResponseStatus::BadRequest, why, grpc),
        RequestRejection::Forbidden(_, reason) => {
            local_problem(ResponseStatus::Forbidden, &reason.to_string(), grpc)
        }
        RequestRejection::NoPeer => local_problem(
            ResponseStatus::InternalServerError,
            "the limiter does not know the peer address of the request; see ratekeeper::tower::LayerBuilder::peer",
            grpc,
        ),
    }
}

/// The response to a request that would have to wait while the maximum number of requests waits.
pub(crate) fn overload_response(grpc: Option<GrpcCall>) -> LocalResponse {
    let why = "too many requests are delayed already";
    let mut response = local_problem(ResponseStatus::ServiceUnavailable, why, grpc);
    response.headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// A Problem Details response (RFC 9457) with a status and a detail text, for services that answer some requests
/// themselves. Caches must not store it.
///
/// ```
/// use ratekeeper::tower::problem;
/// use ratekeeper::tower::response::ResponseStatus;
///
/// let response = problem(ResponseStatus::NotFound, "there is no such file");
/// assert_eq!(response.headers()["content-type"], "application/problem+json");
/// assert!(response.body().contains("there is no such file"));
/// ```
pub fn problem(status: ResponseStatus, detail: &str) -> Response<String> {
    let mut response = Response::new(ratekeeper_rules::response::problem(status, detail));
    *response.status_mut() = status_code(status);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The status as a type of HTTP.
pub fn status_code(status: ResponseStatus) -> StatusCode {
    // All our statuses are valid.
    StatusCode::from_u16(status.code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

fn local_problem(status: ResponseStatus, detail: &str, grpc: Option<GrpcCall>) -> LocalResponse {
    let (parts, body) = problem(status, detail).into_parts();
    let response = LocalResponse { status: parts.status, headers: parts.headers, body: body.into() };
    match grpc {
        Some(call) => response.into_grpc(call, status, detail),
        None => response,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grpc_content_type_of(content_type: &'static str) -> Option<HeaderValue> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        GrpcCall::of(&headers).map(|call| call.0)
    }

    #[test]
    fn grpc_calls_are_recognized_by_content_type() {
        for kind in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"] {
            assert_eq!(grpc_content_type_of(kind).unwrap(), "application/grpc");
        }
        for kind in ["application/grpc-web", "application/grpc-web-text+proto"] {
            assert_eq!(grpc_content_type_of(kind).unwrap(), kind);
        }
        for kind in ["application/json", "application/grpcs", "text/plain; application/grpc"] {
            assert_eq!(grpc_content_type_of(kind), None, "{kind}");
        }
        assert!(GrpcCall::of(&HeaderMap::new()).is_none());
    }
}
