//! Rejects requests that no upstream should receive.
//!
//! Two servers that parse one request differently are a security hole (request smuggling). Requests that hyper
//! accepts and other servers parse differently are rejected here, before any other check.

use http::header::{CONNECTION, COOKIE, HOST, HeaderMap, HeaderName, HeaderValue, UPGRADE};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Uri};
use http::{Method, Request, Version};

use ratekeeper_rules::request::is_well_formed_host;
use ratekeeper_rules::response::ResponseStatus;
use ratekeeper_rules::spelling::{HeaderAliases, is_header_alias};

use super::framing::{FramingError, check_framing};
use super::hop_headers::{is_end_to_end, is_hop_by_hop, is_managed_alias, remove_where};

/// Why a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScreenError {
    pub(crate) status: ResponseStatus,
    pub(crate) detail: &'static str,
}

const fn bad_request(detail: &'static str) -> ScreenError {
    ScreenError { status: ResponseStatus::BadRequest, detail }
}

impl From<FramingError> for ScreenError {
    fn from(error: FramingError) -> ScreenError {
        let status = match error {
            FramingError::TwoLengths | FramingError::BadLength => ResponseStatus::BadRequest,
            FramingError::UnsupportedCoding => ResponseStatus::NotImplemented,
        };
        ScreenError { status, detail: error.text() }
    }
}

/// Checks a request's head and normalizes it to the form that is forwarded: a target without scheme and authority,
/// and one `Host`. `framing` is what its bytes showed that its headers do not. `protected` lists the headers that the configuration reads or edits, and `aliases` those of them that
/// are one header to some servers.
pub(crate) fn screen(
    parts: &mut Parts,
    framing: Result<(), FramingError>,
    protected: &[HeaderName],
    aliases: &HeaderAliases,
) -> Result<(), ScreenError> {
    if parts.method == Method::CONNECT {
        return Err(ScreenError {
            status: ResponseStatus::NotImplemented,
            detail: "CONNECT is not supported",
        });
    }
    if parts.method == Method::TRACE {
        let detail = "TRACE is not allowed";
        return Err(ScreenError { status: ResponseStatus::MethodNotAllowed, detail });
    }
    if parts.uri.path() == "*" && parts.method != Method::OPTIONS {
        return Err(bad_request("the target `*` is only valid with OPTIONS"));
    }
    normalize_host(parts)?;
    framing.and_then(|()| check_framing(&parts.headers))?;
    check_connection(&parts.headers, protected)?;
    remove_aliases(&mut parts.headers, protected);
    if aliases.both_present(|name| parts.headers.contains_key(name)).is_some() {
        return Err(bad_request("the request has two spellings of one header; send one of them"));
    }
    join_cookies(parts);
    Ok(())
}

/// Requires one host and moves it to the `Host` header.
fn normalize_host(parts: &mut Parts) -> Result<(), ScreenError> {
    let mut lines = parts.headers.get_all(HOST).iter();
    let (host, second) = (lines.next(), lines.next());
    if second.is_some() {
        return Err(bad_request("duplicate Host header"));
    }
    let target = parts.uri.authority();
    // The fast path, for nearly all requests.
    if target.is_none() && host.is_some_and(|host| is_plain_host(host.as_bytes())) {
        return Ok(());
    }
    let host = host.map(authority).transpose()?;
    if parts.uri.scheme().is_some_and(|scheme| !matches!(scheme.as_str(), "http" | "https")) {
        return Err(bad_request("the scheme of the target is neither http nor https"));
    }
    if target.is_some_and(|target| target.as_str().contains('@')) {
        return Err(bad_request("the target contains a user name"));
    }
    if target.is_some_and(|target| !is_well_formed_host(target.host())) {
        return Err(bad_request("invalid host in the target"));
    }
    let is_different = |target: &Authority| host.as_ref().is_some_and(|host| !is_same(host, target));
    if target.is_some_and(is_different) {
        return Err(bad_request("the target and the Host header name different hosts"));
    }
    // Old health checkers still use HTTP/1.0, which does not require `Host`.
    if host.is_none() && target.is_none() && parts.version != Version::HTTP_10 {
        return Err(bad_request("missing Host header"));
    }
    let Some(target) = target else { return Ok(()) };
    if host.is_none() {
        let value =
            HeaderValue::from_str(target.as_str()).map_err(|_| bad_request("invalid host in the target"))?;
        parts.headers.insert(HOST, value);
    }
    let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    parts.uri = Uri::from(path);
    Ok(())
}

