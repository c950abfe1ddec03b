//! Connections that have switched protocols, for example to WebSocket.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use tokio::time::sleep;

use super::access::Passage;
use super::body::{Outgoing, UpstreamBody};
use super::timer::{Ticker, Ticks};
use super::worker::Shared;

/// A request that has become a tunnel. It holds the request's resources until the tunnel ends.
#[derive(Debug)]
pub(crate) struct Switched {
    upstream: OnUpgrade,
    /// Holds the concurrency permits and the address's in-flight count.
    _body: Outgoing,
    _passage: Passage,
}

impl Switched {
    /// Keeps the response's empty body, which hyper would drop immediately.
    pub(crate) fn new(response: &mut Response<Outgoing>, passage: Passage) -> Switched {
        let upstream = hyper::upgrade::on(&mut *response);
        let empty = Outgoing::unlimited(UpstreamBody::Told(None));
        Switched { upstream, _body: std::mem::replace(response.body_mut(), empty), _passage: passage }
    }

    /// Copies bytes both ways until both sides have closed, no bytes have moved for the tunnel timeout, or the drain
    /// timeout has passed.
    pub(crate) async fn run<S>(
        self,
        io: impl AsyncRead + AsyncWrite + Unpin,
        early: Bytes,
        shared: &Shared<S>,
    ) {
        let Switched { upstream, _body, _passage } = self;
        let moved = AtomicU64::new(shared.ticker.now().as_millis());
        let mut io = Noted { io, moved: &moved, ticker: &shared.ticker };
        let carrying = async {
            let mut upstream = TokioIo::new(upstream.await.map_err(io::Error::other)?);
            // Bytes that the client sent before it received the response.
            upstream.write_all(&early).await?;
            copy_bidirectional(&mut io, &mut upstream).await
        };
        tokio::select! {
            biased;
            // Both sides see how the tunnel ended.
            _ = carrying => {}
            () = quiet(&moved, shared) => tracing::debug!("tunnel closed: idle"),
            () = shared.draining.over() => {}
        }
    }
}

/// Completes once no bytes have moved for the tunnel timeout.
async fn quiet<S>(moved: &AtomicU64, shared: &Shared<S>) {
    loop {
        let past = shared.ticker.now().since(Ticks::from_millis(moved.load(Ordering::Relaxed)));
        match shared.state.load().timeouts.tunnel.checked_sub(past).filter(|left| !left.is_zero()) {
            Some(left) => sleep(left).await,
            None => return,
        }
    }
}

/// The client's side of a tunnel. All bytes pass through it, so it records the time of the last transfer.
struct Noted<'t, I> {
    io: I,
    moved: &'t AtomicU64,
    ticker: &'t Ticker,
}

impl<I> Noted<'_, I> {
    fn note(&self) {
        self.moved.store(self.ticker.now().as_millis(), Ordering::Relaxed);
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Noted<'_, I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_ready() {
            self.note();
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Noted<'_, I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        if written.is_ready() {
            self.note();
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
