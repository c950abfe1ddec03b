//! The active configuration: routes, upstreams and limits.

use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use ratekeeper::tower::token::Tokens;
use ratekeeper::tower::{ConcurrencySet, NonCanonicalPath, RatekeeperLayer, RuleSet};
use ratekeeper_config::{Config, Gateway, PathEdit, Secret, Timeouts};
use ratekeeper_rules::client::TrustedProxies;
use ratekeeper_rules::key::{Key, KeyPart};
use ratekeeper_rules::path::{PathNormalization, Pattern, is_read_alike, with_parameters};
use ratekeeper_rules::rule::{OverrideScope, Rule};
use ratekeeper_rules::spelling::{HeaderAliases, is_header_alias};
use ratekeeper_rules::when::When;

use super::StartError;
use super::access::observer;
use super::hop_headers::{Edits, is_forwarded};
use super::timer::Ticker;
use super::upstream::Upstream;
use crate::apis::ApiSettings;
use crate::backend::{self, Backend};
use crate::runtime::access_log::KeyLog;
use crate::runtime::metrics::{MetricsDraft, RouteMetrics};

/// Everything that decides on a request, swapped atomically on reload.
#[derive(Debug)]
pub(crate) struct State<S> {
    /// None if neither limits nor APIs are configured.
    pub(crate) limits: Option<RatekeeperLayer<S>>,
    /// One copy per worker, so that workers do not contend for the reference counts of routes.
    routes: Vec<Vec<Arc<Route>>>,
    pub(crate) upstreams: Vec<Arc<Upstream>>,
    pub(crate) trusted_proxies: TrustedProxies,
    pub(crate) paths: PathNormalization,
    /// What limits read of a path, by index.
    rule_paths: Vec<PathUse>,
    concurrency_paths: Vec<PathUse>,
    /// Verifies the tokens whose claims routes read.
    pub(crate) tokens: Option<Arc<Tokens>>,
    /// Headers that the configuration reads or sets.
    pub(crate) header_names: Arc<[HeaderName]>,
    pub(crate) header_aliases: HeaderAliases,
    /// Whether any of them is a forwarding header.
    pub(crate) reads_forwarded: bool,
    pub(crate) timeouts: Timeouts,
    pub(crate) has_access_log: bool,
    /// Token that clients of the admin listener must send for metrics.
    pub(crate) admin_token: Option<Secret>,
    pub(crate) max_connections: usize,
    pub(crate) max_connections_per_client: usize,
    /// Maximum number of requests in flight.
    pub(crate) max_in_flight: usize,
    /// Number of requests in flight from which routes that are not critical are shed.
    pub(crate) max_uncritical: usize,
    /// Settings of the APIs.
    pub(crate) apis: ApiSettings,
}

/// Conditions, upstream, limits and edits of a route.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    /// The route's name, as rules see it.
    pub(crate) id: ratekeeper::tower::Route,
    pub(crate) when: When,
    pub(crate) upstream: Arc<Upstream>,
    /// The route's limits, without its concurrency limits.
    pub(crate) rules: RuleSet,
    pub(crate) concurrency: ConcurrencySet,
    pub(crate) is_critical: bool,
    pub(crate) trusted_proxies: TrustedProxies,
    pub(crate) timeout: Duration,
    pub(crate) path: PathEdit,
    /// Normalization of the paths that the route matches.
    pub(crate) path_normalization: PathNormalization,
    pub(crate) metrics: Arc<RouteMetrics>,
    /// Names of all configured limits, by number.
    pub(crate) limit_names: Arc<[String]>,
    pub(crate) request_edits: Edits,
    pub(crate) response_edits: Edits,
}

/// What a limit reads of a path.
#[derive(Clone, Debug, Default)]
struct PathUse {
    patterns: Vec<Pattern>,
    /// Whether the key contains a part of the path.
    is_in_key: bool,
}

