//! The listener: connections, health, reflection and graceful shutdown.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper::Store;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};
use tower_layer::layer_fn;

use super::bounds::METADATA_BYTES_MAX;
use super::call_guard::{CallGuard, CallKind};
use super::connection::accept;
use super::grpc_only::GrpcOnly;
use super::service::RateLimitService;
use super::{EnvoySnapshot, reflection};
use crate::runtime::current::Current;
use crate::runtime::open_files;
use crate::runtime::sockets::into_tokio;

/// The service names in health checks, as in Envoy's reference implementation; the empty name is the whole server.
const HEALTH_NAMES: [&str; 2] = ["ratelimit", ""];

/// Longest message of a health check or a reflection call, in bytes.
const SMALL_MESSAGE_BYTES_MAX: usize = 4 << 10;

/// Most health checks in flight, including `Watch` streams.
const HEALTH_CALLS_MAX: usize = 1024;

/// Most reflection calls in flight.
const REFLECTION_CALLS_MAX: usize = 64;

/// Most bytes of a connection that are received and not yet read.
const WINDOW_BYTES: u32 = 1 << 20;

/// The bounds on what clients may use.
#[derive(Clone, Copy, Debug)]
pub struct EnvoyListenerSettings {
    /// Most open connections; further ones wait to be accepted.
    pub connections_max: usize,
    /// Most calls in flight per connection.
    pub calls_per_connection_max: u32,
    /// Most calls in flight over all connections; further ones are rejected.
    pub calls_max: usize,
    /// Most bytes of incomplete messages over all calls; calls beyond that are rejected.
    pub incomplete_bytes_max: usize,
    /// How long a client may take for the connection preface, for a call, or to answer a ping; and, if there is a
    /// token, until its first call with the token.
    pub client_timeout: Duration,
    /// Interval between keepalive pings.
    pub ping_interval: Duration,
    /// How long calls are still accepted after health checks report `NOT_SERVING`.
    pub drain_delay: Duration,
}

impl Default for EnvoyListenerSettings {
    fn default() -> EnvoyListenerSettings {
        EnvoyListenerSettings {
            connections_max: 1024,
            calls_per_connection_max: 1024,
            calls_max: 4096,
            incomplete_bytes_max: 256 << 20,
            client_timeout: Duration::from_secs(10),
            ping_interval: Duration::from_secs(30),
            drain_delay: Duration::from_millis(500),
        }
    }
}

/// Serves the rate limit service, health and reflection over gRPC, on a socket of [`Sockets`](crate::Sockets).
///
/// Once `drain` is true, health checks report `NOT_SERVING` immediately. After
/// [`drain_delay`](EnvoyListenerSettings::drain_delay), no more connections are accepted, calls in flight are answered,
/// and the future ends.
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen<S: Store + Send + Sync + 'static>(
    listener: std::net::TcpListener,
    current: Arc<Current<EnvoySnapshot<S>>>,
    settings: EnvoyListenerSettings,
    drain: watch::Receiver<bool>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    let (listener, address) = into_tokio(listener)?;
    let byte_permits = Arc::new(Semaphore::new(settings.incomplete_bytes_max.min(Semaphore::MAX_PERMITS)));
    let limits = CallKind::RateLimit(byte_permits);
    let service =
        CallGuard::new(RateLimitService(current.clone()), current.clone(), limits, settings.calls_max);
    let reflection = reflection::service().map_err(io::Error::other)?;
    let reflection = reflection.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let reflection = CallGuard::new(reflection, current.clone(), CallKind::Reflection, REFLECTION_CALLS_MAX);
    let older = reflection::service_v1alpha().map_err(io::Error::other)?;
    let older = older.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let older = CallGuard::new(older, current.clone(), CallKind::Reflection, REFLECTION_CALLS_MAX);
    let (reporter, health) = health_reporter();
    let health = health.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let health = CallGuard::new(health, current.clone(), CallKind::Health, HEALTH_CALLS_MAX);
    let requires_token = Arc::new(move || current.load().settings.token.is_some());
    let server = Server::builder()
        .layer(layer_fn(GrpcOnly::new))
        .max_concurrent_streams(settings.calls_per_connection_max)
        .timeout(settings.client_timeout)
        .http2_keepalive_interval(Some(settings.ping_interval))
        .http2_keepalive_timeout(Some(settings.client_timeout))
        .http2_max_header_list_size(METADATA_BYTES_MAX)
        .initial_connection_window_size(WINDOW_BYTES)
        .add_service(service)
        .add_service(health)
        .add_service(reflection)
        .add_service(older);
    Ok((address, async move {
        set_status(&reporter, ServingStatus::Serving).await;
        // No queue: the next connection is accepted when the previous one is served.
        let (accepted, connections) = mpsc::channel(1);
        let connections_max = settings.connections_max.min(open_files::connections_max());
        let accepting = accept(listener, connections_max, settings.client_timeout, requires_token, accepted);
        let (shut_down, is_shutting_down) = watch::channel(false);
        let draining = shut_down_after(drain.clone(), reporter, settings.drain_delay, shut_down);
        let served = server.serve_with_incoming_shutdown(
            ReceiverStream::new(connections),
            wait_until_true(is_shutting_down.clone()),
        );
        let serving = async {
            tokio::select! {
                served = served => served.map_err(io::Error::other),
                // A client that watches its health without end does not delay the shutdown.
                () = async { wait_until_true(is_shutting_down).await; sleep(settings.client_timeout).await } => Ok(()),
            }
        };
        tokio::select! {
            served = serving => served,
            // Both end when the service ends; if the service fails first, they are dropped.
            () = async { tokio::join!(accepting, draining); pending().await } => Ok(()),
        }
    }))
}

/// Reports `NOT_SERVING`, and begins the shutdown after `drain_delay`.
async fn shut_down_after(
    mut drain: watch::Receiver<bool>,
    reporter: HealthReporter,
    drain_delay: Duration,
    shut_down: watch::Sender<bool>,
) {
    // A dropped sender ends the service as well.
    let _ = drain.wait_for(|is_draining| *is_draining).await;
    set_status(&reporter, ServingStatus::NotServing).await;
    sleep(drain_delay).await;
    shut_down.send_replace(true);
}

async fn wait_until_true(mut flag: watch::Receiver<bool>) {
    let _ = flag.wait_for(|value| *value).await;
}

async fn set_status(reporter: &HealthReporter, status: ServingStatus) {
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}
