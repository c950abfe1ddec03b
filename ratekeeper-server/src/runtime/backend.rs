//! Builds the middleware from a configuration.

use std::sync::Arc;

use ratekeeper::redis::{Redis, Settings};
use ratekeeper::tower::concurrency::InFlightLimit;
use ratekeeper::tower::token::{Tokens, TokensError};
use ratekeeper::tower::{LayerBuilder, LayerError, RatekeeperLayer};
use ratekeeper::{Limiter, Memory, Store, WhenFull};
use ratekeeper_config as config;
use ratekeeper_config::Config;

use super::metrics::{Exposition, families};
use super::records::{MemoryRecords, RecordStore, RedisRecords};

/// A store that can hold the limits of a configuration.
pub trait Backend: Store + Send + Sync + Sized + 'static {
    /// Builds the limits of a configuration with this kind of store. On a reload, state migrates from `before`.
    ///
    /// # Errors
    /// Returns an error if the store has another type, or if the middleware cannot be built.
    fn limits(
        config: &Config,
        builder: LayerBuilder,
        before: Option<&RatekeeperLayer<Self>>,
    ) -> Result<RatekeeperLayer<Self>, LimitsError>;

    /// Opens the connections of the current runtime to the store.
    #[doc(hidden)]
    fn open_connections(limiter: &Limiter<Self>);

    /// Sends the store a request that changes nothing.
    ///
    /// # Errors
    /// Returns why the store does not answer.
    #[doc(hidden)]
    fn reach(limiter: &Limiter<Self>) -> impl Future<Output = Result<(), String>> + Send;

    /// Whether the store is unavailable and the failure policy decides.
    #[doc(hidden)]
    fn is_degraded(limiter: &Limiter<Self>) -> bool;

    /// Events that an operator should know of, counted since the start.
    #[doc(hidden)]
    fn incidents(limiter: &Limiter<Self>) -> Incidents;

    /// Returns leased budget to the store, before the process ends.
    #[doc(hidden)]
    fn release(limiter: &Limiter<Self>) -> impl Future<Output = ()> + Send;

    /// Where reservations and responses to idempotent requests are stored.
    #[doc(hidden)]
    type Records: RecordStore;

    /// Records are stored beside the limits.
    #[doc(hidden)]
    fn records(limiter: &Limiter<Self>) -> Self::Records;

    /// Writes the store's metrics.
    #[doc(hidden)]
    fn write_metrics(limiter: &Limiter<Self>, out: &mut Exposition);
}

/// Events of a store that an operator should know of.
#[doc(hidden)]
#[derive(Debug)]
pub struct Incidents {
    pub(crate) count: u64,
    pub(crate) what: &'static str,
    /// The reason of the last one, if it is known.
    pub(crate) why: Option<String>,
}

impl Backend for Memory {
    fn limits(
        config: &Config,
        mut builder: LayerBuilder,
        before: Option<&RatekeeperLayer>,
    ) -> Result<RatekeeperLayer, LimitsError> {
        let config::Store::Memory { max_keys, max_bytes, when_full } = &config.store else {
            return Err(LimitsError::OtherStore);
        };
        builder = builder.max_keys(*max_keys).max_bytes(*max_bytes).when_full(match when_full {
            config::WhenFull::Share => WhenFull::Share,
            config::WhenFull::Deny => WhenFull::Deny,
            config::WhenFull::Allow => WhenFull::Allow,
        });
        let Some(before) = before else { return Ok(builder.build()?) };
        let reloaded = builder.reload_from(before)?;
        let set_before = before.limiter().max_keys_and_bytes();
        if *max_keys < set_before.0 || *max_bytes < set_before.1 {
            tracing::warn!(
                max_keys,
                max_bytes,
                "max_keys or max_bytes lowered, limits in use keep their capacity until a restart"
            );
        }
        Ok(reloaded)
    }

    fn open_connections(_limiter: &Limiter) {}

    async fn reach(_limiter: &Limiter) -> Result<(), String> {
        Ok(())
    }

    fn is_degraded(_limiter: &Limiter) -> bool {
        false
    }

    fn incidents(limiter: &Limiter) -> Incidents {
        Incidents {
            count: limiter.overflowed(),
            what: "store full, new keys are decided by when_full",
            why: Some(
                "all entries belong to keys in use, by a flood of keys or because max_keys and max_bytes are too low \
                 for the windows of the limits"
                    .to_owned(),
            ),
        }
    }

    async fn release(_limiter: &Limiter) {}

    type Records = MemoryRecords;

    fn records(_limiter: &Limiter) -> MemoryRecords {
        MemoryRecords::default()
    }

    fn write_metrics(limiter: &Limiter, out: &mut Exposition) {
        out.single(&families::KEYS, limiter.keys());
        out.single(&families::STORE_BYTES, limiter.bytes());
        out.single(&families::STORE_OVERFLOWED, limiter.overflowed());
    }
}

impl Backend for Redis {
    fn limits(
        config: &Config,
        builder: LayerBuilder,
        before: Option<&RatekeeperLayer<Redis>>,
    ) -> Result<RatekeeperLayer<Redis>, LimitsError> {
        let config::Store::Redis(redis) = &config.store else { return Err(LimitsError::OtherStore) };
        Ok(match before {
            Some(before) => builder.reload_from(before)?,
            None => builder.redis(&settings(redis))?,
        })
    }

    fn open_connections(limiter: &Limiter<Redis>) {
        limiter.open_connections();
    }

