//! A configuration at work: what goes where, and by which limits.

use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use tollgate::tower::token::Tokens;
use tollgate::tower::{Chosen, ChosenSlots, OtherSpellings, RateLimitLayer};
use tollgate_config::{Config, Gateway, PathEdit, Secret, Timeouts};
use tollgate_rules::client::Trust;
use tollgate_rules::key::{Key, Part};
use tollgate_rules::path::Spelling;
use tollgate_rules::rule::{Cost, Whose};
use tollgate_rules::when::When;

use super::StartError;
use super::heads::{Edits, is_forwarded};
use super::record::observer;
use super::ticks::Ticker;
use super::upstream::Upstream;
use crate::doors::DoorSettings;
use crate::limits::{self, Stored};
use crate::metrics::{Draft, RouteMetrics};

/// Everything that a request is held against, swapped whole when the configuration changes.
#[derive(Debug)]
pub(crate) struct State<S> {
    /// None if the file has no limits.
    pub(crate) limits: Option<RateLimitLayer<S>>,
    /// For each worker its own, so that workers do not wait for each other over who holds a route.
    routes: Vec<Vec<Arc<Route>>>,
    pub(crate) upstreams: Vec<Arc<Upstream>>,
    pub(crate) client: Trust,
    pub(crate) paths: Spelling,
    /// Verify the tokens whose claims routes go by.
    pub(crate) tokens: Option<Arc<Tokens>>,
    /// Headers that the configuration goes by or sets.
    pub(crate) header_names: Arc<[HeaderName]>,
    /// Whether some of them tell for whom a request is.
    pub(crate) reads_forwarded: bool,
    pub(crate) timeouts: Timeouts,
    pub(crate) has_access_log: bool,
    /// What those have to know who ask the admin listener for metrics.
    pub(crate) admin_token: Option<Secret>,
    pub(crate) max_connections: usize,
    /// How many requests may be under way.
    pub(crate) max_in_flight: usize,
    /// How many of them on routes that are not critical.
    pub(crate) max_uncritical: usize,
    /// What the doors beside the gateway go by.
    pub(crate) doors: DoorSettings,
}

/// What goes where.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    /// Its name, as rules see it.
    pub(crate) id: tollgate::tower::Route,
    pub(crate) when: When,
    pub(crate) upstream: Arc<Upstream>,
    /// Its limits, and how many requests may be under way.
    pub(crate) chosen: Chosen,
    pub(crate) chosen_slots: ChosenSlots,
    pub(crate) is_critical: bool,
    /// Whose word counts.
    pub(crate) trust: Trust,
    pub(crate) timeout: Duration,
    pub(crate) path: PathEdit,
    /// Of the paths that it was found by.
    pub(crate) spelling: Spelling,
    pub(crate) metrics: Arc<RouteMetrics>,
    /// Of all limits of the file, by their numbers.
    pub(crate) limit_names: Arc<[String]>,
    pub(crate) request_edits: Edits,
    pub(crate) response_edits: Edits,
}

/// Of ten requests under way, so many may be on routes that are not critical, where there are critical ones.
const UNCRITICAL_OF_TEN: usize = 8;

/// Every header that limits or routes go by, and those that routes set: what a client may neither call a matter between
/// two hops, nor send under another spelling.
fn header_names(config: &Config, gateway: &Gateway) -> Vec<HeaderName> {
    let mut names: Vec<&str> = Vec::new();
    for rule in config.rules.rules() {
        names.extend(in_key(&rule.key).chain(in_when(&rule.when)));
        names.extend(match &rule.cost {
            Cost::Header { name, .. } => Some(name.as_str()),
            _ => None,
        });
        for it in &rule.overrides {
            if let Whose::When(when) = &it.whose {
                names.extend(in_when(when));
            }
        }
    }
    for slots in &config.slots {
        names.extend(in_key(&slots.key).chain(in_when(&slots.when)));
    }
    for route in &gateway.routes {
        names.extend(in_when(&route.when));
        let edits = &route.request_headers;
        names.extend(edits.set.iter().chain(&edits.add).map(|(name, _)| name.as_str()));
    }
    names.extend(config.jwt.iter().map(|jwt| jwt.header.as_str()));
    let mut names: Vec<HeaderName> = names.into_iter().filter_map(|name| name.parse().ok()).collect();
    names.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    names
}

