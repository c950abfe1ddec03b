//! How a layer is made.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use http::HeaderName;
use http::request::Parts;
use tollgate_core::{Limit, Mode};
use tollgate_rules::answer::{Custom, HeaderSet, PolicyName};
use tollgate_rules::client::Trust;
use tollgate_rules::key::{Key, Part};
use tollgate_rules::path::Spelling;
use tollgate_rules::rule::{Rule, Rules};

use super::error::LayerError;
use super::gate::{Gate, Observed, Observer, PeerOf, Verify};
use super::slots::{SlotRules, Slots};
use super::{Claims, KeyExtractor, OtherSpellings, Peer, RateLimitLayer};
use crate::clock::{Clock, SystemClock};
use crate::limiter::{self, Limiter, MAX_KEYS};
use crate::memory::{Memory, WhenFull};
use crate::slots::{self, Counter};

/// Settings of a [`RateLimitLayer`].
///
/// ```
/// use std::time::Duration;
/// use tollgate::tower::answer::HeaderSet;
/// use tollgate::tower::client::{Trust, parse_cidr};
/// use tollgate::tower::path::{Spelling, WhenAmbiguous};
/// use tollgate::tower::{OtherSpellings, RateLimitLayer};
/// use tollgate::{Align, Limit, WhenFull};
///
/// let layer = RateLimitLayer::builder()
///     .per_client("per-client", Limit::fixed_window(100, Duration::from_secs(60), Align::Clock)?)
///     // From where requests come, and whose word counts for that.
///     .peer(|request| request.extensions.get::<std::net::IpAddr>().copied())
///     .trust(Trust::proxies([parse_cidr("10.0.0.0/8").expect("a network")]))
///     // Which paths are the same, and which of them goes on.
///     .paths(Spelling { ambiguous: WhenAmbiguous::Refuse, ignore_case: true, ..Spelling::default() })
///     .other_spellings(OtherSpellings::Refuse)
///     // What clients are told.
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
pub struct Builder {
    pub(super) rules: Vec<Rule>,
    pub(super) slots: Vec<Slots>,
    customs: HashMap<String, Custom>,
    trust: Trust,
    pub(super) spelling: Spelling,
    other_spellings: OtherSpellings,
    headers: HeaderSet,
    jitter_secs: u64,
    peer: PeerOf,
    verify: Option<Verify>,
    token_header: Option<HeaderName>,
    extractors: Vec<(String, Arc<dyn KeyExtractor>)>,
    observer: Option<Observer>,
    max_waiting: usize,
    max_keys: Option<usize>,
    max_bytes: Option<usize>,
    when_full: Option<WhenFull>,
    pub(super) may_lack_rules: bool,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("rules", &self.rules).finish_non_exhaustive()
    }
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            rules: Vec::new(),
            slots: Vec::new(),
            customs: HashMap::new(),
            trust: Trust::default(),
            spelling: Spelling::default(),
            other_spellings: OtherSpellings::default(),
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
            may_lack_rules: false,
        }
    }
}

/// The peer as it may stand in a request's extensions.
fn known_peer(request: &Parts) -> Option<IpAddr> {
    let extensions = &request.extensions;
    let address = extensions.get::<SocketAddr>().map(SocketAddr::ip);
    extensions.get::<Peer>().map(|peer| peer.0).or(address).or_else(|| extensions.get::<IpAddr>().copied())
}

impl Builder {
    /// Adds a rule. A request must pass all that concern it, and takes nothing from any if one denies it.
    #[must_use]
    pub fn rule(mut self, rule: Rule) -> Builder {
        self.rules.push(rule);
        self
    }

    /// Adds a limit for each client address: short for the rule that says so.
    #[must_use]
    pub fn per_client(self, name: &str, limit: Limit) -> Builder {
        self.rule(Rule::new(name, limit).key(Key::of(Part::Ip)))
    }

    /// What those are told whom the rule of this name denies, in place of 429 and a problem. gRPC calls are not: their
    /// clients know `RESOURCE_EXHAUSTED`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::tower::{RateLimitLayer, answer::Custom};
    /// use tollgate::{Align, Limit};
    ///
    /// let limit = Limit::fixed_window(100, Duration::from_secs(60), Align::Clock)?;
    /// let full = Custom::default().with_status(503)?.with_body("Come back later.");
    /// let layer = RateLimitLayer::builder().per_client("per-client", limit).answer("per-client", full).build()?;
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn answer(mut self, rule: &str, custom: Custom) -> Builder {
        self.customs.insert(rule.to_owned(), custom);
        self
    }

