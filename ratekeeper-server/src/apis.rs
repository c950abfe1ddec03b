//! The HTTP, Envoy and Redis APIs, on the gateway's limits. They are independent of each other, and each applies a
//! reloaded configuration from the next request on.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use ratekeeper::tower::{RatekeeperLayer, RuleSet};
use ratekeeper_config::{Config, Secret};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::admin::StatusSource;
use crate::backend::Backend;
use crate::gateway::{Gateway, GatewayShared, StartError};
use crate::runtime::Sockets;
use crate::runtime::metrics::Exposition;
use crate::runtime::problem::problem;
use crate::{envoy, http_api, redis_api};

/// The API settings of a configuration.
#[derive(Debug)]
pub(crate) struct ApiSettings {
    check: Arc<http_api::HttpApiSettings>,
    domains: Arc<envoy::Domains>,
    rls: Arc<envoy::EnvoyApiSettings>,
    /// For the Envoy API's JSON form, which the HTTP API serves with its own permissions.
    rls_json: Arc<envoy::EnvoyApiSettings>,
    resp_token: Option<Secret>,
    resp_connections: usize,
}

impl ApiSettings {
    pub(crate) fn of(config: &Config) -> ApiSettings {
        let (http, envoy_api) = (config.apis.http.as_ref(), config.apis.envoy.as_ref());
        let resp = config.apis.resp.as_ref();
        ApiSettings {
            check: Arc::new(http_api::HttpApiSettings {
                limits: config.named_limits,
                token: http.and_then(|http| http.api.token.clone()),
                refunds: http.is_some_and(|http| http.refunds),
                resets: http.is_some_and(|http| http.resets),
                trusted_proxies: config.client.clone(),
                deny_status: http.map_or(403, |http| http.authorize.deny_status),
                authorize_limits: http.map(|http| RuleSet(http.authorize.limits.as_slice().into())),
            }),
            domains: Arc::new(envoy::Domains::new(config.domains.clone())),
            rls: Arc::new(envoy::EnvoyApiSettings {
                token: envoy_api.and_then(|envoy_api| envoy_api.api.token.clone()),
                refunds: envoy_api.is_some_and(|envoy_api| envoy_api.refunds),
                headers: envoy_api.is_some_and(|envoy_api| envoy_api.headers),
                header_names: envoy_api.map(|envoy_api| envoy_api.header_names).unwrap_or_default(),
                ..envoy::EnvoyApiSettings::default()
            }),
            rls_json: Arc::new(envoy::EnvoyApiSettings {
                refunds: http.is_some_and(|http| http.refunds),
                ..envoy::EnvoyApiSettings::default()
            }),
            resp_token: resp.and_then(|resp| resp.api.token.clone()),
            resp_connections: resp.map_or(0, |resp| resp.max_connections),
        }
    }
}

/// What every API uses: the gateway's current limits, the records and the counters.
struct ApiContext<S: Backend> {
    shared: Arc<GatewayShared<S>>,
    records: S::Records,
    counts: Arc<ApiCounters>,
}

/// The counters of the APIs.
#[derive(Debug, Default)]
struct ApiCounters {
    check: http_api::HttpApiMetrics,
    rls: Arc<envoy::EnvoyMetrics>,
    resp: Arc<redis_api::RedisApiMetrics>,
}

impl<S: Backend> ApiContext<S> {
    fn layer(&self) -> Option<RatekeeperLayer<S>> {
        self.shared.state.load().limits.clone()
    }
}

fn rls_snapshot<S>(shared: &GatewayShared<S>, counts: &ApiCounters) -> envoy::EnvoySnapshot<S> {
    let state = shared.state.load();
    envoy::EnvoySnapshot {
        layer: state.limits.clone(),
        domains: state.apis.domains.clone(),
        settings: state.apis.rls.clone(),
        metrics: counts.rls.clone(),
    }
}

impl<S: Backend> http_api::HttpApiContext for ApiContext<S> {
    type Store = S;
    type Records = S::Records;

