//! The door itself: connections, health, reflection, and the end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use subtle::ConstantTimeEq;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tollgate_config::Secret;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use super::bounded::Bounded;
use super::connection::accept;
use super::service::Service;
use super::{Source, reflection};

/// What health checks of this service are asked about, as the reference has it; the empty name is the whole server.
const HEALTH_NAMES: [&str; 2] = ["ratelimit", ""];

/// The most bytes of a call's metadata.
const METADATA_BYTES_MAX: u32 = 16 << 10;

/// The most bytes of a connection that have come and that nobody has read yet.
const WINDOW_BYTES: u32 = 1 << 20;

pub(super) fn knows(metadata: &MetadataMap, token: &Secret) -> bool {
    let sent = metadata.get("authorization").map_or(&b""[..], |value| value.as_encoded_bytes());
    let Some((scheme, sent)) = sent.split_at_checked(b"Bearer ".len()) else { return false };
    // How long it takes must not tell how much of it was right.
    scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(sent.ct_eq(token.reveal().as_bytes()))
}

/// How much of the process those who ask may use.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The most connections at once; others wait to be accepted.
    pub connections_max: usize,
    /// The most calls at once of a connection.
    pub calls_of_connection_max: u32,
    /// The most calls at once of all connections, of which each may have sent [so much](MESSAGE_BYTES_MAX); others are
    /// refused.
    pub calls_max: usize,
    /// How long a client may take for its first words, for a call, or until it answers a ping.
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
    let counts = source.snapshot().counts;
    let service = Bounded::new(Service(source), settings.calls_max, counts);
    let reflection = reflection::service().map_err(io::Error::other)?;
    let (reporter, health) = health_reporter();
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
        let accepting = accept(listener, settings.connections_max, settings.patience, taken);
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
        let (served, (), ()) = tokio::join!(serving, accepting, ending);
        served
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
