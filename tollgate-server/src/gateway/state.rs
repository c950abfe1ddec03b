//! A configuration at work: what goes where, and by which limits.

use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use tollgate::tower::token::Tokens;
use tollgate::tower::{Chosen, ChosenSlots, OtherSpellings, RateLimitLayer};
use tollgate_config::{Config, Gateway, PathEdit, Timeouts};
use tollgate_rules::client::Trust;
use tollgate_rules::key::Part;
use tollgate_rules::path::Spelling;
use tollgate_rules::when::When;

use super::StartError;
use super::heads::Edits;
use super::record::observer;
use super::upstream::Upstream;
use crate::limits::{self, Stored};
use crate::metrics::{Metrics, RouteMetrics};

/// Everything that a request is held against, swapped whole when the configuration changes.
#[derive(Debug)]
pub(crate) struct State<S> {
    /// None if the file has no limits.
    pub(crate) limits: Option<RateLimitLayer<S>>,
    pub(crate) routes: Vec<Arc<Route>>,
    pub(crate) upstreams: Vec<Arc<Upstream>>,
    pub(crate) client: Trust,
    pub(crate) paths: Spelling,
    /// Verify the tokens whose claims routes go by.
    pub(crate) tokens: Option<Arc<Tokens>>,
    /// Headers that limits go by.
    pub(crate) key_headers: Vec<HeaderName>,
    pub(crate) timeouts: Timeouts,
    pub(crate) has_access_log: bool,
    pub(crate) max_connections: usize,
    /// How many requests may be under way.
    pub(crate) max_in_flight: usize,
    /// How many of them on routes that are not critical.
    pub(crate) max_uncritical: usize,
}

/// What goes where.
#[derive(Debug)]
pub(crate) struct Route {
    /// Its name, as rules see it.
    pub(crate) id: tollgate::tower::Route,
    pub(crate) when: When,
    pub(crate) upstream: Arc<Upstream>,
    /// Its limits, and how many requests may be under way.
    pub(crate) chosen: Chosen,
    pub(crate) chosen_slots: ChosenSlots,
    pub(crate) is_critical: bool,
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

impl<S: Stored> State<S> {
    /// What a configuration means, going on where the one `before` stands.
    pub(crate) fn new(
        config: &Config,
        gateway: &Gateway,
        workers: usize,
        metrics: &Metrics,
        before: Option<&State<S>>,
    ) -> Result<State<S>, StartError> {
        let names: Arc<[String]> = limits::names(config).collect();
        let tokens = limits::tokens(config).map_err(StartError::Limits)?;
        let has_limits = config.rules.rules().len() > 0 || limits::slots(config).next().is_some();
        let limits = match has_limits {
            false => None,
            true => {
                // Paths are brought into their normal form before the route is looked up.
                let builder = limits::builder(config, tokens.as_ref());
                let counts = names.iter().map(|name| metrics.limit(name)).collect();
                let builder = builder.other_spellings(OtherSpellings::Keep).observe(observer(counts));
                let before = before.and_then(|before| before.limits.as_ref());
                Some(S::limits(config, builder, before).map_err(StartError::Limits)?)
            }
        };
        let mut upstreams = Vec::new();
        for upstream in &gateway.upstreams {
            // One that is the same keeps its connections, and what is known of its health.
            let same = before.and_then(|it| it.upstreams.iter().find(|old| old.config == *upstream));
            upstreams.push(match same {
                Some(same) => same.clone(),
                None => Arc::new(Upstream::new(upstream, workers).map_err(StartError::Tls)?),
            });
        }
        let mut own_slots = config.slots.len();
        let routes = gateway.routes.iter().map(|route| {
            // Those of routes come behind those of the file.
            let own = route.in_flight.map(|_| {
                own_slots += 1;
                own_slots - 1
            });
            Arc::new(Route {
                metrics: metrics.route(&route.id),
                limit_names: names.clone(),
                chosen_slots: ChosenSlots(route.slots.iter().copied().chain(own).collect()),
                id: tollgate::tower::Route(route.id.as_str().into()),
                when: route.when.clone(),
                upstream: upstreams[route.upstream].clone(),
                chosen: Chosen(route.limits.as_slice().into()),
                is_critical: route.is_critical,
                timeout: route.timeout,
                path: route.path.clone(),
                spelling: config.paths,
                request_edits: Edits::new(&route.request_headers),
                response_edits: Edits::new(&route.response_headers),
            })
        });
        let routes: Vec<Arc<Route>> = routes.collect();
        let max_in_flight = gateway.max_in_flight;
        let has_critical = routes.iter().any(|route| route.is_critical);
        let max_uncritical =
            if has_critical { (max_in_flight * UNCRITICAL_OF_TEN / 10).max(1) } else { max_in_flight };
        let header = |part: &Part| match part {
            Part::Header(name) => name.parse().ok(),
            _ => None,
        };
        let keys =
            config.rules.rules().map(|rule| &rule.key).chain(config.slots.iter().map(|slots| &slots.key));
        let key_headers = keys.flat_map(|key| key.parts()).filter_map(header);
        Ok(State {
            limits,
            routes,
            upstreams,
            client: config.client.clone(),
            paths: config.paths,
            tokens,
            key_headers: key_headers.collect(),
            timeouts: gateway.timeouts,
            has_access_log: gateway.access_log,
            max_connections: gateway.max_connections,
            max_in_flight,
            max_uncritical,
        })
    }
}
