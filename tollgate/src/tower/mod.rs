//! Limits in front of any HTTP service, as a [tower](https://docs.rs/tower) middleware: axum, tonic, hyper.
//!
//! ```
//! use std::time::Duration;
//! use tollgate::tower::RateLimitLayer;
//! use tollgate::tower::key::{Key, Otherwise, Part};
//! use tollgate::tower::rule::Rule;
//! use tollgate::{Limit, Rate, Style};
//!
//! // Ten at once for each user, and one more each second; those who do not say who they are share.
//! let limit = Limit::token_bucket(10, Rate::new(1, Duration::from_secs(1))?, Style::Smooth)?;
//! let user = Key::of(Part::header("X-User-Id")).otherwise(Otherwise::Literal("anonymous".to_owned()));
//! let layer = RateLimitLayer::builder().rule(Rule::new("per-user", limit).key(user)).build()?;
//! # let _ = layer;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What a client sees
//!
//! | a request that | gets |
//! |---|---|
//! | all its limits allow | the service's response, with `RateLimit` and `RateLimit-Policy`: what is left, and of what |
//! | a limit denies | 429 with `Retry-After`, the same two, `Cache-Control: no-store` and a problem (RFC 9457) as its body |
//! | finds as many under way as [slots] allow | 429 with `Retry-After: 1`, and the rest as above |
//! | a leaky bucket delays | the service's response, later; 503 at once if [too many](Builder::max_waiting) wait |
//! | is on a rule's list of the denied, or does not say whose it is where it must | 403 |
//! | says twice whose it is, names two hosts, or has a path that servers read in different ways | 400 |
//! | is denied because the store is away, by a limit whose policy is that nothing passes then | 503 |
//! | comes from nobody knows where, and a rule wants to know | 500: see [`Builder::peer`] |
//!
//! gRPC calls get the same as a status: `RESOURCE_EXHAUSTED`, `PERMISSION_DENIED`, `INVALID_ARGUMENT`, `UNAVAILABLE` or
//! `INTERNAL`, with the headers as metadata. Requests of every method count, `HEAD` and `OPTIONS` too, unless a rule says
//! otherwise ([`When::methods`](when::When)). Where the service's own response has such headers already, lists tell both,
//! and of [sets](answer::HeaderSet) with single values the service's own stand.
//!
//! # Several rules
//!
//! A [`Rule`](rule::Rule) is a limit, [whose](key) it is, [which requests](when) it concerns and what each costs. A
//! request must pass all that concern it, and takes nothing from any of them if one denies it.
//!
//! ```
//! # use std::time::Duration;
//! # use tollgate::tower::RateLimitLayer;
//! # use tollgate::tower::key::{Key, Part};
//! # use tollgate::tower::rule::Rule;
//! use tollgate::tower::path::Pattern;
//! use tollgate::tower::when::When;
//! use tollgate::{Align, Limit};
//!
//! let hour = Duration::from_secs(3600);
//! let login = When { paths: vec![Pattern::parse("/login")?], methods: vec!["POST".to_owned()], ..When::default() };
//! let layer = RateLimitLayer::builder()
//!     .per_client("per-client", Limit::fixed_window(1000, hour, Align::Clock)?)
//!     .rule(Rule::new("passwords", Limit::fixed_window(5, hour, Align::Clock)?).key(Key::of(Part::Ip)).when(login))
//!     // This one only counts, and tells `Builder::observe`.
//!     .rule(Rule::new("planned", Limit::fixed_window(100, hour, Align::Clock)?).key(Key::of(Part::Ip)).shadow())
//!     .build()?;
//! # let _ = layer;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Where requests come from
//!
//! Rules that go by address must be told the peer of a connection, which no two servers keep in the same place:
//!
//! | server | how |
//! |---|---|
//! | axum | serve with `into_make_service_with_connect_info::<SocketAddr>()`, and `.peer(\|request\| Some(request.extensions.get::<ConnectInfo<SocketAddr>>()?.ip()))` |
//! | tonic | `.peer(\|request\| Some(request.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip()))` |
//! | hyper | put a [`Peer`] into the extensions of each request, as in `examples/hyper.rs` |
//!
//! Behind proxies, [`Builder::trust`] says whose `X-Forwarded-For` counts.
//!
//! # Where the layer goes
//!
//! In front of the router. Rules see one [normal form](path) of a path, however it was spelt, and that goes on to the
//! service ([`OtherSpellings`]). axum's `Router::layer` is behind the router: use `layer.layer(router)` as the service,
//! or rules that do not look at paths, or [`OtherSpellings::Refuse`].
//!
//! The service must be `Clone`, as those of all three are. A request that is let in at once goes to it without being
//! cloned. One that is delayed or waits for Redis keeps the service that was ready for it; a delay is a timer of tokio.
//!
//! # Several processes
//!
//! With the feature `redis`, `Builder::redis` makes the same layer with its states in Redis.
//!
//! | file | what it does |
//! |---|---|
//! | `builder`, `error` | make a layer, or say why not |
//! | `view` | shows a request to the rules |
//! | `renewal` | rules that change while they are in use |
//! | `gate`, `slots` | decide |
//! | `service`, `told`, `body` | carry out what was decided |
//! | `direct` | the same limits asked by name, without a request |
//! | `token` | verifies tokens, with the feature `jwt` |

