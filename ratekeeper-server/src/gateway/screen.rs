//! Rejects requests that no upstream should receive.
//!
//! Two servers that parse one request differently are a security hole (request smuggling). Requests that hyper
//! accepts and other servers parse differently are rejected here, before any other check.

use http::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, HOST, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Uri};
use http::{Method, StatusCode, Version};

use super::hop_headers::{is_for_the_server, is_forwarded, is_hop_by_hop};

/// Why a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) why: &'static str,
}

const fn bad(why: &'static str) -> Refusal {
    Refusal { status: StatusCode::BAD_REQUEST, why }
}

/// Checks a request's head and normalises it to the form that is forwarded: a target without scheme and authority,
/// and one `Host`. `named` lists the headers that the configuration reads or sets.
pub(crate) fn screen(parts: &mut Parts, named: &[HeaderName]) -> Result<(), Refusal> {
    if parts.method == Method::CONNECT {
        return Err(Refusal { status: StatusCode::NOT_IMPLEMENTED, why: "this gateway opens no tunnels" });
    }
    if parts.method == Method::TRACE {
        let why = "TRACE would show a client what was added on the way";
        return Err(Refusal { status: StatusCode::METHOD_NOT_ALLOWED, why });
    }
    if parts.uri.path() == "*" && parts.method != Method::OPTIONS {
        return Err(bad("the target `*` is for OPTIONS alone"));
    }
    settle_host(parts)?;
    check_framing(&parts.headers)?;
    check_connection(&parts.headers, named)?;
    drop_aliases(&mut parts.headers, named);
    join_cookies(parts);
    Ok(())
}

/// Requires one host and moves it to the `Host` header.
fn settle_host(parts: &mut Parts) -> Result<(), Refusal> {
    let mut lines = parts.headers.get_all(HOST).iter();
    let (host, second) = (lines.next(), lines.next());
    if second.is_some() {
        return Err(bad("the header Host is there twice"));
    }
    let target = parts.uri.authority();
    // The fast path, for nearly all requests.
    if target.is_none() && host.is_some_and(|host| is_plain_host(host.as_bytes())) {
        return Ok(());
    }
    let host = host.map(authority).transpose()?;
    if parts.uri.scheme().is_some_and(|scheme| !matches!(scheme.as_str(), "http" | "https")) {
        return Err(bad("the target is neither of http nor of https"));
    }
    if target.is_some_and(|target| target.as_str().contains('@')) {
        return Err(bad("the target has a user in it"));
    }
    let is_other = |target: &Authority| host.as_ref().is_some_and(|host| !is_same(host, target));
    if target.is_some_and(is_other) {
        return Err(bad("the target and the header Host name different hosts"));
    }
    // Old health checkers still use HTTP/1.0, which does not require `Host`.
    if host.is_none() && target.is_none() && parts.version != Version::HTTP_10 {
        return Err(bad("the header Host is missing"));
    }
    let Some(target) = target else { return Ok(()) };
    if host.is_none() {
        let value = HeaderValue::from_str(target.as_str()).map_err(|_| bad("the target is not a host"))?;
        parts.headers.insert(HOST, value);
    }
    let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    parts.uri = Uri::from(path);
    Ok(())
}

/// Whether it is a name of letters, digits, hyphens and dots, with or without a port: a host to every parser.
fn is_plain_host(host: &[u8]) -> bool {
    let (name, port) = match host.iter().position(|byte| *byte == b':') {
        Some(colon) => (&host[..colon], &host[colon + 1..]),
        None => (host, &b"80"[..]),
    };
    let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    let is_port = matches!(port, [_, ..] if port.len() < 5) || matches!(port, [b'1'..=b'5', _, _, _, _]);
    let is_port = is_port && port.iter().all(u8::is_ascii_digit);
    !name.is_empty() && name.iter().all(is_of_name) && is_port
}

fn authority(value: &HeaderValue) -> Result<Authority, Refusal> {
    let authority =
        Authority::try_from(value.as_bytes()).map_err(|_| bad("the header Host is not a host"))?;
    match authority.as_str().contains('@') || authority.host().is_empty() {
        true => Err(bad("the header Host is not a host")),
        false => Ok(authority),
    }
}