fn in_key(key: &Key) -> impl Iterator<Item = &str> {
    key.parts().filter_map(|part| match part {
        Part::Header(name) => Some(name.as_str()),
        _ => None,
    })
}

fn in_when(when: &When) -> impl Iterator<Item = &str> {
    when.headers.iter().map(|(name, _)| name.as_str())
}

impl<S: Stored> State<S> {
    /// What a configuration means, going on where the one `before` stands. If it does not work, nothing has happened.
    pub(crate) fn new(
        config: &Config,
        gateway: &Gateway,
        workers: usize,
        ticker: &Arc<Ticker>,
        metrics: &mut Draft,
        before: Option<&State<S>>,
    ) -> Result<State<S>, StartError> {
        let names: Arc<[String]> = limits::names(config).collect();
        let tokens = limits::tokens(config).map_err(StartError::Limits)?;
        let mut upstreams = Vec::new();
        for upstream in &gateway.upstreams {
            // One that is the same keeps its connections, and what is known of its health.
            let same = before.and_then(|it| it.upstreams.iter().find(|old| old.config == *upstream));
            upstreams.push(match same {
                Some(same) => same.clone(),
                None => Arc::new(Upstream::new(upstream, workers, ticker).map_err(StartError::Tls)?),
            });
        }
        let has_limits = config.rules.rules().len() > 0 || limits::slots(config).next().is_some();
        // Who comes to a door may bring a limit along.
        let has_limits = has_limits || !config.doors.are_none();
        // Last of what can fail: limits that go on where others stand have begun to.
        let limits = match has_limits {
            false => None,
            true => {
                // Paths are brought into their normal form before the route is looked up.
                let builder = limits::builder(config, tokens.as_ref());
                let counts = names.iter().map(|name| metrics.limit(name)).collect();
                let builder = builder.other_spellings(OtherSpellings::Keep).observe(observer(counts));
                let builder = if config.doors.are_none() { builder } else { builder.may_lack_rules() };
                let before = before.and_then(|before| before.limits.as_ref());
                Some(S::limits(config, builder, before).map_err(StartError::Limits)?)
            }
        };
        let routes = gateway.routes.iter().zip(limits::own_slots(config)).map(|(route, own)| Route {
            metrics: metrics.route(&route.id),
            limit_names: names.clone(),
            chosen_slots: ChosenSlots(route.slots.iter().copied().chain(own).collect()),
            id: tollgate::tower::Route(route.id.as_str().into()),
            when: route.when.clone(),
            upstream: upstreams[route.upstream].clone(),
            chosen: Chosen(route.limits.as_slice().into()),
            is_critical: route.is_critical,
            trust: config.client.clone(),
            timeout: route.timeout,
            path: route.path.clone(),
            spelling: config.paths,
            request_edits: Edits::new(&route.request_headers),
            response_edits: Edits::new(&route.response_headers),
        });
        let routes: Vec<Route> = routes.collect();
        let max_in_flight = gateway.max_in_flight;
        let has_critical = routes.iter().any(|route| route.is_critical);
        let max_uncritical =
            if has_critical { (max_in_flight * UNCRITICAL_OF_TEN / 10).max(1) } else { max_in_flight };
        let header_names = header_names(config, gateway);
        Ok(State {
            limits,
            routes: (0..workers).map(|_| routes.iter().cloned().map(Arc::new).collect()).collect(),
            upstreams,
            client: config.client.clone(),
            paths: config.paths,
            tokens,
            reads_forwarded: header_names.iter().any(is_forwarded),
            header_names: header_names.into(),
            timeouts: gateway.timeouts,
            has_access_log: gateway.access_log,
            admin_token: config.admin.as_ref().and_then(|admin| admin.token.clone()),
            max_connections: gateway.max_connections,
            max_in_flight,
            max_uncritical,
            doors: DoorSettings::of(config),
        })
    }
    /// What goes where, for one of the workers.
    pub(crate) fn routes(&self, worker: usize) -> &[Arc<Route>] {
        &self.routes[worker]
    }
}