    fn snapshot(&self) -> http_api::HttpApiSnapshot<S> {
        let state = self.shared.state.load();
        http_api::HttpApiSnapshot { layer: state.limits.clone(), settings: state.apis.check.clone() }
    }

    fn records(&self) -> &S::Records {
        &self.records
    }

    fn metrics(&self) -> &http_api::HttpApiMetrics {
        &self.counts.check
    }

    fn other_routes(&self) -> Router {
        let (shared, counts) = (self.shared.clone(), self.counts.clone());
        let json = async move |request: Request| {
            let body = match read_body(request).await {
                Ok(body) => body,
                Err(response) => return response,
            };
            let mut snapshot = rls_snapshot(&shared, &counts);
            snapshot.settings = shared.state.load().apis.rls_json.clone();
            let (status, text) = envoy::json(&body, &snapshot).await;
            (status, [(CONTENT_TYPE, "application/json")], text).into_response()
        };
        Router::new().route("/json", post(json)).layer(DefaultBodyLimit::max(envoy::MESSAGE_BYTES_MAX))
    }
}

/// Reads the body of a request, for at most the body timeout.
async fn read_body(request: Request) -> Result<Bytes, Response> {
    match timeout(http_api::BODY_TIMEOUT, Bytes::from_request(request, &())).await {
        Ok(body) => body.map_err(IntoResponse::into_response),
        Err(_) => Err(problem(StatusCode::REQUEST_TIMEOUT, "the body took too long")),
    }
}

impl<S: Backend> envoy::EnvoyApiContext for ApiContext<S> {
    type Store = S;

    fn snapshot(&self) -> envoy::EnvoySnapshot<S> {
        rls_snapshot(&self.shared, &self.counts)
    }
}

impl<S: Backend> redis_api::RedisApiContext for ApiContext<S> {
    type Store = S;

    fn limits(&self) -> Option<RatekeeperLayer<S>> {
        self.layer()
    }

    fn named_limits(&self) -> usize {
        self.shared.state.load().apis.check.limits
    }

    fn token(&self) -> Option<Secret> {
        self.shared.state.load().apis.resp_token.clone()
    }

    fn max_connections(&self) -> usize {
        self.shared.state.load().apis.resp_connections
    }
}

/// The running APIs.
pub struct Apis {
    /// A separate runtime with one thread per core.
    runtime: Option<Runtime>,
    closing: watch::Sender<bool>,
    tasks: JoinSet<()>,
    addresses: Vec<(&'static str, SocketAddr)>,
    counts: Arc<ApiCounters>,
}

impl fmt::Debug for Apis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Apis").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Apis {
    /// Opens the APIs of a configuration, on the limits of the running gateway.
    ///
    /// # Errors
    /// Returns an error if an address cannot be listened on or a thread cannot be started.
    pub fn open<S: Backend>(
        config: &Config,
        sockets: &mut Sockets,
        gateway: &Gateway<S>,
    ) -> Result<Apis, StartError> {
        let (closing, shutdown) = watch::channel(false);
        let counts = Arc::<ApiCounters>::default();
        let mut apis = Apis { runtime: None, closing, tasks: JoinSet::new(), addresses: Vec::new(), counts };
        let shared = gateway.shared().clone();
        let Some(layer) = shared.state.load().limits.clone().filter(|_| !config.apis.are_none()) else {
            return Ok(apis);
        };
        let records = S::records(layer.limiter());
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("api").build();
        let runtime = runtime.map_err(StartError::Thread)?;
        let handle = runtime.handle().clone();
        // Stored before anything can fail: dropping a runtime here would block on its threads, and panic.
        apis.runtime = Some(runtime);
        let context = Arc::new(ApiContext { shared, records, counts: apis.counts.clone() });
        let _entered = handle.enter();
        let mut listen =
            |address| sockets.listen(address).map_err(|error| StartError::Listen(address, error));
        let listen_error = |address| move |error: io::Error| StartError::Listen(address, error);
        if let Some(http) = &config.apis.http {
            let at = http.api.listen;
            let (address, serving) =
                http_api::listen(listen(at)?, context.clone(), shutdown.clone()).map_err(listen_error(at))?;
            apis.spawn("http", address, async move { log_failure("http", serving.await) });
        }
        if let Some(envoy_api) = &config.apis.envoy {
            let at = envoy_api.api.listen;
            let (address, serving) = envoy::listen(
                listen(at)?,
                context.clone(),
                envoy::EnvoyListenerSettings::default(),
                shutdown.clone(),
            )
            .map_err(listen_error(at))?;
            apis.spawn("envoy", address, async move { log_failure("envoy", serving.await) });
        }
        if let Some(resp) = &config.apis.resp {
            let at = resp.api.listen;
            let api = redis_api::RedisApi {
                context,
                metrics: apis.counts.resp.clone(),
                timeouts: redis_api::ClientTimeouts::default(),
                draining: shutdown,
            };
            let (address, serving) = redis_api::listen(listen(at)?, api).map_err(listen_error(at))?;
            apis.spawn("resp", address, serving);
        }
        Ok(apis)
    }