    async fn reach(limiter: &Limiter<Redis>) -> Result<(), String> {
        limiter.reach().await.map_err(|error| error.to_string())
    }

    fn is_degraded(limiter: &Limiter<Redis>) -> bool {
        limiter.is_degraded()
    }

    fn incidents(limiter: &Limiter<Redis>) -> Incidents {
        Incidents {
            count: limiter.failures().map(|(_, count)| count).sum(),
            what: "calls to the store failed, the failure policy decided",
            why: limiter.take_last_failure().map(|error| error.to_string()),
        }
    }

    async fn release(limiter: &Limiter<Redis>) {
        limiter.release().await;
    }

    type Records = RedisRecords;

    fn records(limiter: &Limiter<Redis>) -> RedisRecords {
        RedisRecords::new(limiter)
    }

    fn write_metrics(limiter: &Limiter<Redis>, out: &mut Exposition) {
        let is_up = u8::from(!limiter.is_degraded());
        out.single(&families::REDIS_UP, is_up);
        let mut errors = out.family(&families::REDIS_ERRORS);
        for (reason, count) in limiter.failures() {
            errors.sample([reason.name()], count);
        }
    }
}

fn settings(redis: &config::Redis) -> Settings {
    let mut settings =
        Settings::new(redis.address.reveal()).deadline(redis.deadline).on_store_failure(redis.failure);
    if let Some(secret) = &redis.secret {
        settings = settings.secret(secret.reveal().as_bytes());
    }
    if let Some(namespace) = &redis.namespace {
        settings = settings.namespace(namespace);
    }
    if let Some(connections) = redis.connections {
        settings = settings.connections(connections as usize);
    }
    if let Some(ca) = &redis.ca {
        settings = settings.tls_ca(ca.reveal().as_bytes());
    }
    if let Some((certificate, key)) = &redis.certificate {
        settings = settings.tls_certificate(certificate.reveal().as_bytes(), key.reveal().as_bytes());
    }
    settings
}

/// Builds the part of the middleware that does not depend on the store.
pub(crate) fn builder(config: &Config, tokens: Option<&Arc<Tokens>>) -> LayerBuilder {
    let mut builder = RatekeeperLayer::builder()
        .trusted_proxies(config.client.clone())
        .path_normalization(config.paths)
        .headers(config.responses.headers)
        .jitter_secs(config.responses.jitter_secs);
    for (rule, response) in config.rules.rules().zip(&config.deny_responses) {
        builder = builder.rule(rule.clone()).deny_response(&rule.name, response.clone());
    }
    for limit in in_flight_limits(config) {
        builder = builder.in_flight_limit(limit);
    }
    if let Some(tokens) = tokens.cloned() {
        builder = builder.tokens(tokens);
    }
    builder
}

/// The concurrency limits: those of the configuration, then one for each route with a limit on requests in flight.
pub(crate) fn in_flight_limits(config: &Config) -> impl Iterator<Item = InFlightLimit> {
    let named = config.concurrency.iter().map(|limit| {
        let config::ConcurrencyLimit { name, key, when, max, is_shadow, .. } = limit.clone();
        InFlightLimit { name, key, when, max, is_shadow }
    });
    let routes = config.gateway.iter().flat_map(|gateway| &gateway.routes);
    named.chain(
        routes
            .filter_map(|route| Some(InFlightLimit::new(&route_limit_name(&route.id), route.max_in_flight?))),
    )
}

/// For each route, the index of its concurrency limit in [`in_flight_limits`].
pub(crate) fn route_in_flight_limits(config: &Config) -> impl Iterator<Item = Option<usize>> {
    let mut next = config.concurrency.len();
    let routes = config.gateway.iter().flat_map(|gateway| &gateway.routes);
    routes.map(move |route| {
        let number = next;
        next += usize::from(route.max_in_flight.is_some());
        route.max_in_flight.map(|_| number)
    })
}

/// The names of all limits, in the order in which the middleware numbers them.
pub(crate) fn limit_names(config: &Config) -> impl Iterator<Item = String> {
    config.rules.rules().map(|rule| rule.name.clone()).chain(in_flight_limits(config).map(|limit| limit.name))
}

/// The name that clients see if a route exceeds its limit on requests in flight. No configured limit can have this
/// name.
fn route_limit_name(id: &str) -> String {
    format!("route {id}")
}

/// The verifier of JWTs, if the configuration has keys.
pub(crate) fn tokens(config: &Config) -> Result<Option<Arc<Tokens>>, LimitsError> {
    let verified = config.jwt.as_ref().map(|jwt| {
        let mut tokens = Tokens::new(jwt.keys.reveal())?.header(&jwt.header)?;
        if let Some(issuer) = &jwt.issuer {
            tokens = tokens.issuer(issuer);
        }
        if !jwt.audience.is_empty() {
            tokens = tokens.audience(jwt.audience.iter().map(String::as_str));
        }
        if !jwt.algorithms.is_empty() {
            tokens = tokens.algorithms(&jwt.algorithms)?;
        }
        Ok(Arc::new(tokens))
    });
    verified.transpose()
}

/// Why the limits of a configuration cannot be applied.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitsError {
    /// The configured store has another type than the one in use.
    #[error("the configured store has another type than the one in use; restart to change it")]
    OtherStore,
    /// The keys that verify JWTs are unusable.
    #[error("jwt: {0}")]
    Tokens(#[from] TokensError),
    /// The middleware cannot be built.
    #[error(transparent)]
    Layer(#[from] LayerError),
}