/// Whether host and port are the same. Default ports (80, 443) count as absent.
fn is_same(one: &Authority, other: &Authority) -> bool {
    let port = |it: &Authority| it.port_u16().filter(|port| !matches!(port, 80 | 443));
    one.host().eq_ignore_ascii_case(other.host()) && port(one) == port(other)
}

/// Rejects ambiguous framing. hyper takes the body's length from one header only, and codings other than `chunked`
/// would be lost.
fn check_framing(headers: &HeaderMap) -> Result<(), Refusal> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else { return Ok(()) };
    if headers.contains_key(CONTENT_LENGTH) {
        return Err(bad("the body's length is given in two ways"));
    }
    if codings.next().is_some() || !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") {
        let why = "the body is coded in another way than chunked";
        return Err(Refusal { status: StatusCode::NOT_IMPLEMENTED, why });
    }
    Ok(())
}

/// The header names that `Connection` lists.
pub(crate) fn listed_names(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers.get_all(CONNECTION).iter().map(HeaderValue::as_bytes).flat_map(listed)
}

/// The members of a comma-separated list.
pub(crate) fn listed(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Rejects a `Connection` header that lists a protected header: the header would be removed after limits have
/// evaluated it, or after a proxy has set it.
fn check_connection(headers: &HeaderMap, named: &[HeaderName]) -> Result<(), Refusal> {
    let is_usual = |name: &[u8]| USUAL.iter().any(|it| name.eq_ignore_ascii_case(it));
    let is_protected = |name: &[u8]| {
        let name = HeaderName::from_bytes(name);
        name.is_ok_and(|name| is_for_the_server(&name) || named.contains(&name) && !is_hop_by_hop(&name))
    };
    match listed_names(headers).any(|name| !is_usual(name) && is_protected(name)) {
        true => Err(bad("the header Connection names one that is for the server behind")),
        false => Ok(()),
    }
}

/// The usual members of `Connection`; parsing a name takes longer than comparing it.
const USUAL: [&[u8]; 3] = [b"keep-alive", b"close", b"upgrade"];

/// Removes aliases of protected headers: servers that turn names into variables read `X_Forwarded_For` as
/// `X-Forwarded-For`, so a client could set headers that the gateway sets or that limits read.
fn drop_aliases(headers: &mut HeaderMap, named: &[HeaderName]) {
    let is_odd = |name: &&HeaderName| name.as_str().bytes().any(|byte| matches!(byte, b'_' | b'.'));
    let is_alias = |name: &&HeaderName| {
        let plain = HeaderName::try_from(name.as_str().replace(['_', '.'], "-"));
        plain.is_ok_and(|plain| is_forwarded(&plain) || named.contains(&plain))
    };
    while let Some(alias) = headers.keys().filter(is_odd).find(is_alias).cloned() {
        headers.remove(alias);
    }
}

/// Joins cookie headers: HTTP/2 may split them, HTTP/1 must not.
fn join_cookies(parts: &mut Parts) {
    if parts.version != Version::HTTP_2 || parts.headers.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let pieces: Vec<&[u8]> = parts.headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(whole) = HeaderValue::from_bytes(&pieces.join(&b"; "[..])) {
        parts.headers.insert(COOKIE, whole);
    }
}

/// Protocols that the client offers to switch to, if that is allowed.
pub(crate) fn wanted_upgrade(parts: &Parts) -> Option<HeaderValue> {
    let is_upgrade = |name: &[u8]| name.eq_ignore_ascii_case(b"upgrade");
    if parts.version != Version::HTTP_11 || !listed_names(&parts.headers).any(is_upgrade) {
        return None;
    }
    let wanted = parts.headers.get(UPGRADE)?;
    // An upgrade to HTTP/2 would bypass screening, routing and limits.
    let is_http2 = |name: &[u8]| name.eq_ignore_ascii_case(b"h2c") || name.eq_ignore_ascii_case(b"h2");
    let lines = parts.headers.get_all(UPGRADE).iter().map(HeaderValue::as_bytes);
    (!lines.flat_map(listed).any(is_http2)).then(|| wanted.clone())
}