impl PathUse {
    fn new<'w>(key: &Key, conditions: impl Iterator<Item = &'w When>) -> PathUse {
        let is_path = |part: &KeyPart| matches!(part, KeyPart::Segment(_) | KeyPart::Path(_));
        let patterns = conditions.flat_map(|when| when.paths.iter().cloned()).collect();
        PathUse { patterns, is_in_key: key.parts().any(is_path) }
    }

    fn of_rule(rule: &Rule) -> PathUse {
        let overrides = rule.overrides.iter().filter_map(|it| match &it.scope {
            OverrideScope::When(when) => Some(when),
            OverrideScope::Keys(_) => None,
        });
        PathUse::new(&rule.key, overrides.chain([&rule.when]))
    }
}

/// Longest path whose parameters and empty segments are forwarded: each pattern is compared with all readings of it.
const KEPT_PATH_BYTES_MAX: usize = 4 << 10;

/// Tenths of the in-flight permits that routes which are not critical may use, if there are critical ones.
const UNCRITICAL_TENTHS: usize = 8;

/// All headers that limits or routes read, and those that routes set or remove: a client may neither declare them
/// hop-by-hop nor send aliases of them. Of headers that routes edit and of the token's, no alias is in the list, even if
/// a limit reads it.
fn header_names(config: &Config, gateway: &Gateway) -> Vec<HeaderName> {
    let mut names: Vec<&str> = Vec::new();
    names.extend(config.rules.rules().flat_map(Rule::header_names));
    for limit in &config.concurrency {
        names.extend(limit.key.header_names().chain(limit.when.header_names()));
    }
    for route in &gateway.routes {
        names.extend(route.when.header_names());
    }
    let edits = || gateway.routes.iter().map(|route| &route.request_headers);
    let set = edits().flat_map(|edits| edits.set.iter().chain(&edits.add)).map(|(name, _)| name);
    let owned = set.chain(edits().flat_map(|edits| &edits.remove)).map(String::as_str);
    let owned = owned.chain(config.jwt.iter().map(|jwt| jwt.header.as_str()));
    let parsed = |name: &str| -> Option<HeaderName> { name.parse().ok() };
    let owned: Vec<HeaderName> = owned.filter_map(parsed).collect();
    let is_alias = |name: &HeaderName| owned.iter().any(|of| is_header_alias(name.as_str(), of.as_str()));
    let mut names: Vec<HeaderName> = names.into_iter().filter_map(parsed).collect();
    names.retain(|name| !is_alias(name));
    names.extend(owned);
    names.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    names
}

