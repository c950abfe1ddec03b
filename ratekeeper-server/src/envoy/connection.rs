//! Connections: bounded in number, and closed if the client is silent, does not send the token in time, or floods the
//! server with control frames.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::Connected;

use crate::runtime::accept::accepted;
use crate::runtime::frame_bound::FrameBound;
use crate::runtime::observed_stream::{ObservedStream, PolledIo, StreamObserver};

/// Length of the HTTP/2 client preface.
const PREFACE_BYTES: usize = 24;

/// Accepts connections until the receiver is dropped.
pub(super) async fn accept(
    listener: TcpListener,
    connections_max: usize,
    timeout: Duration,
    requires_token: Arc<dyn Fn() -> bool + Send + Sync>,
    connections: mpsc::Sender<io::Result<EnvoyConnection>>,
) {
    let permits = Arc::new(Semaphore::new(connections_max));
    let accept_loop = async {
        loop {
            // Connections beyond the bound wait in the listen backlog, where they use no memory of this process.
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            let Some((stream, _)) = accepted(listener.accept().await).await else { continue };
            let handshake = Handshake {
                preface_missing: PREFACE_BYTES,
                requires_token: requires_token.clone(),
                deadline: Box::pin(sleep(timeout)),
            };
            let observer = ClientGuard {
                handshake: Some(handshake),
                auth: ConnectionAuth::default(),
                accepted_at: Instant::now(),
                frames: FrameBound::new(Duration::ZERO),
                _permit: permit,
            };
            if connections.send(Ok(ObservedStream { stream, observer })).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = accept_loop => {}
        () = connections.closed() => {}
    }
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
    requires_token: Arc<dyn Fn() -> bool + Send + Sync>,
    deadline: Pin<Box<Sleep>>,
}

/// Whether a connection has made a call with the token. It is an extension of every request on the connection.
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

impl Connected for EnvoyConnection {
    type ConnectInfo = ConnectionAuth;

    fn connect_info(&self) -> ConnectionAuth {
        self.observer.auth.clone()
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
