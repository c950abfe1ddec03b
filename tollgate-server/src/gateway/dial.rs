//! A socket to a server: looked up, connected, and secured.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::room::Place;
use super::upstream::Address;

pub(crate) enum Dialled {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

/// A socket with its place among the connections to its server. Also when the protocol on it is another by then: a
/// WebSocket is a connection, too.
pub(crate) struct Socket {
    stream: TcpStream,
    _place: Option<Place>,
}

pub(crate) async fn dial(address: &Address, place: Option<Place>) -> Result<Dialled, String> {
    let host = address.config.host.trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, address.config.port)).await.map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    let socket = Socket { stream, _place: place };
    match &address.tls {
        None => Ok(Dialled::Plain(socket)),
        Some((connector, name)) => {
            let secured = connector.connect(name.clone(), socket).await.map_err(text)?;
            Ok(Dialled::Tls(Box::new(secured)))
        }
    }
}

pub(crate) fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
