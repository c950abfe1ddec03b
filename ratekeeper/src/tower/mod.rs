//! Rate limits as a [tower](https://docs.rs/tower) middleware for any HTTP service: axum, tonic, hyper.
//!
//! ```
//! use std::time::Duration;
//! use ratekeeper::tower::RatekeeperLayer;
//! use ratekeeper::tower::key::{Key, KeyFallback, KeyPart};
//! use ratekeeper::tower::rule::Rule;
//! use ratekeeper::{Limit, Rate, RefillStyle};
//!
//! // A burst of ten for each user, and one more each second; anonymous requests share one budget.
//! let limit = Limit::token_bucket(10, Rate::new(1, Duration::from_secs(1))?, RefillStyle::Smooth)?;
//! let user = Key::of(KeyPart::header("X-User-Id")).fallback(KeyFallback::Literal("anonymous".to_owned()));
//! let layer = RatekeeperLayer::builder().rule(Rule::new("per-user", limit).key(user)).build()?;
//! # let _ = layer;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Client-visible responses
//!
//! | request | response |
//! |---|---|
//! | allowed by all limits | the service's response, with `RateLimit` (quota left) and `RateLimit-Policy` (of what) |
//! | denied by a limit | 429, `Retry-After`, the same two, `Cache-Control: no-store`, Problem Details (RFC 9457) |
//! | denied by a [concurrency limit](concurrency) | 429 with `Retry-After: 1`, and the rest as above |
//! | delayed by a leaky bucket | the response, delayed; 503 immediately if [too many](LayerBuilder::max_waiting) wait |
//! | on a rule's deny list, or without a key where the rule requires one | 403 |
//! | with a repeated key header, two different hosts, or an ambiguous path | 400 |
//! | denied by the failure policy `closed`, because the store is unavailable | 503 |
//! | without a peer address where a rule needs it | 500: see [`LayerBuilder::peer`] |
//!
//! gRPC calls get the same outcome as a gRPC status: `RESOURCE_EXHAUSTED`, `PERMISSION_DENIED`, `INVALID_ARGUMENT`,
//! `UNAVAILABLE` or `INTERNAL`, with the headers as metadata. Requests of every method count, including `HEAD` and
//! `OPTIONS`, unless a rule restricts them ([`When::methods`](when::When)). If the service's response already has a
//! rate limit header, list headers contain the members of both; in a [header set](response::HeaderSet) of single
//! values, the service's values are kept.
//!
//! # Several rules
//!
//! A [`Rule`](rule::Rule) combines a limit, the [key of its budget](key), [conditions](when) and a cost. A request
//! must be allowed by all rules that apply to it; if one denies it, none is charged.
//!
//! ```
//! # use std::time::Duration;
//! # use ratekeeper::tower::RatekeeperLayer;
//! # use ratekeeper::tower::key::{Key, KeyPart};
//! # use ratekeeper::tower::rule::Rule;
//! use ratekeeper::tower::path::Pattern;
//! use ratekeeper::tower::when::When;
//! use ratekeeper::{WindowAlign, Limit};
//!
//! let hour = Duration::from_secs(3600);
//! let login = When { paths: vec![Pattern::parse("/login")?], methods: vec!["POST".to_owned()], ..When::default() };
//! let layer = RatekeeperLayer::builder()
//!     .per_client("per-client", Limit::fixed_window(1000, hour, WindowAlign::Clock)?)
//!     .rule(Rule::new("passwords", Limit::fixed_window(5, hour, WindowAlign::Clock)?).key(Key::of(KeyPart::Ip)).when(login))
//!     // Shadow: reported to `LayerBuilder::observe`, never enforced.
//!     .rule(Rule::new("planned", Limit::fixed_window(100, hour, WindowAlign::Clock)?).key(Key::of(KeyPart::Ip)).shadow())
//!     .build()?;
//! # let _ = layer;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Client addresses
//!
//! Rules that use the client address need the connection's peer address, which each server keeps elsewhere:
//!
//! | server | how |
//! |---|---|
//! | axum | serve with `into_make_service_with_connect_info::<SocketAddr>()`, and `.peer(\|request\| Some(request.extensions.get::<ConnectInfo<SocketAddr>>()?.ip()))` |
//! | tonic | `.peer(\|request\| Some(request.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip()))` |
//! | hyper | put a [`Peer`] into the extensions of each request, as in `examples/hyper.rs` |
//!
//! Behind proxies, [`LayerBuilder::trusted_proxies`] configures the trusted proxies whose `X-Forwarded-For` counts.
//!
//! # Layer order
//!
//! Place the layer in front of the router. Rules see the [normalized path](path), and the request is forwarded with
//! that path ([`NonCanonicalPath`]). axum's `Router::layer` runs after routing: use `layer.layer(router)` as the
//! service, rules without path conditions, or [`NonCanonicalPath::Reject`].
//!
//! The service must be `Clone`, as services of all three frameworks are. A request that is allowed immediately calls
//! the service without cloning it. A request that is delayed or waits for Redis keeps the instance that was polled
//! ready for it. Delays use tokio timers.
//!
//! # Several processes
//!
//! With the feature `redis`, `LayerBuilder::redis` builds the same layer with its state in Redis.
//!
//! | file | content |
//! |---|---|
//! | `builder`, `error` | construction of a layer and its errors |
//! | `view` | a request as rules see it |
//! | `reload` | configuration reloads and state migration |
//! | `engine`, `concurrency` | decisions: rate limits and concurrency limits |
//! | `event` | the outcome of a request, for metrics and logs |
//! | `service`, `response`, `body` | enforcement: the tower service and its responses |
//! | `check` | checks by rule index or inline limit, without an HTTP request |
//! | `token` | JWT verification, with the feature `jwt` |

