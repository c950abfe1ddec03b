//! Connections that requests share, for HTTP/2. Each request takes one stream; the server states how many there are.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Waker};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http2};
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioExecutor;

use super::capacity::{ConnectionLimit, Grant};
use crate::gateway::body::RequestBody;
use crate::gateway::timer::{Ticker, Ticks};
use crate::runtime::observed_stream::{PolledIo, StreamObserver};

/// A connection that requests share.
#[derive(Clone, Debug)]
pub(crate) struct SharedConnection {
    sender: http2::SendRequest<RequestBody>,
    state: Arc<SharedState>,
}

/// State of a shared connection, common to all its users.
#[derive(Debug)]
struct SharedState {
    settings: Arc<ServerSettings>,
    ticker: Arc<Ticker>,
    /// When the server last sent something over the connection, in milliseconds.
    last_received: AtomicU64,
    /// The connection takes no more requests.
    is_retired: AtomicBool,
    /// Streams in use.
    streams: AtomicUsize,
    /// Whose waiters get the streams that end; none if the connection is outside the pools.
    limit: Option<Arc<ConnectionLimit>>,
}

impl SharedConnection {
    pub(crate) fn new(
        sender: http2::SendRequest<RequestBody>,
        settings: Arc<ServerSettings>,
        ticker: Arc<Ticker>,
        limit: Option<Arc<ConnectionLimit>>,
    ) -> SharedConnection {
        let state = SharedState {
            settings,
            last_received: AtomicU64::new(ticker.now().as_millis()),
            ticker,
            is_retired: AtomicBool::new(false),
            streams: AtomicUsize::new(0),
            limit,
        };
        SharedConnection { sender, state: Arc::new(state) }
    }

    fn touch(&self) {
        self.state.last_received.store(self.state.ticker.now().as_millis(), Ordering::Relaxed);
    }

    pub(crate) fn last_received(&self) -> Ticks {
        Ticks::from_millis(self.state.last_received.load(Ordering::Relaxed))
    }

    /// How many streams the server allows, once it has stated it.
    pub(crate) fn known_max_streams(&self) -> Option<usize> {
        let ServerSettings { max_streams, are_known, .. } = &*self.state.settings;
        are_known.load(Ordering::Relaxed).then(|| max_streams.load(Ordering::Relaxed))
    }

    /// Whether the connection can take further requests, now or when a stream ends.
    pub(crate) fn is_usable(&self) -> bool {
        self.sender.is_ready() && !self.state.is_retired.load(Ordering::Relaxed)
    }

    pub(crate) fn retire(&self) {
        self.state.is_retired.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_streams(&self) -> bool {
        self.state.streams.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn is_same(&self, other: &SharedConnection) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Takes a stream, if the server allows one more.
    pub(crate) fn stream(&self) -> Option<SharedStream> {
        // A server that allows none now may allow one later; opening further connections to it would not help.
        let max = self.state.settings.max_streams.load(Ordering::Relaxed).max(1);
        let one_more = |streams: usize| (streams < max).then_some(streams + 1);
        self.state.streams.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(SharedStream(self.clone()))
    }
}

/// One stream of a shared connection. When it ends, it goes to the request that waits longest for one.
#[derive(Debug)]
pub(crate) struct SharedStream(SharedConnection);

impl SharedStream {
    pub(crate) fn connection(&self) -> &SharedConnection {
        &self.0
    }

    pub(crate) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<RequestBody>>> {
        let sent = self.0.sender.try_send_request(request).await;
        if sent.is_ok() {
            self.touch();
        }
        sent
    }

    /// Called when the server has sent something.
    pub(crate) fn touch(&self) {
        self.0.touch();
    }

    /// Called when the server has refused this stream: it allows fewer than there are, until it states otherwise.
    pub(crate) fn refused(&self) {
        match self.0.state.streams.load(Ordering::Relaxed).saturating_sub(1) {
            // It accepts no stream on this connection.
            0 => self.0.retire(),
            others => _ = self.0.state.settings.max_streams.fetch_min(others, Ordering::Relaxed),
        }
    }
}

impl Drop for SharedStream {
    fn drop(&mut self) {
        self.0.state.streams.fetch_sub(1, Ordering::Relaxed);
        let Some(limit) = self.0.state.limit.as_ref().filter(|limit| limit.has_waiters()) else { return };
        if self.0.is_usable()
            && let Some(stream) = self.0.stream()
        {
            // If no request waits any more, the stream is dropped, and this function is called again.
            let _ = limit.hand_over(Grant::Stream(stream));
        }
    }
}

/// What the server has stated in its SETTINGS.
#[derive(Debug)]
pub(crate) struct ServerSettings {
    max_streams: AtomicUsize,
    /// The value until the server has stated its own.
    assumed: usize,
    are_known: AtomicBool,
    /// The connection's task, until the settings are known.
    waiting: Mutex<Option<Waker>>,
}

impl ServerSettings {
    /// Streams before the server has stated its number. A server that allows fewer refuses the others, which are then
    /// sent on other connections.
    const ASSUMED_STREAMS: usize = 100;

    /// The settings of a new connection: those of an `earlier` one, if there is one.
    pub(crate) fn new(earlier: Option<&SharedConnection>) -> Arc<ServerSettings> {
        let known = earlier.and_then(SharedConnection::known_max_streams);
        let assumed = known.unwrap_or(ServerSettings::ASSUMED_STREAMS);
        Arc::new(ServerSettings {
            max_streams: AtomicUsize::new(assumed),
            assumed,
            are_known: AtomicBool::new(known.is_some()),
            waiting: Mutex::default(),
        })
    }

    pub(crate) fn assumed(&self) -> usize {
        self.assumed
    }
}

/// Runs a connection, and records how many streams its server allows.
pub(crate) async fn drive_shared<I>(
    connection: http2::Connection<I, RequestBody, TokioExecutor>,
    settings: Arc<ServerSettings>,
) -> Result<(), hyper::Error>
where
    I: Read + Write + Unpin + Send + 'static,
{
    let mut connection = pin!(connection);
    poll_fn(|context| {
        let ended = connection.as_mut().poll(context);
        let max_streams = connection.current_max_send_streams();
        if max_streams != settings.assumed {
            settings.are_known.store(true, Ordering::Relaxed);
        }
        settings.max_streams.store(max_streams, Ordering::Relaxed);
        if !settings.are_known.load(Ordering::Relaxed) {
            *settings.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.waker().clone());
        }
        ended
    })
    .await
}

/// Observes the stream below a shared connection. hyper reads it in another task than the one that [`drive_shared`] runs
/// in, so a read wakes that one until the settings are known.
impl StreamObserver for Arc<ServerSettings> {
    fn after_read(&mut self, _: &mut Context<'_>, _: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        if read.is_ready() && !self.are_known.load(Ordering::Relaxed) {
            let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
            waiting.into_iter().for_each(Waker::wake);
        }
        read
    }
}
