//! Pools of upstream connections for reuse.
//!
//! Each worker has its own pool, so requests do not contend for a lock and a connection wakes no other core. Workers
//! use each other's connections only at the server's connection limit.

use std::error::Error;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use pin_project_lite::pin_project;
use ratekeeper_config::Protocol;
use tokio::time::{Instant, timeout, timeout_at};

use super::Address;
use super::capacity::{ConnectionLimit, ConnectionPermit, Grant};
use super::dial::{UpstreamStream, dial, failed};
use super::shared::{ServerSettings, SharedConnection, SharedStream, drive_shared};
use crate::gateway::body::RequestBody;
use crate::gateway::timer::{Ticker, Ticks};
use crate::runtime::observed_stream::ObservedStream;

/// Largest response head over HTTP/2.
const HEADERS_BYTES_MAX: u32 = 64 << 10;
/// Largest response head over HTTP/1.1, and the most bytes of a body that are read at once: a client that does not read
/// holds about four such buffers.
const BUFFER_BYTES_MAX: usize = 16 << 10;
/// Most bytes of a response over HTTP/2 that are received before the client reads them.
const STREAM_WINDOW_BYTES: u32 = 32 << 10;
/// The same over all streams of a connection: so many that streams whose clients do not read leave the others theirs.
const CONNECTION_WINDOW_BYTES: u32 = 512 * STREAM_WINDOW_BYTES;
/// Ping timeout, in connect timeouts: the server may have much to read before the ping.
const PING_TIMEOUT_FACTOR: u32 = 5;
/// How long to wait for a pooled connection; opening one to a nearby server takes no longer.
const READY_TIMEOUT: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Pool {
    idle: Mutex<Vec<IdleConnection>>,
    /// The connections that requests share, for HTTP/2: the oldest first.
    shared: Mutex<Vec<SharedConnection>>,
    /// Held while a shared connection is opened, so that other requests wait for it rather than open more.
    opening: tokio::sync::Mutex<()>,
    /// The connection limit, shared by all workers.
    limit: Arc<ConnectionLimit>,
    ticker: Arc<Ticker>,
}

#[derive(Debug)]
struct IdleConnection {
    sender: http1::SendRequest<RequestBody>,
    since: Ticks,
}

impl IdleConnection {
    /// The connection, if it has not expired and can take a request.
    async fn ready(mut self, address: &Address, now: Ticks) -> Option<http1::SendRequest<RequestBody>> {
        let has_not_expired = now.since(self.since) < address.idle_timeout;
        (has_not_expired && is_ready(&mut self.sender).await).then_some(self.sender)
    }
}

/// Whether the connection can take the next request. A server that responded before it had read the whole request may
/// need time for the rest; the wait is at most `READY_TIMEOUT`.
async fn is_ready(sender: &mut http1::SendRequest<RequestBody>) -> bool {
    let now = poll_fn(|context| Poll::Ready(sender.poll_ready(context))).await;
    match now {
        Poll::Ready(ready) => ready.is_ok(),
        Poll::Pending => {
            let soon = Box::pin(timeout(READY_TIMEOUT, poll_fn(|context| sender.poll_ready(context)))).await;
            soon.is_ok_and(|ready| ready.is_ok())
        }
    }
}

/// Why no connection is available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    /// The connection limit is reached.
    #[error("connection limit reached")]
    LimitReached,
    /// The server did not accept within the connect timeout.
    #[error("connect timeout")]
    TimedOut,
    /// The gateway is out of file descriptors, which says nothing about the server.
    #[error("the gateway is out of file descriptors")]
    OutOfDescriptors,
    /// The server refused the connection, or its name or certificate is invalid.
    #[error(transparent)]
    Failed(Box<dyn Error + Send + Sync>),
}

/// A connection for one request.
#[derive(Debug)]
pub(crate) enum UpstreamConnection {
    Exclusive(http1::SendRequest<RequestBody>),
    Shared(SharedStream),
}

