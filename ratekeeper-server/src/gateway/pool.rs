//! Connections to a server that are kept for later requests.
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

use super::body::RequestBody;
use super::capacity::{Handed, Place, Room};
use super::dial::{Dialled, dial, refused};
use super::timer::{Ticker, Ticks};
use super::upstream::Address;

/// Largest response head from an upstream.
const HEADERS_BYTES_MAX: u32 = 64 << 10;
/// A healthy server answers a ping within this many connect timeouts. It may have much to read before the ping.
const PING_PATIENCE: u32 = 5;
/// How long to wait for a kept connection; opening one to a nearby server takes no longer.
const READY_MAX: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Pool {
    idle: Mutex<Vec<Idle>>,
    /// The connection that all requests share, for HTTP/2.
    shared: Mutex<Option<Kept>>,
    /// Held while the shared connection is opened, so that other requests wait for it rather than open more.
    opening: tokio::sync::Mutex<()>,
    /// The connection limit, shared by all workers.
    room: Arc<Room>,
    ticker: Arc<Ticker>,
}

#[derive(Debug)]
struct Idle {
    sender: http1::SendRequest<RequestBody>,
    since: Ticks,
}

impl Idle {
    /// The connection, if it has not expired and can take a request.
    async fn ready(mut self, address: &Address, now: Ticks) -> Option<http1::SendRequest<RequestBody>> {
        let is_fresh = now.since(self.since) < address.idle_timeout;
        (is_fresh && is_ready(&mut self.sender).await).then_some(self.sender)
    }
}

/// Whether the connection can take the next request. A server that responded before it had read the whole request may
/// need time for the rest; the wait is at most `READY_MAX`.
async fn is_ready(sender: &mut http1::SendRequest<RequestBody>) -> bool {
    let now = poll_fn(|context| Poll::Ready(sender.poll_ready(context))).await;
    match now {
        Poll::Ready(ready) => ready.is_ok(),
        Poll::Pending => {
            let soon = Box::pin(timeout(READY_MAX, poll_fn(|context| sender.poll_ready(context)))).await;
            soon.is_ok_and(|ready| ready.is_ok())
        }
    }
}

/// A connection that all requests share, for HTTP/2.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    sender: http2::SendRequest<RequestBody>,
    life: Arc<Life>,
}

/// State of a shared connection, common to all its users.
#[derive(Debug)]
struct Life {
    ticker: Arc<Ticker>,
    /// When the server last sent something over the connection, in milliseconds.
    heard: AtomicU64,
    /// The connection takes no more requests.
    is_over: AtomicBool,
}

impl Shared {
    fn new(sender: http2::SendRequest<RequestBody>, ticker: Arc<Ticker>) -> Shared {
        let heard = AtomicU64::new(ticker.now().as_millis());
        Shared { sender, life: Arc::new(Life { ticker, heard, is_over: AtomicBool::new(false) }) }
    }

    fn hear(&self) {
        self.life.heard.store(self.life.ticker.now().as_millis(), Ordering::Relaxed);
    }

    fn last_heard(&self) -> Ticks {
        Ticks::from_millis(self.life.heard.load(Ordering::Relaxed))
    }

    /// Whether the connection can take the next request.
    fn is_good(&self) -> bool {
        self.sender.is_ready() && !self.life.is_over.load(Ordering::Relaxed)
    }
}

/// A shared connection in a pool. Requests on it hold `users`.
#[derive(Debug)]
struct Kept {
    shared: Shared,
    users: Arc<()>,
}

/// Why no connection is available.
#[derive(Debug)]
pub(crate) enum NoConnection {
    /// The connection limit is reached.
    Full,
    /// The server did not accept within the connect timeout.
    TimedOut,
    /// The gateway is out of file descriptors, which says nothing about the server.
    Exhausted,
    /// The server refused the connection, or its name or certificate failed.
    Refused(String),
}

impl fmt::Display for NoConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoConnection::Full => write!(f, "all connections are in use"),
            NoConnection::TimedOut => write!(f, "it did not answer in time"),
            NoConnection::Exhausted => write!(f, "the gateway may not open more sockets"),
            NoConnection::Refused(why) => write!(f, "{why}"),
        }
    }
}

