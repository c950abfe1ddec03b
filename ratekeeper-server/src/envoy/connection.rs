//! Connections: bounded in number, and closed if the client is silent, does not send the token in time, or floods the
//! server with control frames.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ratekeeper::Store;
use tokio::net::{TcpListener, TcpStream};
use tokio::select;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::EnvoyListenerSettings;
use super::bounds::METADATA_BYTES_MAX;
use super::service::Calls;
use super::stream_timeout::{CallExecutor, begun};
use crate::runtime::accept::accepted;
use crate::runtime::frame_bound::FrameBound;
use crate::runtime::http_listener::is_closing;
use crate::runtime::observed_stream::{ObservedStream, PolledIo, StreamObserver};
use crate::runtime::open_files;

/// Length of the HTTP/2 client preface.
const PREFACE_BYTES: usize = 24;

/// Most bytes of a connection that are received and not yet read.
const WINDOW_BYTES: u32 = 1 << 20;

/// Most streams of a connection that are reset because data arrives for a stream that has ended. The message of a
/// rejected call may arrive late; the connection must not end for that, because Envoy allows the requests whose calls
/// fail.
const RESETS_MAX: usize = 1 << 16;

/// Serves connections until the shutdown begins, and then until their calls are answered, for at most
/// `client_timeout`: a client that watches its health without end does not delay the shutdown.
pub(super) async fn serve<S: Store + Send + Sync + 'static>(
    listener: TcpListener,
    calls: Arc<Calls<S>>,
    settings: EnvoyListenerSettings,
    mut shut_down: watch::Receiver<bool>,
) {
    let permits = Arc::new(Semaphore::new(settings.connections_max.min(open_files::connections_max())));
    let mut connections = JoinSet::new();
    loop {
        // Connections beyond the bound wait in the listen backlog, where they use no memory of this process.
        let accept = async {
            let permit = permits.clone().acquire_owned().await.ok()?;
            Some((accepted(listener.accept().await).await?.0, permit))
        };
        let next = select! {
            () = is_closing(&mut shut_down) => break,
            next = accept => next,
        };
        while connections.try_join_next().is_some() {}
        let Some((stream, permit)) = next else { continue };
        let observer = ClientGuard::new(&calls, settings, permit);
        let stream = ObservedStream { stream, observer };
        connections.spawn(connection(stream, calls.clone(), settings, shut_down.clone()));
    }
    drop(listener);
    let _ =
        timeout(settings.client_timeout, async { while connections.join_next().await.is_some() {} }).await;
}

async fn connection<S: Store + Send + Sync + 'static>(
    stream: EnvoyConnection,
    calls: Arc<Calls<S>>,
    settings: EnvoyListenerSettings,
    mut shut_down: watch::Receiver<bool>,
) {
    let auth = stream.observer.auth.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let response = calls.clone().respond(request, &auth);
        async { Ok::<_, Infallible>(begun(response.await)) }
    });
    let mut http = http2::Builder::new(CallExecutor { timeout: settings.client_timeout });
    http.timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(settings.calls_per_connection_max)
        .max_header_list_size(METADATA_BYTES_MAX)
        .initial_connection_window_size(WINDOW_BYTES)
        .keep_alive_interval(settings.ping_interval)
        .keep_alive_timeout(settings.client_timeout)
        .max_local_error_reset_streams(RESETS_MAX);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    // A client that disconnects is not an error.
    let _ = select! {
        ended = connection.as_mut() => ended,
        () = is_closing(&mut shut_down) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
}

pub(super) type EnvoyConnection = ObservedStream<TcpStream, ClientGuard>;

/// Closes a connection that sends no preface or no token in time, or that floods. It holds the connection's permit.
pub(super) struct ClientGuard {
    /// Until the preface is complete and, if there is a token, a call has carried it.
    handshake: Option<Handshake>,
    auth: ConnectionAuth,
    accepted_at: Instant,
    frames: FrameBound,
    _permit: OwnedSemaphorePermit,
}

struct Handshake {
    preface_missing: usize,
    requires_token: Box<dyn Fn() -> bool + Send + Sync>,
    deadline: Pin<Box<Sleep>>,
}

/// Whether a connection has made a call with the token.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionAuth(Arc<AtomicBool>);

impl ConnectionAuth {
    pub(super) fn set_authenticated(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_authenticated(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl ClientGuard {
    fn new<S: Send + Sync + 'static>(
        calls: &Arc<Calls<S>>,
        settings: EnvoyListenerSettings,
        permit: OwnedSemaphorePermit,
    ) -> ClientGuard {
        let current = calls.current.clone();
        let handshake = Handshake {
            preface_missing: PREFACE_BYTES,
            requires_token: Box::new(move || current.load().settings.token.is_some()),
            deadline: Box::pin(sleep(settings.client_timeout)),
        };
        ClientGuard {
            handshake: Some(handshake),
            auth: ConnectionAuth::default(),
            accepted_at: Instant::now(),
            frames: FrameBound::new(Duration::ZERO),
            _permit: permit,
        }
    }
}

impl StreamObserver for ClientGuard {
    fn after_read(&mut self, context: &mut Context<'_>, bytes: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        if self.frames.is_flood(bytes, || self.accepted_at.elapsed()) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let Some(handshake) = &mut self.handshake else { return read };
        handshake.preface_missing = handshake.preface_missing.saturating_sub(bytes.len());
        if handshake.preface_missing == 0 && (self.auth.is_authenticated() || !(handshake.requires_token)()) {
            self.handshake = None;
        } else if handshake.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }

    fn after_write(&mut self, _: &mut Context<'_>, written: PolledIo<usize>) -> PolledIo<usize> {
        self.frames.count_written(&written);
        written
    }
}
