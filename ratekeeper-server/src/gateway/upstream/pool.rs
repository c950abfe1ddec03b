//! Pools of upstream connections for reuse.
//!
//! Each worker has its own pool, so requests do not contend for a lock and a connection wakes no other core. Workers
//! use each other's connections only at the server's connection limit.

use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use ratekeeper_config::Protocol;
use tokio::time::{Instant, timeout, timeout_at};

use super::Address;
use super::capacity::{ConnectionLimit, ConnectionPermit, Grant};
use super::dial::{UpstreamStream, dial, failed};
use crate::gateway::body::RequestBody;
use crate::gateway::timer::{Ticker, Ticks};

/// Largest response head from an upstream.
const HEADERS_BYTES_MAX: u32 = 64 << 10;
/// Ping timeout, in connect timeouts: the server may have much to read before the ping.
const PING_TIMEOUT_FACTOR: u32 = 5;
/// How long to wait for a pooled connection; opening one to a nearby server takes no longer.
const READY_TIMEOUT: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Pool {
    idle: Mutex<Vec<IdleConnection>>,
    /// The connection that all requests share, for HTTP/2.
    shared: Mutex<Option<PooledSharedConnection>>,
    /// Held while the shared connection is opened, so that other requests wait for it rather than open more.
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

/// A connection that all requests share, for HTTP/2.
#[derive(Clone, Debug)]
pub(crate) struct SharedConnection {
    sender: http2::SendRequest<RequestBody>,
    state: Arc<SharedConnectionState>,
}

/// State of a shared connection, common to all its users.
#[derive(Debug)]
struct SharedConnectionState {
    ticker: Arc<Ticker>,
    /// When the server last sent something over the connection, in milliseconds.
    last_received: AtomicU64,
    /// The connection takes no more requests.
    is_retired: AtomicBool,
}

impl SharedConnection {
    fn new(sender: http2::SendRequest<RequestBody>, ticker: Arc<Ticker>) -> SharedConnection {
        let last_received = AtomicU64::new(ticker.now().as_millis());
        SharedConnection {
            sender,
            state: Arc::new(SharedConnectionState {
                ticker,
                last_received,
                is_retired: AtomicBool::new(false),
            }),
        }
    }

    fn touch(&self) {
        self.state.last_received.store(self.state.ticker.now().as_millis(), Ordering::Relaxed);
    }

    fn last_received(&self) -> Ticks {
        Ticks::from_millis(self.state.last_received.load(Ordering::Relaxed))
    }

    /// Whether the connection can take the next request.
    fn is_usable(&self) -> bool {
        self.sender.is_ready() && !self.state.is_retired.load(Ordering::Relaxed)
    }
}

/// A shared connection in a pool. Requests on it hold `users`.
#[derive(Debug)]
struct PooledSharedConnection {
    shared: SharedConnection,
    users: Arc<()>,
}

/// Why no connection is available.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// The connection limit is reached.
    LimitReached,
    /// The server did not accept within the connect timeout.
    TimedOut,
    /// The gateway is out of file descriptors, which says nothing about the server.
    OutOfDescriptors,
    /// The server refused the connection, or its name or certificate is invalid.
    Failed(String),
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::LimitReached => write!(f, "connection limit reached"),
            ConnectError::TimedOut => write!(f, "connect timeout"),
            ConnectError::OutOfDescriptors => write!(f, "the gateway is out of file descriptors"),
            ConnectError::Failed(reason) => write!(f, "{reason}"),
        }
    }
}

/// A connection for one request.
#[derive(Debug)]
pub(crate) enum UpstreamConnection {
    Exclusive(http1::SendRequest<RequestBody>),
    Shared {
        shared: SharedConnection,
        /// Marks the connection as in use.
        _user: Arc<()>,
    },
}

/// A request that got no response.
#[derive(Debug)]
pub(crate) struct SendError {
    pub(crate) error: hyper::Error,
    /// The request, if none of it was sent.
    pub(crate) unsent: Option<Request<RequestBody>>,
}

impl UpstreamConnection {
    pub(crate) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let sent = match self {
            UpstreamConnection::Exclusive(sender) => sender.try_send_request(request).await,
            UpstreamConnection::Shared { shared, .. } => {
                let sent = shared.sender.try_send_request(request).await;
                if sent.is_ok() {
                    shared.touch();
                }
                sent
            }
        };
        sent.map_err(|mut error| SendError { unsent: error.take_message(), error: error.into_error() })
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

    /// Returns a pooled or a new connection, and whether it was pooled.
    pub(crate) async fn connection(
        address: &Arc<Address>,
        worker: usize,
        now: Ticks,
    ) -> Result<(UpstreamConnection, bool), ConnectError> {
        let pool = address.pool(worker);
        // The rare cases are boxed: a future is as large as the longest of its waits, and several kilobytes per
        // request cost more than a rare allocation.
        if address.protocol == Protocol::Http2 {
            return match pool.current_shared() {
                Some(connection) => Ok((connection, true)),
                None => Box::pin(pool.open_or_share(address)).await,
            };
        }
        while let Some(idle) = pool.pop_idle() {
            if let Some(sender) = idle.ready(address, now).await {
                return Ok((UpstreamConnection::Exclusive(sender), true));
            }
        }
        Box::pin(pool.open_or_wait(address, now)).await
    }

