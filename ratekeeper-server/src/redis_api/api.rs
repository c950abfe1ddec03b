//! The Redis API as a service of the server.

use std::sync::Arc;

use ratekeeper_config::Config;
use tokio::runtime::Handle;

use super::{ClientTimeouts, RedisApi, RedisApiMetrics, RedisApiSnapshot, listen};
use crate::runtime::backend::Backend;
use crate::runtime::current::Current;
use crate::runtime::engine::EngineState;
use crate::runtime::error::StartError;
use crate::runtime::metrics::{Exposition, MetricsDraft};
use crate::runtime::service::{ListenerTask, PreparedReload, Service, ServiceAddress};
use crate::runtime::{AddressSetting, BoundSocket};

pub(crate) const ADDRESS: AddressSetting = AddressSetting {
    name: "apis.resp",
    address: |config| config.apis.resp.as_ref().map(|resp| resp.api.listen),
};

/// The Redis API, while it is served.
#[derive(Debug)]
pub(crate) struct RedisApiService<S> {
    current: Arc<Current<RedisApiSnapshot<S>>>,
    metrics: Arc<RedisApiMetrics>,
    listener: ListenerTask,
}

impl<S: Backend> RedisApiService<S> {
    pub(crate) fn start(
        config: &Config,
        engine: &EngineState<S>,
        socket: BoundSocket,
        runtime: &Handle,
    ) -> Result<RedisApiService<S>, StartError> {
        let current = Arc::new(Current::new(snapshot(config, engine)));
        let metrics = Arc::<RedisApiMetrics>::default();
        let listener = ListenerTask::spawn(runtime, socket, |listener, draining| {
            let (current, metrics) = (current.clone(), metrics.clone());
            let api = RedisApi { current, metrics, timeouts: ClientTimeouts::default(), draining };
            let (address, serving) = listen(listener, api)?;
            Ok((address, async move {
                serving.await;
                Ok(())
            }))
        });
        Ok(RedisApiService { current, metrics, listener: listener? })
    }
}

fn snapshot<S>(config: &Config, engine: &EngineState<S>) -> RedisApiSnapshot<S> {
    let resp = config.apis.resp.as_ref();
    RedisApiSnapshot {
        layer: engine.layer.clone(),
        named_limits: config.named_limits,
        token: resp.and_then(|resp| resp.api.token.clone()),
        max_connections: resp.map_or(0, |resp| resp.max_connections),
    }
}

impl<S: Backend> Service<S> for RedisApiService<S> {
    fn addresses(&self) -> Vec<ServiceAddress> {
        vec![self.listener.address("Redis API", "redis", "")]
    }

    fn prepare<'a>(&'a self, config: &'a Config, _: &mut MetricsDraft) -> PreparedReload<'a, S> {
        Ok(Box::new(move |engine| self.current.replace(snapshot(config, engine))))
    }

    fn write_metrics(&self, out: &mut Exposition) {
        self.metrics.write(out);
    }

    fn drained_listener(&self) -> Option<&ListenerTask> {
        Some(&self.listener)
    }
}
