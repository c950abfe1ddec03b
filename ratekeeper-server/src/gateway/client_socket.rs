//! The socket of a client, and a watch on it for clients that disconnect while they wait.
//!
//! hyper notices a disconnect by reading. It does not read while bytes of a further request are buffered, so a client
//! that sends one more byte and disconnects would hold its request's permits and upstream connection until a timeout.

use std::future::Future;
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use super::client_timeouts::ConnectionActivity;

/// Interval between checks for a disconnect while a request is served.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A client's socket that can be watched while it is read and written elsewhere.
#[derive(Debug)]
pub(crate) struct ClientSocket(Arc<TcpStream>);

impl ClientSocket {
    pub(crate) fn new(stream: TcpStream) -> ClientSocket {
        ClientSocket(Arc::new(stream))
    }

    pub(crate) fn watch(&self) -> DisconnectWatch {
        DisconnectWatch { socket: self.0.clone(), timer: None, was_busy: false }
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (socket, room) = (&*self.0, buffer.remaining());
        loop {
            ready!(socket.poll_read_ready(context))?;
            let mut read = None;
            let result = socket.try_io(Interest::READABLE, || {
                let bytes = socket.try_read_buf(buffer)?;
                read = Some(bytes);
                // A read that leaves room has emptied the socket: `WouldBlock` records that, and saves the next read
                // the system call to find out.
                if (1..room).contains(&bytes) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
            });
            match result {
                _ if read.is_some() => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }
}

impl ClientSocket {
    fn poll_write_with(
        &self,
        context: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(context))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(context, |socket| socket.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(context, |socket| socket.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.0).shutdown(Shutdown::Write))
    }
}

/// Watches whether the client disconnects while a request is served.
#[derive(Debug)]
pub(crate) struct DisconnectWatch {
    socket: Arc<TcpStream>,
    /// Left set after a request: it is set once per interval, not once per request.
    timer: Option<Pin<Box<Sleep>>>,
    was_busy: bool,
}

impl DisconnectWatch {
    /// Ready once a request is served whose client has closed or reset the connection.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>, activity: &ConnectionActivity) -> Poll<()> {
        let was_busy = std::mem::replace(&mut self.was_busy, activity.is_busy());
        if !self.was_busy {
            return Poll::Pending;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(CHECK_INTERVAL)));
        if !was_busy && timer.is_elapsed() {
            timer.as_mut().reset(Instant::now() + CHECK_INTERVAL);
        }
        while timer.as_mut().poll(context).is_ready() {
            if has_disconnected(&self.socket) {
                return Poll::Ready(());
            }
            timer.as_mut().reset(Instant::now() + CHECK_INTERVAL);
        }
        Poll::Pending
    }
}

/// Whether the client has closed or reset the connection, also if there is unread data. If that data fills the receive
/// buffer, the kernel cannot receive the end of the stream behind it, and this is false until the data is read.
fn has_disconnected(socket: &TcpStream) -> bool {
    let ready = pin!(socket.ready(Interest::READABLE)).poll(&mut Context::from_waker(Waker::noop()));
    matches!(ready, Poll::Ready(Ok(ready)) if ready.is_read_closed())
}
