//! The original request, as a proxy describes it in headers.
//!
//! Proxies pass on the headers that clients send, so a description counts only if it is complete: a header that the
//! proxy does not set can be set by a client. There are two kinds of description, and a request with both is
//! rejected, because a client could otherwise choose which one counts.
//!
//! | kind | sent by | method | target | host | client |
//! |---|---|---|---|---|---|
//! | original | nginx | `X-Original-Method` | `X-Original-URI`, `-URL` | `X-Original-Host`, `-URL` | as configured |
//! | forwarded | Traefik, Caddy | `X-Forwarded-Method` | `X-Forwarded-Uri` | `X-Forwarded-Host` | as configured |

use axum::http::header::{HOST, HeaderMap, HeaderName, HeaderValue};
use axum::http::request::Parts;
use axum::http::uri::{Authority, PathAndQuery, Uri};
use axum::http::{Method, Request};
use ratekeeper_rules::client::TrustedProxies;
use ratekeeper_rules::response::ResponseStatus;

use super::error::HttpApiError;

const ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
const ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");
const ORIGINAL_HOST: HeaderName = HeaderName::from_static("x-original-host");
const FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// Headers of the subrequest, which are not part of the original request.
const DESCRIPTION_HEADERS: [HeaderName; 6] =
    [ORIGINAL_METHOD, ORIGINAL_URI, ORIGINAL_URL, ORIGINAL_HOST, FORWARDED_METHOD, FORWARDED_URI];

fn bad_request(reason: impl Into<String>) -> HttpApiError {
    HttpApiError::new(ResponseStatus::BadRequest, reason)
}

/// Rebuilds the original request, without its body.
pub(super) fn parse(parts: Parts, proxies: &TrustedProxies) -> Result<Request<()>, HttpApiError> {
    let headers = &parts.headers;
    let has = |name: &HeaderName| headers.contains_key(name);
    let is_original = [ORIGINAL_METHOD, ORIGINAL_URI, ORIGINAL_URL].iter().any(has);
    let is_forwarded = [FORWARDED_METHOD, FORWARDED_URI].iter().any(has);
    let (method, target, host) = match (is_original, is_forwarded) {
        (true, false) => {
            (required(headers, &ORIGINAL_METHOD)?, original_target(headers)?, original_host(headers)?)
        }
        (false, true) => (
            required(headers, &FORWARDED_METHOD)?,
            path_and_query(required(headers, &FORWARDED_URI)?)?,
            parse_host(required(headers, &FORWARDED_HOST)?)?,
        ),
        (true, true) => {
            return Err(bad_request(
                "the request is described by both `X-Original-` and `X-Forwarded-` headers; remove one set",
            ));
        }
        (false, false) => {
            return Err(bad_request(
                "the request is not described; set `X-Original-Method`, `-URI` and `-Host`, or \
                 `X-Forwarded-Method`, `-Uri` and `-Host`",
            ));
        }
    };
    let method = Method::from_bytes(method.as_bytes()).ok().filter(|it| *it != Method::CONNECT);
    let method = method.ok_or_else(|| bad_request("the original request has an invalid method"))?;
    if target.path() == "*" && method != Method::OPTIONS {
        return Err(bad_request("the target `*` is valid only for OPTIONS"));
    }
    let header = proxies.source().header_name();
    if !headers.contains_key(header) {
        return Err(bad_request(format!("`{header}` is missing; the proxy must set it, or clients could")));
    }
    let host = HeaderValue::from_str(host.as_str())
        .map_err(|_| bad_request("the original request has an invalid host"))?;
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = Uri::from(target);
    *request.headers_mut() = parts.headers;
    for name in DESCRIPTION_HEADERS {
        request.headers_mut().remove(name);
    }
    request.headers_mut().insert(HOST, host);
    Ok(request)
}

/// The single value of a required header.
fn required<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a str, HttpApiError> {
    optional(headers, name)?
        .ok_or_else(|| bad_request(format!("`{name}` is missing; the proxy must set it, or clients could")))
}

fn optional<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, HttpApiError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(bad_request(format!("`{name}` is sent twice; send it once")));
    }
    let text = value.to_str().ok().filter(|text| !text.is_empty() && !text.contains([' ', '\t']));
    text.map(Some).ok_or_else(|| bad_request(format!("`{name}` is empty or has invalid characters")))
}

/// A request target. A fragment is rejected: a URI parser drops it, but a server might not.
fn path_and_query(text: &str) -> Result<PathAndQuery, HttpApiError> {
    let is_valid = (text.starts_with('/') && !text.contains('#')) || text == "*";
    let parsed = PathAndQuery::try_from(text).ok().filter(|_| is_valid);
    parsed.ok_or_else(|| {
        bad_request("the original request has an invalid target: it must begin with `/` and contain no `#`")
    })
}

/// Whether the host is well-formed is left to the middleware, which rejects it as it does in any request: as a denial,
/// which nginx passes on.
fn parse_host(text: &str) -> Result<Authority, HttpApiError> {
    let parsed =
        Authority::try_from(text).ok().filter(|it| !it.as_str().contains('@') && !it.host().is_empty());
    parsed.ok_or_else(|| bad_request("the original request has an invalid host"))
}

fn original_url(headers: &HeaderMap) -> Result<Option<(Authority, PathAndQuery)>, HttpApiError> {
    let Some(text) = optional(headers, &ORIGINAL_URL)? else { return Ok(None) };
    let invalid = || {
        bad_request("`X-Original-URL` is not a URL: it must have `http://` or `https://`, a host and a path")
    };
    let (scheme, rest) = text.split_once("://").ok_or_else(invalid)?;
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return Err(invalid());
    }
    let slash = rest.find('/').ok_or_else(invalid)?;
    let (host, target) = rest.split_at(slash);
    Ok(Some((parse_host(host)?, path_and_query(target)?)))
}

fn original_target(headers: &HeaderMap) -> Result<PathAndQuery, HttpApiError> {
    let uri = optional(headers, &ORIGINAL_URI)?.map(path_and_query).transpose()?;
    match (uri, original_url(headers)?) {
        (Some(uri), Some((_, url))) if uri != url => {
            Err(bad_request("`X-Original-URI` and `X-Original-URL` have different targets; set one of them"))
        }
        (Some(target), _) | (None, Some((_, target))) => Ok(target),
        (None, None) => {
            Err(bad_request("`X-Original-URI` is missing; the proxy must set it, or clients could"))
        }
    }
}

fn original_host(headers: &HeaderMap) -> Result<Authority, HttpApiError> {
    let host = optional(headers, &ORIGINAL_HOST)?.map(parse_host).transpose()?;
    match (host, original_url(headers)?) {
        (Some(host), Some((url, _))) if host != url => {
            Err(bad_request("`X-Original-Host` and `X-Original-URL` have different hosts; set one of them"))
        }
        (Some(host), _) | (None, Some((host, _))) => Ok(host),
        (None, None) => {
            Err(bad_request("`X-Original-Host` is missing; the proxy must set it, or clients could"))
        }
    }
}
