//! The admin listener: metrics and health, on a port separate from client traffic.
//!
//! | request | accepted |
//! |---|---|
//! | with `Origin`: a cross-origin browser request | never |
//! | for a host name, if there is no token | never: DNS rebinding can point a site's host name here |
//! | for `/healthz` or `/readyz` | always: load balancers have no token, and the responses hold no secrets |
//! | for anything else | if there is no token, or with the token |

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ratekeeper_config::Secret;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::runtime::guard::{Guard, reject_cross_origin, reject_host_names, require_token};
use crate::runtime::http_listener;

/// Most open connections. A further one takes the place of a connection that waits for a request head, if there is one.
pub const CONNECTIONS_MAX: usize = 64;

/// Metrics, readiness and token, which the admin listener serves.
pub trait StatusSource: Send + Sync + 'static {
    /// The metrics, in the Prometheus text format.
    fn metrics(&self) -> String;

    /// Whether new requests are accepted.
    fn is_ready(&self) -> bool;

    /// The bearer token that clients must send for the metrics.
    fn token(&self) -> Option<Secret>;
}

/// Serves the admin listener on a socket of [`Sockets`](crate::Sockets): `/metrics`, `/healthz` (the process runs),
/// `/readyz` (it accepts new requests).
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen(
    listener: std::net::TcpListener,
    source: Arc<dyn StatusSource>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let tokens = source.clone();
    let guard = Guard::new("admin", move || tokens.token());
    let router = Router::new()
        .route("/metrics", get(metrics))
        // This layer covers the routes added above it only.
        .route_layer(from_fn_with_state(guard.clone(), require_token))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .layer(from_fn_with_state(guard, reject_host_names))
        .layer(from_fn(reject_cross_origin))
        .with_state(source);
    Ok((address, async move {
        // Never true: the listener answers health checks until the process ends.
        let (_closing, drain) = watch::channel(false);
        http_listener::serve(listener, router, CONNECTIONS_MAX, drain).await
    }))
}

async fn metrics(State(source): State<Arc<dyn StatusSource>>) -> Response {
    // On a blocking thread: counting millions of keys would delay the accept loop.
    match tokio::task::spawn_blocking(move || source.metrics()).await {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn ready(State(source): State<Arc<dyn StatusSource>>) -> impl IntoResponse {
    match source.is_ready() {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    }
}