    /// Where a request comes from: the address at the other end of its connection. Unless this is said, it is a
    /// [`Peer`], a `SocketAddr` or an `IpAddr` in the request's extensions. The [module](super) says where axum, tonic
    /// and hyper have it.
    ///
    /// A request whose address a rule wants to know and that has none gets 500, and so does every such request: nobody
    /// shares a budget, or passes, because something is set up wrongly.
    #[must_use]
    pub fn peer(mut self, peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Builder {
        self.peer = Arc::new(peer);
        self
    }

    /// Which proxies are believed when they say for whom they ask; none if nothing is said.
    #[must_use]
    pub fn trust(mut self, trust: Trust) -> Builder {
        self.trust = trust;
        self
    }

    /// Which spellings of a path are the same, for all rules, whichever their patterns were read for. Those that servers read in different ways (`/a%2fb`) get 400 unless this
    /// says otherwise.
    #[must_use]
    pub fn paths(mut self, spelling: Spelling) -> Builder {
        self.spelling = spelling;
        self
    }

    /// What happens to a request whose path is not in its [normal form](super::path); that form goes on if nothing is
    /// said.
    #[must_use]
    pub fn other_spellings(mut self, other_spellings: OtherSpellings) -> Builder {
        self.other_spellings = other_spellings;
        self
    }

    /// By which headers clients are told; those of the IETF's draft if nothing is said.
    #[must_use]
    pub fn headers(mut self, headers: HeaderSet) -> Builder {
        self.headers = headers;
        self
    }

    /// Lengthens waits by up to so many seconds, at random: those who were denied together do not come back together.
    #[must_use]
    pub fn jitter_secs(mut self, at_most: u64) -> Builder {
        self.jitter_secs = at_most;
        self
    }

    /// Makes up a part of keys, under a name that rules use: `Part::Custom(name)`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::request::Parts;
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::tower::key::{Key, Part};
    /// use tollgate::tower::rule::Rule;
    /// use tollgate::{Align, Limit};
    ///
    /// fn tenant(request: &Parts) -> Option<String> {
    ///     let user = request.headers.get("x-user")?.to_str().ok()?;
    ///     Some(user.split_once('@')?.1.to_owned())
    /// }
    ///
    /// let limit = Limit::fixed_window(1000, Duration::from_secs(3600), Align::Clock)?;
    /// let per_tenant = Rule::new("per-tenant", limit).key(Key::of(Part::Custom("tenant".to_owned())));
    /// let layer = RateLimitLayer::builder().rule(per_tenant).extractor("tenant", tenant).build()?;
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn extractor(mut self, name: &str, extractor: impl KeyExtractor) -> Builder {
        self.extractors.push((name.to_owned(), Arc::new(extractor)));
        self
    }

    /// Verifies tokens, whose claims rules may use. It is asked once for a request, and only if a rule wants to know a
    /// claim. Where it has none, [`Claims`] in the request's extensions count. With the feature `jwt`, `Builder::tokens`
    /// does it.
    ///
    /// ```
    /// use http::request::Parts;
    /// use tollgate::tower::{Claims, RateLimitLayer};
    ///
    /// # fn session(text: &str) -> Option<String> { Some(text.to_owned()) }
    /// fn verify(request: &Parts) -> Option<Claims> {
    ///     let user = session(request.headers.get("x-session")?.to_str().ok()?)?;
    ///     Some(Claims([("sub".to_owned(), user)].into()))
    /// }
    ///
    /// let builder = RateLimitLayer::builder().claims(verify);
    /// # let _ = builder;
    /// ```
    #[must_use]
    pub fn claims(mut self, verify: impl Fn(&Parts) -> Option<Claims> + Send + Sync + 'static) -> Builder {
        self.verify = Some(Arc::new(verify));
        self.token_header = None;
        self
    }

    /// Verifies tokens with a set of keys; rules may use what they claim. A request with two tokens gets 400 if a rule
    /// wants to know a claim.
    #[cfg(feature = "jwt")]
    #[must_use]
    pub fn tokens(self, tokens: impl Into<Arc<super::token::Tokens>>) -> Builder {
        let tokens = tokens.into();
        let token_header = Some(tokens.header_name().clone());
        Builder { token_header, ..self.claims(move |request| tokens.claims(request)) }
    }

    /// Is told of every request: what its limits decided, those of shadow rules included, or why they were not even asked.
    /// For counters and logs. It is called while the request waits, so it should be quick.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::tower::{Outcome, RateLimitLayer, rule::Rule};
    /// # use tollgate::{Align, Limit};
    /// # let limit = Limit::fixed_window(1000, Duration::from_secs(3600), Align::Clock)?;
    /// let layer = RateLimitLayer::builder()
    ///     .rule(Rule::new("planned", limit).shadow())
    ///     .observe(|observed| {
    ///         for rule in observed.rules.iter().filter(|rule| rule.is_shadow && !rule.decision.allowed) {
    ///             println!("{} would have denied a request", rule.name);
    ///         }
    ///         if observed.outcome == Outcome::Busy {
    ///             println!("too many wait");
    ///         }
    ///     })
    ///     .build()?;
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn observe(mut self, observer: impl Fn(&Observed<'_>) + Send + Sync + 'static) -> Builder {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// How many requests may wait at once for leaky buckets that delay; 1024 if nothing is said. More that meet such a
    /// bucket get 503 at once, and nothing is taken from their limits.
    #[must_use]
    pub fn max_waiting(mut self, max_waiting: usize) -> Builder {
        self.max_waiting = max_waiting;
        self
    }

    /// There may be no rules at all: for those who only ask about [limits that they bring](super::direct::Which::Own).
    #[must_use]
    pub fn may_lack_rules(mut self) -> Builder {
        self.may_lack_rules = true;
        self
    }

    /// Room for so many keys in use, for each limit, in memory.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Builder {
        self.max_keys = Some(max_keys);
        self
    }

    /// The most memory that all states may hold.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Builder {
        self.max_bytes = Some(max_bytes);
        self
    }

    /// What is answered when there is room for no more keys in memory.
    #[must_use]
    pub fn when_full(mut self, when_full: WhenFull) -> Builder {
        self.when_full = Some(when_full);
        self
    }

    /// The layer, with its states in this process.
    ///
    /// # Errors
    /// If there is no rule, or they do not fit together, or there is no room for any key.
    pub fn build(self) -> Result<RateLimitLayer, LayerError> {
        self.build_on(SystemClock::new())
    }

    /// The layer, with its states in this process, on a clock of your own: a test cranks a
    /// [`ManualClock`](crate::ManualClock) instead of waiting.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::{Align, Limit, ManualClock};
    ///
    /// let clock = ManualClock::default();
    /// let limit = Limit::fixed_window(1, Duration::from_secs(3600), Align::Clock)?;
    /// let layer = RateLimitLayer::builder().per_client("per-client", limit).build_on(clock.clone())?;
    /// clock.advance(Duration::from_secs(3600));
    /// # let _ = layer;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// A delay is a timer of tokio all the same.
    ///
    /// # Errors
    /// As [`build`](Builder::build).
    pub fn build_on<C>(self, clock: C) -> Result<RateLimitLayer<Memory<C>>, LayerError>
    where
        C: Clock + Clone + Send + Sync + 'static,
    {
        let rules = self.spelt_rules()?;
        let builder = self.bounded(limiter_builder(&rules, &self)?).clock(clock.clone());
        let limiter = builder.build().map_err(LayerError::Memory)?;
        let slots = SlotRules::new(&self.slots, self.spelling, &rules, || Ok(self.counter_in_memory()))?;
        self.with(rules, limiter, slots, clock)
    }

    /// The layer, with its states in Redis: all processes whose rules have the same names share their limits. Must be
    /// called on a tokio runtime.
    ///
    /// # Errors
    /// If there is no rule, they do not fit together, or the settings do not work.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// use tollgate::redis::Settings;
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::{Align, Limit};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = Limit::fixed_window(100, Duration::from_secs(60), Align::Clock)?;
    /// let layer = RateLimitLayer::builder()
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
    ) -> Result<RateLimitLayer<crate::redis::Redis>, LayerError> {
        let rules = self.spelt_rules()?;
        let of_rules = settings_for(&rules, settings);
        let limiter =
            limiter_builder(&rules, &self)?.redis_on(&of_rules, settings).map_err(LayerError::Redis)?;
        let slots = SlotRules::new(&self.slots, self.spelling, &rules, || self.counter_in_redis(&limiter))?;
        self.with(rules, limiter, slots, SystemClock::new())
    }

