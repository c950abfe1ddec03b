//! Parses an address and brings it into canonical form.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The form in which addresses are compared, trusted and counted: an IPv4 address inside an IPv6 one
/// (`::ffff:1.2.3.4`, which is also `::ffff:102:304`) is that IPv4 address.
///
/// Dual-stack sockets report IPv4 peers in the long form. Without this, one client would have two budgets, and all
/// clients would share one where IPv6 addresses are grouped by network.
///
/// A translated address (`64:ff9b::1.2.3.4`, RFC 6052) is not changed: a client must not become a trusted `10.0.0.5`
/// through a translator. It still shares the budget of its IPv4 address, see [`Grouping`](super::Grouping).
pub fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// The canonical address in a hop, if it is one: with or without a port, an IPv6 address in brackets or bare.
///
/// Port and zone are checked and dropped. A bare IPv6 address has no port: `2001:db8::1:443` is an address.
pub(super) fn parse(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    if let Some(bracketed) = text.strip_prefix('[') {
        let (inside, after) = bracketed.split_once(']')?;
        if !after.is_empty() && !is_port(after.strip_prefix(':')?) {
            return None;
        }
        return Some(canonical(ipv6(inside)?.into()));
    }
    if let Some((address, port)) = text.split_once(':')
        && !port.contains(':')
    {
        let address: Ipv4Addr = address.parse().ok()?;
        return is_port(port).then_some(address.into());
    }
    match text.parse() {
        // Rust's parser accepts neither zones nor leading zeros nor short forms like `127.1`.
        Ok(IpAddr::V4(address)) => Some(address.into()),
        _ => Some(canonical(ipv6(text)?.into())),
    }
}

/// `fe80::1%eth0` without its zone, which names a network interface of this host or of another one.
fn ipv6(text: &str) -> Option<Ipv6Addr> {
    let (address, zone) = text.split_once('%').unwrap_or((text, "0"));
    let in_a_zone = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'~' | b'%');
    if zone.is_empty() || !zone.bytes().all(in_a_zone) {
        return None;
    }
    address.parse().ok()
}

/// A port number, or an obfuscated port, which RFC 7239 allows.
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => {
            !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        }
        None => text.bytes().all(|b| b.is_ascii_digit()) && text.len() <= 5 && text.parse::<u16>().is_ok(),
    }
}
