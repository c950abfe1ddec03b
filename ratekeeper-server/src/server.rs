//! The server: the engine and the services that a configuration describes. The only file that knows all services.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;

use ratekeeper_config::{Config, Listener, Redis, Store};
use tokio::runtime::{Handle, Runtime};
use tokio::task::JoinSet;

use crate::admin::{self, Admin};
use crate::envoy::{self, EnvoyApi};
use crate::gateway::{Gateway, GatewayDraft, GatewaySockets};
use crate::http_api::{self, HttpApiService};
use crate::redis_api::{self, RedisApiService};
use crate::runtime::access_log::{AccessLog, LogStyle};
use crate::runtime::backend::Backend;
use crate::runtime::engine::{Engine, EngineState};
use crate::runtime::error::StartError;
use crate::runtime::metrics::{Exposition, Metrics, Traffic};
use crate::runtime::service::{Service, ServiceAddress};
use crate::runtime::status::StatusSource;
use crate::runtime::store_monitor::{monitor_store, reach_store};
use crate::runtime::{AddressSetting, BoundSocket, Sockets};

/// A running server.
pub struct Server<S> {
    engine: Arc<Engine<S>>,
    /// The gateway, the APIs and the admin listener, in this order.
    services: Services<S>,
    restart_settings: RestartSettings,
    /// The APIs have threads of their own.
    api_runtime: Option<Runtime>,
    tasks: JoinSet<()>,
}

type Services<S> = Vec<Arc<dyn Service<S>>>;

impl<S: 'static> fmt::Debug for Server<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<_> = self.services.iter().flat_map(|service| service.addresses()).collect();
        f.debug_struct("Server").field("addresses", &addresses).finish_non_exhaustive()
    }
}

impl<S: Backend> Server<S> {
    /// Starts everything that `config` describes. Must be called on a tokio runtime, which accepts connections and
    /// runs timers; requests run on other threads.
    ///
    /// # Errors
    /// If the configuration has neither a gateway nor an API, an address cannot be bound, or certificates, limits,
    /// the store or a thread cannot be set up.
    pub async fn start(
        config: &Config,
        sockets: &mut Sockets,
        log: LogStyle,
    ) -> Result<Server<S>, StartError> {
        Server::start_on(config, sockets, Box::new(io::stdout()), log).await
    }

    /// Like [`start`](Server::start), but with new sockets, and with the access log written to `log` instead of
    /// stdout.
    ///
    /// # Errors
    /// As [`start`](Server::start).
    pub async fn start_with_log(
        config: &Config,
        log: Box<dyn io::Write + Send>,
    ) -> Result<Server<S>, StartError> {
        Server::start_on(config, &mut Sockets::default(), log, LogStyle::Json).await
    }

    async fn start_on(
        config: &Config,
        sockets: &mut Sockets,
        log: Box<dyn io::Write + Send>,
        log_style: LogStyle,
    ) -> Result<Server<S>, StartError> {
        check_services(config)?;
        let workers = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        // All sockets are bound before anything is started.
        let gateway_sockets = config.gateway.as_ref().map(|gateway| GatewaySockets::bind(gateway, sockets));
        let gateway_sockets = gateway_sockets.transpose()?;
        let api_sockets = ApiSockets::bind(config, sockets)?;
        let admin_socket = admin::ADDRESS.bind(config, sockets)?;
        // One shard for each worker of the gateway and each thread of the APIs.
        let metrics = Metrics::new(2 * workers);
        let mut metrics_draft = metrics.draft();
        let gateway = config.gateway.as_ref().map(|gateway| {
            let log = |workers| AccessLog::start(workers, log, log_style);
            GatewayDraft::new(gateway, workers, &mut metrics_draft, log)
        });
        let gateway = gateway.transpose()?;
        let state = Arc::new(EngineState::<S>::new(config, &mut metrics_draft, None)?);
        metrics.publish(metrics_draft);
        let is_up = reach_store(config, &state).await?;
        let mut server = Server {
            engine: Arc::new(Engine::new(state.clone(), metrics)),
            services: Vec::new(),
            restart_settings: RestartSettings::of(config),
            api_runtime: None,
            tasks: JoinSet::new(),
        };
        if let (Some(settings), Some(draft), Some(sockets)) = (&config.gateway, gateway, gateway_sockets) {
            let gateway = Gateway::start(config, settings, sockets, draft, &state)?;
            server.services.push(Arc::new(gateway));
        }
        if !config.apis.are_none() {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("api").build();
            let runtime = runtime.map_err(StartError::Thread)?;
            let handle = runtime.handle().clone();
            // Opened before the first request needs them.
            if let Some(layer) = &state.layer {
                let _entered = handle.enter();
                S::open_connections(layer.limiter());
            }
            // Stored before anything can fail: dropping a runtime here would block on its threads, and panic.
            server.api_runtime = Some(runtime);
            server.services.extend(start_apis(config, &state, api_sockets, &handle)?);
        }
        if let Some(socket) = admin_socket {
            let admin = Admin::start(config, socket, server.status(), &Handle::current())?;
            server.services.push(Arc::new(admin));
        }
        server.tasks.spawn(monitor_store(server.engine.clone(), is_up));
        Ok(server)
    }