    /// Requires that the runtime has been entered.
    fn spawn(
        &mut self,
        name: &'static str,
        address: SocketAddr,
        serving: impl Future<Output = ()> + Send + 'static,
    ) {
        self.tasks.spawn(serving);
        self.addresses.push((name, address));
    }

    /// The addresses, by the names of the APIs in the configuration.
    pub fn addresses(&self) -> &[(&'static str, SocketAddr)] {
        &self.addresses
    }

    /// What the admin listener reports: the gateway's metrics and state, with the counters of the APIs.
    pub fn status(&self, gateway: Arc<dyn StatusSource>) -> Arc<dyn StatusSource> {
        Arc::new(CombinedStatus {
            gateway,
            counts: (!self.addresses.is_empty()).then(|| self.counts.clone()),
        })
    }

    /// Closes the APIs gracefully: requests in flight are answered, for at most `drain_timeout`.
    pub async fn close(mut self, drain_timeout: Duration) {
        self.closing.send_replace(true);
        let _ = timeout(drain_timeout, async { while self.tasks.join_next().await.is_some() {} }).await;
    }
}

impl Drop for Apis {
    fn drop(&mut self) {
        // An async context must not block on the runtime's threads.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn log_failure(api: &str, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::error!(api, %error, "API stopped unexpectedly");
    }
}

/// The gateway's metrics with those of the APIs.
struct CombinedStatus {
    gateway: Arc<dyn StatusSource>,
    /// None if no API is configured.
    counts: Option<Arc<ApiCounters>>,
}

impl StatusSource for CombinedStatus {
    fn metrics(&self) -> String {
        let mut text = self.gateway.metrics();
        if let Some(counts) = &self.counts {
            let mut out = Exposition::default();
            counts.check.write(&mut out);
            counts.rls.write(&mut out);
            counts.resp.write(&mut out);
            text.push_str(&out.into_text());
        }
        text
    }

    fn is_ready(&self) -> bool {
        self.gateway.is_ready()
    }

    fn token(&self) -> Option<Secret> {
        self.gateway.token()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use axum::body::Body;
    use http_body::Frame;

    use super::*;

    /// A body that never arrives.
    struct PendingBody;

    impl http_body::Body for PendingBody {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
            Poll::Pending
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_body_times_out_with_408() {
        let read = timeout(Duration::from_secs(60), read_body(Request::new(Body::new(PendingBody)))).await;
        let status = read.map(|read| read.map_err(|response| response.status()));
        assert_eq!(status, Ok(Err(StatusCode::REQUEST_TIMEOUT)));
        let read = read_body(Request::new(Body::from("{}"))).await;
        assert_eq!(read.unwrap_or_default(), "{}");
    }
}
