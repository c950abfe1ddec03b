//! The admin listener: metrics and health, apart from where clients connect.
//!
//! | who asks | is answered |
//! |---|---|
//! | a page of another site (`Origin`) | never |
//! | for a host that is a name, where there is no token | never: a page can have its own name lead here |
//! | for `/healthz` or `/readyz` | always: balancers have no secrets, and these tell none |
//! | for anything else | where there is no token, or with it |

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE,
};
use axum::http::uri::Authority;
use axum::http::{StatusCode, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use subtle::ConstantTimeEq;
use tokio::net::TcpListener;
use tollgate_config::Secret;

const NOT_BY_NAME: &str = "\
there is nothing here by this name: ask for localhost or an IP address, or give `admin` a token
";
const NO_TOKEN: &str = "\
send the token that the configuration has under `admin`, as in `Authorization: Bearer ...`
";

/// What can be asked about a door.
pub trait Watched: Send + Sync + 'static {
    /// Its metrics, in the text format of Prometheus.
    fn metrics(&self) -> String;

    /// Whether it takes new requests.
    fn is_ready(&self) -> bool;

    /// What those have to know who ask for its metrics.
    fn token(&self) -> Option<Secret>;
}

type Door = Arc<dyn Watched>;

/// Answers those who watch, on a socket of [`Sockets`](crate::Sockets): `/metrics`, `/healthz` (it runs), `/readyz` (it takes new requests).
///
/// # Errors
/// If the socket does not work.
pub fn listen(
    listener: std::net::TcpListener,
    watched: Door,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        // Everything that is above this line.
        .route_layer(from_fn_with_state(watched.clone(), only_with_token))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .layer(from_fn_with_state(watched.clone(), no_names))
        .layer(from_fn(no_pages))
        .with_state(watched);
    Ok((address, async move { axum::serve(listener, router).await }))
}

/// Pages of other sites are not to read what is here, whoever looks at them.
async fn no_pages(request: Request, next: Next) -> Response {
    match request.headers().contains_key(ORIGIN) {
        true => StatusCode::FORBIDDEN.into_response(),
        false => next.run(request).await,
    }
}

/// A site can have its own name lead to this address once its page is loaded, and its page is then none of another site.
/// But it asks by that name, and it does not know the token.
async fn no_names(State(watched): State<Door>, request: Request, next: Next) -> Response {
    match watched.token().is_some() || is_for_us(request.uri(), request.headers()) {
        true => next.run(request).await,
        false => (StatusCode::MISDIRECTED_REQUEST, NOT_BY_NAME).into_response(),
    }
}

/// Whether every host that a request is for is one that nobody else can have. One for no host is by no browser.
fn is_for_us(uri: &Uri, headers: &HeaderMap) -> bool {
    let is_ours = |host: &str| {
        let is_ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        is_ip || host.eq_ignore_ascii_case("localhost")
    };
    let in_headers = |value: &HeaderValue| {
        Authority::try_from(value.as_bytes()).is_ok_and(|authority| is_ours(authority.host()))
    };
    uri.host().is_none_or(is_ours) && headers.get_all(HOST).iter().all(in_headers)
}

async fn only_with_token(State(watched): State<Door>, request: Request, next: Next) -> Response {
    let is_known = watched.token().is_none_or(|token| knows(request.headers(), &token));
    match is_known {
        true => next.run(request).await,
        false => (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")], NO_TOKEN).into_response(),
    }
}

fn knows(headers: &HeaderMap, token: &Secret) -> bool {
    let sent = headers.get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
    let Some((scheme, sent)) = sent.split_at_checked(b"Bearer ".len()) else { return false };
    // How long it takes must not tell how much of it was right.
    scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(sent.ct_eq(token.reveal().as_bytes()))
}

async fn metrics(State(watched): State<Door>) -> Response {
    // Elsewhere than where connections are accepted: to count millions of keys takes a while.
    match tokio::task::spawn_blocking(move || watched.metrics()).await {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn ready(State(watched): State<Door>) -> impl IntoResponse {
    match watched.is_ready() {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    }
}