impl<S: Backend> State<S> {
    /// Builds the state of a configuration and migrates state from `before`. On an error, nothing has changed.
    pub(crate) fn new(
        config: &Config,
        gateway: &Gateway,
        workers: usize,
        ticker: &Arc<Ticker>,
        metrics: &mut MetricsDraft,
        before: Option<&State<S>>,
    ) -> Result<State<S>, StartError> {
        let names: Arc<[String]> = backend::limit_names(config).collect();
        let tokens = backend::tokens(config).map_err(StartError::Limits)?;
        let mut upstreams = Vec::new();
        for upstream in &gateway.upstreams {
            // An unchanged upstream keeps its connections and health.
            let unchanged = before.and_then(|it| it.upstreams.iter().find(|old| old.config == *upstream));
            upstreams.push(match unchanged {
                Some(unchanged) => unchanged.clone(),
                None => Arc::new(Upstream::new(upstream, workers, ticker).map_err(StartError::Tls)?),
            });
        }
        let has_limits = config.rules.rules().len() > 0 || backend::in_flight_limits(config).next().is_some();
        // API clients may send inline limits.
        let has_limits = has_limits || !config.apis.are_none();
        // The last step that can fail, because it starts the state migration of the limits.
        let limits = match has_limits {
            false => None,
            true => {
                // Paths are normalized before the route is looked up.
                let builder = backend::builder(config, tokens.as_ref());
                let counters = names.iter().map(|name| metrics.limit(name)).collect();
                let rules = config.rules.rules().filter(|rule| rule.is_shadow).map(|rule| &rule.name);
                let concurrency = config.concurrency.iter().filter(|it| it.is_shadow).map(|it| &it.name);
                rules.chain(concurrency).for_each(|name| metrics.mark_shadow(name));
                let builder = builder
                    .non_canonical_paths(NonCanonicalPath::Keep)
                    .observe(observer(counters, KeyLog::new(config)));
                let builder = if config.apis.are_none() { builder } else { builder.allow_no_rules() };
                let before = before.and_then(|before| before.limits.as_ref());
                Some(S::limits(config, builder, before).map_err(StartError::Limits)?)
            }
        };
        let routes =
            gateway.routes.iter().zip(backend::route_in_flight_limits(config)).map(|(route, own)| Route {
                metrics: metrics.route(&route.id),
                limit_names: names.clone(),
                concurrency: ConcurrencySet(route.concurrency.iter().copied().chain(own).collect()),
                id: ratekeeper::tower::Route(route.id.as_str().into()),
                when: route.when.clone(),
                upstream: upstreams[route.upstream].clone(),
                rules: RuleSet(route.limits.as_slice().into()),
                is_critical: route.is_critical,
                trusted_proxies: config.client.clone(),
                timeout: route.timeout,
                path: route.path.clone(),
                path_normalization: config.paths,
                request_edits: Edits::new(&route.request_headers),
                response_edits: Edits::new(&route.response_headers),
            });
        let routes: Vec<Route> = routes.collect();
        let max_in_flight = gateway.max_in_flight;
        let has_critical = routes.iter().any(|route| route.is_critical);
        let max_uncritical =
            if has_critical { (max_in_flight * UNCRITICAL_TENTHS / 10).max(1) } else { max_in_flight };
        let header_names = header_names(config, gateway);
        Ok(State {
            limits,
            routes: (0..workers).map(|_| routes.iter().cloned().map(Arc::new).collect()).collect(),
            upstreams,
            trusted_proxies: config.client.clone(),
            paths: config.paths,
            rule_paths: config.rules.rules().map(PathUse::of_rule).collect(),
            concurrency_paths: config
                .concurrency
                .iter()
                .map(|limit| PathUse::new(&limit.key, [&limit.when].into_iter()))
                .collect(),
            tokens,
            reads_forwarded: header_names.iter().any(is_forwarded),
            header_aliases: HeaderAliases::among(&header_names),
            header_names: header_names.into(),
            timeouts: gateway.timeouts,
            has_access_log: gateway.access_log,
            admin_token: config.admin.as_ref().and_then(|admin| admin.token.clone()),
            max_connections: gateway.max_connections,
            max_connections_per_client: gateway.max_connections_per_client,
            max_in_flight,
            max_uncritical,
            apis: ApiSettings::of(config),
        })
    }

    /// The received path with its parameters and empty segments, if the routes and the limits of the route apply alike
    /// however an upstream reads them, and the route does not edit the path.
    pub(crate) fn with_parameters(
        &self,
        route: &Route,
        worker: usize,
        received: &str,
        normalization: PathNormalization,
    ) -> Option<String> {
        let has_any = received.contains(';') || received.contains("//");
        if !has_any || received.len() > KEPT_PATH_BYTES_MAX || route.path != PathEdit::Keep {
            return None;
        }
        let rules = route.rules.0.iter().filter_map(|index| self.rule_paths.get(*index));
        // The routes' own concurrency limits come after these and have no conditions.
        let concurrency = route.concurrency.0.iter().filter_map(|index| self.concurrency_paths.get(*index));
        let uses = || rules.clone().chain(concurrency.clone());
        let routes = self.routes(worker).iter().flat_map(|route| &route.when.paths);
        let patterns = routes.chain(uses().flat_map(|it| &it.patterns));
        let is_safe = !uses().any(|it| it.is_in_key) && is_read_alike(received, self.paths, patterns);
        is_safe.then(|| with_parameters(received, normalization)).flatten()
    }

    /// The routes, for one worker.
    pub(crate) fn routes(&self, worker: usize) -> &[Arc<Route>] {
        &self.routes[worker]
    }
}
