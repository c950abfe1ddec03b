//! Connections to a server that are kept for the next request.
//!
//! Every worker has its own, so nobody waits for a lock, and a connection never wakes another core.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tollgate_config::Protocol;

use super::body::RequestBody;
use super::ticks::{Ticker, Ticks};
use super::upstream::Address;

/// The largest head that an upstream may answer with.
const HEADERS_BYTES_MAX: u32 = 64 << 10;

#[derive(Debug)]
pub(crate) struct Pool {
    idle: Mutex<Vec<Idle>>,
    /// One connection for all requests, where HTTP/2 is spoken.
    shared: Mutex<Option<http2::SendRequest<RequestBody>>>,
    /// Held by whoever opens it, so that the others wait for it rather than open more.
    opening: tokio::sync::Mutex<()>,
    room: Arc<Room>,
    max_open: usize,
    ticker: Arc<Ticker>,
}

/// What an open connection is counted in. It holds no connection: each of them holds it.
#[derive(Debug, Default)]
struct Room {
    open: AtomicUsize,
    /// Somebody waits for one to become free.
    freed: Notify,
}

#[derive(Debug)]
struct Idle {
    sender: http1::SendRequest<RequestBody>,
    since: Ticks,
}

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum NoConnection {
    /// As many as there may be are in use.
    Full,
    /// It took too long.
    TimedOut,
    /// The server does not want to.
    Refused(String),
}

impl fmt::Display for NoConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoConnection::Full => write!(f, "all connections are in use"),
            NoConnection::TimedOut => write!(f, "it did not answer in time"),
            NoConnection::Refused(why) => write!(f, "{why}"),
        }
    }
}

/// A connection for one request.
#[derive(Debug)]
pub(crate) enum Connection {
    Own(http1::SendRequest<RequestBody>),
    Shared(http2::SendRequest<RequestBody>),
}

/// A request that got no response.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: hyper::Error,
    /// If nothing of it was sent.
    pub(crate) unsent: Option<Request<RequestBody>>,
}

impl Connection {
    pub(crate) async fn send(&mut self, request: Request<RequestBody>) -> Result<Response<Incoming>, Failed> {
        let sent = match self {
            Connection::Own(sender) => sender.try_send_request(request).await,
            Connection::Shared(sender) => sender.try_send_request(request).await,
        };
        sent.map_err(|mut failed| Failed { unsent: failed.take_message(), error: failed.into_error() })
    }
}

impl Pool {
    pub(crate) fn new(max_open: usize, ticker: Arc<Ticker>) -> Pool {
        Pool {
            idle: Mutex::default(),
            shared: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            room: Arc::default(),
            max_open,
            ticker,
        }
    }

    /// A connection that was used before, or a new one, and which of the two.
    pub(crate) async fn connection(
        address: &Arc<Address>,
        worker: usize,
        now: Ticks,
    ) -> Result<(Connection, bool), NoConnection> {
        let pool = address.pool(worker);
        if address.protocol == Protocol::Http2 {
            return pool.shared(address).await;
        }
        loop {
            while let Some(Idle { mut sender, since }) = pool.take() {
                let is_fresh = now.since(since) < address.idle_timeout && !sender.is_closed();
                if is_fresh && poll_fn(|context| sender.poll_ready(context)).await.is_ok() {
                    return Ok((Connection::Own(sender), true));
                }
            }
            if pool.room.open.load(Ordering::Relaxed) < pool.max_open {
                break;
            }
            // In boxes, here and below: a future is as large as the rarest of its waits, and one of several kilobytes for
            // each request costs more than the rare box.
            let freed = Box::pin(timeout(address.connect_timeout, pool.room.freed.notified())).await;
            freed.map_err(|_| NoConnection::Full)?;
        }
        let open = Open::count(pool.room.clone());
        let opening = Box::pin(timeout(address.connect_timeout, Pool::open(address, Some(open)))).await;
        let sender = opening.map_err(|_| NoConnection::TimedOut)?.map_err(NoConnection::Refused)?;
        Ok((Connection::Own(sender), false))
    }

    /// A new connection that belongs to no pool.
    pub(crate) async fn fresh(address: &Arc<Address>) -> Result<Connection, String> {
        match address.protocol {
            Protocol::Http1 => Pool::open(address, None).await.map(Connection::Own),
            Protocol::Http2 => Pool::open_shared(address, None).await.map(Connection::Shared),
        }
    }

