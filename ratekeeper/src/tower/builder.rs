//! Construction of a layer.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use http::HeaderName;
use http::request::Parts;
use ratekeeper_core::{LeakyMode, Limit};
use ratekeeper_rules::client::TrustedProxies;
use ratekeeper_rules::key::{Key, KeyPart};
use ratekeeper_rules::path::PathNormalization;
use ratekeeper_rules::response::{DenialResponse, HeaderSet, LimitText, PolicyName};
use ratekeeper_rules::rule::{Rule, Rules, StoredLimit};
use ratekeeper_rules::spelling::{HeaderAliases, is_header_alias};

use super::concurrency::{InFlightLimit, InFlightLimits};
use super::engine::{Engine, Observer, PeerLookup, TokenVerifier};
use super::error::LayerError;
use super::event::{DecisionEvent, RuleNames};
use super::{Claims, KeyExtractor, NonCanonicalPath, Peer, RatekeeperLayer};
use crate::clock::{Clock, SystemClock};
use crate::concurrency::{MemoryPermits, PermitCounter};
use crate::limiter::{Limiter, LimiterBuilder, MAX_KEYS};
use crate::memory::{Memory, WhenFull};

/// Settings of a [`RatekeeperLayer`].
///
/// ```
/// use std::time::Duration;
/// use ratekeeper::tower::response::HeaderSet;
/// use ratekeeper::tower::client::{TrustedProxies, parse_cidr};
/// use ratekeeper::tower::path::{PathNormalization, AmbiguousPathPolicy};
/// use ratekeeper::tower::{NonCanonicalPath, RatekeeperLayer};
/// use ratekeeper::{WindowAlign, Limit, WhenFull};
///
/// let layer = RatekeeperLayer::builder()
///     .per_client("per-client", Limit::fixed_window(100, Duration::from_secs(60), WindowAlign::Clock)?)
///     // From where requests come, and whose word counts for that.
///     .peer(|request| request.extensions.get::<std::net::IpAddr>().copied())
///     .trusted_proxies(TrustedProxies::proxies([parse_cidr("10.0.0.0/8").expect("a network")]))
///     // Which paths are the same, and which of them goes on.
///     .path_normalization(PathNormalization { ambiguous: AmbiguousPathPolicy::Reject, ignore_case: true, ..PathNormalization::default() })
///     .non_canonical_paths(NonCanonicalPath::Reject)
///     // Response headers and denial responses.
///     .headers(HeaderSet::named("legacy").expect("a set"))
///     .jitter_secs(5)
///     // Bounds.
///     .max_waiting(100)
///     .max_keys(50_000)
///     .max_bytes(16 << 20)
///     .when_full(WhenFull::Deny)
///     .build()?;
/// # let _ = layer;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct LayerBuilder {
    pub(super) rules: Vec<Rule>,
    pub(super) in_flight_limits: Vec<InFlightLimit>,
    deny_responses: HashMap<String, DenialResponse>,
    trusted_proxies: TrustedProxies,
    pub(super) path_normalization: PathNormalization,
    non_canonical_paths: NonCanonicalPath,
    headers: HeaderSet,
    jitter_secs: u64,
    peer: PeerLookup,
    verify: Option<TokenVerifier>,
    token_header: Option<HeaderName>,
    extractors: Vec<(String, Arc<dyn KeyExtractor>)>,
    observer: Option<Observer>,
    max_waiting: usize,
    max_keys: Option<usize>,
    max_bytes: Option<usize>,
    when_full: Option<WhenFull>,
    pub(super) allow_no_rules: bool,
}

impl fmt::Debug for LayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("rules", &self.rules).finish_non_exhaustive()
    }
}

