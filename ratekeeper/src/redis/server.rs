//! How a connection to a server is opened.

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

use super::address::{Address, HostList, ServerAddress};
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
        let address =
            ServerAddress::parse(&settings.url).map_err(|error| SettingsError::Address(error.to_string()))?;
        let tls = settings.url.starts_with("rediss").then(|| {
            // Fails if a provider is already installed, which is fine.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let client_tls = settings
                .certificate
                .clone()
                .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
            TlsCertificates { client_tls, root_cert: settings.ca.clone() }
        });
        match address {
            ServerAddress::Sentinel(list) => {
                let client = sentinels(&list).map_err(wrong)?;
                Ok(Topology::One(Server::Sentinel(Arc::new(Mutex::new(client)))))
            }
            ServerAddress::Cluster(list) => {
                let access = NodeAccess { user: list.user, tls };
                // An invalid configuration is reported now.
                access.to(&list.hosts[0]).map_err(wrong)?;
                Ok(Topology::Cluster { seeds: list.hosts, access })
            }
            ServerAddress::One(info) => {
                let info = info.set_tcp_settings(tcp());
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

fn sentinels(list: &HostList) -> Result<SentinelClient, RedisError> {
    let hosts = list.hosts.iter().map(Address::to_connection_addr);
    let mut builder = SentinelClientBuilder::new(hosts, &list.path, SentinelServerType::Master)?
        .set_client_to_redis_tcp_settings(tcp());
    if let Some((name, password)) = &list.user {
        if !name.is_empty() {
            builder = builder.set_client_to_redis_username(name);
        }
        builder = builder.set_client_to_redis_password(password);
    }
    builder.build()
}
