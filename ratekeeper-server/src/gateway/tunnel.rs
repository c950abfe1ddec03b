//! Connections that have switched protocols, for example to WebSocket.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::time::sleep;

use super::access::AccessRecord;
use super::body::{ClientBody, UpstreamBody};
use super::timer::{Ticker, Ticks};
use super::worker::GatewayShared;
use crate::runtime::observed_stream::{ObservedStream, PolledIo, StreamObserver};

/// A request that has become a tunnel. It holds the request's resources until the tunnel ends.
#[derive(Debug)]
pub(crate) struct Tunnel {
    upstream: OnUpgrade,
    /// Holds the concurrency permits and the address's in-flight count.
    _body: ClientBody,
    _record: Box<AccessRecord>,
}

impl Tunnel {
    /// Keeps the response's empty body, which hyper would drop immediately.
    pub(crate) fn new(response: &mut Response<ClientBody>, record: Box<AccessRecord>) -> Tunnel {
        let upstream = hyper::upgrade::on(&mut *response);
        let empty = ClientBody::unlimited(UpstreamBody::Empty);
        Tunnel { upstream, _body: std::mem::replace(response.body_mut(), empty), _record: record }
    }

    /// Copies bytes both ways until both sides have closed, no bytes have moved for the tunnel timeout, or the drain
    /// timeout has passed.
    pub(crate) async fn run<S>(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin,
        early: Bytes,
        shared: &GatewayShared<S>,
    ) {
        let Tunnel { upstream, _body, _record } = self;
        let last_transfer = AtomicU64::new(shared.ticker.now().as_millis());
        let observer = TransferTime { last_transfer: &last_transfer, ticker: &shared.ticker };
        let mut client = ObservedStream { stream, observer };
        let copying = async {
            let mut upstream = TokioIo::new(upstream.await.map_err(io::Error::other)?);
            // Bytes that the client sent before it received the response.
            upstream.write_all(&early).await?;
            copy_bidirectional(&mut client, &mut upstream).await
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

/// Records the time of the last transfer. It observes the client's side, which all bytes of a tunnel pass through.
struct TransferTime<'t> {
    last_transfer: &'t AtomicU64,
    ticker: &'t Ticker,
}

impl TransferTime<'_> {
    fn record<T>(&self, transfer: Poll<T>) -> Poll<T> {
        if transfer.is_ready() {
            self.last_transfer.store(self.ticker.now().as_millis(), Ordering::Relaxed);
        }
        transfer
    }
}

impl StreamObserver for TransferTime<'_> {
    fn after_read(&mut self, _: &mut Context<'_>, _: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        self.record(read)
    }

    fn after_write(&mut self, _: &mut Context<'_>, written: PolledIo<usize>) -> PolledIo<usize> {
        self.record(written)
    }
}
