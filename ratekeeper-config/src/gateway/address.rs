//! The address of an upstream: the URL of a server, with an optional path prefix.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ratekeeper_rules::path::{PathNormalization, normalize};

use crate::error::quoted;
use crate::quantity::ValueError;

/// The address of an upstream server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Whether the scheme is `https`.
    pub is_tls: bool,
    /// A host name in lower case, or an IP address; IPv6 without brackets.
    pub host: String,
    /// The port. Default: 80, or 443 for `https`.
    pub port: u16,
    /// The prefix of every path, without a trailing slash. Usually empty.
    pub path: String,
}

const EXAMPLE: &str = "write as in `http://127.0.0.1:8081`";
/// The maximum of DNS.
const HOST_BYTES_MAX: usize = 253;

pub(super) fn address(word: &str) -> Result<Address, ValueError> {
    let value_error =
        |message: &str, help: &str| Err(ValueError { message: message.to_owned(), help: help.to_owned() });
    let name_error = || ValueError {
        message: format!("invalid upstream address {}", quoted(word)),
        help: EXAMPLE.to_owned(),
    };
    let Some((scheme, rest)) = word.split_once("://") else {
        let with_scheme = format!("http://{word}");
        let is_host = word.contains(['.', ':']) || word == "localhost";
        return Err(match is_host && address(&with_scheme).is_ok() {
            true => ValueError { help: format!("write {}", quoted(&with_scheme)), ..name_error() },
            false => name_error(),
        });
    };
    let is_tls = match scheme {
        "http" => false,
        "https" => true,
        _ => return Err(name_error()),
    };
    let (ca, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if ca.contains('@') {
        return value_error("the address of an upstream cannot contain a user or password", EXAMPLE);
    }
    if word.contains(|c: char| !c.is_ascii_graphic()) {
        return Err(name_error());
    }
    if path.contains(['?', '#']) {
        return value_error(
            "the address of an upstream cannot contain a query or fragment",
            "remove it, including the `?` or `#`",
        );
    }
    let (host, port) = match ca.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port),
        None => ca.split_at(ca.find(':').unwrap_or(ca.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(name_error)?,
        None if port.is_empty() => [80, 443][usize::from(is_tls)],
        None => return Err(name_error()),
    };
    let ip = if ca.starts_with('[') {
        Some(host.parse::<Ipv6Addr>().map_err(|_| name_error())?.into())
    } else if looks_numeric(host) {
        // A resolver may accept other notations of an IPv4 address, so only the dotted form is allowed.
        Some(IpAddr::from(host.parse::<Ipv4Addr>().map_err(|_| name_error())?))
    } else if is_name(host) {
        None
    } else {
        return Err(name_error());
    };
    if ip.is_some_and(is_link_local) {
        let message =
            format!("{} is a link-local address, where clouds serve machine credentials", quoted(host));
        return value_error(&message, "write the address of your service");
    }
    let host = ip.map_or_else(|| host.to_ascii_lowercase(), |ip| ip.to_string());
    Ok(Address { is_tls, host, port, path: prefix(path)? })
}

fn is_name(host: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !host.is_empty()
        && host.len() <= HOST_BYTES_MAX
        && host.bytes().all(is_good)
        && !host.starts_with(['-', '.'])
}

/// Whether the last label of a host is a number. Resolvers take these hosts for IPv4 addresses: `2852039166` and
/// `0xa9fea9fe` are 169.254.169.254.
fn looks_numeric(host: &str) -> bool {
    let last = host.trim_end_matches('.').rsplit('.').next().unwrap_or_default();
    let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let hex = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    !last.is_empty() && (last.bytes().all(|byte| byte.is_ascii_digit()) || hex.is_some_and(is_hex))
}

/// Whether an address is link-local. Cloud metadata services, which serve credentials, use these addresses, so an
/// upstream may not: neither as a configured address nor as the result of name resolution.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Reads the path prefix. It must be normalized, as the paths of requests are.
fn prefix(path: &str) -> Result<String, ValueError> {
    let typed = path.trim_end_matches('/');
    if typed.is_empty() {
        return Ok(String::new());
    }
    match normalize(typed, PathNormalization::default()) {
        Ok(normal) if normal == typed => Ok(normal.into_owned()),
        normal => Err(ValueError {
            message: format!("the path {} is not normalized", quoted(typed)),
            help: match normal {
                Ok(normal) => format!("write {} after the host", quoted(&normal)),
                Err(_) => "write a plain path, as in `http://127.0.0.1:8081/api`".to_owned(),
            },
        }),
    }
}
