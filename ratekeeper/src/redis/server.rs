//! A server, and how a connection to it is opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::address::{Address, Endpoint, HostList, Login, ServerAddress};
use super::link::{Link, LinkError};
use super::network::{Network, SystemNetwork};
use super::resp::{self, RespValue};
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
        let address =
            ServerAddress::parse(&settings.url).map_err(|error| SettingsError::Address(error.to_string()))?;
        let network: Arc<dyn Network> = match &settings.environment.network {
            Some(network) => network.clone(),
            None => Arc::new(SystemNetwork::new(settings, settings.url.starts_with("rediss"))?),
        };
        Ok(match address {
            ServerAddress::One { endpoint, login } => Topology::One(Server::one(endpoint, login, network)),
            ServerAddress::Sentinel(HostList { user, hosts, path, .. }) => {
                let login = Login { user, database: 0 };
                let sentinels = Sentinels {
                    hosts: hosts.into_iter().map(Endpoint::Tcp).collect(),
                    master: path,
                    next: AtomicUsize::new(0),
                };
                Topology::One(Server(Arc::new(Access {
                    location: Location::OfMaster(sentinels),
                    login,
                    network,
                })))
            }
            ServerAddress::Cluster(HostList { user, hosts, .. }) => {
                let login = Login { user, database: 0 };
                Topology::Cluster { seeds: hosts, access: NodeAccess { login, network } }
            }
        })
    }
}

/// Login and network of all nodes of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct NodeAccess {
    login: Login,
    network: Arc<dyn Network>,
}

impl NodeAccess {
    pub(crate) fn to(&self, address: &Address) -> Server {
        Server::one(Endpoint::Tcp(address.clone()), self.login.clone(), self.network.clone())
    }
}

/// A server. Cloning is cheap.
#[derive(Clone, Debug)]
pub(crate) struct Server(Arc<Access>);

#[derive(Debug)]
struct Access {
    location: Location,
    login: Login,
    network: Arc<dyn Network>,
}

#[derive(Debug)]
enum Location {
    At(Endpoint),
    /// The current master according to the sentinels.
    OfMaster(Sentinels),
}

#[derive(Debug)]
struct Sentinels {
    hosts: Box<[Endpoint]>,
    master: String,
    /// The sentinel to query first: the next one after each connection, because one of them may be outdated.
    next: AtomicUsize,
}

impl Server {
    fn one(endpoint: Endpoint, login: Login, network: Arc<dyn Network>) -> Server {
        Server(Arc::new(Access { location: Location::At(endpoint), login, network }))
    }

    /// Opens a connection within [`CONNECT_MAX`].
    pub(crate) async fn connect(&self) -> Result<Link, LinkError> {
        let Access { location, login, network } = &*self.0;
        let connecting = async {
            let found;
            let endpoint = match location {
                Location::At(endpoint) => endpoint,
                Location::OfMaster(sentinels) => {
                    found = sentinels.find_master(&**network).await?;
                    &found
                }
            };
            let mut link = Link::log_in(network.open(endpoint).await?, login).await?;
            if let Location::OfMaster(_) = location {
                check_role(&mut link).await?;
            }
            Ok(link)
        };
        tokio::time::timeout(CONNECT_MAX, connecting).await.unwrap_or(Err(LinkError::TimedOut))
    }
}

/// A sentinel without contact to the others may name an old master.
async fn check_role(link: &mut Link) -> Result<(), LinkError> {
    link.send(b"*1\r\n$4\r\nROLE\r\n").await?;
    let reply = link.receive().await?;
    // The login may have no permission for this command.
    let role = reply.elements().and_then(|elements| elements.first()?.text());
    match role.is_none_or(|role| role == "master") {
        true => Ok(()),
        false => Err(LinkError::NotMaster),
    }
}

impl Sentinels {
    /// Time limit for one sentinel to answer, so that the next one can be queried.
    const ANSWER_MAX: Duration = Duration::from_millis(250);

    async fn find_master(&self, network: &dyn Network) -> Result<Endpoint, LinkError> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut failure = LinkError::TimedOut;
        for turn in 0..self.hosts.len() {
            let sentinel = &self.hosts[first.wrapping_add(turn) % self.hosts.len()];
            match tokio::time::timeout(Self::ANSWER_MAX, self.query(network, sentinel)).await {
                Ok(Ok(master)) => return Ok(master),
                Ok(Err(error)) => failure = error,
                Err(_) => {}
            }
        }
        Err(failure)
    }

    async fn query(&self, network: &dyn Network, sentinel: &Endpoint) -> Result<Endpoint, LinkError> {
        let mut link = Link::log_in(network.open(sentinel).await?, &Login::default()).await?;
        let mut command = Vec::new();
        resp::push_all(&mut command, &[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self.master.as_bytes()]);
        link.send(&command).await?;
        let unknown = || LinkError::UnknownMaster(self.master.clone());
        let reply = link.receive().await?;
        if let RespValue::Error(text) = reply {
            return Err(LinkError::of_reply(text));
        }
        let Some([host, port]) = reply.elements() else { return Err(unknown()) };
        let host = host.text().ok_or_else(unknown)?.to_owned();
        let port = port.text().and_then(|port| port.parse().ok()).ok_or_else(unknown)?;
        Ok(Endpoint::Tcp(Address { host, port }))
    }
}
