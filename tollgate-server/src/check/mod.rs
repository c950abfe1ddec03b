//! The check API: limits asked over HTTP, by programs in any language and by proxies.
//!
//! | | |
//! |---|---|
//! | `POST /v1/check` | charges limits by their names, all or none |
//! | `POST /v1/peek` | says what a check would be told, and takes nothing |
//! | `POST /v1/reserve`, `POST /v1/settle` | charges what something may cost, and puts it right once that is known |
//! | `POST /v1/refund`, `POST /v1/reset` | gives back, or forgets a key; off unless the configuration says otherwise |
//! | any `/v1/authorize` | whether a proxy's request may pass |
//! | `GET /openapi.json` | all of this, for programs |
//!
//! | who asks | is answered |
//! |---|---|
//! | a page of another site (`Origin`) | never, but by `/v1/authorize`: there it is the client's |
//! | for a host that is a name, where there is no token | never, with the same exception |
//! | for `/v1/authorize` | from an address that is trusted |
//! | for anything else | where there is no token, or with it |
//!
//! A denial is an answer, and its status is 200 unless another is asked for; a status of 400 or more that was not asked
//! for is a problem (RFC 9457) and says what to do.
//!
//! | file | what it does |
//! |---|---|
//! | `serve`, `heads` | connections, and how long the head of a request may take |
//! | `asked` | JSON -> what is asked |
//! | `decide`, `reserve` | decides |
//! | `once` | does what is sent twice once |
//! | `records` | what is remembered between requests |
//! | `told`, `refusal` | what is answered |
//! | `original`, `authorize` | a proxy's subrequest -> the request that it is about, and whether it may pass |
//! | `counts` | what has happened |

mod asked;
mod authorize;
mod counts;
mod decide;
mod heads;
mod once;
mod original;
mod records;
mod refusal;
mod reserve;
mod serve;
mod told;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{any, get, post};
use tokio::join;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tollgate::Store;
use tollgate::tower::client::Trust;
use tollgate::tower::{Chosen, RateLimitLayer};
use tollgate_config::Secret;

pub(crate) use self::asked::BODY_TIMEOUT;
pub use self::asked::{BODY_BYTES_MAX, CHECKS_MAX, EXPIRES, KEY_BYTES_MAX, KEY_PARTS_MAX};
pub use self::counts::Counts;
use self::counts::Endpoint;
pub use self::once::IDEMPOTENCY_KEY_BYTES_MAX;
pub use self::records::{
    CLAIM_NUMBER_BYTES, Claim, Claimed, MemoryRecords, NotKept, Records, RedisRecords, Taken,
};
pub use self::reserve::give_back_expired;
pub use self::serve::CONNECTIONS_MAX;
use crate::guard::{Guard, no_names, no_pages, only_with_token};
use crate::problem::problem;

/// What there is to be asked, as OpenAPI 3.1.
pub const OPENAPI: &str = include_str!("openapi.json");

/// What this door is made of. It is asked anew with each request, so that a configuration can change while it is open.
pub trait Source: Send + Sync + 'static {
    /// Where the limits are kept.
    type Store: Store + Send + Sync + 'static;
    /// Where reservations and answers are kept.
    type Records: Records;

    /// How things are now.
    fn snapshot(&self) -> Snapshot<Self::Store>;

    /// What is remembered between requests.
    fn records(&self) -> &Self::Records;

    /// Where it is counted what happens.
    fn counts(&self) -> &Counts;

    /// What else is answered here, to those who know the token: `POST /json` of the gRPC door.
    fn other_routes(&self) -> Router {
        Router::new()
    }
}

/// How things are while one request is answered.
#[derive(Debug)]
pub struct Snapshot<S> {
    /// The limits; none if the configuration has none.
    pub layer: Option<RateLimitLayer<S>>,
    /// What the configuration says of this door.
    pub settings: Arc<Settings>,
}

/// What a configuration says of this door.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many of the layer's rules, counted from the first, are limits of the file, which can be asked by name.
    pub limits: usize,
    /// What those have to know who ask.
    pub token: Option<Secret>,
    /// Whether charges may be given back that nobody reserved.
    pub refunds: bool,
    /// Whether keys may be forgotten.
    pub resets: bool,
    /// The proxies that may ask for their clients.
    pub trusted: Trust,
    /// The status of a denial to a proxy: 401, 403, or 429 for the denial as it is.
    pub deny_status: u16,
    /// The rules that a proxy's requests are held against; all of the file's if nothing is said.
    pub authorize_limits: Option<Chosen>,
}

impl Default for Settings {
    /// No limits, no token, nobody is trusted, and nothing is allowed that is dangerous.
    fn default() -> Settings {
        Settings {
            limits: 0,
            token: None,
            refunds: false,
            resets: false,
            trusted: Trust::default(),
            deny_status: 403,
            authorize_limits: None,
        }
    }
}

/// Answers on a socket of [`Sockets`](crate::Sockets), until `drain` says that the door closes: no more connections are
/// accepted then, and the future ends when those that there are have ended. Reservations that have expired are given back
/// meanwhile; those that are being given back at the end are waited for.
///
/// # Errors
/// If the socket does not work.
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

/// What is answered, without a socket: who comes from where stands in the extensions of a request, as
/// [`Peer`](tollgate::tower::Peer).
pub fn router<T: Source>(source: Arc<T>) -> Router {
    let asked = source.clone();
    let guard = Guard::new("doors.http", move || asked.snapshot().settings.token.clone());
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
        // Everything that is above this line.
        .route_layer(from_fn_with_state(guard.clone(), only_with_token))
        .route("/openapi.json", get(openapi))
        .fallback(nothing_here)
        .layer(from_fn_with_state(guard, no_names))
        .layer(from_fn(no_pages))
        // A proxy's subrequest has its client's `Origin`, and often its `Host`.
        .route("/v1/authorize", any(authorize::authorize::<T>).with_state(source))
}

async fn check<T: Source>(State(door): State<Arc<T>>, request: Request) -> axum::response::Response {
    once::answer(door, Endpoint::Check, request, decide::check).await
}

async fn peek<T: Source>(State(door): State<Arc<T>>, request: Request) -> axum::response::Response {
    once::answer(door, Endpoint::Peek, request, decide::peek).await
}

async fn reset<T: Source>(State(door): State<Arc<T>>, request: Request) -> axum::response::Response {
    once::answer(door, Endpoint::Reset, request, decide::reset).await
}

async fn refund<T: Source>(State(door): State<Arc<T>>, request: Request) -> axum::response::Response {
    once::answer(door, Endpoint::Refund, request, decide::refund).await
}

async fn reserve<T: Source>(State(door): State<Arc<T>>, request: Request) -> axum::response::Response {
    once::answer(door, Endpoint::Reserve, request, reserve::reserve).await
}

async fn settle<T: Source>(State(door): State<Arc<T>>, request: Request) -> axum::response::Response {
    once::answer(door, Endpoint::Settle, request, reserve::settle).await
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
