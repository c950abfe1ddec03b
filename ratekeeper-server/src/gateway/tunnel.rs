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

use super::access::AccessRecord;
use super::body::{ClientBody, UpstreamBody};
use super::timer::{Ticker, Ticks};
use super::worker::GatewayShared;

/// A request that has become a tunnel. It holds the request's resources until the tunnel ends.
#[derive(Debug)]
pub(crate) struct Tunnel {
    upstream: OnUpgrade,
    /// Holds the concurrency permits and the address's in-flight count.
    _body: ClientBody,
    _record: AccessRecord,
}

impl Tunnel {
    /// Keeps the response's empty body, which hyper would drop immediately.
    pub(crate) fn new(response: &mut Response<ClientBody>, record: AccessRecord) -> Tunnel {
        let upstream = hyper::upgrade::on(&mut *response);
        let empty = ClientBody::unlimited(UpstreamBody::Full(None));
        Tunnel { upstream, _body: std::mem::replace(response.body_mut(), empty), _record: record }
    }

    /// Copies bytes both ways until both sides have closed, no bytes have moved for the tunnel timeout, or the drain
    /// timeout has passed.
    pub(crate) async fn run<S>(
        self,
        io: impl AsyncRead + AsyncWrite + Unpin,
        early: Bytes,
        shared: &GatewayShared<S>,
    ) {
        let Tunnel { upstream, _body, _record } = self;
        let last_transfer = AtomicU64::new(shared.ticker.now().as_millis());
        let mut io = TrackedIo { io, last_transfer: &last_transfer, ticker: &shared.ticker };
        let copying = async {
            let mut upstream = TokioIo::new(upstream.await.map_err(io::Error::other)?);
            // Bytes that the client sent before it received the response.
            upstream.write_all(&early).await?;
            copy_bidirectional(&mut io, &mut upstream).await
        };
        tokio::select! {
            biased;
            // Both peers see the error, so it is not logged.
            _ = copying => {}
            () = idle_timeout(&last_transfer, shared) => tracing::debug!("tunnel closed: idle timeout"),
            () = shared.drain.wait_timed_out() => {}
        }
    }
}

/// Completes once no bytes have moved for the tunnel timeout.
async fn idle_timeout<S>(last_transfer: &AtomicU64, shared: &GatewayShared<S>) {
    loop {
        let past = shared.ticker.now().since(Ticks::from_millis(last_transfer.load(Ordering::Relaxed)));
        match shared.state.load().timeouts.tunnel.checked_sub(past).filter(|left| !left.is_zero()) {
            Some(left) => sleep(left).await,
            None => return,
        }
    }
}

/// The client's side of a tunnel. All bytes pass through it, so it records the time of the last transfer.
struct TrackedIo<'t, I> {
    io: I,
    last_transfer: &'t AtomicU64,
    ticker: &'t Ticker,
}

impl<I> TrackedIo<'_, I> {
    fn record_transfer(&self) {
        self.last_transfer.store(self.ticker.now().as_millis(), Ordering::Relaxed);
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for TrackedIo<'_, I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_ready() {
            self.record_transfer();
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for TrackedIo<'_, I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        if written.is_ready() {
            self.record_transfer();
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
