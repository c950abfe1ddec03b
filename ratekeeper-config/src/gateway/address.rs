//! The address of an upstream: the URL of a server, with an optional path prefix.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ratekeeper_rules::path::{PathNormalization, normalise};

use crate::error::quoted;
use crate::quantity::Fault;

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

pub(super) fn address(word: &str) -> Result<Address, Fault> {
    let fault = |what: &str, instead: &str| Err(Fault { what: what.to_owned(), instead: instead.to_owned() });
    let unfit = || Fault {
        what: format!("{} is not the address of an upstream", quoted(word)),
        instead: EXAMPLE.to_owned(),
    };
    let Some((scheme, rest)) = word.split_once("://") else {
        let with_scheme = format!("http://{word}");
        let is_host = word.contains(['.', ':']) || word == "localhost";
        return Err(match is_host && address(&with_scheme).is_ok() {
            true => Fault { instead: format!("write {}", quoted(&with_scheme)), ..unfit() },
            false => unfit(),
        });
    };
    let is_tls = match scheme {
        "http" => false,
        "https" => true,
        _ => return Err(unfit()),
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if authority.contains('@') {
        return fault("an upstream has no user and no password", EXAMPLE);
    }
    if word.contains(|c: char| !c.is_ascii_graphic()) {
        return Err(unfit());
    }
    if path.contains(['?', '#']) {
        return fault("an upstream has no query and no fragment", "remove it, with the `?` or `#` in front");
    }
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port),
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(unfit)?,
        None if port.is_empty() => [80, 443][usize::from(is_tls)],
        None => return Err(unfit()),
    };
    let ip = if authority.starts_with('[') {
        Some(host.parse::<Ipv6Addr>().map_err(|_| unfit())?.into())
    } else if looks_numeric(host) {
        // A resolver may accept other notations of an IPv4 address, so only the dotted form is allowed.
        Some(IpAddr::from(host.parse::<Ipv4Addr>().map_err(|_| unfit())?))
    } else if is_name(host) {
        None
    } else {
        return Err(unfit());
    };
    if ip.is_some_and(is_link_local) {
        let what = format!("{} is link-local: clouds keep their machines' passwords there", quoted(host));
        return fault(&what, "write the address of a server of your own");
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

/// Reads the path prefix. It must be normalised, as the paths of requests are.
fn prefix(path: &str) -> Result<String, Fault> {
    let typed = path.trim_end_matches('/');
    if typed.is_empty() {
        return Ok(String::new());
    }
    match normalise(typed, PathNormalization::default()) {
        Ok(normal) if normal == typed => Ok(normal.into_owned()),
        normal => Err(Fault {
            what: format!("the path {} can be read in several ways", quoted(typed)),
            instead: match normal {
                Ok(normal) => format!("write {} behind the host", quoted(&normal)),
                Err(_) => "write a path of plain letters, as in `http://127.0.0.1:8081/api`".to_owned(),
            },
        }),
    }
}
