//! The address of Redis: one parser, for a check of a configuration and for the connection.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

/// Why an address cannot be used. It quotes nothing of the address, which may contain a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; write it as in {example}")]
#[non_exhaustive]
pub struct AddressError {
    /// What is wrong.
    pub reason: &'static str,
    /// A valid address of this kind.
    pub example: &'static str,
}

/// Checks an address as [`Settings::new`](super::Settings::new) takes it, without a connection.
///
/// # Errors
/// Returns the reason if the address cannot be used.
pub fn check_address(url: &str) -> Result<(), AddressError> {
    ServerAddress::parse(url).map(drop)
}

const SERVER_EXAMPLE: &str = "redis://127.0.0.1:6379/0";
const SOCKET_EXAMPLE: &str = "unix:///run/redis.sock";
const SENTINEL_EXAMPLE: &str = "redis+sentinel://user:password@host:26379,other:26379/master";
const CLUSTER_EXAMPLE: &str = "redis+cluster://user:password@host:6379,other:6379";
/// The password has a slash.
const ESCAPED_EXAMPLE: &str = "redis://user:pass%2Fword@host:6379";

const WRONG_HOST: &str = "the host or port is invalid";
const WRONG_DATABASE: &str = "the database is not a number from 0";
const WRONG_QUERY: &str = "the address contains `?` or `#`";

const REDIS_PORT: u16 = 6_379;
const SENTINEL_PORT: u16 = 26_379;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Tcp(Address),
    Unix(PathBuf),
}

/// What a connection sends first.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Login {
    /// The name, which may be empty, and the password.
    pub(crate) user: Option<(String, String)>,
    pub(crate) database: u32,
}

impl fmt::Debug for Login {
    /// Omits the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("database", &self.database).finish_non_exhaustive()
    }
}

/// A parsed address. It has no `Debug`, because it may contain a password.
pub(crate) enum ServerAddress {
    One {
        endpoint: Endpoint,
        login: Login,
    },
    /// The path is the name of the master.
    Sentinel(HostList),
    Cluster(HostList),
}

impl ServerAddress {
    pub(crate) fn parse(url: &str) -> Result<ServerAddress, AddressError> {
        let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
        match scheme {
            "redis+sentinel" => {
                let list = HostList::parse(rest, SENTINEL_EXAMPLE, SENTINEL_PORT)?;
                match list.path.is_empty() {
                    true => Err(list.error("the name of the master is missing")),
                    false => Ok(ServerAddress::Sentinel(list)),
                }
            }
            "redis+cluster" | "rediss+cluster" => {
                let list = HostList::parse(rest, CLUSTER_EXAMPLE, REDIS_PORT)?;
                match list.path.is_empty() {
                    true => Ok(ServerAddress::Cluster(list)),
                    false => Err(list.error("a cluster has no numbered databases")),
                }
            }
            "unix" => socket(rest),
            "redis" | "rediss" => server(rest),
            _ => Err(AddressError { reason: "the scheme is unknown", example: SERVER_EXAMPLE }),
        }
    }
}

/// Parses the address of a Unix socket, whose user and database are in the query.
fn socket(rest: &str) -> Result<ServerAddress, AddressError> {
    let error = |reason| AddressError { reason, example: SOCKET_EXAMPLE };
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    if !path.starts_with('/') {
        return Err(error("the absolute path of the socket is missing"));
    }
    let (mut login, mut name, mut password) = (Login::default(), String::new(), None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("db", number)) => login.database = number.parse().map_err(|_| error(WRONG_DATABASE))?,
            Some(("user", value)) => name = unescaped(value),
            Some(("pass", value)) => password = Some(unescaped(value)),
            _ => return Err(error("the parameters of a socket are `db`, `user` and `pass`")),
        }
    }
    login.user = password.map(|password| (name, password));
    Ok(ServerAddress::One { endpoint: Endpoint::Unix(unescaped(path).into()), login })
}