mod body;
mod builder;
pub mod check;
pub mod concurrency;
mod engine;
mod error;
mod event;
mod http_response;
mod reload;
mod service;
#[cfg(feature = "jwt")]
pub mod token;
mod view;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::request::Parts;
pub use ratekeeper_rules::{client, key, path, request, response, rule, when};
use smallvec::SmallVec;
use tower_layer::Layer;
use tower_service::Service;

pub use self::body::ResponseBody;
pub use self::builder::LayerBuilder;
pub use self::concurrency::ConcurrencySet;
use self::engine::Engine;
pub use self::engine::{RequestChecks, RequestRejection};
pub use self::error::LayerError;
pub use self::event::{DecisionEvent, Outcome, RuleNames, RuleOutcome};
pub use self::http_response::{problem, status_code};
pub use self::reload::Reload;
pub use self::service::{LimitedCall, RateLimit, ResponseFuture};
use crate::limiter::Limiter;
use crate::memory::Memory;
use crate::store::Store;

/// Applies limits to a service. See the [module](self).
///
/// Clones of a layer and all services it wraps share the limits.
#[derive(Debug)]
pub struct RatekeeperLayer<S = Memory> {
    engine: Arc<Engine<S>>,
}

impl<S> Clone for RatekeeperLayer<S> {
    /// Returns a layer with the same limits and shared state.
    fn clone(&self) -> Self {
        RatekeeperLayer { engine: self.engine.clone() }
    }
}

impl<T, S> Layer<T> for RatekeeperLayer<S> {
    type Service = RateLimit<T, S>;

    fn layer(&self, inner: T) -> RateLimit<T, S> {
        RateLimit { inner, engine: self.engine.clone() }
    }
}

impl<S> RatekeeperLayer<S> {
    /// The limiter that decides, for inspection.
    pub fn limiter(&self) -> &Limiter<S> {
        &self.engine.limiter
    }

