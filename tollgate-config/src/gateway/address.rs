//! The address of an upstream: the URL of a server, without anything that a request brings itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tollgate_rules::path::{Spelling, normalise};

use crate::error::quoted;
use crate::quantity::Fault;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Whether it is `https`.
    pub is_tls: bool,
    /// A name in lower case, or an IP address; IPv6 without brackets.
    pub host: String,
    /// The port; 80 or 443 where none is written.
    pub port: u16,
    /// What stands in front of every path, without a slash at its end; mostly empty.
    pub path: String,
}

const EXAMPLE: &str = "write as in `http://127.0.0.1:8081`";
/// As DNS has it.
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
        // What is no address of the usual spelling may still be one for whoever looks it up.
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

/// Whether a host ends as a number, which makes it an IPv4 address to those who look up names: `2852039166` and
/// `0xa9fea9fe` are 169.254.169.254.
fn looks_numeric(host: &str) -> bool {
    let last = host.trim_end_matches('.').rsplit('.').next().unwrap_or_default();
    let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let hex = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    !last.is_empty() && (last.bytes().all(|byte| byte.is_ascii_digit()) || hex.is_some_and(is_hex))
}

/// Whether an address is for machines on the same link only, as those are at which clouds keep their machines' passwords.
/// No upstream is there: not by its address, which a configuration cannot have, and not by a name that leads there.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// What stands in front of every path. It must be what requests are compared by, too.
fn prefix(path: &str) -> Result<String, Fault> {
    let typed = path.trim_end_matches('/');
    if typed.is_empty() {
        return Ok(String::new());
    }
    match normalise(typed, Spelling::default()) {
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
