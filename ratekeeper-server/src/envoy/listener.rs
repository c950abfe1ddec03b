//! The listener: connections, health, reflection and graceful shutdown.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper::Store;
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use super::call_guard::CallGuard;
use super::connection::serve;
use super::service::{Calls, OtherService};
use super::{EnvoySnapshot, reflection};
use crate::runtime::current::Current;
use crate::runtime::http_listener::is_closing;
use crate::runtime::sockets::into_tokio;

/// The service names in health checks, as in Envoy's reference implementation; the empty name is the whole server.
const HEALTH_NAMES: [&str; 2] = ["ratelimit", ""];

/// Longest message of a health check or a reflection call, in bytes.
const SMALL_MESSAGE_BYTES_MAX: usize = 4 << 10;

/// Most health checks in flight, and most `Watch` streams.
const HEALTH_CALLS_MAX: usize = 1024;

/// Most reflection calls in flight.
const REFLECTION_CALLS_MAX: usize = 64;

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
    /// How long a client may take for the connection preface, for a call, to read its response, or to answer a ping;
    /// and, if there is a token, until its first call with the token.
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
    let (reporter, health) = health_reporter();
    let health = health.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let reflection = reflection::service().map_err(io::Error::other)?;
    let reflection = reflection.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let reflection_v1alpha = reflection::service_v1alpha().map_err(io::Error::other)?;
    let reflection_v1alpha = reflection_v1alpha.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let calls = Calls {
        current,
        guard: CallGuard::new(settings.calls_max),
        byte_permits: Semaphore::new(settings.incomplete_bytes_max.min(Semaphore::MAX_PERMITS)),
        other_services: vec![
            OtherService::new(health, || CallGuard::new(HEALTH_CALLS_MAX).without_token()),
            OtherService::new(reflection, || CallGuard::new(REFLECTION_CALLS_MAX)),
            OtherService::new(reflection_v1alpha, || CallGuard::new(REFLECTION_CALLS_MAX)),
        ],
        timeout: settings.client_timeout,
    };
    Ok((address, async move {
        set_status(&reporter, ServingStatus::Serving).await;
        let (shut_down, is_shutting_down) = watch::channel(false);
        let draining = shut_down_after(drain, reporter, settings.drain_delay, shut_down);
        let serving = serve(listener, Arc::new(calls), settings, is_shutting_down);
        tokio::join!(serving, draining);
        Ok(())
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
    is_closing(&mut drain).await;
    set_status(&reporter, ServingStatus::NotServing).await;
    sleep(drain_delay).await;
    shut_down.send_replace(true);
}

async fn set_status(reporter: &HealthReporter, status: ServingStatus) {
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}
