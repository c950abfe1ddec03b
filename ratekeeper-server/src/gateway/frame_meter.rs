//! Client connections whose HTTP/2 frames are counted against the bound per second.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::client_timeouts::ConnectionActivity;
use crate::runtime::frame_bound::FrameBound;

/// A client's HTTP/2 connection. Above the bound, it reads nothing more and marks its activity as a flood.
#[derive(Debug)]
pub(crate) struct FrameMeter<I> {
    io: I,
    bound: FrameBound,
    activity: Arc<ConnectionActivity>,
}

impl<I> FrameMeter<I> {
    /// `read_ahead` holds the bytes that were read before.
    pub(crate) fn new(io: I, read_ahead: &[u8], activity: Arc<ConnectionActivity>) -> FrameMeter<I> {
        let bound = FrameBound::new(now(&activity));
        let mut meter = FrameMeter { io, bound, activity };
        // The first read is shorter than the bound.
        meter.is_flood(read_ahead);
        meter
    }

    fn is_flood(&mut self, bytes: &[u8]) -> bool {
        self.bound.is_flood(bytes, || now(&self.activity))
    }

    fn count_written(&mut self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = written {
            self.bound.count_written(*bytes);
        }
    }
}

fn now(activity: &ConnectionActivity) -> Duration {
    Duration::from_millis(activity.now().as_millis())
}

impl<I: AsyncRead + Unpin> AsyncRead for FrameMeter<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let meter = self.get_mut();
        if meter.activity.is_flood() {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut meter.io).poll_read(context, buffer);
        if meter.is_flood(&buffer.filled()[before..]) {
            meter.activity.set_flood();
            context.waker().wake_by_ref();
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for FrameMeter<I> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let meter = self.get_mut();
        let written = Pin::new(&mut meter.io).poll_write(context, bytes);
        meter.count_written(&written);
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let meter = self.get_mut();
        let written = Pin::new(&mut meter.io).poll_write_vectored(context, slices);
        meter.count_written(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}
