//! A request, as a test writes it down.

use std::net::IpAddr;

use tollgate_rules::path::{Spelling, normalise};
use tollgate_rules::request::Request;

/// `GET /` of `example.com`, from 203.0.113.7, unless something else is said.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    method: String,
    host: String,
    path: String,
    query: String,
    headers: Vec<(String, Vec<u8>)>,
    client: IpAddr,
    route: String,
    claims: Vec<(String, String)>,
    customs: Vec<(String, String)>,
}

/// The request that everything is left out of.
pub(crate) fn sent() -> Sent {
    Sent {
        method: "GET".to_owned(),
        host: "example.com".to_owned(),
        path: "/".to_owned(),
        query: String::new(),
        headers: Vec::new(),
        client: IpAddr::from([203, 0, 113, 7]),
        route: String::new(),
        claims: Vec::new(),
        customs: Vec::new(),
    }
}

impl Sent {
    pub(crate) fn with_method(self, method: &str) -> Sent {
        Sent { method: method.to_owned(), ..self }
    }

    pub(crate) fn for_host(self, host: &str) -> Sent {
        Sent { host: host.to_owned(), ..self }
    }

    /// A path and what follows its `?`.
    pub(crate) fn target(self, target: &str) -> Sent {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let path = normalise(path, Spelling::default()).unwrap().into_owned();
        Sent { path, query: query.to_owned(), ..self }
    }

    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Sent {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    pub(crate) fn sent_by(self, client: &str) -> Sent {
        Sent { client: client.parse().unwrap(), ..self }
    }

    pub(crate) fn on_route(self, route: &str) -> Sent {
        Sent { route: route.to_owned(), ..self }
    }

    pub(crate) fn claim(mut self, name: &str, value: &str) -> Sent {
        self.claims.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn custom(mut self, name: &str, value: &str) -> Sent {
        self.customs.push((name.to_owned(), value.to_owned()));
        self
    }
}

fn named<'a>(all: &'a [(String, String)], name: &str) -> Option<&'a str> {
    all.iter().find(|(its, _)| its == name).map(|(_, value)| value.as_str())
}

impl Request for Sent {
    fn method(&self) -> &str {
        &self.method
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn path(&self) -> &str {
        &self.path
    }

    fn query(&self) -> &str {
        &self.query
    }

    fn header<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        self.headers.iter().filter(move |(its, _)| its == name).map(|(_, value)| value.as_slice())
    }

    fn client(&self) -> IpAddr {
        self.client
    }

    fn route(&self) -> &str {
        &self.route
    }

    fn claim(&self, name: &str) -> Option<&str> {
        named(&self.claims, name)
    }

    fn custom(&self, name: &str) -> Option<String> {
        named(&self.customs, name).map(str::to_owned)
    }
}
