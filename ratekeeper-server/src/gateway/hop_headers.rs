//! Hop-by-hop headers, forwarding headers and the header edits of routes.

use std::net::IpAddr;

use http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE,
    FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use ratekeeper_config::HeaderEdits;
use ratekeeper_rules::client::{Source, TrustedProxies};
use ratekeeper_rules::spelling::is_header_alias;
use smallvec::SmallVec;

use super::access::X_REQUEST_ID;
use super::screen::connection_names;

/// Prefix of the unstandardised forwarding headers.
const X_FORWARDED: &str = "x-forwarded-";
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Headers that [`set_forwarded`] sets, plus the request id.
const FORWARDED_HEADERS_MAX: usize = 7;

/// Headers for this hop only.
static HOP_BY_HOP: [HeaderName; 8] = [
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    HeaderName::from_static("http2-settings"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Removes hop-by-hop headers: those that `Connection` lists and the well-known ones.
pub(crate) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let listed: SmallVec<[HeaderName; 4]> =
            connection_names(headers).filter_map(|name| HeaderName::from_bytes(name).ok()).collect();
        for name in listed {
            headers.remove(name);
        }
        headers.remove(CONNECTION);
    }
    // Few requests have any of them: one scan of the names is cheaper than eight lookups.
    remove_where(headers, |name| HOP_BY_HOP.contains(name));
}

/// Removes the headers whose names match. Each name is tested once: a client chooses how many match.
pub(crate) fn remove_where(headers: &mut HeaderMap, mut matches: impl FnMut(&HeaderName) -> bool) {
    let matching: SmallVec<[HeaderName; 4]> = headers.keys().filter(|name| matches(name)).cloned().collect();
    for name in matching {
        headers.remove(name);
    }
}

/// Whether a header is hop-by-hop.
pub(crate) fn is_hop_by_hop(name: &HeaderName) -> bool {
    *name == CONNECTION || HOP_BY_HOP.contains(name)
}

/// Headers that [`set_forwarded`] sets, except those that begin with [`X_FORWARDED`], and the request id.
static FORWARDED_NAMES: [HeaderName; 3] = [FORWARDED, X_REAL_IP, X_REQUEST_ID];

/// Whether a header is set by [`set_forwarded`] or is the request id.
pub(crate) fn is_forwarded(name: &HeaderName) -> bool {
    FORWARDED_NAMES.contains(name) || name.as_str().starts_with(X_FORWARDED)
}

/// Headers that describe the message and its sender, and are never hop-by-hop.
static END_TO_END: [HeaderName; 7] =
    [AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, HOST];

/// Whether a header must reach the upstream, even if `Connection` lists it.
pub(crate) fn is_end_to_end(name: &HeaderName) -> bool {
    END_TO_END.contains(name) || is_forwarded(name)
}

/// Whether the gateway or the framing of a message depends on a header.
pub(crate) fn is_managed(name: &HeaderName) -> bool {
    is_hop_by_hop(name) || is_end_to_end(name) || *name == TRAILER
}

/// Whether a byte occurs in the names of managed headers.
static IS_MANAGED_BYTE: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = (byte as u8).is_ascii_alphanumeric() || byte as u8 == b'-';
        byte += 1;
    }
    table
};

/// Whether servers may read the header as a managed one of another name: `Content_Length` as `Content-Length`.
pub(crate) fn is_managed_alias(name: &HeaderName) -> bool {
    let name = name.as_str();
    // The managed names have no other bytes. Every header of every request comes here, so a table is worth it.
    if name.bytes().all(|byte| IS_MANAGED_BYTE[usize::from(byte)]) {
        return false;
    }
    let names = HOP_BY_HOP.iter().chain(&END_TO_END).chain(&FORWARDED_NAMES).chain([&CONNECTION, &TRAILER]);
    let is_prefix_alias = |prefix: &str| prefix == X_FORWARDED || is_header_alias(prefix, X_FORWARDED);
    name.get(..X_FORWARDED.len()).is_some_and(is_prefix_alias)
        || names.into_iter().any(|of| is_header_alias(name, of.as_str()))
}

/// Whether a header is allowed as a trailer.
pub(crate) fn is_allowed_trailer(name: &HeaderName) -> bool {
    !is_managed(name) && !is_managed_alias(name)
}

/// Whether the client accepts trailers, which gRPC requires.
pub(crate) fn accepts_trailers(headers: &HeaderMap) -> bool {
    headers.get_all(TE).iter().any(|value| value.as_bytes().eq_ignore_ascii_case(b"trailers"))
}

/// Origin of a request, for the forwarding headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub(crate) peer: IpAddr,
    pub(crate) peer_text: &'a HeaderValue,
    pub(crate) client: IpAddr,
    pub(crate) port_text: &'a HeaderValue,
    pub(crate) is_tls: bool,
    pub(crate) trusted_proxies: &'a TrustedProxies,
}

