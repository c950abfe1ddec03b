//! Conditions: which requests a rule applies to.

use std::collections::BTreeSet;

use ipnet::IpNet;

use crate::client::{canonical, canonical_network};
use crate::path::Pattern;
use crate::request::{Request, host_name};
use crate::spelling::trim;

/// The conditions of a rule. A request must fit all that are set; of several values in one condition, one must fit.
/// An empty condition fits every request.
#[derive(Clone, Debug, Default)]
pub struct When {
    /// Methods, case-insensitive.
    pub methods: Vec<String>,
    /// Path patterns.
    pub paths: Vec<Pattern>,
    /// Hosts, case-insensitive and without ports; `*.example.com` is every name below it, but not itself.
    pub hosts: Vec<String>,
    /// Headers, by name in lower case; all must fit.
    pub headers: Vec<(String, ValueCondition)>,
    /// Claims of a verified token; all must fit.
    pub claims: Vec<(String, ValueCondition)>,
    /// Networks that contain the client.
    pub clients: Vec<IpNet>,
}

/// The condition on a header or a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueCondition {
    /// It is present.
    Present,
    /// It is absent.
    Absent,
    /// It has one of these values. If a header has several lines, one is enough.
    OneOf(Vec<String>),
}

impl ValueCondition {
    fn fits<'a>(&self, mut values: impl Iterator<Item = &'a [u8]>) -> bool {
        match self {
            ValueCondition::Present => values.next().is_some(),
            ValueCondition::Absent => values.next().is_none(),
            ValueCondition::OneOf(condition) => {
                values.any(|value| condition.iter().any(|condition| condition.as_bytes() == trim(value)))
            }
        }
    }
}

impl When {
    /// The conditions as text: the same for conditions that differ only in order, letter case or repetition.
    pub(crate) fn canonical_text(&self) -> String {
        fn sorted(name: &str, values: impl Iterator<Item = String>) -> Option<String> {
            let values: BTreeSet<String> = values.collect();
            (!values.is_empty()).then(|| format!("{name} {values:?}"))
        }
        let lower = |values: &[String]| values.iter().map(|it| it.to_ascii_lowercase()).collect::<Vec<_>>();
        let named = |conditions: &[(String, ValueCondition)]| {
            let text = |(name, condition): &(String, ValueCondition)| match condition {
                ValueCondition::Present => format!("{name:?} present"),
                ValueCondition::Absent => format!("{name:?} absent"),
                ValueCondition::OneOf(values) => {
                    format!("{name:?} {:?}", values.iter().collect::<BTreeSet<_>>())
                }
            };
            conditions.iter().map(text).collect::<Vec<_>>()
        };
        let conditions = [
            sorted("methods", lower(&self.methods).into_iter()),
            sorted("paths", self.paths.iter().map(Pattern::to_string)),
            sorted("hosts", lower(&self.hosts).into_iter()),
            sorted("headers", named(&self.headers).into_iter()),
            sorted("claims", named(&self.claims).into_iter()),
            sorted("clients", self.clients.iter().map(|it| canonical_network(*it).to_string())),
        ];
        conditions.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }

    /// Whether the rule applies to a request.
    pub fn fits(&self, request: &impl Request) -> bool {
        let is_method = |method: &String| method.eq_ignore_ascii_case(request.method());
        (self.methods.is_empty() || self.methods.iter().any(is_method))
            && (self.paths.is_empty() || self.paths.iter().any(|it| it.matches(request.path())))
            && (self.hosts.is_empty() || self.hosts.iter().any(|it| is_host(it, request.host())))
            && (self.clients.is_empty() || is_in(&self.clients, request))
            && self.headers.iter().all(|(name, condition)| condition.fits(request.header(name)))
            && self
                .claims
                .iter()
                .all(|(name, condition)| condition.fits(request.claim(name).map(str::as_bytes).into_iter()))
    }
}

impl When {
    /// The headers that the conditions read, in lower case.
    pub fn header_names(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|(name, _)| name.as_str())
    }

    /// Whether every request that `other` fits certainly fits here as well. Conservative: `false` may be wrong.
    pub fn covers(&self, other: &When) -> bool {
        fn each<T>(wide: &[T], narrow: &[T], covers: impl Fn(&T, &T) -> bool) -> bool {
            let is_covered = |one: &T| wide.iter().any(|it| covers(it, one));
            wide.is_empty() || (!narrow.is_empty() && narrow.iter().all(is_covered))
        }
        each(&self.methods, &other.methods, |a, b| a.eq_ignore_ascii_case(b))
            && each(&self.hosts, &other.hosts, |a, b| a.eq_ignore_ascii_case(b) || is_host(a, b))
            && each(&self.clients, &other.clients, |a, b| {
                canonical_network(*a).contains(&canonical_network(*b))
            })
            && self.headers.iter().all(|it| other.headers.contains(it))
            && self.claims.iter().all(|it| other.claims.contains(it))
            && each(&self.paths, &other.paths, Pattern::covers)
    }
}

/// Whether a request's client is in one of the networks.
pub(crate) fn is_in(networks: &[IpNet], request: &impl Request) -> bool {
    // Without networks, the client's address is not needed: it takes work to find, and may be missing.
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