/// A connection for one request.
#[derive(Debug)]
pub(crate) enum Connection {
    Own(http1::SendRequest<RequestBody>),
    Shared {
        shared: Shared,
        /// Marks the connection as in use.
        _user: Arc<()>,
    },
}

/// A request without a response.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: hyper::Error,
    /// The request, if none of it was sent.
    pub(crate) unsent: Option<Request<RequestBody>>,
}

impl Connection {
    pub(crate) async fn send(&mut self, request: Request<RequestBody>) -> Result<Response<Incoming>, Failed> {
        let sent = match self {
            Connection::Own(sender) => sender.try_send_request(request).await,
            Connection::Shared { shared, .. } => {
                let sent = shared.sender.try_send_request(request).await;
                if sent.is_ok() {
                    shared.hear();
                }
                sent
            }
        };
        sent.map_err(|mut failed| Failed { unsent: failed.take_message(), error: failed.into_error() })
    }
}

impl Pool {
    pub(crate) fn new(room: Arc<Room>, ticker: Arc<Ticker>) -> Pool {
        Pool {
            idle: Mutex::default(),
            shared: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            room,
            ticker,
        }
    }

    /// Returns a kept or a new connection, and whether it was kept.
    pub(crate) async fn connection(
        address: &Arc<Address>,
        worker: usize,
        now: Ticks,
    ) -> Result<(Connection, bool), NoConnection> {
        let pool = address.pool(worker);
        // The rare cases are boxed: a future is as large as the longest of its waits, and several kilobytes per
        // request cost more than a rare allocation.
        if address.protocol == Protocol::Http2 {
            return match pool.shared_now() {
                Some(connection) => Ok((connection, true)),
                None => Box::pin(pool.open_for_all(address)).await,
            };
        }
        while let Some(idle) = pool.take() {
            if let Some(sender) = idle.ready(address, now).await {
                return Ok((Connection::Own(sender), true));
            }
        }
        Box::pin(pool.open_for_one(address, now)).await
    }

    /// Opens a connection outside the pools.
    pub(crate) async fn fresh(address: &Arc<Address>) -> Result<Connection, NoConnection> {
        match address.protocol {
            Protocol::Http1 => Pool::open(address, None).await.map(Connection::Own),
            Protocol::Http2 => {
                let ticker = address.pool(0).ticker.clone();
                let sender = Pool::open_shared(address, None).await?;
                Ok(Connection::Shared { shared: Shared::new(sender, ticker), _user: Arc::default() })
            }
        }
    }

    fn take(&self) -> Option<Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Returns a connection to the pool after use.
    pub(crate) fn keep(&self, connection: Connection) {
        let mut sender = match connection {
            Connection::Own(sender) => sender,
            Connection::Shared { shared, .. } => return shared.hear(),
        };
        // Repeats only if a waiter joined and gave up before it received the connection.
        while !sender.is_closed() {
            let idle = Idle { sender, since: self.ticker.now() };
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(idle);
            if !self.room.is_awaited() {
                return;
            }
            let Some(idle) = self.take() else { return };
            let Some(Handed::Idle(back)) = self.room.hand(idle.sender) else { return };
            sender = back;
        }
    }

    /// Called when a request has timed out after `waited`. If the server sent nothing over the shared connection in
    /// that time, the connection may be dead without an error, so the next requests get another.
    pub(crate) fn doubt(&self, waited: Duration) {
        let so_far = self.ticker.now().since(Ticks::default());
        let begun = Ticks::default().after(so_far.saturating_sub(waited));
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = shared.take_if(|kept| kept.shared.last_heard() <= begun) {
            kept.shared.life.is_over.store(true, Ordering::Relaxed);
        }
    }

