//! The Envoy API as a service of the server.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use ratekeeper::tower::status_code;
use ratekeeper_config::Config;
use ratekeeper_rules::response::ResponseStatus;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::error::EnvoyApiError;
use super::{
    Domains, EnvoyApiSettings, EnvoyListenerSettings, EnvoyMetrics, EnvoySnapshot, MESSAGE_BYTES_MAX, json,
    listen,
};
use crate::runtime::backend::Backend;
use crate::runtime::current::Current;
use crate::runtime::engine::EngineState;
use crate::runtime::error::StartError;
use crate::runtime::http_listener::BODY_TIMEOUT;
use crate::runtime::metrics::{CallOutcome, Exposition, MetricsDraft};
use crate::runtime::problem::problem;
use crate::runtime::service::{ListenerTask, PreparedReload, Service, ServiceAddress};
use crate::runtime::{AddressSetting, BoundSocket};

pub(crate) const ADDRESS: AddressSetting = AddressSetting {
    name: "apis.envoy",
    address: |config| config.apis.envoy.as_ref().map(|envoy| envoy.api.listen),
};

/// The Envoy API: a gRPC listener, and the JSON form for a listener of HTTP.
#[derive(Debug)]
pub(crate) struct EnvoyApi<S> {
    grpc: Arc<Current<EnvoySnapshot<S>>>,
    /// The JSON form, with the permissions of the HTTP API, which serves it.
    json: Arc<Current<EnvoySnapshot<S>>>,
    metrics: Arc<EnvoyMetrics>,
    /// None if the configuration has only the HTTP API, which serves the JSON form.
    listener: Option<ListenerTask>,
}

impl<S: Backend> EnvoyApi<S> {
    /// Serves gRPC on a socket, if there is one.
    pub(crate) fn start(
        config: &Config,
        engine: &EngineState<S>,
        socket: Option<BoundSocket>,
        runtime: &Handle,
    ) -> Result<EnvoyApi<S>, StartError> {
        let metrics = Arc::<EnvoyMetrics>::default();
        let [grpc, json] = snapshots(config, engine, &metrics).map(|it| Arc::new(Current::new(it)));
        let listener = socket.map(|socket| {
            ListenerTask::spawn(runtime, socket, |listener, closing| {
                listen(listener, grpc.clone(), EnvoyListenerSettings::default(), closing)
            })
        });
        Ok(EnvoyApi { grpc, json, metrics, listener: listener.transpose()? })
    }

    /// The route of the JSON form.
    pub(crate) fn json_routes(&self) -> Router {
        let current = self.json.clone();
        let answer = async move |request: Request| {
            let body = read_body(request).await;
            let snapshot = current.load();
            let body = match body {
                Ok(body) => body,
                Err(response) => {
                    snapshot.metrics.count(CallOutcome::Error);
                    return response;
                }
            };
            let (status, text) = json(&body, &snapshot).await;
            (status, [(CONTENT_TYPE, "application/json")], text).into_response()
        };
        Router::new().route("/json", post(answer)).layer(DefaultBodyLimit::max(MESSAGE_BYTES_MAX))
    }
}

/// The snapshots of a configuration: for gRPC and for JSON.
fn snapshots<S>(
    config: &Config,
    engine: &EngineState<S>,
    metrics: &Arc<EnvoyMetrics>,
) -> [EnvoySnapshot<S>; 2] {
    let domains = Arc::new(Domains::new(config.domains.clone()));
    [EnvoyApiSettings::of_grpc(config), EnvoyApiSettings::of_json(config)].map(|settings| EnvoySnapshot {
        layer: engine.layer.clone(),
        domains: domains.clone(),
        settings: Arc::new(settings),
        metrics: metrics.clone(),
    })
}

impl EnvoyApiSettings {
    fn of_grpc(config: &Config) -> EnvoyApiSettings {
        let Some(envoy) = &config.apis.envoy else { return EnvoyApiSettings::default() };
        EnvoyApiSettings {
            token: envoy.api.token.clone(),
            refunds: envoy.refunds,
            headers: envoy.headers,
            header_names: envoy.header_names,
            ..EnvoyApiSettings::default()
        }
    }

    fn of_json(config: &Config) -> EnvoyApiSettings {
        let refunds = config.apis.http.as_ref().is_some_and(|http| http.refunds);
        EnvoyApiSettings { refunds, ..EnvoyApiSettings::default() }
    }
}

impl<S: Backend> Service<S> for EnvoyApi<S> {
    fn addresses(&self) -> Vec<ServiceAddress> {
        self.listener.iter().map(|listener| listener.address("Envoy API", "grpc", "")).collect()
    }

    fn prepare<'a>(&'a self, config: &'a Config, _: &mut MetricsDraft) -> PreparedReload<'a, S> {
        Ok(Box::new(move |engine| {
            let [grpc, json] = snapshots(config, engine, &self.metrics);
            self.grpc.replace(grpc);
            self.json.replace(json);
        }))
    }

    fn write_metrics(&self, out: &mut Exposition) {
        self.metrics.write(out);
    }

    fn drained_listener(&self) -> Option<&ListenerTask> {
        self.listener.as_ref()
    }
}

/// Reads the body of a request, for at most the body timeout.
async fn read_body(request: Request) -> Result<Bytes, Response> {
    match timeout(BODY_TIMEOUT, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(rejection)) if rejection.status() == status_code(ResponseStatus::PayloadTooLarge) => {
            Err(problem(ResponseStatus::PayloadTooLarge, &EnvoyApiError::BodyTooLong.to_string()))
        }
        Ok(Err(_)) => Err(problem(ResponseStatus::BadRequest, "the body could not be read")),
        Err(_) => Err(problem(ResponseStatus::RequestTimeout, "the body took too long")),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::time::Duration;

    use axum::body::Body;
    use axum::http::StatusCode;
    use http_body::Frame;
    use ratekeeper::Memory;
    use ratekeeper_config::EmptyEnvironment;
    use tower_service::Service as _;

    use super::*;
    use crate::runtime::metrics::Metrics;

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

    #[tokio::test]
    async fn body_that_is_too_long_gets_a_problem_response_and_is_counted() {
        let config = ratekeeper_config::parse("apis: { http: 127.0.0.1:0 }", &EmptyEnvironment);
        let config = config.unwrap_or_else(|errors| panic!("{errors}"));
        let engine = EngineState::<Memory>::new(&config, &mut Metrics::new(1).draft(), None).unwrap();
        let api = EnvoyApi::start(&config, &engine, None, &Handle::current()).unwrap();
        let mut routes = api.json_routes();
        for (length, status) in [(MESSAGE_BYTES_MAX, 400), (MESSAGE_BYTES_MAX + 1, 413)] {
            let request = Request::post("/json").body(Body::from(" ".repeat(length))).unwrap();
            let response = routes.call(request).await.unwrap();
            assert_eq!(response.status().as_u16(), status);
            let is_problem = response.headers()[CONTENT_TYPE] == "application/problem+json";
            assert_eq!(is_problem, status == 413);
        }
        let mut metrics = Exposition::default();
        Service::<Memory>::write_metrics(&api, &mut metrics);
        assert!(metrics.into_text().contains("ratekeeper_envoy_api_requests_total{result=\"error\"} 2\n"));
    }
}