/// Parses the address of one server.
fn server(rest: &str) -> Result<ServerAddress, AddressError> {
    let error = |reason| AddressError { reason, example: SERVER_EXAMPLE };
    let (user, behind) = match rest.rsplit_once('@') {
        Some((user, behind)) => (Some(user), behind),
        None => (None, rest),
    };
    if user.is_some_and(|user| user.contains(['/', '?', '#'])) {
        let reason = "the password contains `/`, `?` or `#`: write %2F, %3F or %23";
        return Err(AddressError { reason, example: ESCAPED_EXAMPLE });
    }
    if behind.contains(['?', '#']) {
        return Err(error(WRONG_QUERY));
    }
    let (hosts, database) = behind.split_once('/').unwrap_or((behind, ""));
    if hosts.contains(',') {
        let reason = "only Sentinel and Cluster have several hosts";
        return Err(AddressError { reason, example: CLUSTER_EXAMPLE });
    }
    let address = Address::parse(hosts, REDIS_PORT).ok_or_else(|| error(WRONG_HOST))?;
    let digits = if database.is_empty() { "0" } else { database };
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let database = digits.parse().ok().filter(|_| is_number).ok_or_else(|| error(WRONG_DATABASE))?;
    // Without a password there is no login: a server that needs none rejects one, and another reports that it is missing.
    let user = user.and_then(|user| user.split_once(':')).filter(|(_, password)| !password.is_empty());
    let user = user.map(|(name, password)| (unescaped(name), unescaped(password)));
    Ok(ServerAddress::One { endpoint: Endpoint::Tcp(address), login: Login { user, database } })
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Address {
    /// Parses `host:port`, `[::1]:port`, or either without a port.
    pub(crate) fn parse(text: &str, default_port: u16) -> Option<Address> {
        let (host, port) = match text.rsplit_once(':').filter(|_| !text.ends_with(']')) {
            Some((host, port)) => {
                let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
                (host, port.parse().ok().filter(|_| is_number)?)
            }
            None => (text, default_port),
        };
        let name = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_name = |c: char| !c.is_whitespace() && !c.is_control() && !"[]/?#@\\:<>^|%".contains(c);
        let is_host = match name {
            Some(name) => name.parse::<Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.chars().all(is_name),
        };
        (is_host && port != 0).then(|| Address { host: name.unwrap_or(host).to_owned(), port })
    }

    /// Parses the address in a redirection of a cluster node, which may have no host, or IPv6 without brackets.
    pub(crate) fn parse_redirection(text: &str) -> Option<Address> {
        let (host, port) = text.rsplit_once(':')?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Some(Address { host: bare.to_owned(), port: port.parse().ok()? })
    }
}

/// `[user:password@]host[:port][,host[:port]...][/path]`.
#[derive(PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct HostList {
    pub(crate) user: Option<(String, String)>,
    pub(crate) hosts: Vec<Address>,
    pub(crate) path: String,
    example: &'static str,
}

/// Decodes percent-encoding.
fn unescaped(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

impl HostList {
    fn parse(text: &str, example: &'static str, port: u16) -> Result<HostList, AddressError> {
        let error = |reason| AddressError { reason, example };
        let (user, rest) = match text.rsplit_once('@') {
            Some((user, rest)) => {
                let (name, password) =
                    user.split_once(':').ok_or_else(|| error("a user needs a password"))?;
                (Some((unescaped(name), unescaped(password))), rest)
            }
            None => (None, text),
        };
        if rest.contains(['?', '#']) {
            return Err(error(WRONG_QUERY));
        }
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let hosts: Option<Vec<_>> = hosts.split(',').map(|host| Address::parse(host, port)).collect();
        let hosts = hosts.ok_or_else(|| error(WRONG_HOST))?;
        Ok(HostList { user, hosts, path: path.to_owned(), example })
    }

    fn error(&self, reason: &'static str) -> AddressError {
        AddressError { reason, example: self.example }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> Address {
        Address { host: host.to_owned(), port }
    }

    #[test]
    fn multiple_hosts_are_parsed() {
        assert_eq!(
            HostList::parse("me:a%40b@one:1,two,[::1],[::1]:2/primary", SENTINEL_EXAMPLE, 26_379).unwrap(),
            HostList {
                user: Some(("me".to_owned(), "a@b".to_owned())),
                hosts: vec![
                    address("one", 1),
                    address("two", 26_379),
                    address("::1", 26_379),
                    address("::1", 2)
                ],
                path: "primary".to_owned(),
                example: SENTINEL_EXAMPLE,
            }
        );
    }

    #[test]
    fn address_error_shows_a_valid_address() {
        let sentinels = ["", "host:1", "host:1/", "host:x/master", "user@host/master", "one,,two/master"];
        let clusters = ["", "host:x", "user@host", "one,,two", "one:1,two:2/1", "ho st"];
        for (scheme, rests) in [("redis+sentinel://", &sentinels[..]), ("redis+cluster://", &clusters[..])] {
            for rest in rests {
                let url = format!("{scheme}{rest}");
                let error = check_address(&url).unwrap_err();
                assert!(error.to_string().contains(scheme), "{url}: {error}");
            }
        }
        for error in [SERVER_EXAMPLE, SOCKET_EXAMPLE, SENTINEL_EXAMPLE, CLUSTER_EXAMPLE].map(check_address) {
            assert_eq!(error, Ok(()));
        }
    }
}
