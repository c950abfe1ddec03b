//! The admin listener: metrics and health, on a port separate from client traffic.
//!
//! | request | answered |
//! |---|---|
//! | with `Origin`: a page of another site | never |
//! | for a host name, if there is no token | never: DNS rebinding can point a page's own name here |
//! | for `/healthz` or `/readyz` | always: load balancers have no token, and the answers hold no secrets |
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

use crate::guard::{Guard, no_names, no_pages, only_with_token};

/// What the admin listener reports.
pub trait Watched: Send + Sync + 'static {
    /// Its metrics, in the text format of Prometheus.
    fn metrics(&self) -> String;

    /// Whether new requests are accepted.
    fn is_ready(&self) -> bool;

    /// The bearer token that clients must send to read the metrics.
    fn token(&self) -> Option<Secret>;
}

type Api = Arc<dyn Watched>;

/// Serves the admin listener on a socket of [`Sockets`](crate::Sockets): `/metrics`, `/healthz` (the process runs),
/// `/readyz` (it accepts new requests).
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen(
    listener: std::net::TcpListener,
    watched: Api,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let asked = watched.clone();
    let guard = Guard::new("admin", move || asked.token());
    let router = Router::new()
        .route("/metrics", get(metrics))
        // This layer covers the routes added above it only.
        .route_layer(from_fn_with_state(guard.clone(), only_with_token))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .layer(from_fn_with_state(guard, no_names))
        .layer(from_fn(no_pages))
        .with_state(watched);
    Ok((address, async move { axum::serve(listener, router).await }))
}

async fn metrics(State(watched): State<Api>) -> Response {
    // On a blocking thread: counting millions of keys would delay the accept loop.
    match tokio::task::spawn_blocking(move || watched.metrics()).await {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn ready(State(watched): State<Api>) -> impl IntoResponse {
    match watched.is_ready() {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    }
}
