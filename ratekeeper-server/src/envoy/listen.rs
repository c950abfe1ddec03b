//! The listener: connections, health, reflection and graceful shutdown.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use super::bounded::{Bounded, Calls};
use super::bounds::METADATA_BYTES_MAX;
use super::connection::accept;
use super::service::Service;
use super::{Source, reflection};

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
pub struct Settings {
    /// Most open connections; further ones wait to be accepted.
    pub connections_max: usize,
    /// Most calls in flight per connection.
    pub calls_of_connection_max: u32,
    /// Most calls in flight over all connections; further ones are rejected.
    pub calls_max: usize,
    /// Most bytes of incomplete messages over all calls; calls beyond that are rejected.
    pub unread_bytes_max: usize,
    /// How long a client may take for the connection preface, for a call, or to answer a ping; and, if there is a
    /// token, until its first call with the token.
    pub patience: Duration,
    /// Interval between keepalive pings.
    pub ping_every: Duration,
    /// How long calls are still accepted after health checks report `NOT_SERVING`.
    pub last_call: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            connections_max: 1024,
            calls_of_connection_max: 1024,
            calls_max: 4096,
            unread_bytes_max: 256 << 20,
            patience: Duration::from_secs(10),
            ping_every: Duration::from_secs(30),
            last_call: Duration::from_millis(500),
        }
    }
}

/// Serves the rate limit service, health and reflection over gRPC, on a socket of [`Sockets`](crate::Sockets).
///
/// Once `drain` is true, health checks report `NOT_SERVING` immediately; after [`last_call`](Settings::last_call) no
/// more connections are accepted, calls in flight are answered, and the future ends.
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen<P: Source>(
    listener: std::net::TcpListener,
    source: Arc<P>,
    settings: Settings,
    drain: watch::Receiver<bool>,
) -> io::Result<(SocketAddr, impl Future<Output = io::Result<()>> + Send)> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let unread = Arc::new(Semaphore::new(settings.unread_bytes_max.min(Semaphore::MAX_PERMITS)));
    let limits = Calls::Limits(unread);
    let service = Bounded::new(Service(source.clone()), source.clone(), limits, settings.calls_max);
    let reflection = reflection::service().map_err(io::Error::other)?;
    let reflection = reflection.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let reflection = Bounded::new(reflection, source.clone(), Calls::Reflection, REFLECTION_CALLS_MAX);
    let (reporter, health) = health_reporter();
    let health = health.max_decoding_message_size(SMALL_MESSAGE_BYTES_MAX);
    let health = Bounded::new(health, source.clone(), Calls::Health, HEALTH_CALLS_MAX);
    let asks_token = Arc::new(move || source.snapshot().options.token.is_some());
    let server = Server::builder()
        .max_concurrent_streams(settings.calls_of_connection_max)
        .timeout(settings.patience)
        .http2_keepalive_interval(Some(settings.ping_every))
        .http2_keepalive_timeout(Some(settings.patience))
        .http2_max_header_list_size(METADATA_BYTES_MAX)
        .initial_connection_window_size(WINDOW_BYTES)
        .add_service(service)
        .add_service(health)
        .add_service(reflection);
    Ok((address, async move {
        tell(&reporter, ServingStatus::Serving).await;
        // No queue: the next connection is accepted when the previous one is served.
        let (taken, connections) = mpsc::channel(1);
        let accepting = accept(listener, settings.connections_max, settings.patience, asks_token, taken);
        let (ended, is_ending) = watch::channel(false);
        let ending = end_after(drain.clone(), reporter, settings.last_call, ended);
        let served =
            server.serve_with_incoming_shutdown(ReceiverStream::new(connections), begun(is_ending.clone()));
        let serving = async {
            tokio::select! {
                served = served => served.map_err(io::Error::other),
                // A client that watches its health without end does not delay the shutdown.
                () = async { begun(is_ending).await; sleep(settings.patience).await } => Ok(()),
            }
        };
        tokio::select! {
            served = serving => served,
            // Both end when the service does; if the service fails first, they are dropped.
            () = async { tokio::join!(accepting, ending); pending().await } => Ok(()),
        }
    }))
}

/// Reports `NOT_SERVING`, and begins the shutdown after `last_call`.
async fn end_after(
    mut drain: watch::Receiver<bool>,
    reporter: HealthReporter,
    last_call: Duration,
    ended: watch::Sender<bool>,
) {
    // A dropped sender ends the service as well.
    let _ = drain.wait_for(|is_draining| *is_draining).await;
    tell(&reporter, ServingStatus::NotServing).await;
    sleep(last_call).await;
    ended.send_replace(true);
}

async fn begun(mut news: watch::Receiver<bool>) {
    let _ = news.wait_for(|has_begun| *has_begun).await;
}

async fn tell(reporter: &HealthReporter, status: ServingStatus) {
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}
