//! The view of a request that rules read.

use std::net::IpAddr;

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