/// Sets the forwarding headers. Received values count only from trusted proxies, and of `Forwarded` and
/// `X-Forwarded-For` only the one that those proxies are configured to use: the other may come from a client.
pub(crate) fn set_forwarded(headers: &mut HeaderMap, origin: Origin<'_>) {
    let Origin { peer, peer_text, client, port_text, is_tls, trusted_proxies } = origin;
    let is_trusted = trusted_proxies.trusts(peer);
    let source = trusted_proxies.source();
    // Capacity for all headers set here and the request id: growing the map rehashes every entry.
    headers.reserve(FORWARDED_HEADERS_MAX);
    let scheme = if is_tls { "https" } else { "http" };
    if !is_trusted {
        // Includes the ones that are not set below: servers may read them.
        remove_where(headers, |name| name.as_str().starts_with(X_FORWARDED));
    }
    if is_trusted && source == Source::Forwarded {
        let node = if peer.is_ipv6() { format!("\"[{peer}]\"") } else { peer.to_string() };
        append(headers, FORWARDED, &format!("for={node};proto={scheme}"));
        headers.remove(X_FORWARDED_FOR);
    } else {
        headers.remove(FORWARDED);
    }
    if headers.contains_key(X_FORWARDED_FOR) {
        append(headers, X_FORWARDED_FOR, &peer.to_string());
    } else if client == peer {
        headers.insert(X_FORWARDED_FOR, peer_text.clone());
    } else {
        headers.insert(X_FORWARDED_FOR, text_value(&format!("{client}, {peer}")));
    }
    headers.insert(X_REAL_IP, if client == peer { peer_text.clone() } else { address_value(client) });
    if !headers.contains_key(X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static(scheme));
    }
    if !headers.contains_key(X_FORWARDED_PORT) {
        headers.insert(X_FORWARDED_PORT, port_text.clone());
    }
    if !headers.contains_key(X_FORWARDED_HOST)
        && let Some(host) = headers.get(HOST).cloned()
    {
        headers.insert(X_FORWARDED_HOST, host);
    }
}

pub(crate) fn address_value(address: IpAddr) -> HeaderValue {
    text_value(&address.to_string())
}

fn text_value(text: &str) -> HeaderValue {
    // Contains only digits, letters, dots, colons, commas and spaces.
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("unknown"))
}

/// Joins all lines of a header into one list and appends a member.
fn append(headers: &mut HeaderMap, name: HeaderName, member: &str) {
    let mut list: Vec<u8> = Vec::new();
    for line in headers.get_all(&name).iter().map(HeaderValue::as_bytes).chain([member.as_bytes()]) {
        if !list.is_empty() {
            list.extend_from_slice(b", ");
        }
        list.extend_from_slice(line);
    }
    if let Ok(value) = HeaderValue::from_bytes(&list) {
        headers.insert(name, value);
    }
}

/// A route's header edits, parsed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Edits {
    set: Vec<(HeaderName, HeaderValue)>,
    add: Vec<(HeaderName, HeaderValue)>,
    remove: Vec<HeaderName>,
}

impl Edits {
    /// The configuration has validated names and values; any that do not parse are omitted.
    pub(crate) fn new(edits: &HeaderEdits) -> Edits {
        let name = |name: &String| HeaderName::from_bytes(name.as_bytes()).ok();
        let pair = |(key, value): &(String, ratekeeper_config::Secret)| {
            let mut parsed = HeaderValue::from_str(value.reveal()).ok()?;
            parsed.set_sensitive(true);
            Some((name(key)?, parsed))
        };
        Edits {
            set: edits.set.iter().filter_map(pair).collect(),
            add: edits.add.iter().filter_map(pair).collect(),
            remove: edits.remove.iter().filter_map(name).collect(),
        }
    }

    pub(crate) fn apply(&self, headers: &mut HeaderMap) {
        for name in &self.remove {
            headers.remove(name);
        }
        for (name, value) in &self.set {
            let _ = headers.try_insert(name, value.clone());
        }
        for (name, value) in &self.add {
            let _ = headers.try_append(name, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_tested_once_however_many_are_removed() {
        let mut headers = HeaderMap::new();
        for number in 0..1_000 {
            let name = HeaderName::try_from(format!("x-forwarded-{number}")).unwrap();
            headers.append(&name, HeaderValue::from_static("1"));
            headers.append(name, HeaderValue::from_static("2"));
        }
        headers.insert(HOST, HeaderValue::from_static("a"));
        let mut tested = 0;
        remove_where(&mut headers, |name| {
            tested += 1;
            name.as_str().starts_with(X_FORWARDED)
        });
        assert_eq!((tested, headers.len()), (1_001, 1));
    }
}