impl Default for LayerBuilder {
    fn default() -> LayerBuilder {
        LayerBuilder {
            rules: Vec::new(),
            in_flight_limits: Vec::new(),
            deny_responses: HashMap::new(),
            trusted_proxies: TrustedProxies::default(),
            path_normalization: PathNormalization::default(),
            non_canonical_paths: NonCanonicalPath::default(),
            headers: HeaderSet::default(),
            jitter_secs: 0,
            peer: Arc::new(known_peer),
            verify: None,
            token_header: None,
            extractors: Vec::new(),
            observer: None,
            max_waiting: 1_024,
            max_keys: None,
            max_bytes: None,
            when_full: None,
            allow_no_rules: false,
        }
    }
}

/// The peer address from a request's extensions: [`Peer`], `SocketAddr` or `IpAddr`, in this order.
fn known_peer(request: &Parts) -> Option<IpAddr> {
    let extensions = &request.extensions;
    let address = extensions.get::<SocketAddr>().map(SocketAddr::ip);
    extensions.get::<Peer>().map(|peer| peer.0).or(address).or_else(|| extensions.get::<IpAddr>().copied())
}

impl LayerBuilder {
    /// Adds a rule. A request must be allowed by all rules that apply to it; if one denies it, none is charged.
    #[must_use]
    pub fn rule(mut self, rule: Rule) -> LayerBuilder {
        self.rules.push(rule);
        self
    }

    /// Adds a limit per client address: shorthand for a rule with the key [`KeyPart::Ip`].
    #[must_use]
    pub fn per_client(self, name: &str, limit: Limit) -> LayerBuilder {
        self.rule(Rule::new(name, limit).key(Key::of(KeyPart::Ip)))
    }

    /// Sets the response to requests that the rule of this name denies, instead of 429 with Problem Details. gRPC
    /// calls still get `RESOURCE_EXHAUSTED`, which their clients understand.
    ///
    /// ```
    /// use std::time::Duration;
    /// use ratekeeper::tower::{RatekeeperLayer, response::DenialResponse};
    /// use ratekeeper::{WindowAlign, Limit};
    ///
    /// let limit = Limit::fixed_window(100, Duration::from_secs(60), WindowAlign::Clock)?;
    /// let full = DenialResponse::default().with_status(503)?.with_body("Come back later.");
    /// let layer = RatekeeperLayer::builder().per_client("per-client", limit).deny_response("per-client", full).build()?;
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn deny_response(mut self, rule: &str, custom: DenialResponse) -> LayerBuilder {
        self.deny_responses.insert(rule.to_owned(), custom);
        self
    }

