//! The address of the server, and how a connection to it is opened.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::io::tcp::TcpSettings;
use ::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use ::redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, TlsCertificates,
};
use tokio::sync::Mutex;

use super::{Settings, SettingsError};

/// Connecting takes longer than a decision may take, above all with TLS. Callers do not wait for it.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// A parsed address.
#[derive(Debug)]
pub(crate) enum Topology {
    One(Server),
    Cluster { seeds: Vec<Address>, access: NodeAccess },
}

impl Topology {
    pub(crate) fn new(settings: &Settings) -> Result<Topology, SettingsError> {
        let wrong = |error: RedisError| SettingsError::Address(error.to_string());
        let url = settings.url.as_str();
        let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
        let is_tls = scheme.starts_with("rediss");
        let tls = is_tls.then(|| {
            // Fails if a provider is already installed, which is fine.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let client_tls = settings
                .certificate
                .clone()
                .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
            TlsCertificates { client_tls, root_cert: settings.ca.clone() }
        });
        match scheme {
            "redis+sentinel" => {
                let list = HostList::parse(rest, SENTINEL_FORM, SENTINEL_PORT)?;
                if list.path.is_empty() {
                    return Err(list.wrong("the name of the master is missing"));
                }
                let client = list.sentinels().map_err(wrong)?;
                Ok(Topology::One(Server::Sentinel(Arc::new(Mutex::new(client)))))
            }
            "redis+cluster" | "rediss+cluster" => {
                let list = HostList::parse(rest, CLUSTER_FORM, REDIS_PORT)?;
                if !list.path.is_empty() {
                    return Err(list.wrong("a cluster has no numbered databases"));
                }
                let access = NodeAccess { user: list.user, tls };
                // An invalid configuration is reported now.
                access.to(&list.hosts[0]).map_err(wrong)?;
                Ok(Topology::Cluster { seeds: list.hosts, access })
            }
            _ => {
                let info = url.into_connection_info().map_err(wrong)?.set_tcp_settings(tcp());
                let client = match tls {
                    Some(certificates) => Client::build_with_tls(info, certificates),
                    None => Client::open(info),
                };
                client.map(Server::one).map(Topology::One).map_err(wrong)
            }
        }
    }
}

/// Without `TCP_NODELAY`, a call larger than one packet would wait for the acknowledgement of its first packet.
fn tcp() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Address {
    /// Parses `host:port` or `[::1]:port`.
    pub(crate) fn parse(text: &str) -> Option<Address> {
        let (host, port) = text.rsplit_once(':')?;
        Some(Address { host: unbracketed(host).to_owned(), port: port.parse().ok()? })
    }
}

fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Credentials and TLS configuration for all nodes of a cluster.
#[derive(Clone)]
pub(crate) struct NodeAccess {
    user: Option<(String, String)>,
    tls: Option<TlsCertificates>,
}

impl fmt::Debug for NodeAccess {
    /// Omits the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeAccess")
    }
}

impl NodeAccess {
    pub(crate) fn to(&self, address: &Address) -> Result<Server, RedisError> {
        let (host, port) = (address.host.clone(), address.port);
        let address = match &self.tls {
            Some(_) => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            None => ConnectionAddr::Tcp(host, port),
        };
        let mut user = RedisConnectionInfo::default();
        if let Some((name, password)) = &self.user {
            user = user.set_password(password);
            if !name.is_empty() {
                user = user.set_username(name);
            }
        }
        let info = address.into_connection_info()?.set_redis_settings(user).set_tcp_settings(tcp());
        let client = match &self.tls {
            Some(certificates) => Client::build_with_tls(info, certificates.clone())?,
            None => Client::open(info)?,
        };
        Ok(Server::one(client))
    }
}

#[derive(Clone)]
pub(crate) enum Server {
    One(Box<Client>),
    /// The current master according to the sentinels.
    Sentinel(Arc<Mutex<SentinelClient>>),
}

impl fmt::Debug for Server {
    /// Addresses contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}

impl Server {
    fn one(client: Client) -> Server {
        Server::One(Box::new(client))
    }