/// Whether it is a name of letters, digits, hyphens and single dots, with or without a port: a host to every parser.
fn is_plain_host(host: &[u8]) -> bool {
    let (name, port) = match host.iter().position(|byte| *byte == b':') {
        Some(colon) => (&host[..colon], &host[colon + 1..]),
        None => (host, &b"80"[..]),
    };
    let mut before = b'.';
    let mut is_name_byte = |byte: &u8| {
        let is_fine = byte.is_ascii_alphanumeric() || *byte == b'-' || (*byte == b'.' && before != b'.');
        before = *byte;
        is_fine
    };
    let is_port = matches!(port, [_, ..] if port.len() < 5) || matches!(port, [b'1'..=b'5', _, _, _, _]);
    let is_port = is_port && port.iter().all(u8::is_ascii_digit);
    !name.is_empty() && name.iter().all(&mut is_name_byte) && is_port
}

fn authority(value: &HeaderValue) -> Result<Authority, ScreenError> {
    let authority = Authority::try_from(value.as_bytes()).map_err(|_| bad_request("invalid Host header"))?;
    match authority.as_str().contains('@') || !is_well_formed_host(authority.host()) {
        true => Err(bad_request("invalid Host header")),
        false => Ok(authority),
    }
}

/// Whether host and port are the same. Default ports (80, 443) count as absent.
fn is_same(one: &Authority, other: &Authority) -> bool {
    let port = |it: &Authority| it.port_u16().filter(|port| !matches!(port, 80 | 443));
    one.host().eq_ignore_ascii_case(other.host()) && port(one) == port(other)
}

/// The header names that `Connection` lists.
pub(crate) fn connection_names(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers.get_all(CONNECTION).iter().map(HeaderValue::as_bytes).flat_map(list_members)
}

/// The members of a comma-separated list.
pub(crate) fn list_members(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Rejects a `Connection` header that lists a protected header: the header would be removed after limits have
/// evaluated it, or after a proxy has set it.
fn check_connection(headers: &HeaderMap, protected: &[HeaderName]) -> Result<(), ScreenError> {
    let is_common = |name: &[u8]| COMMON_OPTIONS.iter().any(|it| name.eq_ignore_ascii_case(it));
    let is_protected = |name: &[u8]| {
        let name = HeaderName::from_bytes(name);
        name.is_ok_and(|name| is_end_to_end(&name) || protected.contains(&name) && !is_hop_by_hop(&name))
    };
    match connection_names(headers).any(|name| !is_common(name) && is_protected(name)) {
        true => Err(bad_request("the Connection header lists a header that must be forwarded")),
        false => Ok(()),
    }
}

/// The common members of `Connection`: comparing a name is cheaper than parsing it.
const COMMON_OPTIONS: [&[u8]; 3] = [b"keep-alive", b"close", b"upgrade"];

/// Removes aliases of headers that the gateway interprets or sets, and of protected ones: servers that turn names into
/// variables read `Content_Length` as `Content-Length`, so a client could frame its body twice or forge a header.
fn remove_aliases(headers: &mut HeaderMap, protected: &[HeaderName]) {
    remove_where(headers, |name| is_protected_alias(name, protected) || is_managed_alias(name));
}

/// Whether servers may read the header as a protected one of another name.
pub(crate) fn is_protected_alias(name: &HeaderName, protected: &[HeaderName]) -> bool {
    protected.iter().any(|of| is_header_alias(name.as_str(), of.as_str())) && !protected.contains(name)
}

/// Joins cookie headers: HTTP/2 may split them, HTTP/1 must not.
fn join_cookies(parts: &mut Parts) {
    if parts.version != Version::HTTP_2 || parts.headers.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let pieces: Vec<&[u8]> = parts.headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(joined) = HeaderValue::from_bytes(&pieces.join(&b"; "[..])) {
        parts.headers.insert(COOKIE, joined);
    }
}

/// Protocols that the client offers to switch to, if that is allowed.
pub(crate) fn offered_upgrade<B>(request: &Request<B>) -> Option<HeaderValue> {
    let headers = request.headers();
    let is_upgrade = |name: &[u8]| name.eq_ignore_ascii_case(b"upgrade");
    if request.version() != Version::HTTP_11 || !connection_names(headers).any(is_upgrade) {
        return None;
    }
    let offered = headers.get(UPGRADE)?;
    // An upgrade to HTTP/2 would bypass screening, routing and limits.
    let is_http2 = |name: &[u8]| name.eq_ignore_ascii_case(b"h2c") || name.eq_ignore_ascii_case(b"h2");
    let lines = headers.get_all(UPGRADE).iter().map(HeaderValue::as_bytes);
    (!lines.flat_map(list_members).any(is_http2)).then(|| offered.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_without_allocations() {
        let mut headers = HeaderMap::new();
        for number in 0..1_000 {
            let name = HeaderName::try_from(format!("x_own.header~{number}")).unwrap();
            headers.insert(name, HeaderValue::from_static("1"));
        }
        let protected = [HeaderName::from_static("x-user-id")];
        let allocated = allocation_counter::measure(|| remove_aliases(&mut headers, &protected));
        assert_eq!((allocated.count_total, headers.len()), (0, 1_000));
    }
}