    /// Sets how the peer address of a request's connection is found. The default is a [`Peer`], a `SocketAddr` or an
    /// `IpAddr` in the request's extensions. The [module](super) shows where axum, tonic and hyper keep it.
    ///
    /// If a rule needs the address and the request has none, the request gets 500: a wrong setup neither merges
    /// clients into one budget nor bypasses a limit.
    #[must_use]
    pub fn peer(mut self, peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> LayerBuilder {
        self.peer = Arc::new(peer);
        self
    }

    /// Sets the trusted proxies, whose forwarding headers name the client; none by default.
    #[must_use]
    pub fn trusted_proxies(mut self, trusted_proxies: TrustedProxies) -> LayerBuilder {
        self.trusted_proxies = trusted_proxies;
        self
    }

    /// Sets the path normalization for all rules; patterns parsed with another normalization are converted. By
    /// default, ambiguous paths (`/a%2fb`), which servers interpret differently, get 400.
    #[must_use]
    pub fn path_normalization(mut self, path_normalization: PathNormalization) -> LayerBuilder {
        self.path_normalization = path_normalization;
        self
    }

    /// Sets the handling of requests whose path is not the [normalized path](super::path); by default the normalized
    /// path is forwarded.
    #[must_use]
    pub fn non_canonical_paths(mut self, non_canonical_paths: NonCanonicalPath) -> LayerBuilder {
        self.non_canonical_paths = non_canonical_paths;
        self
    }

    /// Sets the rate limit headers in responses; the default is the set of the IETF draft.
    #[must_use]
    pub fn headers(mut self, headers: HeaderSet) -> LayerBuilder {
        self.headers = headers;
        self
    }

    /// Lengthens waits by a random 0 to `at_most` seconds, so that clients denied together do not retry together.
    #[must_use]
    pub fn jitter_secs(mut self, at_most: u64) -> LayerBuilder {
        self.jitter_secs = at_most;
        self
    }

    /// Adds an extractor for key parts, under the name that rules use: `KeyPart::Custom(name)`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::request::Parts;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::tower::key::{Key, KeyPart};
    /// use ratekeeper::tower::rule::Rule;
    /// use ratekeeper::{WindowAlign, Limit};
    ///
    /// fn tenant(request: &Parts) -> Option<String> {
    ///     let user = request.headers.get("x-user")?.to_str().ok()?;
    ///     Some(user.split_once('@')?.1.to_owned())
    /// }
    ///
    /// let limit = Limit::fixed_window(1000, Duration::from_secs(3600), WindowAlign::Clock)?;
    /// let per_tenant = Rule::new("per-tenant", limit).key(Key::of(KeyPart::Custom("tenant".to_owned())));
    /// let layer = RatekeeperLayer::builder().rule(per_tenant).extractor("tenant", tenant).build()?;
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn extractor(mut self, name: &str, extractor: impl KeyExtractor) -> LayerBuilder {
        self.extractors.push((name.to_owned(), Arc::new(extractor)));
        self
    }

    /// Sets the function that verifies tokens, whose claims rules may use. It is called at most once per request, and
    /// only if a rule uses a claim. If it returns `None`, [`Claims`] in the request's extensions apply. With the
    /// feature `jwt`, `LayerBuilder::tokens` provides this function.
    ///
    /// ```
    /// use http::request::Parts;
    /// use ratekeeper::tower::{Claims, RatekeeperLayer};
    ///
    /// # fn session(text: &str) -> Option<String> { Some(text.to_owned()) }
    /// fn verify(request: &Parts) -> Option<Claims> {
    ///     let user = session(request.headers.get("x-session")?.to_str().ok()?)?;
    ///     Some(Claims([("sub".to_owned(), user)].into()))
    /// }
    ///
    /// let builder = RatekeeperLayer::builder().claims(verify);
    /// # let _ = builder;
    /// ```
    #[must_use]
    pub fn claims(
        mut self,
        verify: impl Fn(&Parts) -> Option<Claims> + Send + Sync + 'static,
    ) -> LayerBuilder {
        self.verify = Some(Arc::new(verify));
        self.token_header = None;
        self
    }

    /// Verifies tokens with a key set; rules may use their claims. A request with two tokens gets 400 if a rule uses
    /// a claim.
    #[cfg(feature = "jwt")]
    #[must_use]
    pub fn tokens(self, tokens: impl Into<Arc<super::token::Tokens>>) -> LayerBuilder {
        let tokens = tokens.into();
        let token_header = Some(tokens.header_name().clone());
        LayerBuilder { token_header, ..self.claims(move |request| tokens.claims(request)) }
    }

    /// Sets an observer, for metrics and logs. It is called for every request with the decisions of its limits,
    /// including shadow rules, or the reason why no limit was checked. The request waits for it, so it should be
    /// fast.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::tower::{Outcome, RatekeeperLayer, rule::Rule};
    /// # use ratekeeper::{WindowAlign, Limit};
    /// # let limit = Limit::fixed_window(1000, Duration::from_secs(3600), WindowAlign::Clock)?;
    /// let layer = RatekeeperLayer::builder()
    ///     .rule(Rule::new("planned", limit).shadow())
    ///     .observe(|event, names| {
    ///         for rule in event.rules.iter().filter(|rule| rule.is_shadow && !rule.decision.allowed) {
    ///             println!("{} would have denied a request", names.get(rule.index));
    ///         }
    ///         if event.outcome == Outcome::Shed {
    ///             println!("too many wait");
    ///         }
    ///     })
    ///     .build()?;
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn observe(
        mut self,
        observer: impl Fn(&DecisionEvent, RuleNames<'_>) + Send + Sync + 'static,
    ) -> LayerBuilder {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// Bounds the requests that wait for leaky buckets with delay; the default is 1024. Above it, requests that
    /// a leaky bucket may delay get 503 immediately and are not charged.
    #[must_use]
    pub fn max_waiting(mut self, max_waiting: usize) -> LayerBuilder {
        self.max_waiting = max_waiting;
        self
    }

    /// Allows a layer without rules, for callers that only check [inline limits](super::check::LimitRef::Inline).
    #[must_use]
    pub fn allow_no_rules(mut self) -> LayerBuilder {
        self.allow_no_rules = true;
        self
    }

    /// Bounds the keys in use per limit in memory.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> LayerBuilder {
        self.max_keys = Some(max_keys);
        self
    }

    /// Bounds the memory of all state, in bytes.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> LayerBuilder {
        self.max_bytes = Some(max_bytes);
        self
    }

    /// Sets the decision for new keys when the memory table is full.
    #[must_use]
    pub fn when_full(mut self, when_full: WhenFull) -> LayerBuilder {
        self.when_full = Some(when_full);
        self
    }

    /// Builds the layer with its state in this process.
    ///
    /// # Errors
    /// If there is no rule, the rules are inconsistent, or the memory bound is too small for any key.
    pub fn build(self) -> Result<RatekeeperLayer, LayerError> {
        self.build_on(SystemClock::new())
    }

    /// Builds the layer with its state in this process and the given clock: a test advances a
    /// [`ManualClock`](crate::ManualClock) instead of waiting.
    ///
    /// ```
    /// use std::time::Duration;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::{WindowAlign, Limit, ManualClock};
    ///
    /// let clock = ManualClock::default();
    /// let limit = Limit::fixed_window(1, Duration::from_secs(3600), WindowAlign::Clock)?;
    /// let layer = RatekeeperLayer::builder().per_client("per-client", limit).build_on(clock.clone())?;
    /// clock.advance(Duration::from_secs(3600));
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Delays still use tokio timers.
    ///
    /// # Errors
    /// As [`build`](LayerBuilder::build).
    pub fn build_on<C>(self, clock: C) -> Result<RatekeeperLayer<Memory<C>>, LayerError>
    where
        C: Clock + Clone + Send + Sync + 'static,
    {
        let rules = self.normalized_rules()?;
        let builder = self.bounded(limiter_builder(&rules, &self)?).clock(clock.clone());
        let limiter = builder.build().map_err(LayerError::Memory)?;
        let concurrency =
            InFlightLimits::new(&self.in_flight_limits, self.path_normalization, &rules, None, |_| {
                Ok(self.counter_in_memory(None))
            })?;
        self.with(rules, limiter, concurrency, clock)
    }

    /// Builds the layer with its state in Redis: all processes whose rules have the same names share their limits.
    /// Must be called on a tokio runtime.
    ///
    /// # Errors
    /// If there is no rule, the rules are inconsistent, or the settings are invalid.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// use ratekeeper::redis::Settings;
    /// use ratekeeper::tower::RatekeeperLayer;
    /// use ratekeeper::{WindowAlign, Limit};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = Limit::fixed_window(100, Duration::from_secs(60), WindowAlign::Clock)?;
    /// let layer = RatekeeperLayer::builder()
    ///     .per_client("per-client", limit)
    ///     .redis(&Settings::new("redis://127.0.0.1:6379"))?;
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "redis")]
    pub fn redis(
        self,
        settings: &crate::redis::Settings,
    ) -> Result<RatekeeperLayer<crate::redis::Redis>, LayerError> {
        let rules = self.normalized_rules()?;
        let of_rules = settings_for(&rules, settings);
        let limiter =
            limiter_builder(&rules, &self)?.redis_on(&of_rules, settings).map_err(LayerError::Redis)?;
        let concurrency =
            InFlightLimits::new(&self.in_flight_limits, self.path_normalization, &rules, None, |_| {
                self.counter_in_redis(&limiter, None)
            })?;
        self.with(rules, limiter, concurrency, SystemClock::new())
    }

    /// The permit counter in this process: that of the configuration before, if any, with all permits that are held.
    pub(super) fn counter_in_memory(&self, before: Option<&PermitCounter>) -> PermitCounter {
        let max_keys = self.max_keys.unwrap_or(MAX_KEYS);
        match before {
            Some(PermitCounter::Memory(permits)) => {
                permits.set_max_keys(max_keys);
                PermitCounter::Memory(permits.clone())
            }
            _ => PermitCounter::Memory(Arc::new(MemoryPermits::new(max_keys))),
        }
    }

    /// The permit counter shared by processes through Redis: that of the configuration before, if any.
    #[cfg(feature = "redis")]
    pub(super) fn counter_in_redis(
        &self,
        limiter: &Limiter<crate::redis::Redis>,
        before: Option<&PermitCounter>,
    ) -> Result<PermitCounter, LayerError> {
        let store = limiter.store();
        let names = store.permit_names(self.in_flight_limits.iter().map(|limit| limit.name.as_str()));
        let permits = match before {
            Some(PermitCounter::Redis(permits, _)) => permits.clone(),
            _ => store.shared_permits().map_err(LayerError::Redis)?,
        };
        Ok(PermitCounter::Redis(permits, Arc::new(names)))
    }

    /// The rules, with patterns converted to the layer's path normalization; otherwise they would silently match
    /// nothing.
    pub(super) fn normalized_rules(&self) -> Result<Rules, LayerError> {
        let normalized = |rule: &Rule| {
            let wrong = |error| LayerError::Pattern(rule.name.clone(), error);
            rule.clone().with_normalization(self.path_normalization).map_err(wrong)
        };
        let rules: Vec<Rule> = self.rules.iter().map(normalized).collect::<Result<_, _>>()?;
        Rules::new(rules).map_err(LayerError::Rules)
    }

    pub(super) fn bounded(&self, mut builder: LimiterBuilder) -> LimiterBuilder {
        if let Some(max_keys) = self.max_keys {
            builder = builder.max_keys(max_keys);
        }
        if let Some(max_bytes) = self.max_bytes {
            builder = builder.max_bytes(max_bytes);
        }
        if let Some(when_full) = self.when_full {
            builder = builder.when_full(when_full);
        }
        builder
    }

    fn with<S>(
        self,
        rules: Rules,
        limiter: Limiter<S>,
        concurrency: Option<InFlightLimits>,
        clock: impl Clock + Send + Sync + 'static,
    ) -> Result<RatekeeperLayer<S>, LayerError> {
        Ok(RatekeeperLayer { engine: Arc::new(self.engine(rules, limiter, concurrency, clock)?) })
    }

    pub(super) fn engine<S>(
        self,
        rules: Rules,
        limiter: Limiter<S>,
        concurrency: Option<InFlightLimits>,
        clock: impl Clock + Send + Sync + 'static,
    ) -> Result<Engine<S>, LayerError> {
        let name = |rule: &Rule| {
            PolicyName::new(&rule.name).map_err(|error| LayerError::Name(rule.name.clone(), error))
        };
        let names: Vec<PolicyName> = rules.rules().map(name).collect::<Result<_, _>>()?;
        if let Some(unknown) =
            self.deny_responses.keys().find(|name| rules.rules().all(|rule| rule.name != **name))
        {
            return Err(LayerError::UnknownRule(unknown.clone()));
        }
        let keys = rules.rules().map(|rule| (&rule.name, &rule.key));
        for (name, key) in keys.chain(concurrency.iter().flat_map(InFlightLimits::keys)) {
            for part in key.parts() {
                // Without an extractor the part would be missing from every request, and the key's fallback would
                // apply.
                if let KeyPart::Custom(extractor) = part
                    && self.extractors.iter().all(|(known, _)| known != extractor)
                {
                    return Err(LayerError::UnknownExtractor(name.clone(), extractor.clone()));
                }
            }
        }
        let deny_responses: Vec<DenialResponse> = rules
            .rules()
            .map(|rule| self.deny_responses.get(&rule.name).cloned().unwrap_or_default())
            .collect();
        let limit_text = |stored: &StoredLimit| {
            let (name, custom) = (&names[stored.rule], &deny_responses[stored.rule]);
            LimitText::new(self.headers, name, &stored.limit, Some(custom))
        };
        let limit_texts = rules.limits().iter().map(limit_text).collect();
        let is_delay =
            |limit: &Limit| matches!(limit, Limit::Bucket(it) if it.mode() == Some(LeakyMode::Shape));
        let mut header_names: Vec<HeaderName> = Vec::new();
        let read = rules.rules().flat_map(Rule::header_names);
        let read = read.chain(concurrency.iter().flat_map(InFlightLimits::header_names));
        let read = read.chain(self.token_header.iter().map(HeaderName::as_str));
        let has_aliases = |name: &&str| !name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        for name in read.filter(has_aliases).filter_map(|name| name.parse().ok()) {
            if !header_names.contains(&name) {
                header_names.push(name);
            }
        }
        // A token is read in one spelling only, so the others are rejected even if a rule reads them.
        if let Some(token) = &self.token_header {
            header_names.retain(|name| !is_header_alias(name.as_str(), token.as_str()));
        }
        Ok(Engine {
            patterns: rules
                .rules()
                .flat_map(Rule::patterns)
                .chain(concurrency.iter().flat_map(InFlightLimits::patterns))
                .cloned()
                .collect(),
            header_aliases: HeaderAliases::among(&header_names),
            header_names,
            deny_responses,
            limit_texts,
            delays: rules.limits().iter().map(|stored| is_delay(&stored.limit)).collect(),
            limiter,
            rules,
            concurrency,
            names,
            trusted_proxies: self.trusted_proxies,
            path_normalization: self.path_normalization,
            non_canonical_paths: self.non_canonical_paths,
            headers: self.headers,
            jitter_secs: self.jitter_secs,
            peer: self.peer,
            verify: self.verify,
            token_header: self.token_header,
            extractors: self.extractors,
            observer: self.observer,
            max_waiting: self.max_waiting,
            waiting: Arc::new(AtomicUsize::new(0)),
            clock: Box::new(clock),
            responses: AtomicU64::new(0),
        })
    }
}

/// Settings with the names, failure policies and leases of the rules' limits.
#[cfg(feature = "redis")]
pub(super) fn settings_for(rules: &Rules, settings: &crate::redis::Settings) -> crate::redis::Settings {
    let mut settings = settings.clone();
    for (index, stored) in rules.limits().iter().enumerate() {
        settings = settings.named(index, &stored.name);
        if let Some(policy) = stored.on_store_failure {
            settings = settings.on_store_failure_of(index, policy);
        }
        if let Some(lease) = stored.lease {
            settings = settings.lease(index, lease);
        }
    }
    settings
}

/// A limiter builder for all limits of the rules.
pub(super) fn limiter_builder(rules: &Rules, builder: &LayerBuilder) -> Result<LimiterBuilder, LayerError> {
    if rules.limits().is_empty() && builder.in_flight_limits.is_empty() && !builder.allow_no_rules {
        return Err(LayerError::NoRules);
    }
    Ok(LimiterBuilder::new(rules.limits().iter().map(|stored| stored.limit.clone()).collect()))
}

#[cfg(test)]
mod tests;
