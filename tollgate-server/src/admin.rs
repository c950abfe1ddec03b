//! The admin listener: metrics and health, apart from where clients connect.
//!
//! | who asks | is answered |
//! |---|---|
//! | a page of another site (`Origin`) | never |
//! | for a host that is a name, where there is no token | never: a page can have its own name lead here |
//! | for `/healthz` or `/readyz` | always: balancers have no secrets, and these tell none |
//! | for anything else | where there is no token, or with it |

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
use tokio::net::TcpListener;
use tollgate_config::Secret;

use crate::guard::{Guard, no_names, no_pages, only_with_token};

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
    let asked = watched.clone();
    let guard = Guard::new("admin", move || asked.token());
    let router = Router::new()
        .route("/metrics", get(metrics))
        // Everything that is above this line.
        .route_layer(from_fn_with_state(guard.clone(), only_with_token))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .layer(from_fn_with_state(guard, no_names))
        .layer(from_fn(no_pages))
        .with_state(watched);
    Ok((address, async move { axum::serve(listener, router).await }))
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