mod body;
mod builder;
pub mod direct;
mod error;
mod gate;
mod renewal;
mod service;
pub mod slots;
#[cfg(feature = "jwt")]
pub mod token;
mod told;
mod view;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::request::Parts;
use smallvec::SmallVec;
pub use tollgate_rules::{answer, client, key, path, rule, when};
use tower_layer::Layer;
use tower_service::Service;

pub use self::body::ResponseBody;
pub use self::builder::Builder;
pub use self::error::LayerError;
use self::gate::Gate;
pub use self::gate::{Observed, Outcome, Ruled};
pub use self::renewal::Renewable;
pub use self::service::{RateLimit, ResponseFuture};
pub use self::slots::ChosenSlots;
use crate::limiter::Limiter;
use crate::memory::Memory;
use crate::store::Store;

/// Puts limits in front of a service. See the [module](self).
///
/// A layer and its clones, and all services that they are put in front of, share the limits.
#[derive(Debug)]
pub struct RateLimitLayer<S = Memory> {
    gate: Arc<Gate<S>>,
}

impl<S> Clone for RateLimitLayer<S> {
    /// The same limits: what passes one clone counts for all.
    fn clone(&self) -> Self {
        RateLimitLayer { gate: self.gate.clone() }
    }
}

impl<T, S> Layer<T> for RateLimitLayer<S> {
    type Service = RateLimit<T, S>;

    fn layer(&self, inner: T) -> RateLimit<T, S> {
        RateLimit { inner, gate: self.gate.clone() }
    }
}

impl<S> RateLimitLayer<S> {
    /// The limiter that decides, for those who want to know how it does.
    pub fn limiter(&self) -> &Limiter<S> {
        &self.gate.limiter
    }

    /// How many requests wait now, for leaky buckets that delay.
    pub fn waiting(&self) -> usize {
        self.gate.waiting.load(Ordering::Relaxed)
    }
}

impl<S: Store + Send + Sync + 'static> RateLimitLayer<S> {
    /// Calls a service that is ready, for one request: what [`layer`](Layer::layer) and a call of the service that it
    /// makes do, for a router in front that knows more of a request than stands in it.
    pub fn call_about<T, B, R>(
        &self,
        inner: T,
        request: http::Request<B>,
        about: About<'_>,
    ) -> ResponseFuture<T, http::Request<B>, S>
    where
        T: Service<http::Request<B>, Response = http::Response<R>>,
    {
        service::call(&self.gate, service::Once(inner), request, about)
    }
}

impl RateLimitLayer {
    /// Any number of limits, and how clients are known and told.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

/// Whose requests are whose, in ways that rules cannot say: [`Builder::extractor`]. Functions are extractors, as in the
/// example there; what needs more than a request is a type of its own:
///
/// ```
/// use std::collections::HashMap;
/// use http::request::Parts;
/// use tollgate::tower::KeyExtractor;
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
    /// The text that names the owner of a request, if it has one.
    fn extract(&self, request: &Parts) -> Option<String>;
}

impl<F: Fn(&Parts) -> Option<String> + Send + Sync + 'static> KeyExtractor for F {
    fn extract(&self, request: &Parts) -> Option<String> {
        self(request)
    }
}

/// What a verified token claims, by the claims' names. A service in front that verifies tokens itself may put one into
/// the extensions of a request; else there is [`Builder::claims`].
///
/// ```
/// use tollgate::tower::Claims;
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

/// The address at the other end of a request's connection, for the extensions of a request.
///
/// ```
/// use tollgate::tower::Peer;
///
/// let request = http::Request::get("/").extension(Peer([192, 0, 2, 7].into()));
/// # let _ = request;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// The name of a request's route, for the extensions of a request. A router in front knows it; rules may have it in keys
/// and costs.
///
/// ```
/// use tollgate::tower::Route;
///
/// let request = http::Request::get("/files/7").extension(Route("download".into()));
/// # let _ = request;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route(pub Arc<str>);