    /// Opens a connection outside the pools.
    pub(crate) async fn open_unpooled(address: &Arc<Address>) -> Result<UpstreamConnection, ConnectError> {
        match address.protocol {
            Protocol::Http1 => Pool::open(address, None).await.map(UpstreamConnection::Exclusive),
            Protocol::Http2 => {
                let ticker = address.pool(0).ticker.clone();
                let sender = Pool::open_shared(address, None).await?;
                Ok(UpstreamConnection::Shared {
                    shared: SharedConnection::new(sender, ticker),
                    _user: Arc::default(),
                })
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
            UpstreamConnection::Shared { shared, .. } => return shared.touch(),
        };
        // Repeats only if a waiter joined and gave up before it received the connection.
        while !sender.is_closed() {
            let idle = IdleConnection { sender, since: self.ticker.now() };
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(idle);
            if !self.limit.has_waiters() {
                return;
            }
            let Some(idle) = self.pop_idle() else { return };
            let Some(Grant::Idle(back)) = self.limit.hand_over(idle.sender) else { return };
            sender = back;
        }
    }

    /// Called when a request has timed out after `waited`. If the server sent nothing over the shared connection in
    /// that time, the connection may be dead without an error, so the next requests get another.
    pub(crate) fn retire_if_silent(&self, waited: Duration) {
        let so_far = self.ticker.now().since(Ticks::default());
        let begun = Ticks::default().after(so_far.saturating_sub(waited));
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pooled) = shared.take_if(|pooled| pooled.shared.last_received() <= begun) {
            pooled.shared.state.is_retired.store(true, Ordering::Relaxed);
        }
    }

    /// Closes connections that were last used before `oldest`. The idle list is ordered oldest first.
    pub(crate) fn sweep(&self, oldest: Ticks) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let old = idle.iter().take_while(|idle| idle.since < oldest).count();
        idle.drain(..old);
        drop(idle);
        let is_unused = |pooled: &mut PooledSharedConnection| {
            pooled.shared.last_received() < oldest && Arc::strong_count(&pooled.users) == 1
        };
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).take_if(is_unused);
    }

    /// For a worker without an idle connection: opens one, or at the connection limit takes another worker's idle
    /// connection, or waits for the next that is returned.
    async fn open_or_wait(
        &self,
        address: &Arc<Address>,
        now: Ticks,
    ) -> Result<(UpstreamConnection, bool), ConnectError> {
        let deadline = Instant::now() + address.connect_timeout;
        let permit = loop {
            let granted = match self.limit.acquire() {
                Ok(permit) => break permit,
                Err(granted) => granted,
            };
            while let Some(idle) = address.pools().iter().find_map(|pool| pool.pop_idle()) {
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
        builder.writev(false).max_header_size(HEADERS_BYTES_MAX as usize);
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

    /// For a worker without a shared connection: opens one, or at the connection limit shares another worker's.
    async fn open_or_share(
        &self,
        address: &Arc<Address>,
    ) -> Result<(UpstreamConnection, bool), ConnectError> {
        let deadline = Instant::now() + address.connect_timeout;
        let _opening = timeout_at(deadline, self.opening.lock()).await.map_err(|_| ConnectError::TimedOut)?;
        // Another request may have opened one in the meantime.
        if let Some(connection) = self.current_shared() {
            return Ok((connection, true));
        }
        let permit = match self.limit.acquire() {
            Ok(permit) => permit,
            Err(granted) => {
                if let Some(UpstreamConnection::Shared { shared, .. }) =
                    address.pools().iter().find_map(|pool| pool.current_shared())
                {
                    return Ok((self.set_shared(shared), true));
                }
                match timeout_at(deadline, granted).await {
                    Ok(Ok(Grant::Permit(permit))) => permit,
                    Ok(Ok(Grant::Shared(shared))) => return Ok((self.set_shared(shared), true)),
                    _ => return Err(ConnectError::LimitReached),
                }
            }
        };
        let opening = timeout(address.connect_timeout, Pool::open_shared(address, Some(permit))).await;
        let sender = opening.map_err(|_| ConnectError::TimedOut)??;
        let shared = SharedConnection::new(sender, self.ticker.clone());
        let connection = self.set_shared(shared.clone());
        if self.limit.has_waiters() {
            self.limit.share_with_waiters(&shared);
        }
        Ok((connection, false))
    }

    /// Makes a connection the shared one of this pool.
    fn set_shared(&self, shared: SharedConnection) -> UpstreamConnection {
        let users = Arc::default();
        let connection = UpstreamConnection::Shared { shared: shared.clone(), _user: Arc::clone(&users) };
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(PooledSharedConnection { shared, users });
        connection
    }

    /// The shared connection, if it is open.
    fn current_shared(&self) -> Option<UpstreamConnection> {
        let mut pooled = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if pooled.as_ref().is_some_and(|pooled| !pooled.shared.is_usable()) {
            // Dropped, so that the pool does not hold it open.
            *pooled = None;
        }
        pooled.as_ref().map(|pooled| UpstreamConnection::Shared {
            shared: pooled.shared.clone(),
            _user: pooled.users.clone(),
        })
    }

    async fn open_shared(
        address: &Arc<Address>,
        permit: Option<ConnectionPermit>,
    ) -> Result<http2::SendRequest<RequestBody>, ConnectError> {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .max_header_list_size(HEADERS_BYTES_MAX)
            .adaptive_window(true)
            // Pings are sent only while a request waits: otherwise it does not matter whether the server is up.
            .keep_alive_interval(address.ping_after)
            .keep_alive_timeout(address.connect_timeout * PING_TIMEOUT_FACTOR);
        match dial(address, permit).await? {
            UpstreamStream::Plain(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
                drive(connection);
                Ok(sender)
            }
            UpstreamStream::Tls(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
                drive(connection);
                Ok(sender)
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
