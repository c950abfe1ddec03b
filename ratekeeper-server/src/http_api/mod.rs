//! The HTTP API: limits checked over HTTP, by programs in any language and by proxies.
//!
//! | endpoint | what it does |
//! |---|---|
//! | `POST /v1/check` | checks limits by name: charges all of them, or none |
//! | `POST /v1/peek` | decides as a check would, without charging |
//! | `POST /v1/reserve`, `POST /v1/settle` | charges an estimate, then corrects it to the actual cost |
//! | `POST /v1/refund`, `POST /v1/reset` | refunds units, or resets a key; disabled by default |
//! | any `/v1/authorize` | decides about a request that a proxy describes |
//! | `GET /openapi.json` | describes the API |
//!
//! | request | answered |
//! |---|---|
//! | with `Origin`: a page of another site | never, except at `/v1/authorize`, where the header is the client's |
//! | for a host name, if there is no token | never, with the same exception |
//! | for `/v1/authorize` | if it comes from a trusted proxy |
//! | for anything else | if there is no token, or with the token |
//!
//! A denial has status 200 unless the caller chooses another with `deny_status`; any other status of 400 or more is a
//! Problem Details response (RFC 9457) that states what to change.
//!
//! | file | what it does |
//! |---|---|
//! | `api` | the service: settings, reloads and graceful shutdown |
//! | `router` | the routes and their access checks |
//! | `request_body` | parses JSON bodies |
//! | `check`, `reserve` | checks, refunds, resets and reservations |
//! | `idempotency` | executes a retried request once |
//! | `response`, `error` | writes responses and errors |
//! | `original_request`, `authorize` | parses the request that a proxy describes, and decides about it |
//! | `metrics` | metrics |

mod api;
mod authorize;
mod check;
mod error;
mod idempotency;
mod metrics;
mod original_request;
mod request_body;
mod reserve;
mod response;
mod router;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use ratekeeper::Store;
use ratekeeper::tower::client::TrustedProxies;
use ratekeeper::tower::{RatekeeperLayer, RuleSet};
use ratekeeper_config::{Authorize, Secret};
use tokio::join;
use tokio::sync::watch;

pub(crate) use self::api::{ADDRESS, HttpApiService};
pub use self::idempotency::IDEMPOTENCY_KEY_BYTES_MAX;
pub use self::metrics::HttpApiMetrics;
pub use self::request_body::{BODY_BYTES_MAX, CHECKS_MAX, EXPIRES, KEY_BYTES_MAX, KEY_PARTS_MAX};
pub use self::reserve::refund_expired;
use self::router::HttpApiHandler;
pub use self::router::router;
use crate::runtime::current::Current;
use crate::runtime::http_listener;
pub use crate::runtime::records::{
    CLAIM_NONCE_BYTES, Claim, ClaimResult, MemoryRecords, RecordError, RecordStore, RedisRecords, TakeResult,
};
use crate::runtime::sockets::into_tokio;

/// Most open connections; further ones are closed immediately.
pub const CONNECTIONS_MAX: usize = 4096;

/// The OpenAPI 3.1 description of this API.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The HTTP API: limits, settings, records and metrics.
#[derive(Debug)]
pub struct HttpApi<S, R> {
    /// The limits and settings.
    pub current: Current<HttpApiSnapshot<S>>,
    /// The stored reservations and idempotent responses.
    pub records: R,
    /// The metrics.
    pub metrics: HttpApiMetrics,
    other_routes: Router,
}

impl<S, R> HttpApi<S, R> {
    /// An API with these limits and settings.
    pub fn new(snapshot: HttpApiSnapshot<S>, records: R) -> HttpApi<S, R> {
        HttpApi {
            current: Current::new(snapshot),
            records,
            metrics: HttpApiMetrics::default(),
            other_routes: Router::new(),
        }
    }

    /// The limits and settings now.
    pub(crate) fn snapshot(&self) -> Arc<HttpApiSnapshot<S>> {
        self.current.load()
    }

    /// Serves further routes behind the token.
    pub(crate) fn with_routes(self, other_routes: Router) -> HttpApi<S, R> {
        HttpApi { other_routes, ..self }
    }
}

/// The configuration during one request.
#[derive(Debug)]
pub struct HttpApiSnapshot<S> {
    /// The limits; none if the configuration has none.
    pub layer: Option<RatekeeperLayer<S>>,
    /// The settings of this API.
    pub settings: Arc<HttpApiSettings>,
}

/// The settings of this API.
#[derive(Clone, Debug)]
pub struct HttpApiSettings {
    /// How many of the layer's rules, from the first, are limits of the configuration and can be checked by name.
    pub limits: usize,
    /// The bearer token that clients must send, if there is one.
    pub token: Option<Secret>,
    /// Whether `/v1/refund` is allowed.
    pub refunds: bool,
    /// Whether `/v1/reset` is allowed.
    pub resets: bool,
    /// The trusted proxies: they may use `/v1/authorize`.
    pub trusted_proxies: TrustedProxies,
    /// The status of a denial to a proxy: 401, 403, or 429 to pass the denial on unchanged.
    pub deny_status: u16,
    /// The rules that `/v1/authorize` checks; none for all limits of the configuration.
    pub authorize_limits: Option<RuleSet>,
}

impl Default for HttpApiSettings {
    /// No limits, no token, no trusted proxies; refunds and resets are disabled.
    fn default() -> HttpApiSettings {
        HttpApiSettings {
            limits: 0,
            token: None,
            refunds: false,
            resets: false,
            trusted_proxies: TrustedProxies::default(),
            deny_status: Authorize::DENY_STATUS_DEFAULT.code(),
            authorize_limits: None,
        }
    }
}

/// Serves the API on a socket of [`Sockets`](crate::Sockets) until `drain` is true: it then accepts no more
/// connections, and the future ends when the open ones have ended. Expired reservations are refunded meanwhile;
/// refunds in progress at the end are completed.
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen<S: Store + Send + Sync + 'static, R: RecordStore>(
    listener: std::net::TcpListener,
    context: Arc<HttpApi<S, R>>,
    drain: watch::Receiver<bool>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    let (listener, address) = into_tokio(listener)?;
    let handler = HttpApiHandler::new(context.clone());
    Ok((address, async move {
        let (end, ended) = watch::channel(false);
        let serving = async move {
            let result = http_listener::serve(listener, handler, CONNECTIONS_MAX, drain).await;
            end.send_replace(true);
            result
        };
        join!(serving, reserve::sweep(context, ended)).0
    }))
}
