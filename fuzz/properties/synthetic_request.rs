//! Synthetic requests.

use std::net::IpAddr;

use ratekeeper_rules::request::Request;

/// A synthetic request. Its path is normalized.
#[derive(Clone, Debug)]
pub(crate) struct SyntheticRequest {
    pub(crate) method: String,
    pub(crate) host: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) client: IpAddr,
    pub(crate) route: String,
    pub(crate) claims: Vec<(String, String)>,
    pub(crate) customs: Vec<(String, String)>,
}

impl SyntheticRequest {
    /// Returns the values of all headers with this name.
    pub(crate) fn lines<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        self.headers.iter().filter(move |(its, _)| its == name).map(|(_, value)| value.as_slice())
    }
}

fn named<'a>(all: &'a [(String, String)], name: &str) -> Option<&'a str> {
    all.iter().find(|(its, _)| its == name).map(|(_, value)| value.as_str())
}

impl Request for SyntheticRequest {
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
        self.lines(name)
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