    /// The addresses of the gateway, the APIs and the admin listener, in this order.
    pub fn addresses(&self) -> Vec<ServiceAddress> {
        self.services.iter().flat_map(|service| service.addresses()).collect()
    }

    /// Metrics and readiness, also during graceful shutdown.
    pub fn status(&self) -> Arc<dyn StatusSource> {
        Arc::new(ServerStatus { engine: self.engine.clone(), services: self.services.clone() })
    }

    /// Returns totals of the traffic, also after [`drain`](Server::drain).
    pub fn traffic(&self) -> impl Fn() -> Traffic + use<S> {
        let engine = self.engine.clone();
        move || engine.metrics.traffic()
    }

    /// Replaces the configuration. Requests in flight finish under the old one.
    ///
    /// # Errors
    /// If the new configuration cannot be applied or needs a restart; the old one then stays in effect.
    pub fn reload(&self, config: &Config) -> Result<(), StartError> {
        let reloaded = self.replace(config);
        self.engine.metrics.count_reload(reloaded.is_ok());
        reloaded
    }

    /// Counts a failed reload whose configuration could not be read.
    pub fn count_failed_reload(&self) {
        self.engine.metrics.count_reload(false);
    }

    fn replace(&self, config: &Config) -> Result<(), StartError> {
        check_services(config)?;
        self.restart_settings.check(&RestartSettings::of(config))?;
        let mut metrics = self.engine.metrics.draft();
        let mut prepared = Vec::new();
        for service in &self.services {
            prepared.push(service.prepare(config, &mut metrics)?);
        }
        // The last step that can fail, because it starts the state migration of the limits.
        let state = Arc::new(EngineState::new(config, &mut metrics, Some(&self.engine.state()))?);
        self.engine.metrics.publish(metrics);
        self.engine.replace(state.clone());
        for apply in prepared {
            apply(&state);
        }
        Ok(())
    }

    /// Closes the admin listener, because a successor serves it.
    pub fn close_admin(&self) {
        self.services.iter().for_each(|service| service.close_for_successor());
    }

    /// Shuts down gracefully: accepts no more connections, lets requests in flight finish and announces the close to
    /// clients. Returns when all connections are closed or the drain timeout has passed; the result is the number of
    /// connections of the gateway that were still open then.
    pub async fn drain(mut self) -> usize {
        self.engine.start_draining();
        let state = Arc::clone(&self.engine.state());
        let mut draining = JoinSet::new();
        for service in self.services.drain(..) {
            draining.spawn(service.drain(state.drain_timeout));
        }
        let left = draining.join_all().await.iter().sum();
        self.tasks.shutdown().await;
        if let Some(layer) = &self.engine.state().layer {
            S::release(layer.limiter()).await;
        }
        left
    }
}