    /// The number of requests that currently wait for leaky buckets with delay.
    pub fn waiting(&self) -> usize {
        self.engine.waiting.load(Ordering::Relaxed)
    }
}

impl<S: Store + Send + Sync + 'static> RatekeeperLayer<S> {
    /// Calls a ready service for one request, as [`layer`](Layer::layer) and a call of its service would, with
    /// context that a router in front has about the request. The decision of the limits comes with the response.
    pub fn call_with<T, B, R>(
        &self,
        inner: T,
        request: http::Request<B>,
        context: RequestContext<'_>,
    ) -> LimitedCall<T, http::Request<B>, S>
    where
        T: Service<http::Request<B>, Response = http::Response<R>>,
    {
        service::call(&self.engine, service::OwnedService(inner), request, context)
    }

    /// Reads what the limits need of a request from the caller's own view of it, for a router in front that has read
    /// the request already: nothing is parsed or normalized twice. The view must return the [normalized
    /// path](path::normalize) and one host, and the caller must have rejected requests with two hosts, with other
    /// spellings of headers that rules read, or with two tokens. The peer, the extractors and the extensions of the
    /// request do not apply.
    ///
    /// # Errors
    /// If the request is rejected independently of its limits. [`call_checked`](Self::call_checked) takes the error, too.
    pub fn read(
        &self,
        view: &impl request::Request,
        rules: Option<&RuleSet>,
        concurrency: Option<&ConcurrencySet>,
    ) -> Result<RequestChecks, RequestRejection> {
        self.engine.read_rules(view, rules, concurrency)
    }

    /// Runs the checks that were [read](Self::read) from a request of this route, and calls a ready service if they allow
    /// it.
    pub fn call_checked<T, B, R>(
        &self,
        inner: T,
        request: http::Request<B>,
        route: Option<Route>,
        checks: Result<RequestChecks, RequestRejection>,
    ) -> LimitedCall<T, http::Request<B>, S>
    where
        T: Service<http::Request<B>, Response = http::Response<R>>,
    {
        service::call_checked(&self.engine, service::OwnedService(inner), request, route, checks)
    }
}

impl RatekeeperLayer {
    /// Starts a layer without rules and with default settings.
    pub fn builder() -> LayerBuilder {
        LayerBuilder::default()
    }
}

/// Extracts a key part that rules cannot express: [`LayerBuilder::extractor`]. Functions are extractors, as in the
/// example there; an extractor with state is a type:
///
/// ```
/// use std::collections::HashMap;
/// use http::request::Parts;
/// use ratekeeper::tower::KeyExtractor;
///
/// /// The owner of an API key.
/// struct Owners(HashMap<String, String>);
///
/// impl KeyExtractor for Owners {
///     fn extract(&self, request: &Parts) -> Option<String> {
///         self.0.get(request.headers.get("x-api-key")?.to_str().ok()?).cloned()
///     }
/// }
/// ```
pub trait KeyExtractor: Send + Sync + 'static {
    /// Returns the value of the key part, if the request has one.
    fn extract(&self, request: &Parts) -> Option<String>;
}

impl<F: Fn(&Parts) -> Option<String> + Send + Sync + 'static> KeyExtractor for F {
    fn extract(&self, request: &Parts) -> Option<String> {
        self(request)
    }
}

/// Claims of a verified token, by name. A service in front that verifies tokens may insert them into the extensions
/// of a request; otherwise use [`LayerBuilder::claims`].
///
/// ```
/// use ratekeeper::tower::Claims;
///
/// let request = http::Request::get("/").extension(Claims([("plan".to_owned(), "gold".to_owned())].into()));
/// # let _ = request;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims(pub HashMap<String, String>);