    /// Opens a connection within [`CONNECT_MAX`].
    pub(crate) async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_MAX)).set_response_timeout(None);
        let connecting = async {
            match self {
                Server::One(client) => client.get_multiplexed_async_connection_with_config(&config).await,
                Server::Sentinel(client) => {
                    client.lock().await.get_async_connection_with_config(&config).await
                }
            }
        };
        tokio::time::timeout(CONNECT_MAX, connecting).await.unwrap_or_else(|_| {
            let why = (::redis::ErrorKind::Io, "no connection within a second");
            Err(RedisError::from(why))
        })
    }
}

/// `[user:password@]host[:port][,host[:port]...][/path]`.
#[derive(Debug, PartialEq, Eq)]
struct HostList<'a> {
    user: Option<(String, String)>,
    hosts: Vec<Address>,
    path: &'a str,
    /// How to write an address of this kind.
    form: &'static str,
}

const REDIS_PORT: u16 = 6_379;
const SENTINEL_PORT: u16 = 26_379;
const SENTINEL_FORM: &str =
    "write sentinels as in redis+sentinel://user:password@host:26379,other:26379/master";
const CLUSTER_FORM: &str = "write a cluster as in redis+cluster://user:password@host:6379,other:6379";

/// Decodes percent-encoding.
fn unescaped(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

impl<'a> HostList<'a> {
    fn parse(text: &'a str, form: &'static str, port: u16) -> Result<HostList<'a>, SettingsError> {
        let wrong = |why: &str| SettingsError::Address(format!("{why}; {form}"));
        let (user, rest) = match text.rsplit_once('@') {
            Some((user, rest)) => {
                let (name, password) =
                    user.split_once(':').ok_or_else(|| wrong("a user needs a password"))?;
                (Some((unescaped(name), unescaped(password))), rest)
            }
            None => (None, text),
        };
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let address = |text: &str| match text.contains(':') && !text.ends_with(']') {
            true => Address::parse(text),
            false => Some(Address { host: unbracketed(text).to_owned(), port }),
        };
        let hosts: Option<Vec<_>> = hosts.split(',').map(address).collect();
        let hosts = hosts.filter(|hosts| hosts.iter().all(|address| !address.host.is_empty()));
        Ok(HostList {
            user,
            hosts: hosts.ok_or_else(|| wrong("the address of a host is wrong"))?,
            path,
            form,
        })
    }

    fn wrong(&self, why: &str) -> SettingsError {
        SettingsError::Address(format!("{why}; {}", self.form))
    }

    fn sentinels(&self) -> Result<SentinelClient, RedisError> {
        let hosts = self.hosts.iter().map(|it| ConnectionAddr::Tcp(it.host.clone(), it.port));
        let mut builder = SentinelClientBuilder::new(hosts, self.path, SentinelServerType::Master)?
            .set_client_to_redis_tcp_settings(tcp());
        if let Some((name, password)) = &self.user {
            if !name.is_empty() {
                builder = builder.set_client_to_redis_username(name);
            }
            builder = builder.set_client_to_redis_password(password);
        }
        builder.build()
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
            HostList::parse("me:a%40b@one:1,two,[::1],[::1]:2/primary", SENTINEL_FORM, 26_379).unwrap(),
            HostList {
                user: Some(("me".to_owned(), "a@b".to_owned())),
                hosts: vec![
                    address("one", 1),
                    address("two", 26_379),
                    address("::1", 26_379),
                    address("::1", 2)
                ],
                path: "primary",
                form: SENTINEL_FORM,
            }
        );
    }

    #[test]
    fn address_error_shows_the_expected_form() {
        let sentinels = ["", "host:1", "host:1/", "host:x/master", "user@host/master", "one,,two/master"];
        let clusters = ["", "host:x", "user@host", "one,,two", "one:1,two:2/1"];
        for (form, rests) in [("redis+sentinel://", &sentinels[..]), ("redis+cluster://", &clusters[..])] {
            for rest in rests {
                let url = format!("{form}{rest}");
                let error = Topology::new(&Settings::new(&url)).unwrap_err().to_string();
                assert!(error.contains(form), "{url}: {error}");
            }
        }
    }
}