impl<S> Drop for Server<S> {
    fn drop(&mut self) {
        // An async context must not block on the runtime's threads.
        if let Some(runtime) = self.api_runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Starts the APIs that have a socket.
fn start_apis<S: Backend>(
    config: &Config,
    engine: &EngineState<S>,
    sockets: ApiSockets,
    runtime: &Handle,
) -> Result<Services<S>, StartError> {
    let mut services: Services<S> = Vec::new();
    // The HTTP API serves the JSON form of the Envoy API.
    if sockets.envoy.is_some() || sockets.http.is_some() {
        let envoy = EnvoyApi::start(config, engine, sockets.envoy, runtime)?;
        if let (Some(socket), Some(layer)) = (sockets.http, &engine.layer) {
            let records = S::records(layer.limiter());
            let http = HttpApiService::start(config, engine, records, envoy.json_routes(), socket, runtime)?;
            services.push(Arc::new(http));
        }
        services.push(Arc::new(envoy));
    }
    if let Some(socket) = sockets.resp {
        services.push(Arc::new(RedisApiService::start(config, engine, socket, runtime)?));
    }
    Ok(services)
}

/// The sockets of the APIs that are configured.
struct ApiSockets {
    http: Option<BoundSocket>,
    envoy: Option<BoundSocket>,
    resp: Option<BoundSocket>,
}

impl ApiSockets {
    fn bind(config: &Config, sockets: &mut Sockets) -> Result<ApiSockets, StartError> {
        Ok(ApiSockets {
            http: http_api::ADDRESS.bind(config, sockets)?,
            envoy: envoy::ADDRESS.bind(config, sockets)?,
            resp: redis_api::ADDRESS.bind(config, sockets)?,
        })
    }
}

/// A file that configures no service is probably a mistake.
fn check_services(config: &Config) -> Result<(), StartError> {
    match config.gateway.is_none() && config.apis.are_none() {
        true => Err(StartError::NoService),
        false => Ok(()),
    }
}

/// The addresses of all services but the gateway.
const ADDRESS_SETTINGS: [AddressSetting; 4] =
    [admin::ADDRESS, http_api::ADDRESS, envoy::ADDRESS, redis_api::ADDRESS];

/// Settings that need a restart to change, because sockets and counters depend on them.
#[derive(Debug)]
struct RestartSettings {
    listeners: Vec<Listener>,
    /// Of the [`ADDRESS_SETTINGS`].
    addresses: [Option<SocketAddr>; ADDRESS_SETTINGS.len()],
    /// Its connections are kept across reloads.
    redis: Option<Box<Redis>>,
}

impl RestartSettings {
    fn of(config: &Config) -> RestartSettings {
        let redis = match &config.store {
            Store::Redis(redis) => Some(redis.clone()),
            Store::Memory { .. } => None,
        };
        RestartSettings {
            listeners: config.gateway.as_ref().map(|gateway| gateway.listeners.clone()).unwrap_or_default(),
            addresses: ADDRESS_SETTINGS.map(|setting| (setting.address)(config)),
            redis,
        }
    }

    fn check(&self, new: &RestartSettings) -> Result<(), StartError> {
        let addresses = ADDRESS_SETTINGS.iter().zip(self.addresses.iter().zip(&new.addresses));
        let changed = [("gateway.listen", self.listeners != new.listeners)]
            .into_iter()
            .chain(addresses.map(|(setting, (old, new))| (setting.name, old != new)))
            .chain([
                ("the type of `store`", self.redis.is_some() != new.redis.is_some()),
                ("store.redis", self.redis != new.redis),
            ])
            .find(|(_, is_changed)| *is_changed);
        match changed {
            Some((what, _)) => Err(StartError::NeedsRestart(what)),
            None => Ok(()),
        }
    }
}

/// The server as the admin listener sees it, also during graceful shutdown.
struct ServerStatus<S> {
    engine: Arc<Engine<S>>,
    services: Services<S>,
}

impl<S: Backend> StatusSource for ServerStatus<S> {
    fn metrics(&self) -> String {
        let mut out = Exposition::default();
        self.engine.write_metrics(&mut out);
        for service in &self.services {
            service.write_metrics(&mut out);
        }
        out.into_text()
    }

    fn is_ready(&self) -> bool {
        self.engine.is_ready()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use ratekeeper::Memory;
    use ratekeeper::redis::Redis as RedisStore;
    use ratekeeper_config::EmptyEnvironment;

    use super::*;
    use crate::runtime::metrics::families::{AnyFamily, SECTIONS};

    async fn start<S: Backend>(config: &str) -> Server<S> {
        let config =
            ratekeeper_config::parse(config, &EmptyEnvironment).unwrap_or_else(|errors| panic!("{errors}"));
        Server::start_with_log(&config, Box::new(io::sink())).await.unwrap()
    }

    /// The metrics of a server with every service, and with this store.
    async fn scrape<S: Backend>(store: &str) -> String {
        let config = format!(
            "store: {store}
limits:
  per-ip: {{ key: ip, token_bucket: {{ capacity: 10 }} }}
  busy: {{ key: ip, concurrency: {{ limit: 10 }} }}
gateway: {{ listen: 127.0.0.1:0, routes: [{{ id: all, limits: all, upstream: http://127.0.0.1:9 }}] }}
admin: {{ listen: 127.0.0.1:0 }}
apis: {{ http: 127.0.0.1:0, envoy: 127.0.0.1:0, resp: 127.0.0.1:0 }}
"
        );
        let server = start::<S>(&config).await;
        let gateway = server.addresses()[0].address;
        tokio::task::spawn_blocking(move || {
            use std::io::{Read, Write};
            let mut client = std::net::TcpStream::connect(gateway).unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
            client.read_to_end(&mut Vec::new()).unwrap();
        })
        .await
        .unwrap();
        server.status().metrics()
    }

    /// The labels of a sample, and its value.
    fn parse_sample(rest: &str) -> (Vec<(&str, &str)>, &str) {
        let Some(labels) = rest.strip_prefix('{') else {
            return (Vec::new(), rest.strip_prefix(' ').unwrap());
        };
        let (labels, value) = labels.split_once("} ").unwrap();
        (labels.split(',').map(|label| label.split_once('=').unwrap()).map(unquoted).collect(), value)
    }

    fn unquoted<'a>((name, value): (&'a str, &'a str)) -> (&'a str, &'a str) {
        (name, value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap())
    }

    /// Checks that each family is written once, with its samples below its header, and returns their names.
    fn families_of(text: &str) -> HashSet<&'static str> {
        let all = || SECTIONS.iter().flat_map(|section| section.families);
        let mut found = HashSet::new();
        let mut current: Option<&AnyFamily> = None;
        for line in text.lines() {
            if let Some(header) = line.strip_prefix("# TYPE ") {
                let family = all().find(|it| header == format!("{} {}", it.name, it.kind));
                let family = family.unwrap_or_else(|| panic!("not in the registry: {line}"));
                assert!(found.insert(family.name), "written twice: {line}");
                current = Some(family);
            } else if !line.starts_with("# HELP ") {
                let family = current.unwrap_or_else(|| panic!("without a header: {line}"));
                let suffixes: &[&str] =
                    if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
                let name = &line[..line.find(['{', ' ']).unwrap()];
                assert!(suffixes.iter().any(|suffix| name == format!("{}{suffix}", family.name)), "{line}");
                let (labels, value) = parse_sample(&line[name.len()..]);
                assert!(family.allows(&labels), "{line}");
                assert!(value.parse::<f64>().is_ok(), "{line}");
            }
        }
        found
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn server_with_all_services_reports_exactly_the_registered_metrics() {
        let memory = families_of(&scrape::<Memory>("memory").await);
        // A port without a server: the failure policy decides.
        let redis = families_of(
            &scrape::<RedisStore>("{ redis: { address: 'redis://127.0.0.1:9', on_store_failure: open } }")
                .await,
        );
        let reported = |section: &str| match section {
            "Memory store" => (true, false),
            "Redis store" => (false, true),
            _ => (true, true),
        };
        for section in SECTIONS {
            for family in section.families {
                let is_in = (memory.contains(family.name), redis.contains(family.name));
                assert_eq!(is_in, reported(section.name), "{}", family.name);
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn envoy_metrics_are_reported_only_with_an_api_that_serves_envoy_requests() {
        for (apis, is_reported) in [
            ("resp: 127.0.0.1:0", false),
            ("envoy: 127.0.0.1:0", true),
            ("http: 127.0.0.1:0", true),
            ("envoy: 127.0.0.1:0, resp: 127.0.0.1:0", true),
        ] {
            let server = start::<Memory>(&format!("admin: 127.0.0.1:0\napis: {{ {apis} }}")).await;
            let metrics = server.status().metrics();
            let names = families_of(&metrics);
            assert_eq!(names.contains("ratekeeper_envoy_api_requests_total"), is_reported, "{apis}");
            assert!(names.contains("ratekeeper_reloads_total"), "{apis}");
        }
    }
}