impl Claims {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

/// The peer address of a request's connection, for the extensions of a request.
///
/// ```
/// use ratekeeper::tower::Peer;
///
/// let request = http::Request::get("/").extension(Peer([192, 0, 2, 7].into()));
/// # let _ = request;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// The name of a request's route, for the extensions of a request. A router in front sets it; rules may use it in
/// keys and costs.
///
/// ```
/// use ratekeeper::tower::Route;
///
/// let request = http::Request::get("/files/7").extension(Route("download".into()));
/// # let _ = request;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route(pub Arc<str>);

/// The indices of the rules that apply to a request, from 0 in the order of the [builder](LayerBuilder::rule), for
/// the extensions of a request; without it, all rules apply. The conditions of each rule still hold.
///
/// ```
/// use ratekeeper::tower::RuleSet;
///
/// // The first rule and the third.
/// let request = http::Request::get("/").extension(RuleSet([0, 2].into()));
/// # let _ = request;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSet(pub Arc<[usize]>);

impl RuleSet {
    /// Sorts the indices and removes duplicates and indices out of range, which a faulty router could send.
    fn sorted(indices: &[usize], count: usize) -> SmallVec<[usize; 8]> {
        let mut sorted: SmallVec<_> = indices.iter().copied().filter(|index| *index < count).collect();
        sorted.sort_unstable();
        sorted.dedup();
        sorted
    }
}

/// Context of a request for [`RatekeeperLayer::call_with`]: the same values that its extensions may hold, without the
/// cost of extensions. Fields that are not set are read from the extensions.
///
/// ```
/// use ratekeeper::tower::{RequestContext, RuleSet, Route};
///
/// let (route, rules) = (Route("download".into()), RuleSet([0, 2].into()));
/// let context = RequestContext { client: Some([192, 0, 2, 7].into()), route: Some(&route), rules: Some(&rules), ..RequestContext::default() };
/// # let _ = context;
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestContext<'a> {
    /// The client's address; it overrides the peer and the forwarding headers.
    pub client: Option<IpAddr>,
    /// The claims of the request's token, if it was verified already; `Some(None)` if the request has no valid token.
    /// The caller must also have rejected requests with two tokens.
    pub claims: Option<Option<&'a Claims>>,
    /// The name of the route.
    pub route: Option<&'a Route>,
    /// The rules that apply.
    pub rules: Option<&'a RuleSet>,
    /// The concurrency limits that apply.
    pub concurrency: Option<&'a ConcurrencySet>,
}

/// The content type of a response to a gRPC call, whose client reads the status from a trailer; `None` if the request
/// is not a gRPC call. For services that answer some requests themselves.
///
/// ```
/// let request = http::Request::post("/").header("content-type", "application/grpc+proto").body(())?;
/// assert_eq!(ratekeeper::tower::grpc_content_type(request.headers()).unwrap(), "application/grpc");
/// # Ok::<(), http::Error>(())
/// ```
pub fn grpc_content_type(headers: &http::HeaderMap) -> Option<http::HeaderValue> {
    http_response::GrpcCall::of(headers).map(|call| call.0)
}

/// Handling of a request whose path differs from the [normalized path](path) that rules compare.
///
/// Rules match the normalized path: `//login` is `/login`. If the service normalizes differently, a request is
/// counted as one path and served as another: `/search/../login` is a login to the rules and may be a search to the
/// service.
///
/// ```
/// use ratekeeper::tower::{NonCanonicalPath, RatekeeperLayer};
///
/// // For axum's `Router::layer`.
/// let builder = RatekeeperLayer::builder().non_canonical_paths(NonCanonicalPath::Reject);
/// # let _ = builder;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonCanonicalPath {
    /// Forward the normalized path, so that the counted path is the served path. Letter case and a trailing slash are
    /// not changed.
    #[default]
    Rewrite,
    /// Reject the request with 400. For a layer inside a router, for example in axum's `Router::layer`: the route is
    /// selected before the layer sees the path, so rewriting the path has no effect on routing.
    Reject,
    /// Forward the path unchanged. For services that normalize paths exactly as the rules do, and for rules without
    /// path conditions.
    Keep,
}
