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
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ratekeeper_config::{Config, Secret};
use ratekeeper_rules::response::ResponseStatus;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::runtime::current::Current;
use crate::runtime::error::StartError;
use crate::runtime::guard::{Guard, reject_cross_origin, reject_host_names, require_token};
use crate::runtime::http_listener;
use crate::runtime::metrics::MetricsDraft;
use crate::runtime::problem::{problem, wrong_method};
use crate::runtime::service::{ListenerTask, PreparedReload, Service, ServiceAddress};
use crate::runtime::sockets::into_tokio;
use crate::runtime::status::StatusSource;
use crate::runtime::{AddressSetting, BoundSocket};

/// Most open connections. A further one takes the place of a connection that waits for a request head, if there is one.
pub const CONNECTIONS_MAX: usize = 64;

pub(crate) const ADDRESS: AddressSetting =
    AddressSetting { name: "admin", address: |config| config.admin.as_ref().map(|admin| admin.listen) };

/// The admin listener, while it is served.
#[derive(Debug)]
pub(crate) struct Admin {
    token: Arc<Current<Option<Secret>>>,
    listener: ListenerTask,
}

impl Admin {
    pub(crate) fn start(
        config: &Config,
        socket: BoundSocket,
        source: Arc<dyn StatusSource>,
        runtime: &Handle,
    ) -> Result<Admin, StartError> {
        let token = Arc::new(Current::new(token(config)));
        let listener =
            ListenerTask::spawn(runtime, socket, |listener, _| listen(listener, source, token.clone()));
        Ok(Admin { token, listener: listener? })
    }
}

fn token(config: &Config) -> Option<Secret> {
    config.admin.as_ref().and_then(|admin| admin.token.clone())
}

impl<S> Service<S> for Admin {
    fn addresses(&self) -> Vec<ServiceAddress> {
        vec![self.listener.address("admin", "http", "/metrics")]
    }

    fn prepare<'a>(&'a self, config: &'a Config, _: &mut MetricsDraft) -> PreparedReload<'a, S> {
        Ok(Box::new(move |_| self.token.replace(token(config))))
    }

    /// A graceful shutdown does not close the listener: it answers health checks until the process ends.
    fn close_for_successor(&self) {
        self.listener.abort();
    }
}

/// Serves the admin listener on a socket of [`Sockets`](crate::Sockets): `/metrics`, `/healthz` (the process runs),
/// `/readyz` (it accepts new requests). Clients must send the token for the metrics, if there is one.
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen(
    listener: std::net::TcpListener,
    source: Arc<dyn StatusSource>,
    token: Arc<Current<Option<Secret>>>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    let (listener, address) = into_tokio(listener)?;
    let guard = Guard::new("admin", move || Option::clone(&token.load()));
    let router = Router::new()
        .route("/metrics", get(metrics).fallback(wrong_method))
        // This layer covers the routes added above it only.
        .route_layer(from_fn_with_state(guard.clone(), require_token))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path)
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
        Err(_) => {
            problem(ResponseStatus::InternalServerError, "the metrics could not be written; see the log")
        }
    }
}

async fn ready(State(source): State<Arc<dyn StatusSource>>) -> Response {
    match source.is_ready() {
        true => "ready\n".into_response(),
        false => {
            problem(ResponseStatus::ServiceUnavailable, "the server is draining; send requests elsewhere")
        }
    }
}

async fn unknown_path() -> Response {
    problem(ResponseStatus::NotFound, "unknown path; use `/metrics`, `/healthz` or `/readyz`")
}
