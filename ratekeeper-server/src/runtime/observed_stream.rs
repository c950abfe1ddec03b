//! A stream whose reads and writes are observed.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The result of a read, a write or a flush.
pub(crate) type PolledIo<T> = Poll<io::Result<T>>;

/// Observes the reads and writes of a stream. A method may return another result than the stream's.
pub(crate) trait StreamObserver: Unpin {
    /// Called before each read. If it returns a result, the stream is not read.
    fn before_read(&mut self, _: &mut ReadBuf<'_>) -> Option<PolledIo<()>> {
        None
    }

    /// Called after each read of the stream, with the bytes that were read.
    fn after_read(&mut self, _: &mut Context<'_>, _: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        read
    }

    /// Called after each write, with the number of bytes that were written.
    fn after_write(&mut self, _: &mut Context<'_>, written: PolledIo<usize>) -> PolledIo<usize> {
        written
    }

    /// Called after each flush.
    fn after_flush(&mut self, _: &mut Context<'_>, flushed: PolledIo<()>) -> PolledIo<()> {
        flushed
    }
}

/// A stream with its observer.
#[derive(Debug)]
pub(crate) struct ObservedStream<I, O> {
    pub(crate) stream: I,
    pub(crate) observer: O,
}

impl<I: AsyncRead + Unpin, O: StreamObserver> AsyncRead for ObservedStream<I, O> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let ObservedStream { stream, observer } = self.get_mut();
        if let Some(read) = observer.before_read(buffer) {
            return read;
        }
        let before = buffer.filled().len();
        let read = Pin::new(stream).poll_read(context, buffer);
        observer.after_read(context, buffer.filled().get(before..).unwrap_or_default(), read)
    }
}

impl<I: AsyncWrite + Unpin, O: StreamObserver> AsyncWrite for ObservedStream<I, O> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let ObservedStream { stream, observer } = self.get_mut();
        let written = Pin::new(stream).poll_write(context, bytes);
        observer.after_write(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let ObservedStream { stream, observer } = self.get_mut();
        let written = Pin::new(stream).poll_write_vectored(context, slices);
        observer.after_write(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ObservedStream { stream, observer } = self.get_mut();
        let flushed = Pin::new(stream).poll_flush(context);
        observer.after_flush(context, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
