//! The admin listener: metrics and health, apart from where clients connect.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, ORIGIN};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

/// What can be asked about a door.
pub trait Watched: Send + Sync + 'static {
    /// Its metrics, in the text format of Prometheus.
    fn metrics(&self) -> String;

    /// Whether it takes new requests.
    fn is_ready(&self) -> bool;
}

/// Answers those who watch, on a socket of [`Sockets`](crate::Sockets): `/metrics`, `/healthz` (it runs), `/readyz` (it takes new requests).
///
/// # Errors
/// If the socket does not work.
pub fn listen(
    listener: std::net::TcpListener,
    watched: Arc<dyn Watched>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
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

async fn metrics(State(watched): State<Arc<dyn Watched>>) -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], watched.metrics())
}

async fn ready(State(watched): State<Arc<dyn Watched>>) -> impl IntoResponse {
    match watched.is_ready() {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    }
}
