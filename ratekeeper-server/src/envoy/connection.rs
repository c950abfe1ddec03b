//! Connections: bounded in number, and closed if the client is silent, does not send the token in time, or floods the
//! server with control frames.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::Connected;

use crate::runtime::frame_bound::FrameBound;

/// Length of the HTTP/2 client preface.
const PREFACE_BYTES: usize = 24;

/// Delay after an accept error: the system is short of a resource, and an immediate retry would fail again.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

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
            match listener.accept().await {
                Ok((stream, _)) => {
                    // Responses are small, and a client waits for each.
                    let _ = stream.set_nodelay(true);
                    let handshake = Handshake {
                        preface_missing: PREFACE_BYTES,
                        requires_token: requires_token.clone(),
                        deadline: Box::pin(sleep(timeout)),
                    };
                    let connection = EnvoyConnection {
                        stream,
                        handshake: Some(handshake),
                        auth: ConnectionAuth::default(),
                        accepted_at: Instant::now(),
                        frames: FrameBound::new(Duration::ZERO),
                        _permit: permit,
                    };
                    if connections.send(Ok(connection)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    };
    tokio::select! {
        () = accept_loop => {}
        () = connections.closed() => {}
    }
}

/// A connection, with its permit.
pub(super) struct EnvoyConnection {
    stream: TcpStream,
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
        self.auth.clone()
    }
}

impl EnvoyConnection {
    fn count_written(&mut self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = written {
            self.frames.count_written(*bytes);
        }
    }
}

impl AsyncRead for EnvoyConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        if this.frames.is_flood(&buffer.filled()[before..], || this.accepted_at.elapsed()) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let Some(handshake) = &mut this.handshake else { return read };
        handshake.preface_missing = handshake.preface_missing.saturating_sub(buffer.filled().len() - before);
        if handshake.preface_missing == 0 && (this.auth.is_authenticated() || !(handshake.requires_token)()) {
            this.handshake = None;
        } else if handshake.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for EnvoyConnection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.count_written(&written);
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, parts);
        this.count_written(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