/// Something of a caller's own, for the extensions of a request: [`Builder::observe`] gets it back with what was decided
/// about that request.
///
/// ```
/// use std::sync::{Arc, OnceLock};
/// use tollgate::tower::{RateLimitLayer, Subject};
/// # use tollgate::{Align, Limit};
/// # let limit = Limit::fixed_window(10, std::time::Duration::from_secs(60), Align::Clock)?;
///
/// #[derive(Default)]
/// struct Line {
///     allowed: OnceLock<bool>,
/// }
///
/// let layer = RateLimitLayer::builder().per_client("per-client", limit).observe(|observed| {
///     if let Some(line) = observed.subject.and_then(|subject| subject.downcast_ref::<Line>()) {
///         let _ = line.allowed.set(observed.allowed);
///     }
/// });
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(Subject(Arc::new(Line::default())));
/// # let _ = layer.build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Subject(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Subject")
    }
}

/// The numbers of the rules that concern a request, from 0 in the order of the [builder](Builder::rule), for the
/// extensions of a request; without it, all do. What a rule itself says about which requests it concerns still holds.
///
/// ```
/// use tollgate::tower::Chosen;
///
/// // The first rule and the third.
/// let request = http::Request::get("/").extension(Chosen([0, 2].into()));
/// # let _ = request;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen(pub Arc<[usize]>);

impl Chosen {
    /// Each of them once, in order, and none that there is not: whoever wrote them down may have erred.
    fn numbers(chosen: &[usize], rules: usize) -> SmallVec<[usize; 8]> {
        let mut numbers: SmallVec<_> = chosen.iter().copied().filter(|number| *number < rules).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }
}

/// What a router in front knows of a request, for [`RateLimitLayer::call_about`]: the same that may stand in its extensions,
/// without their cost. What is not said here is looked for there.
///
/// ```
/// use tollgate::tower::{About, Chosen, Route};
///
/// let (route, chosen) = (Route("download".into()), Chosen([0, 2].into()));
/// let about = About { client: Some([192, 0, 2, 7].into()), route: Some(&route), chosen: Some(&chosen), ..About::default() };
/// # let _ = about;
/// ```
#[derive(Clone, Debug, Default)]
pub struct About<'a> {
    /// Its client's address, whoever says so.
    pub client: Option<IpAddr>,
    /// What its token claims, if that was verified already; none in it if there is no token that counts. Whoever says
    /// so has also seen to it that there are not two.
    pub claims: Option<Option<&'a Claims>>,
    /// The name of its route.
    pub route: Option<&'a Route>,
    /// The rules that concern it.
    pub chosen: Option<&'a Chosen>,
    /// The rules of slots that concern it.
    pub slots: Option<&'a ChosenSlots>,
    /// What [`Builder::observe`] gets back.
    pub subject: Option<Subject>,
}

/// The content type of an answer to a gRPC call, whose client looks for its status in a trailer; none if a request is no
/// such call. For a service that answers some requests itself.
///
/// ```
/// let request = http::Request::post("/").header("content-type", "application/grpc+proto").body(())?;
/// assert_eq!(tollgate::tower::grpc_content_type(request.headers()).unwrap(), "application/grpc");
/// # Ok::<(), http::Error>(())
/// ```
pub fn grpc_content_type(headers: &http::HeaderMap) -> Option<http::HeaderValue> {
    told::GrpcCall::of(headers).map(|call| call.0)
}

/// What happens to a request whose path is spelt in another way than the [normal form](path) that rules compare.
///
/// Rules meet it under any spelling: `//login` is `/login`. But if the service behind does not think so, a request is
/// counted as one thing and served as another: `/search/../login` is a login to the rules and may be a search to
/// the service.
///
/// ```
/// use tollgate::tower::{OtherSpellings, RateLimitLayer};
///
/// // For axum's `Router::layer`.
/// let builder = RateLimitLayer::builder().other_spellings(OtherSpellings::Refuse);
/// # let _ = builder;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtherSpellings {
    /// It goes on with the normal form, so that what was counted is what is served. Letters and the slash at the end stay
    /// as they came.
    #[default]
    Rewrite,
    /// It gets 400. For a layer inside of a router, such as one given to axum's `Router::layer`: there the route was
    /// chosen before the layer sees the path, and a rewritten path comes too late.
    Refuse,
    /// It goes on as it came. For services that read paths exactly as the rules do, and for rules that do not look at
    /// paths.
    Keep,
}
