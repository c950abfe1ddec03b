//! The door itself: connections, health, reflection, and the end.

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

/// What health checks of this service are asked about, as the reference has it; the empty name is the whole server.
const HEALTH_NAMES: [&str; 2] = ["ratelimit", ""];

/// The most bytes of a question about health, or of one about what there is.
const SMALL_MESSAGE_BYTES_MAX: usize = 4 << 10;

/// The most health checks at once, those who watch included.
const HEALTH_CALLS_MAX: usize = 1024;

/// The most at once who ask what there is.
const REFLECTION_CALLS_MAX: usize = 64;

/// The most bytes of a connection that have come and that nobody has read yet.
const WINDOW_BYTES: u32 = 1 << 20;

/// How much of the process those who ask may use.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The most connections at once; others wait to be accepted.
    pub connections_max: usize,
    /// The most calls at once of a connection.
    pub calls_of_connection_max: u32,
    /// The most calls at once of all connections; others are refused.
    pub calls_max: usize,
    /// The most bytes at once of messages that have not come to their end, of all calls; what is beyond is refused.
    pub unread_bytes_max: usize,
    /// How long a client may take for its first words, for a call, or until it answers a ping; and where there is a token,
    /// until it has shown that it knows it.
    pub patience: Duration,
    /// How often a connection is asked whether there is still somebody.
    pub ping_every: Duration,
    /// How long calls are still taken after health checks are told that there is an end.
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

/// Answers those who ask over gRPC, on a socket of [`Sockets`](crate::Sockets): rate limits, health and reflection.
///
/// Once `drain` is true, health checks are told so at once; then nobody is accepted any more, calls that are under way
/// get their answers, and it ends.
///
/// # Errors
/// If the socket does not work.
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
        // None waits here: the next one is accepted when the one before is served.
        let (taken, connections) = mpsc::channel(1);
        let accepting = accept(listener, settings.connections_max, settings.patience, asks_token, taken);
        let (ended, is_ending) = watch::channel(false);
        let ending = end_after(drain.clone(), reporter, settings.last_call, ended);
        let served =
            server.serve_with_incoming_shutdown(ReceiverStream::new(connections), begun(is_ending.clone()));
        let serving = async {
            tokio::select! {
                served = served => served.map_err(io::Error::other),
                // A client that watches its health check for ever is not waited for.
                () = async { begun(is_ending).await; sleep(settings.patience).await } => Ok(()),
            }
        };
        tokio::select! {
            served = serving => served,
            // They end when the service does; if it ends by itself, nobody waits for them.
            () = async { tokio::join!(accepting, ending); pending().await } => Ok(()),
        }
    }))
}

/// Tells of the end, and begins it a while after.
async fn end_after(
    mut drain: watch::Receiver<bool>,
    reporter: HealthReporter,
    last_call: Duration,
    ended: watch::Sender<bool>,
) {
    // If nobody is left who could tell, it ends as well.
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