    /// Where slots are counted.
    pub(super) fn counter_in_memory(&self) -> Counter {
        let most = self.slots.iter().map(|slots| slots.most);
        Counter::Memory(Arc::new(slots::Memory::new(most, self.max_keys.unwrap_or(MAX_KEYS))))
    }

    /// The same for several processes.
    #[cfg(feature = "redis")]
    pub(super) fn counter_in_redis(
        &self,
        limiter: &Limiter<crate::redis::Redis>,
    ) -> Result<Counter, LayerError> {
        let named = self.slots.iter().map(|slots| (slots.name.as_str(), slots.most));
        let store = limiter.store();
        store.slots(store.base(), named).map(Counter::Redis).map_err(LayerError::Redis)
    }

    /// The rules with patterns for the paths that they will meet: for any others they would silently match nothing.
    pub(super) fn spelt_rules(&self) -> Result<Rules, LayerError> {
        let spelt = |rule: &Rule| {
            let wrong = |error| LayerError::Pattern(rule.name.clone(), error);
            rule.clone().spelt(self.spelling).map_err(wrong)
        };
        let rules: Vec<Rule> = self.rules.iter().map(spelt).collect::<Result<_, _>>()?;
        Rules::new(rules).map_err(LayerError::Rules)
    }

    pub(super) fn bounded(&self, mut builder: limiter::Builder) -> limiter::Builder {
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
        slots: Option<SlotRules>,
        clock: impl Clock + Send + Sync + 'static,
    ) -> Result<RateLimitLayer<S>, LayerError> {
        Ok(RateLimitLayer { gate: Arc::new(self.gate(rules, limiter, slots, clock)?) })
    }