/// A request that got no response.
#[derive(Debug)]
pub(crate) struct SendError {
    pub(crate) error: hyper::Error,
    /// The request, if none of it was sent.
    pub(crate) unsent: Option<Box<Request<RequestBody>>>,
}

impl From<TrySendError<Request<RequestBody>>> for SendError {
    fn from(mut error: TrySendError<Request<RequestBody>>) -> SendError {
        SendError { unsent: error.take_message().map(Box::new), error: error.into_error() }
    }
}

impl SendError {
    /// Whether the server has stated that it did not process the request: it refused the stream, or closed the
    /// connection after an earlier one. h2 reports GOAWAY only to streams after the last that it names.
    pub(crate) fn is_unprocessed(&self) -> bool {
        let source = self.error.source().and_then(|source| source.downcast_ref::<h2::Error>());
        source.is_some_and(|error| {
            let is_refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            error.is_remote() && (is_refused || error.is_go_away())
        })
    }

    /// Whether the connection ended before a response. On a connection that was used before, the server has most likely
    /// closed it as the request was sent.
    pub(crate) fn is_connection_lost(&self) -> bool {
        let has_ended =
            self.error.is_incomplete_message() || self.error.is_canceled() || self.error.is_closed();
        has_ended || self.error.source().is_some_and(|source| source.is::<io::Error>())
    }
}

impl UpstreamConnection {
    /// Sends a request; what follows is in the future.
    pub(crate) fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> + Send {
        match self {
            UpstreamConnection::Exclusive(sender) => {
                SendFuture::Exclusive { sending: sender.try_send_request(request) }
            }
            UpstreamConnection::Shared(stream) => SendFuture::Shared {
                sending: Box::pin(async move {
                    let sent = stream.send(request).await.map_err(SendError::from);
                    sent.inspect_err(|failed| {
                        if failed.is_unprocessed() {
                            stream.refused();
                        }
                    })
                }),
            },
        }
    }
}

pin_project! {
    /// A request that is being sent. An `async fn` would have room for the request twice.
    #[project = SendProjection]
    enum SendFuture<E, S> {
        Exclusive { #[pin] sending: E },
        Shared { sending: Pin<Box<S>> },
    }
}

impl<E, S> Future for SendFuture<E, S>
where
    E: Future<Output = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>>,
    S: Future<Output = Result<Response<Incoming>, SendError>>,
{
    type Output = Result<Response<Incoming>, SendError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            SendProjection::Exclusive { sending } => sending.poll(context).map_err(SendError::from),
            SendProjection::Shared { sending } => sending.as_mut().poll(context),
        }
    }
}

impl Pool {
    pub(crate) fn new(limit: Arc<ConnectionLimit>, ticker: Arc<Ticker>) -> Pool {
        Pool {
            idle: Mutex::default(),
            shared: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            limit,
            ticker,
        }
    }

    /// Returns a pooled or a new connection, and whether it was pooled. An idle connection is not used if a `fresh` one
    /// is wanted.
    pub(crate) async fn connection(
        address: &Arc<Address>,
        worker: usize,
        now: Ticks,
        fresh: bool,
    ) -> Result<(UpstreamConnection, bool), ConnectError> {
        let pool = address.pool(worker);
        // The rare cases are boxed: a future is as large as the longest of its waits, and several kilobytes per
        // request cost more than a rare allocation.
        if address.protocol == Protocol::Http2 {
            return match pool.free_stream() {
                Some(stream) => Ok((UpstreamConnection::Shared(stream), true)),
                None => Box::pin(pool.open_or_share(address)).await,
            };
        }
        while !fresh && let Some(idle) = pool.pop_idle() {
            if let Some(sender) = idle.ready(address, now).await {
                return Ok((UpstreamConnection::Exclusive(sender), true));
            }
        }
        Box::pin(pool.open_or_wait(address, now, fresh)).await
    }

    /// Opens a connection outside the pools.
    pub(crate) async fn open_unpooled(address: &Arc<Address>) -> Result<UpstreamConnection, ConnectError> {
        match address.protocol {
            Protocol::Http1 => Pool::open(address, None).await.map(UpstreamConnection::Exclusive),
            Protocol::Http2 => {
                let shared = address.pool(0).open_shared(address, None).await?;
                shared.stream().map(UpstreamConnection::Shared).ok_or(ConnectError::LimitReached)
            }
        }
    }

