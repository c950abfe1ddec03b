//! Where the server is, and how a connection to it is made.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use ::redis::{AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, RedisError, TlsCertificates};
use tokio::sync::Mutex;

use super::{Settings, SettingsError};

/// A connection takes longer to make than a decision may take, above all with TLS. Whoever asks meanwhile does not wait
/// for it.
const CONNECT_MAX: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(crate) enum Server {
    One(Box<Client>),
    /// The master, as the sentinels name it at the time.
    Watched(Arc<Mutex<SentinelClient>>),
}

impl fmt::Debug for Server {
    /// Addresses hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}

impl Server {
    pub(crate) fn new(settings: &Settings) -> Result<Server, SettingsError> {
        let wrong = |error: RedisError| SettingsError::Address(error.to_string());
        let url = settings.url.as_str();
        if let Some(sentinels) = url.strip_prefix("redis+sentinel://") {
            let client = Sentinels::parse(sentinels)?.client().map_err(wrong)?;
            return Ok(Server::Watched(Arc::new(Mutex::new(client))));
        }
        if !url.starts_with("rediss:") {
            return Client::open(url).map(Server::one).map_err(wrong);
        }
        // Of two that install one, the second finds it there.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client_tls = settings
            .certificate
            .clone()
            .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
        let certificates = TlsCertificates { client_tls, root_cert: settings.authority.clone() };
        Client::build_with_tls(url, certificates).map(Server::one).map_err(wrong)
    }

    fn one(client: Client) -> Server {
        Server::One(Box::new(client))
    }

    /// Makes a connection, within [`CONNECT_MAX`].
    pub(crate) async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_MAX)).set_response_timeout(None);
        let connecting = async {
            match self {
                Server::One(client) => client.get_multiplexed_async_connection_with_config(&config).await,
                Server::Watched(client) => {
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

/// `[user:password@]host:port[,host:port...]/master`.
#[derive(Debug, PartialEq, Eq)]
struct Sentinels<'a> {
    user: Option<(&'a str, &'a str)>,
    hosts: Vec<(&'a str, u16)>,
    master: &'a str,
}

const SENTINEL_PORT: u16 = 26_379;

impl<'a> Sentinels<'a> {
    fn parse(text: &'a str) -> Result<Sentinels<'a>, SettingsError> {
        let wrong = |why: &str| {
            SettingsError::Address(format!(
                "{why}; write sentinels as in redis+sentinel://user:password@host:26379,other:26379/master"
            ))
        };
        let (user, rest) = match text.rsplit_once('@') {
            Some((user, rest)) => {
                (Some(user.split_once(':').ok_or_else(|| wrong("a user needs a password"))?), rest)
            }
            None => (None, text),
        };
        let (hosts, master) = rest.split_once('/').unwrap_or((rest, ""));
        if master.is_empty() {
            return Err(wrong("the name of the master is missing"));
        }
        let host = |host: &'a str| match host.rsplit_once(':') {
            Some((host, port)) => port.parse().ok().map(|port| (host, port)),
            None => Some((host, SENTINEL_PORT)),
        };
        let hosts: Option<Vec<_>> = hosts.split(',').map(host).collect();
        let hosts = hosts.filter(|hosts| hosts.iter().all(|(host, _)| !host.is_empty()));
        Ok(Sentinels { user, hosts: hosts.ok_or_else(|| wrong("a sentinel's address is wrong"))?, master })
    }

    fn client(&self) -> Result<SentinelClient, RedisError> {
        let hosts = self.hosts.iter().map(|(host, port)| ConnectionAddr::Tcp((*host).to_owned(), *port));
        let mut builder = SentinelClientBuilder::new(hosts, self.master, SentinelServerType::Master)?;
        if let Some((name, password)) = self.user {
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

    #[test]
    fn sentinels_are_read() {
        assert_eq!(
            Sentinels::parse("me:a@b@one:1,two/primary").unwrap(),
            Sentinels {
                user: Some(("me", "a@b")),
                hosts: vec![("one", 1), ("two", 26_379)],
                master: "primary"
            }
        );
        for wrong in ["", "host:1", "host:1/", "host:x/master", "user@host/master", "one,,two/master"] {
            let told = Sentinels::parse(wrong).unwrap_err().to_string();
            assert!(told.contains("redis+sentinel://"), "{wrong}: {told}");
        }
    }
}
