//! Connections: bounded in number, and closed if the client is silent or does not send the token in time.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep};
use tonic::transport::server::Connected;

/// Length of the HTTP/2 client preface.
const PREFACE_BYTES: usize = 24;

/// Delay after an accept error: the system is short of a resource, and an immediate retry would fail again.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Accepts connections until the receiver is dropped.
pub(super) async fn accept(
    listener: TcpListener,
    connections_max: usize,
    patience: Duration,
    asks_token: Arc<dyn Fn() -> bool + Send + Sync>,
    taken: mpsc::Sender<io::Result<Connection>>,
) {
    let room = Arc::new(Semaphore::new(connections_max));
    let accepted = async {
        loop {
            // Connections beyond the bound wait in the listen backlog, where they use no memory of this process.
            let Ok(place) = room.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    // Responses are small, and a client waits for each.
                    let _ = stream.set_nodelay(true);
                    let opening = Opening {
                        missing: PREFACE_BYTES,
                        asks_token: asks_token.clone(),
                        until: Box::pin(sleep(patience)),
                    };
                    let known = Known::default();
                    let connection = Connection { stream, opening: Some(opening), known, _place: place };
                    if taken.send(Ok(connection)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    sleep(AFTER_ERROR).await;
                }
            }
        }
    };
    tokio::select! {
        () = accepted => {}
        () = taken.closed() => {}
    }
}

/// A connection, with its permit.
pub(super) struct Connection {
    stream: TcpStream,
    /// Until the preface is complete and, if there is a token, a call has carried it.
    opening: Option<Opening>,
    known: Known,
    _place: OwnedSemaphorePermit,
}

struct Opening {
    missing: usize,
    asks_token: Arc<dyn Fn() -> bool + Send + Sync>,
    until: Pin<Box<Sleep>>,
}

/// Whether a connection has made a call with the token. It is an extension of every request on the connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Known(Arc<AtomicBool>);

impl Known {
    pub(super) fn learn(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_so(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Connected for Connection {
    type ConnectInfo = Known;

    fn connect_info(&self) -> Known {
        self.known.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        let Some(opening) = &mut this.opening else { return read };
        opening.missing = opening.missing.saturating_sub(buffer.filled().len() - before);
        if opening.missing == 0 && (this.known.is_so() || !(opening.asks_token)()) {
            this.opening = None;
        } else if opening.until.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, parts)
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
