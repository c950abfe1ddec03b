//! Networks: those in a configuration, and those by which clients are counted.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;

use ipnet::IpNet;

use super::canonical;

/// Bits of an IPv6 address before the IPv4 address that it holds.
const MAPPED_BITS: u8 = 96;
/// Maximum number of characters of the input that a message repeats.
const SHOWN_CHARS_MAX: usize = 40;

/// What is wrong with a network in a configuration, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}; {instead}")]
pub struct CidrError {
    what: String,
    instead: String,
}

impl CidrError {
    fn new(typed: &str, what: impl fmt::Display, instead: impl Into<String>) -> CidrError {
        let mut shown: String = typed.chars().take(SHOWN_CHARS_MAX).flat_map(char::escape_debug).collect();
        if typed.chars().nth(SHOWN_CHARS_MAX).is_some() {
            shown.push('…');
        }
        CidrError { what: format!("`{shown}` {what}"), instead: instead.into() }
    }

    /// What is wrong.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What to write instead.
    pub fn instead(&self) -> &str {
        &self.instead
    }
}

/// Parses a network: `10.0.0.0/8`, `2001:db8::/32`, or an address, which is a network of one.
///
/// The result is in [`canonical`] form: `::ffff:10.0.0.0/104` is `10.0.0.0/8`. An IPv6 network, even `::/0`, contains
/// no IPv4 address.
///
/// # Errors
///
/// If it is not a network, if bits are set to the right of the prefix (network and address are both plausible), or if
/// it is an IPv4 address in IPv6 form with a prefix shorter than 96: `::ffff:10.0.0.0/8` is eight bits of zeros, and
/// literally contains all of IPv4.
pub fn parse_cidr(typed: &str) -> Result<IpNet, CidrError> {
    let typed = typed.trim();
    let (address, prefix) =
        typed.split_once('/').map_or((typed, None), |(address, prefix)| (address, Some(prefix)));
    let Ok(address) = address.parse::<IpAddr>() else {
        return Err(CidrError::new(
            typed,
            "is not a network",
            "write an IP address in full and a prefix, as in `10.0.0.0/8` or `2001:db8::/32`",
        ));
    };
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let Some(prefix) = prefix.map_or(Some(bits), |prefix| whole_number_up_to(prefix, bits)) else {
        return Err(CidrError::new(
            typed,
            "has a prefix that does not fit",
            format!("write a whole number from 0 to {bits} after the slash"),
        ));
    };
    let mapped = address.is_ipv6() && canonical(address).is_ipv4();
    if mapped && prefix < MAPPED_BITS {
        let meant = network(canonical(address), prefix.min(32)).trunc();
        return Err(CidrError::new(
            typed,
            "is an IPv4 address in IPv6 form, and its prefix takes in all of IPv4",
            if prefix <= 32 { format!("write `{meant}`") } else { "write it as an IPv4 network".to_owned() },
        ));
    }
    let typed_network = canonical_network(network(address, prefix));
    if typed_network != typed_network.trunc() {
        let (whole, single) = (typed_network.trunc(), single(typed_network.addr()));
        return Err(CidrError::new(
            typed,
            "has bits set to the right of its prefix",
            format!("write `{whole}` or `{single}`"),
        ));
    }
    Ok(typed_network)
}

/// Parses digits without leading zeros: other programs read `010` as eight.
fn whole_number_up_to(typed: &str, max: u8) -> Option<u8> {
    let plain = typed.bytes().all(|b| b.is_ascii_digit()) && (typed == "0" || !typed.starts_with('0'));
    typed.parse().ok().filter(|number| plain && *number <= max)
}

/// A network whose prefix fits; the address alone if it does not.
fn network(address: IpAddr, prefix: u8) -> IpNet {
    IpNet::new(address, prefix).unwrap_or_else(|_| single(address))
}

fn single(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

/// A network of IPv4 addresses in IPv6 form becomes an IPv4 network.
pub(crate) fn canonical_network(typed: IpNet) -> IpNet {
    match (canonical(typed.addr()), typed.prefix_len().checked_sub(MAPPED_BITS)) {
        // Only IPv6 input gets here: the prefix of an IPv4 network is at most 32.
        (address @ IpAddr::V4(_), Some(prefix)) => network(address, prefix),
        _ => typed,
    }
}

/// Which clients are counted as one: each IPv4 address separately, IPv6 addresses by their network.
///
/// A client with one IPv6 address usually controls all 2^64 addresses of its network, so a budget per address would
/// not limit it. The default is a /64, which every provider assigns to a single customer; many assign a /56 or a /48.
///
/// A translated address (`64:ff9b::1.2.3.4`, RFC 6052) is an IPv4 client behind a translator, and is counted as that
/// IPv4 address. As an IPv6 address it would share its /64 with all of IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grouping {
    ipv6_prefix: u8,
}

impl Default for Grouping {
    fn default() -> Grouping {
        Grouping { ipv6_prefix: Grouping::IPV6_PREFIX }
    }
}

impl Grouping {
    /// The prefixes that IPv6 addresses may be grouped by: from a whole provider to a single address.
    pub const IPV6_PREFIXES: RangeInclusive<u8> = 32..=128;

    /// The default prefix.
    pub const IPV6_PREFIX: u8 = 64;

    /// Groups IPv6 addresses by `bits` bits, if that is one of the [`IPV6_PREFIXES`](Grouping::IPV6_PREFIXES).
    pub fn by_ipv6_prefix(bits: u8) -> Option<Grouping> {
        Grouping::IPV6_PREFIXES.contains(&bits).then_some(Grouping { ipv6_prefix: bits })
    }

    /// The network that a client is counted in, which becomes part of a key.
    ///
    /// Its text (`203.0.113.7/32`, `2001:db8:1:2::/64`) is the same for every form of the address and in every
    /// version, because stored keys depend on it.
    pub fn network(self, client: IpAddr) -> IpNet {
        match canonical(client) {
            IpAddr::V4(address) => single(address.into()),
            IpAddr::V6(address) => match translated(address) {
                Some(ipv4) => single(ipv4),
                None => network(address.into(), self.ipv6_prefix).trunc(),
            },
        }
    }
}

/// The IPv4 address in a translated address.
fn translated(address: Ipv6Addr) -> Option<IpAddr> {
    match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => {
            let [.., a, b, c, d] = address.octets();
            Some(IpAddr::from([a, b, c, d]))
        }
        _ => None,
    }
}
