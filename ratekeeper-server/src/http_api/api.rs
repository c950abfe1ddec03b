//! The HTTP API as a service of the server.

use std::sync::Arc;

use axum::Router;
use ratekeeper::tower::RuleSet;
use ratekeeper_config::Config;
use tokio::runtime::Handle;

use super::{HttpApi, HttpApiSettings, HttpApiSnapshot, listen};
use crate::runtime::backend::Backend;
use crate::runtime::engine::EngineState;
use crate::runtime::error::StartError;
use crate::runtime::metrics::{Exposition, MetricsDraft};
use crate::runtime::records::RecordStore;
use crate::runtime::service::{ListenerTask, PreparedReload, Service, ServiceAddress};
use crate::runtime::{AddressSetting, BoundSocket};

pub(crate) const ADDRESS: AddressSetting = AddressSetting {
    name: "apis.http",
    address: |config| config.apis.http.as_ref().map(|http| http.api.listen),
};

/// The HTTP API, while it is served.
#[derive(Debug)]
pub(crate) struct HttpApiService<S, R> {
    api: Arc<HttpApi<S, R>>,
    listener: ListenerTask,
}

impl<S: Backend, R: RecordStore> HttpApiService<S, R> {
    /// `other_routes` are served behind the token, too.
    pub(crate) fn start(
        config: &Config,
        engine: &EngineState<S>,
        records: R,
        other_routes: Router,
        socket: BoundSocket,
        runtime: &Handle,
    ) -> Result<HttpApiService<S, R>, StartError> {
        let api = Arc::new(HttpApi::new(snapshot(config, engine), records).with_routes(other_routes));
        let listener =
            ListenerTask::spawn(runtime, socket, |listener, closing| listen(listener, api.clone(), closing));
        Ok(HttpApiService { api, listener: listener? })
    }
}

fn snapshot<S>(config: &Config, engine: &EngineState<S>) -> HttpApiSnapshot<S> {
    HttpApiSnapshot { layer: engine.layer.clone(), settings: Arc::new(HttpApiSettings::of(config)) }
}

impl HttpApiSettings {
    fn of(config: &Config) -> HttpApiSettings {
        let settings = HttpApiSettings {
            limits: config.named_limits,
            trusted_proxies: config.client.clone(),
            ..HttpApiSettings::default()
        };
        let Some(http) = &config.apis.http else { return settings };
        HttpApiSettings {
            token: http.api.token.clone(),
            refunds: http.refunds,
            resets: http.resets,
            deny_status: http.authorize.deny_status,
            authorize_limits: Some(RuleSet(http.authorize.limits.as_slice().into())),
            ..settings
        }
    }
}

impl<S: Backend, R: RecordStore> Service<S> for HttpApiService<S, R> {
    fn addresses(&self) -> Vec<ServiceAddress> {
        vec![self.listener.address("HTTP API", "http", "/v1/check")]
    }

    fn prepare<'a>(&'a self, config: &'a Config, _: &mut MetricsDraft) -> PreparedReload<'a, S> {
        Ok(Box::new(move |engine| self.api.current.replace(snapshot(config, engine))))
    }

    fn write_metrics(&self, out: &mut Exposition) {
        self.api.metrics.write(out);
    }

    fn drained_listener(&self) -> Option<&ListenerTask> {
        Some(&self.listener)
    }
}