    fn take(&self) -> Option<Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// A connection has done its work.
    pub(crate) fn keep(&self, connection: Connection) {
        if let Connection::Own(sender) = connection
            && !sender.is_closed()
        {
            let idle = Idle { sender, since: self.ticker.now() };
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(idle);
            self.room.freed.notify_one();
        }
    }

    /// Closes connections that nobody has used for long. The oldest lie in front.
    pub(crate) fn sweep(&self, oldest: Ticks) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let old = idle.iter().take_while(|idle| idle.since < oldest).count();
        idle.drain(..old);
    }

    /// How many connections are open.
    pub(crate) fn open_now(&self) -> usize {
        self.room.open.load(Ordering::Relaxed)
    }

    async fn open(
        address: &Arc<Address>,
        open: Option<Open>,
    ) -> Result<http1::SendRequest<RequestBody>, String> {
        let mut builder = http1::Builder::new();
        builder.writev(false).max_header_size(HEADERS_BYTES_MAX as usize);
        match dial(address).await? {
            Dialled::Plain(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(text)?;
                drive(open, connection.with_upgrades());
                Ok(sender)
            }
            Dialled::Tls(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(text)?;
                drive(open, connection.with_upgrades());
                Ok(sender)
            }
        }
    }

    async fn shared(&self, address: &Arc<Address>) -> Result<(Connection, bool), NoConnection> {
        if let Some(sender) = self.shared_now().await {
            return Ok((Connection::Shared(sender), true));
        }
        let opening = async {
            let _opening = self.opening.lock().await;
            // Somebody else may have opened one while we waited.
            if let Some(sender) = self.shared_now().await {
                return Ok((Connection::Shared(sender), true));
            }
            let open = Open::count(self.room.clone());
            let sender = Pool::open_shared(address, Some(open)).await.map_err(NoConnection::Refused)?;
            *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender.clone());
            Ok((Connection::Shared(sender), false))
        };
        timeout(address.connect_timeout, opening).await.map_err(|_| NoConnection::TimedOut)?
    }

    /// The shared connection, if it is open.
    async fn shared_now(&self) -> Option<http2::SendRequest<RequestBody>> {
        let mut sender = self.shared.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let is_ready = !sender.is_closed() && poll_fn(|context| sender.poll_ready(context)).await.is_ok();
        is_ready.then_some(sender)
    }

    async fn open_shared(
        address: &Arc<Address>,
        open: Option<Open>,
    ) -> Result<http2::SendRequest<RequestBody>, String> {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).max_header_list_size(HEADERS_BYTES_MAX).adaptive_window(true);
        match dial(address).await? {
            Dialled::Plain(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(text)?;
                drive(open, connection);
                Ok(sender)
            }
            Dialled::Tls(stream) => {
                let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(text)?;
                drive(open, connection);
                Ok(sender)
            }
        }
    }
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

enum Dialled {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

async fn dial(address: &Address) -> Result<Dialled, String> {
    let host = address.config.host.trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, address.config.port)).await.map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    match &address.tls {
        None => Ok(Dialled::Plain(stream)),
        Some((connector, name)) => {
            Ok(Dialled::Tls(Box::new(secured(connector, name, stream).await.map_err(text)?)))
        }
    }
}

async fn secured<T: AsyncRead + AsyncWrite + Unpin>(
    connector: &TlsConnector,
    name: &ServerName<'static>,
    stream: T,
) -> io::Result<tokio_rustls::client::TlsStream<T>> {
    connector.connect(name.clone(), stream).await
}

/// Counts a connection as open, until it is closed.
///
/// The task that works on a connection holds this, and ends when nobody holds the connection's other end. So it must not
/// lead to the pool, which holds that end: an upstream that is no longer in use would keep itself alive.
struct Open(Arc<Room>);

impl Open {
    fn count(room: Arc<Room>) -> Open {
        room.open.fetch_add(1, Ordering::Relaxed);
        Open(room)
    }
}

/// Has a task of its own work on the connection.
fn drive<F: Future<Output = Result<(), hyper::Error>> + Send + 'static>(open: Option<Open>, connection: F) {
    tokio::spawn(async move {
        // How it ended is told to the request that it was for.
        let _ = connection.await;
        drop(open);
    });
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        self.0.freed.notify_one();
    }
}
