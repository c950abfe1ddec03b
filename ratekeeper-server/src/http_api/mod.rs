//! The HTTP API: limits checked over HTTP, by programs in any language and by proxies.
//!
//! | endpoint | what it does |
//! |---|---|
//! | `POST /v1/check` | checks limits by name: charges all of them, or none |
//! | `POST /v1/peek` | decides as a check would, without charging |
//! | `POST /v1/reserve`, `POST /v1/settle` | charges an estimate, then corrects it to the actual cost |
//! | `POST /v1/refund`, `POST /v1/reset` | refunds units, or resets a key; off unless the configuration allows it |
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
//! | `serve`, `read_timeout` | connections, and the time limit for request heads |
//! | `request` | parses JSON bodies |
//! | `decide`, `reserve` | runs the checks, refunds, resets and reservations |
//! | `idempotency` | executes a retried request once |
//! | `records` | stores reservations and idempotent responses |
//! | `response`, `refusal` | writes responses and rejections |
//! | `original`, `authorize` | reads the request that a proxy describes, and decides about it |
//! | `counts` | metrics |

mod authorize;
mod counts;
mod decide;
mod idempotency;
mod original;
mod read_timeout;
mod records;
mod refusal;
mod request;
mod reserve;
mod response;
mod serve;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{any, get, post};
use ratekeeper::Store;
use ratekeeper::tower::client::TrustedProxies;
use ratekeeper::tower::{RatekeeperLayer, RuleSet};
use ratekeeper_config::Secret;
use tokio::join;
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use self::counts::Counts;
use self::counts::Endpoint;
pub use self::idempotency::IDEMPOTENCY_KEY_BYTES_MAX;
pub use self::records::{
    CLAIM_NUMBER_BYTES, Claim, Claimed, MemoryRecords, NotKept, Records, RedisRecords, Taken,
};
pub(crate) use self::request::BODY_TIMEOUT;
pub use self::request::{BODY_BYTES_MAX, CHECKS_MAX, EXPIRES, KEY_BYTES_MAX, KEY_PARTS_MAX};
pub use self::reserve::refund_expired;
pub use self::serve::CONNECTIONS_MAX;
use crate::guard::{Guard, reject_cross_origin, reject_host_names, require_token};
use crate::problem::problem;

/// The OpenAPI 3.1 description of this API.
pub const OPENAPI: &str = include_str!("openapi.json");

/// What this API serves. It is consulted on every request, so that a reload takes effect while the API is open.
pub trait Source: Send + Sync + 'static {
    /// The store of the limits.
    type Store: Store + Send + Sync + 'static;
    /// The store of reservations and idempotent responses.
    type Records: Records;

    /// The current configuration.
    fn snapshot(&self) -> Snapshot<Self::Store>;

    /// The stored reservations and idempotent responses.
    fn records(&self) -> &Self::Records;

    /// The metrics of this API.
    fn counts(&self) -> &Counts;

    /// Further routes behind the token: the Envoy API's `POST /json`.
    fn other_routes(&self) -> Router {
        Router::new()
    }
}

/// The configuration during one request.
#[derive(Debug)]
pub struct Snapshot<S> {
    /// The limits; none if the configuration has none.
    pub layer: Option<RatekeeperLayer<S>>,
    /// The settings of this API.
    pub settings: Arc<Settings>,
}

/// The settings of this API.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many of the layer's rules, from the first, are limits of the configuration and can be checked by name.
    pub limits: usize,
    /// The bearer token that clients must send, if there is one.
    pub token: Option<Secret>,
    /// Whether `/v1/refund` is allowed.
    pub refunds: bool,
    /// Whether `/v1/reset` is allowed.
    pub resets: bool,
    /// The trusted proxies: they may use `/v1/authorize`.
    pub trusted: TrustedProxies,
    /// The status of a denial to a proxy: 401, 403, or 429 to pass the denial on unchanged.
    pub deny_status: u16,
    /// The rules that `/v1/authorize` checks; none for all limits of the configuration.
    pub authorize_limits: Option<RuleSet>,
}

impl Default for Settings {
    /// No limits, no token, no trusted proxies; refunds and resets are off.
    fn default() -> Settings {
        Settings {
            limits: 0,
            token: None,
            refunds: false,
            resets: false,
            trusted: TrustedProxies::default(),
            deny_status: 403,
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
pub fn listen<T: Source>(
    listener: std::net::TcpListener,
    source: Arc<T>,
    drain: watch::Receiver<bool>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let router = router(source.clone());
    Ok((address, async move {
        let (ends, ending) = watch::channel(false);
        let serving = async move {
            let ended = serve::serve(listener, router, drain).await;
            ends.send_replace(true);
            ended
        };
        join!(serving, reserve::sweep(source, ending)).0
    }))
}

/// The routes of the API, without a socket. The caller's address is taken from the request extension
/// [`Peer`](ratekeeper::tower::Peer).
pub fn router<T: Source>(source: Arc<T>) -> Router {
    let asked = source.clone();
    let guard = Guard::new("apis.http", move || asked.snapshot().settings.token.clone());
    Router::new()
        .route("/v1/check", post(check::<T>))
        .route("/v1/peek", post(peek::<T>))
        .route("/v1/reset", post(reset::<T>))
        .route("/v1/refund", post(refund::<T>))
        .route("/v1/reserve", post(reserve::<T>))
        .route("/v1/settle", post(settle::<T>))
        .method_not_allowed_fallback(wrong_method)
        .with_state(source.clone())
        .merge(source.other_routes())
        // This layer covers the routes added above it only.
        .route_layer(from_fn_with_state(guard.clone(), require_token))
        .route("/openapi.json", get(openapi))
        .fallback(nothing_here)
        .layer(from_fn_with_state(guard, reject_host_names))
        .layer(from_fn(reject_cross_origin))
        // After the layers: a proxy's subrequest carries its client's `Origin`, and often its `Host`.
        .route("/v1/authorize", any(authorize::authorize::<T>).with_state(source))
}

async fn check<T: Source>(State(api): State<Arc<T>>, request: Request) -> axum::response::Response {
    idempotency::answer(api, Endpoint::Check, request, decide::check).await
}

async fn peek<T: Source>(State(api): State<Arc<T>>, request: Request) -> axum::response::Response {
    idempotency::answer(api, Endpoint::Peek, request, decide::peek).await
}

async fn reset<T: Source>(State(api): State<Arc<T>>, request: Request) -> axum::response::Response {
    idempotency::answer(api, Endpoint::Reset, request, decide::reset).await
}

async fn refund<T: Source>(State(api): State<Arc<T>>, request: Request) -> axum::response::Response {
    idempotency::answer(api, Endpoint::Refund, request, decide::refund).await
}

async fn reserve<T: Source>(State(api): State<Arc<T>>, request: Request) -> axum::response::Response {
    idempotency::answer(api, Endpoint::Reserve, request, reserve::reserve).await
}

async fn settle<T: Source>(State(api): State<Arc<T>>, request: Request) -> axum::response::Response {
    idempotency::answer(api, Endpoint::Settle, request, reserve::settle).await
}

async fn openapi() -> impl axum::response::IntoResponse {
    ([(CONTENT_TYPE, "application/json")], OPENAPI)
}

async fn wrong_method() -> axum::response::Response {
    problem(
        StatusCode::METHOD_NOT_ALLOWED,
        "this is asked by another method; see `Allow`, or `/openapi.json`",
    )
}

async fn nothing_here() -> axum::response::Response {
    problem(StatusCode::NOT_FOUND, "there is nothing by this path; `/openapi.json` lists what there is")
}