    fn pop_idle(&self) -> Option<IdleConnection> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Returns a connection to the pool after use.
    pub(crate) fn release(&self, connection: UpstreamConnection) {
        let mut sender = match connection {
            UpstreamConnection::Exclusive(sender) => sender,
            UpstreamConnection::Shared(stream) => return stream.touch(),
        };
        // Repeats only if a waiter joined and gave up before it received the connection.
        while !sender.is_closed() {
            let idle = IdleConnection { sender, since: self.ticker.now() };
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(idle);
            if !self.limit.has_waiters() {
                return;
            }
            let Some(idle) = self.pop_idle() else { return };
            let Some(Grant::Idle(back)) = self.limit.hand_over(Grant::Idle(idle.sender)) else { return };
            sender = back;
        }
    }

    /// Called when a request has timed out after `waited`. If the server sent nothing over the shared connection in
    /// that time, the connection may be dead without an error, so the next requests get another.
    pub(crate) fn retire_if_silent(&self, waited: Duration) {
        let so_far = self.ticker.now().since(Ticks::default());
        let begun = Ticks::default().after(so_far.saturating_sub(waited));
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|connection| {
            let is_silent = connection.last_received() <= begun && connection.has_streams();
            if is_silent {
                connection.retire();
            }
            !is_silent
        });
    }

    /// Closes connections that were last used before `oldest`. The idle list is ordered oldest first.
    pub(crate) fn sweep(&self, oldest: Ticks) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let old = idle.iter().take_while(|idle| idle.since < oldest).count();
        idle.drain(..old);
        drop(idle);
        let is_used = |shared: &SharedConnection| shared.last_received() >= oldest || shared.has_streams();
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).retain(is_used);
    }

    /// For a worker without an idle connection: opens one, or at the connection limit takes another worker's idle
    /// connection, or waits for the next that is returned.
    async fn open_or_wait(
        &self,
        address: &Arc<Address>,
        now: Ticks,
        fresh: bool,
    ) -> Result<(UpstreamConnection, bool), ConnectError> {
        let deadline = Instant::now() + address.connect_timeout;
        let permit = loop {
            let granted = match self.limit.acquire() {
                Ok(permit) => break permit,
                Err(granted) => granted,
            };
            while let Some(idle) = address.pools().iter().find_map(|pool| pool.pop_idle()) {
                // Closed, so that its permit becomes available for a fresh connection.
                if fresh {
                    break;
                }
                if let Some(sender) = idle.ready(address, now).await {
                    return Ok((UpstreamConnection::Exclusive(sender), true));
                }
            }
            let grant = timeout_at(deadline, granted).await.map_err(|_| ConnectError::LimitReached)?;
            if let Ok(Grant::Permit(permit)) = grant {
                break permit;
            }
            // The server may have closed it in the meantime.
            if let Ok(Grant::Idle(mut sender)) = grant
                && is_ready(&mut sender).await
            {
                return Ok((UpstreamConnection::Exclusive(sender), true));
            }
        };
        let opening = timeout(address.connect_timeout, Pool::open(address, Some(permit))).await;
        let sender = opening.map_err(|_| ConnectError::TimedOut)??;
        Ok((UpstreamConnection::Exclusive(sender), false))
    }

    async fn open(
        address: &Arc<Address>,
        permit: Option<ConnectionPermit>,
    ) -> Result<http1::SendRequest<RequestBody>, ConnectError> {
        let mut builder = http1::Builder::new();
        builder.writev(false).max_header_size(BUFFER_BYTES_MAX).max_buf_size(BUFFER_BYTES_MAX);
        match dial(address, permit).await? {
            UpstreamStream::Plain(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
                drive(connection.with_upgrades());
                Ok(sender)
            }
            UpstreamStream::Tls(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
                drive(connection.with_upgrades());
                Ok(sender)
            }
        }
    }

    /// For a worker without a free stream: opens a connection, or at the connection limit takes a stream of another
    /// worker's connection, or waits for the next that ends.
    async fn open_or_share(
        &self,
        address: &Arc<Address>,
    ) -> Result<(UpstreamConnection, bool), ConnectError> {
        let deadline = Instant::now() + address.connect_timeout;
        let Ok(opening) = timeout_at(deadline, self.opening.lock()).await else {
            // If there is a connection, the server is not late: further connections are opened one after the other.
            let is_first = self.shared.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
            return Err(if is_first { ConnectError::TimedOut } else { ConnectError::LimitReached });
        };
        // Another request may have opened a connection in the meantime.
        if let Some(stream) = self.free_stream() {
            return Ok((UpstreamConnection::Shared(stream), true));
        }
        let permit = match self.limit.acquire() {
            Ok(permit) => permit,
            Err(granted) => {
                // Requests that wait for a stream must not wait for each other.
                drop(opening);
                if let Some(stream) = address.pools().iter().find_map(|pool| pool.free_stream()) {
                    return Ok((self.adopt(stream), true));
                }
                match timeout_at(deadline, granted).await {
                    Ok(Ok(Grant::Permit(permit))) => permit,
                    Ok(Ok(Grant::Stream(stream))) => return Ok((self.adopt(stream), true)),
                    _ => return Err(ConnectError::LimitReached),
                }
            }
        };
        let opening = timeout(address.connect_timeout, self.open_shared(address, Some(permit))).await;
        let shared = opening.map_err(|_| ConnectError::TimedOut)??;
        // None only if the server allows no stream at all.
        let stream = shared.stream().ok_or(ConnectError::LimitReached)?;
        let connection = self.adopt(stream);
        while self.limit.has_waiters()
            && let Some(stream) = shared.stream()
        {
            self.limit.hand_over(Grant::Stream(stream));
        }
        Ok((connection, false))
    }

    /// Adds the connection of a stream to this pool, if it is not there.
    fn adopt(&self, stream: SharedStream) -> UpstreamConnection {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if !shared.iter().any(|connection| connection.is_same(stream.connection())) {
            shared.push(stream.connection().clone());
        }
        drop(shared);
        UpstreamConnection::Shared(stream)
    }

    /// A stream of the first connection that has one left.
    fn free_stream(&self) -> Option<SharedStream> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        // Removed, so that the pool does not hold them open.
        shared.retain(SharedConnection::is_usable);
        shared.iter().find_map(SharedConnection::stream)
    }

    async fn open_shared(
        &self,
        address: &Arc<Address>,
        permit: Option<ConnectionPermit>,
    ) -> Result<SharedConnection, ConnectError> {
        let limit = permit.is_some().then(|| self.limit.clone());
        let ticker = self.ticker.clone();
        let settings = ServerSettings::new(self.shared.lock().unwrap_or_else(PoisonError::into_inner).last());
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .max_header_list_size(HEADERS_BYTES_MAX)
            .initial_max_send_streams(settings.assumed())
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            // Pings are sent only while a request waits: otherwise it does not matter whether the server is up.
            .keep_alive_interval(address.ping_after)
            .keep_alive_timeout(address.connect_timeout * PING_TIMEOUT_FACTOR);
        match dial(address, permit).await? {
            UpstreamStream::Plain(stream) => {
                let stream = ObservedStream { stream, observer: settings.clone() };
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
                drive(drive_shared(connection, settings.clone()));
                Ok(SharedConnection::new(sender, settings, ticker, limit))
            }
            UpstreamStream::Tls(stream) => {
                let stream = ObservedStream { stream, observer: settings.clone() };
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
                drive(drive_shared(connection, settings.clone()));
                Ok(SharedConnection::new(sender, settings, ticker, limit))
            }
        }
    }
}

/// Drives the connection in a separate task.
fn drive<F: Future<Output = Result<(), hyper::Error>> + Send + 'static>(connection: F) {
    tokio::spawn(async move {
        // The request in flight receives the error.
        let _ = connection.await;
    });
}
