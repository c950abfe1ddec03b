//! The view of a request that rules read.

use std::net::{IpAddr, Ipv6Addr};

/// A request as rules see it. The middleware and each API implement it for their requests.
pub trait Request {
    /// The method. Rules compare it case-insensitively, because some servers accept `post` as `POST`.
    fn method(&self) -> &str;

    /// The requested host. Rules ignore its case, port and trailing dot.
    fn host(&self) -> &str;

    /// The path, [normalized](crate::path::normalize).
    fn path(&self) -> &str;

    /// The query without the `?`; empty if there is none.
    fn query(&self) -> &str;

    /// The values of a header, in order. The name is in lower case.
    fn header<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a;

    /// The [client's](crate::client) address.
    fn client(&self) -> IpAddr;

    /// The route's name; empty without routes.
    fn route(&self) -> &str;

    /// A claim of a verified token.
    fn claim(&self, name: &str) -> Option<&str>;

    /// A value that the service computes, by name.
    fn custom(&self, name: &str) -> Option<String>;
}

/// A host without its port and without the trailing dot of the root; both denote the same host.
pub fn host_name(host: &str) -> &str {
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        // A bare IPv6 address has colons, but no port.
        Some((name, port)) if is_port(port) && (!name.contains(':') || name.ends_with(']')) => name,
        _ => host,
    };
    name.strip_suffix('.').unwrap_or(name)
}

/// Whether all servers read the host as the same name: labels of letters, digits, `-` and `_`, none of them empty, or an
/// IPv6 address in brackets; each with or without a port and the trailing dot of the root.
///
/// ```
/// use ratekeeper_rules::request::is_well_formed_host;
///
/// assert!(is_well_formed_host("a.test.:80") && is_well_formed_host("[::1]:80") && is_well_formed_host("my_api"));
/// assert!(!["", ".", "a..", ".a", "a..b", "a,", "a%2eb", "u@a", "::1"].into_iter().any(is_well_formed_host));
/// ```
pub fn is_well_formed_host(host: &str) -> bool {
    let name = host_name(host);
    if let Some(address) = name.strip_prefix('[') {
        return address.strip_suffix(']').is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    }
    let mut before = b'.';
    let is_fine = name.bytes().all(|byte| {
        let is_label = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let is_fine = is_label || (byte == b'.' && before != b'.');
        before = byte;
        is_fine
    });
    is_fine && before != b'.'
}