    pub(super) fn gate<S>(
        self,
        rules: Rules,
        limiter: Limiter<S>,
        slots: Option<SlotRules>,
        clock: impl Clock + Send + Sync + 'static,
    ) -> Result<Gate<S>, LayerError> {
        let name = |rule: &Rule| {
            PolicyName::new(&rule.name).map_err(|error| LayerError::Name(rule.name.clone(), error))
        };
        let names: Vec<PolicyName> = rules.rules().map(name).collect::<Result<_, _>>()?;
        if let Some(unknown) = self.customs.keys().find(|name| rules.rules().all(|rule| rule.name != **name))
        {
            return Err(LayerError::UnknownRule(unknown.clone()));
        }
        let keys = rules.rules().map(|rule| (&rule.name, &rule.key));
        for (name, key) in keys.chain(slots.iter().flat_map(SlotRules::keys)) {
            for part in key.parts() {
                // Such a part would be missing from every request: the rule would go by what stands in for it.
                if let Part::Custom(made_up) = part
                    && self.extractors.iter().all(|(known, _)| known != made_up)
                {
                    return Err(LayerError::UnknownExtractor(name.clone(), made_up.clone()));
                }
            }
        }
        let customs = rules.rules().map(|rule| self.customs.get(&rule.name).cloned().unwrap_or_default());
        let is_delay = |limit: &Limit| matches!(limit, Limit::Bucket(it) if it.mode() == Some(Mode::Shape));
        Ok(Gate {
            customs: customs.collect(),
            delays: rules.limits().iter().map(|kept| is_delay(&kept.limit)).collect(),
            limiter,
            rules,
            slots,
            names,
            trust: self.trust,
            spelling: self.spelling,
            other_spellings: self.other_spellings,
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
            answers: AtomicU64::new(0),
        })
    }
}

/// Settings with what rules say of their limits.
#[cfg(feature = "redis")]
pub(super) fn settings_for(rules: &Rules, settings: &crate::redis::Settings) -> crate::redis::Settings {
    let mut settings = settings.clone();
    for (number, kept) in rules.limits().iter().enumerate() {
        settings = settings.named(number, &kept.name);
        if let Some(failure) = kept.failure {
            settings = settings.failure_of(number, failure);
        }
        if let Some(lease) = kept.lease {
            settings = settings.lease(number, lease);
        }
    }
    settings
}

/// A limiter for all limits of the rules.
pub(super) fn limiter_builder(rules: &Rules, builder: &Builder) -> Result<limiter::Builder, LayerError> {
    if rules.limits().is_empty() && builder.slots.is_empty() && !builder.may_lack_rules {
        return Err(LayerError::NoRules);
    }
    Ok(limiter::Builder::of(rules.limits().iter().map(|kept| kept.limit.clone()).collect()))
}

#[cfg(test)]
mod tests;