    /// Closes connections that were last used before `oldest`. The idle list is ordered oldest first.
    pub(crate) fn sweep(&self, oldest: Ticks) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let old = idle.iter().take_while(|idle| idle.since < oldest).count();
        idle.drain(..old);
        drop(idle);
        let is_unused =
            |kept: &mut Kept| kept.shared.last_heard() < oldest && Arc::strong_count(&kept.users) == 1;
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).take_if(is_unused);
    }

    /// For a worker without an idle connection: opens one, or at the connection limit takes another worker's idle
    /// connection, or waits for the next that is returned.
    async fn open_for_one(
        &self,
        address: &Arc<Address>,
        now: Ticks,
    ) -> Result<(Connection, bool), NoConnection> {
        let until = Instant::now() + address.connect_timeout;
        let place = loop {
            let told = match self.room.enter() {
                Ok(place) => break place,
                Err(told) => told,
            };
            while let Some(idle) = address.pools().iter().find_map(|pool| pool.take()) {
                if let Some(sender) = idle.ready(address, now).await {
                    return Ok((Connection::Own(sender), true));
                }
            }
            let handed = timeout_at(until, told).await.map_err(|_| NoConnection::Full)?;
            if let Ok(Handed::Place(place)) = handed {
                break place;
            }
            // The server may have closed it in the meantime.
            if let Ok(Handed::Idle(mut sender)) = handed
                && is_ready(&mut sender).await
            {
                return Ok((Connection::Own(sender), true));
            }
        };
        let opening = timeout(address.connect_timeout, Pool::open(address, Some(place))).await;
        let sender = opening.map_err(|_| NoConnection::TimedOut)??;
        Ok((Connection::Own(sender), false))
    }

    async fn open(
        address: &Arc<Address>,
        place: Option<Place>,
    ) -> Result<http1::SendRequest<RequestBody>, NoConnection> {
        let mut builder = http1::Builder::new();
        builder.writev(false).max_header_size(HEADERS_BYTES_MAX as usize);
        match dial(address, place).await? {
            Dialled::Plain(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(refused)?;
                drive(connection.with_upgrades());
                Ok(sender)
            }
            Dialled::Tls(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(refused)?;
                drive(connection.with_upgrades());
                Ok(sender)
            }
        }
    }

    /// For a worker without a shared connection: opens one, or at the connection limit shares another worker's.
    async fn open_for_all(&self, address: &Arc<Address>) -> Result<(Connection, bool), NoConnection> {
        let until = Instant::now() + address.connect_timeout;
        let _opening = timeout_at(until, self.opening.lock()).await.map_err(|_| NoConnection::TimedOut)?;
        // Another request may have opened one in the meantime.
        if let Some(connection) = self.shared_now() {
            return Ok((connection, true));
        }
        let place = match self.room.enter() {
            Ok(place) => place,
            Err(told) => {
                if let Some(Connection::Shared { shared, .. }) =
                    address.pools().iter().find_map(|pool| pool.shared_now())
                {
                    return Ok((self.share(shared), true));
                }
                match timeout_at(until, told).await {
                    Ok(Ok(Handed::Place(place))) => place,
                    Ok(Ok(Handed::Shared(shared))) => return Ok((self.share(shared), true)),
                    _ => return Err(NoConnection::Full),
                }
            }
        };
        let opening = timeout(address.connect_timeout, Pool::open_shared(address, Some(place))).await;
        let sender = opening.map_err(|_| NoConnection::TimedOut)??;
        let shared = Shared::new(sender, self.ticker.clone());
        let connection = self.share(shared.clone());
        if self.room.is_awaited() {
            self.room.share(&shared);
        }
        Ok((connection, false))
    }

    /// Makes a connection the shared one of this pool.
    fn share(&self, shared: Shared) -> Connection {
        let users = Arc::default();
        let connection = Connection::Shared { shared: shared.clone(), _user: Arc::clone(&users) };
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(Kept { shared, users });
        connection
    }

    /// The shared connection, if it is open.
    fn shared_now(&self) -> Option<Connection> {
        let mut kept = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.as_ref().is_some_and(|kept| !kept.shared.is_good()) {
            // Dropped, so that the pool does not hold it open.
            *kept = None;
        }
        kept.as_ref()
            .map(|kept| Connection::Shared { shared: kept.shared.clone(), _user: kept.users.clone() })
    }

    async fn open_shared(
        address: &Arc<Address>,
        place: Option<Place>,
    ) -> Result<http2::SendRequest<RequestBody>, NoConnection> {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .max_header_list_size(HEADERS_BYTES_MAX)
            .adaptive_window(true)
            // Pings are sent only while a request waits: otherwise it does not matter whether the server is up.
            .keep_alive_interval(address.ping_after)
            .keep_alive_timeout(address.connect_timeout * PING_PATIENCE);
        match dial(address, place).await? {
            Dialled::Plain(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(refused)?;
                drive(connection);
                Ok(sender)
            }
            Dialled::Tls(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(refused)?;
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
