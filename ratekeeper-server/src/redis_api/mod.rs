//! The Redis API: any Redis client can check limits here, with the commands of redis-cell.
//!
//! ```text
//! $ redis-cli -p 6380 CL.THROTTLE user:alice 14 30 60
//! 1) (integer) 0     allowed
//! 2) (integer) 15    limit
//! 3) (integer) 14    remaining
//! 4) (integer) -1    retry after: none, because it is allowed
//! 5) (integer) 2     reset after, in seconds
//! ```
//!
//! Replies are arrays of integers:
//!
//! - `CL.THROTTLE key max_burst count period [quantity]`, as in redis-cell: 0 if allowed, 1 if denied; the limit,
//!   which is `max_burst` + 1; units remaining; seconds until a retry, -1 if allowed or if no wait helps; seconds
//!   until the full budget is restored.
//! - `THROTTLE key max_burst count period [quantity]`, as in throttlecrab: 1 if allowed, 0 if denied; the limit,
//!   which is `max_burst`; units remaining; seconds until the full budget is restored; seconds until a retry, 0 if
//!   allowed, -1 if no wait helps.
//! - `RK.CHECK limit [key [cost [key ...]]]`: 1 if allowed, 0 if denied; the limit; units remaining; milliseconds
//!   until a retry, -1 if allowed or if no wait helps; milliseconds until the full budget is restored; milliseconds
//!   that the caller has to delay the request, if the limit shapes traffic.
//!
//! The first two carry an inline limit: a token bucket that refills `count` units per `period` seconds, one by one. A
//! key keeps one instant, whatever the parameters of its commands.
//! The third checks a limit of the configuration by name. If its key has several parts, the first precedes the cost
//! and the others follow it; if it has none, the key is empty or omitted. For a key on the limit's deny list the
//! reply has a limit of 0, and for a key that the limit exempts a limit of -1. Quantities and costs default to 1, and
//! 0 peeks. All times are rounded up, so that a retry after the stated time is never too early. If the store is
//! unavailable and the failure policy is `closed`, the reply is the error `UNAVAILABLE`.
//!
//! `PING`, `ECHO`, `HELLO`, `AUTH`, `COMMAND`, `CLIENT`, `SELECT 0`, `INFO`, `QUIT` and `RESET` are supported because
//! clients send them when they connect. Commands can be pipelined: all that have arrived are answered in order, with
//! one write.
//!
//! | file | what it does |
//! |---|---|
//! | `api` | the service: settings, reloads and graceful shutdown |
//! | [`protocol`] | parses commands |
//! | `connection` | reads, answers and writes, with time limits |
//! | `session`, `commands` | the state of a client, and the table of commands |
//! | `check` | the commands that check a limit |
//! | `pipeline` | groups commands that are checked concurrently |
//! | `reply` | encodes replies |
//! | `metrics` | metrics |

mod api;
mod check;
mod commands;
mod connection;
mod metrics;
mod pipeline;
pub mod protocol;
mod reply;
mod session;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper::Store;
use ratekeeper::tower::RatekeeperLayer;
use ratekeeper_config::Secret;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

pub(crate) use self::api::{ADDRESS, RedisApiService};
pub use self::metrics::RedisApiMetrics;
use crate::runtime::accept::accepted;
use crate::runtime::current::Current;
use crate::runtime::open_files;
use crate::runtime::sockets::into_tokio;

/// The limits and settings of the API. They are read repeatedly, so that a reload takes effect from the next command
/// on.
#[derive(Debug)]
pub struct RedisApiSnapshot<S> {
    /// The limits, if there are any now.
    pub layer: Option<RatekeeperLayer<S>>,
    /// How many of the rules, from the first, can be checked by name. The others belong to descriptors of the Envoy
    /// API.
    pub named_limits: usize,
    /// The token that clients must send with `AUTH`, once per connection.
    pub token: Option<Secret>,
    /// Most open connections.
    pub max_connections: usize,
}

/// How long the API waits for a client before it closes the connection.
#[derive(Clone, Debug)]
pub struct ClientTimeouts {
    /// Between commands.
    pub idle: Duration,
    /// From the first byte of a command to its last.
    pub command: Duration,
    /// For the client to read its replies.
    pub write: Duration,
}

impl Default for ClientTimeouts {
    fn default() -> ClientTimeouts {
        let short = Duration::from_secs(10);
        ClientTimeouts { idle: Duration::from_secs(300), command: short, write: short }
    }
}

/// The state that all connections of the API share.
#[derive(Debug)]
pub struct RedisApi<S> {
    /// The limits and settings.
    pub current: Arc<Current<RedisApiSnapshot<S>>>,
    /// The metrics.
    pub metrics: Arc<RedisApiMetrics>,
    /// The time limits for clients.
    pub timeouts: ClientTimeouts,
    /// Becomes true when the API is to close: commands that have arrived by then are answered, and no others.
    pub draining: watch::Receiver<bool>,
}

/// Serves the API on a socket of [`Sockets`](crate::Sockets), until `draining` is true and all connections have
/// ended.
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen<S: Store + Send + Sync + 'static>(
    listener: std::net::TcpListener,
    api: RedisApi<S>,
) -> io::Result<(SocketAddr, impl Future<Output = ()> + Send)> {
    let (listener, address) = into_tokio(listener)?;
    Ok((address, serve(listener, Arc::new(api))))
}

/// Resolves when the API is to close.
async fn wait_for_drain(mut draining: watch::Receiver<bool>) {
    // A dropped sender closes the API as well.
    let _ = draining.wait_for(|is_draining| *is_draining).await;
}

async fn serve<S: Store + Send + Sync + 'static>(listener: TcpListener, api: Arc<RedisApi<S>>) {
    let mut draining = pin!(wait_for_drain(api.draining.clone()));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            // A panic in one connection does not affect the others.
            Some(_) = connections.join_next() => {}
            result = listener.accept() => {
                if let Some((stream, _)) = accepted(result).await {
                    serve_client(&mut connections, &api, stream);
                }
            }
            () = &mut draining => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Serves a connection, or rejects it if there are too many.
fn serve_client<S: Store + Send + Sync + 'static>(
    connections: &mut JoinSet<()>,
    api: &Arc<RedisApi<S>>,
    stream: TcpStream,
) {
    if connections.len() >= api.current.load().max_connections.min(open_files::connections_max()) {
        api.metrics.reject_connection();
        // If the socket does not accept the error, the client sees the connection end.
        let _ = stream.try_write(b"-ERR max number of clients reached\r\n");
        return;
    }
    let (open, number) = api.metrics.open_connection();
    let api = api.clone();
    connections.spawn(async move {
        let _open = open;
        connection::run(api, stream, number).await;
    });
}
