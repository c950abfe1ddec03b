//! What rules look at.

use std::net::IpAddr;

/// A request as rules see it. The middleware shows them an HTTP request this way, and other doors theirs.
pub trait Request {
    /// The method. Case does not matter: some servers take `post` for `POST`.
    fn method(&self) -> &str;

    /// The host that was asked for. Neither case nor a port or a dot at the end matter.
    fn host(&self) -> &str;

    /// The path, [normalised](crate::path::normalise).
    fn path(&self) -> &str;

    /// What stands behind the `?`, or nothing.
    fn query(&self) -> &str;

    /// The values of a header, in order. The name is in lower case.
    fn header<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a;

    /// The [client's](crate::client) address.
    fn client(&self) -> IpAddr;

    /// The route's name, if there are routes.
    fn route(&self) -> &str;

    /// A claim of a token that has been verified.
    fn claim(&self, name: &str) -> Option<&str>;

    /// What the service has made up itself under a name.
    fn custom(&self, name: &str) -> Option<String>;
}

/// A host without its port, and without the dot of the root at its end: with or without these, it is the same host.
pub fn host_name(host: &str) -> &str {
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        // A bare IPv6 address has colons, but no port.
        Some((name, port)) if is_port(port) && (!name.contains(':') || name.ends_with(']')) => name,
        _ => host,
    };
    name.strip_suffix('.').unwrap_or(name)
}
