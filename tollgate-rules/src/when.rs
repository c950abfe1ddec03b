//! Which requests a rule concerns.

use ipnet::IpNet;

use crate::client::{canonical, canonical_network};
use crate::path::Pattern;
use crate::request::{Request, host_name};

/// Which requests a rule concerns: those that fit everything that is said. Of several choices for one thing, one must
/// fit; where nothing is said, everything fits.
#[derive(Clone, Debug, Default)]
pub struct When {
    /// Methods, in any case.
    pub methods: Vec<String>,
    /// Paths.
    pub paths: Vec<Pattern>,
    /// Hosts, in any case and without ports; `*.example.com` is every name below it, but not itself.
    pub hosts: Vec<String>,
    /// Headers, by names in lower case, all of which must be as said.
    pub headers: Vec<(String, Wanted)>,
    /// Claims of a verified token, all of which must be as said.
    pub claims: Vec<(String, Wanted)>,
    /// Networks of the client.
    pub clients: Vec<IpNet>,
}

/// What is wanted of a header or a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// It is there.
    Present,
    /// It is not there.
    Absent,
    /// It has one of these values. Of several lines of a header, one is enough.
    OneOf(Vec<String>),
}

impl Wanted {
    fn fits<'a>(&self, mut values: impl Iterator<Item = &'a [u8]>) -> bool {
        match self {
            Wanted::Present => values.next().is_some(),
            Wanted::Absent => values.next().is_none(),
            Wanted::OneOf(wanted) => {
                values.any(|value| wanted.iter().any(|wanted| wanted.as_bytes() == value.trim_ascii()))
            }
        }
    }
}

impl When {
    /// Whether a request is concerned.
    pub fn fits(&self, request: &impl Request) -> bool {
        let is_method = |method: &String| method.eq_ignore_ascii_case(request.method());
        (self.methods.is_empty() || self.methods.iter().any(is_method))
            && (self.paths.is_empty() || self.paths.iter().any(|it| it.matches(request.path())))
            && (self.hosts.is_empty() || self.hosts.iter().any(|it| is_host(it, request.host())))
            && (self.clients.is_empty() || is_in(&self.clients, request))
            && self.headers.iter().all(|(name, wanted)| wanted.fits(request.header(name)))
            && self
                .claims
                .iter()
                .all(|(name, wanted)| wanted.fits(request.claim(name).map(str::as_bytes).into_iter()))
    }
}

/// Whether a request's client is in one of the networks.
pub(crate) fn is_in(networks: &[IpNet], request: &impl Request) -> bool {
    // Who is in none need not be known: a request's address takes work, and may be missing.
    if networks.is_empty() {
        return false;
    }
    let client = canonical(request.client());
    networks.iter().any(|network| canonical_network(*network).contains(&client))
}

fn is_host(pattern: &str, host: &str) -> bool {
    let (pattern, host) = (host_name(pattern), host_name(host));
    match pattern.strip_prefix("*.") {
        Some(domain) => {
            let below = host.len().checked_sub(domain.len() + 1).filter(|length| *length > 0);
            below.is_some_and(|length| {
                let end = &host.as_bytes()[length..];
                end[0] == b'.' && end[1..].eq_ignore_ascii_case(domain.as_bytes())
            })
        }
        None => host.eq_ignore_ascii_case(pattern),
    }
}
