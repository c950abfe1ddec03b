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
use axum::http::{Method, Request, StatusCode};
use ratekeeper_rules::client::TrustedProxies;

use super::refusal::Refusal;

const ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
const ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");
const ORIGINAL_HOST: HeaderName = HeaderName::from_static("x-original-host");
const FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// Headers of the subrequest, which are not part of the original request.
const DESCRIBING: [HeaderName; 6] =
    [ORIGINAL_METHOD, ORIGINAL_URI, ORIGINAL_URL, ORIGINAL_HOST, FORWARDED_METHOD, FORWARDED_URI];

fn bad(why: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, why)
}

/// Rebuilds the original request, without its body.
pub(super) fn request(parts: Parts, trust: &TrustedProxies) -> Result<Request<()>, Refusal> {
    let headers = &parts.headers;
    let has = |name: &HeaderName| headers.contains_key(name);
    let is_original = [ORIGINAL_METHOD, ORIGINAL_URI, ORIGINAL_URL].iter().any(has);
    let is_forwarded = [FORWARDED_METHOD, FORWARDED_URI].iter().any(has);
    let (method, target, host) = match (is_original, is_forwarded) {
        (true, false) => {
            (only(headers, &ORIGINAL_METHOD)?, original_target(headers)?, original_host(headers)?)
        }
        (false, true) => (
            only(headers, &FORWARDED_METHOD)?,
            path_and_query(only(headers, &FORWARDED_URI)?)?,
            host_in(only(headers, &FORWARDED_HOST)?)?,
        ),
        (true, true) => {
            return Err(bad(
                "the request is described twice, by `X-Original-` and by `X-Forwarded-` headers; clear one of them",
            ));
        }
        (false, false) => {
            return Err(bad(
                "no request is described; set `X-Original-Method`, `-URI` and `-Host`, or `X-Forwarded-Method`, \
                 `-Uri` and `-Host`",
            ));
        }
    };
    let method = Method::from_bytes(method.as_bytes()).ok().filter(|it| *it != Method::CONNECT);
    let method = method.ok_or_else(|| bad("the method of the request is none"))?;
    if target.path() == "*" && method != Method::OPTIONS {
        return Err(bad("the target `*` is for OPTIONS alone"));
    }
    let from = trust.source().header_name();
    if !headers.contains_key(from) {
        return Err(bad(format!("set `{from}` to where the request comes from, or a client may set it")));
    }
    let host = HeaderValue::from_str(host.as_str()).map_err(|_| bad("the host of the request is none"))?;
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = Uri::from(target);
    *request.headers_mut() = parts.headers;
    for name in DESCRIBING {
        request.headers_mut().remove(name);
    }
    request.headers_mut().insert(HOST, host);
    Ok(request)
}

/// The single value of a required header.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a str, Refusal> {
    optional(headers, name)?
        .ok_or_else(|| bad(format!("`{name}` is missing; set it, or a client may set it")))
}

fn optional<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(bad(format!("`{name}` is there twice; nobody can know which one counts")));
    }
    let text = value.to_str().ok().filter(|text| !text.is_empty() && !text.contains([' ', '\t']));
    text.map(Some).ok_or_else(|| bad(format!("`{name}` has something in it that does not belong there")))
}

/// A request target. A fragment is rejected: a URI parser drops it, but a server might not.
fn path_and_query(text: &str) -> Result<PathAndQuery, Refusal> {
    let is_one = (text.starts_with('/') && !text.contains('#')) || text == "*";
    let parsed = PathAndQuery::try_from(text).ok().filter(|_| is_one);
    parsed.ok_or_else(|| bad("the target of the request is none: it begins with `/` and has no `#`"))
}

fn host_in(text: &str) -> Result<Authority, Refusal> {
    let parsed =
        Authority::try_from(text).ok().filter(|it| !it.as_str().contains('@') && !it.host().is_empty());
    parsed.ok_or_else(|| bad("the host of the request is none"))
}

fn original_url(headers: &HeaderMap) -> Result<Option<(Authority, PathAndQuery)>, Refusal> {
    let Some(text) = optional(headers, &ORIGINAL_URL)? else { return Ok(None) };
    let no_url = || bad("`X-Original-URL` is no URL: write `http://` or `https://`, a host and a path");
    let (scheme, rest) = text.split_once("://").ok_or_else(no_url)?;
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return Err(no_url());
    }
    let slash = rest.find('/').ok_or_else(no_url)?;
    let (host, target) = rest.split_at(slash);
    Ok(Some((host_in(host)?, path_and_query(target)?)))
}

fn original_target(headers: &HeaderMap) -> Result<PathAndQuery, Refusal> {
    let uri = optional(headers, &ORIGINAL_URI)?.map(path_and_query).transpose()?;
    match (uri, original_url(headers)?) {
        (Some(uri), Some((_, url))) if uri != url => {
            Err(bad("`X-Original-URI` and `X-Original-URL` name two targets; set one"))
        }
        (Some(target), _) | (None, Some((_, target))) => Ok(target),
        (None, None) => Err(bad("`X-Original-URI` is missing; set it, or a client may set it")),
    }
}

fn original_host(headers: &HeaderMap) -> Result<Authority, Refusal> {
    let named = optional(headers, &ORIGINAL_HOST)?.map(host_in).transpose()?;
    match (named, original_url(headers)?) {
        (Some(named), Some((url, _))) if named != url => {
            Err(bad("`X-Original-Host` and `X-Original-URL` name two hosts; set one"))
        }
        (Some(host), _) | (None, Some((host, _))) => Ok(host),
        (None, None) => Err(bad("`X-Original-Host` is missing; set it, or a client may set it")),
    }
}
