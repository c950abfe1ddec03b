//! Opens sockets to servers: name lookup, TCP connection and TLS handshake.

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::client::TlsStream;

use super::Address;
use super::capacity::ConnectionPermit;
use super::pool::ConnectError;
use crate::runtime::observed_stream::{ObservedStream, StreamObserver};

/// File descriptors are exhausted, in the system or in this process: the same numbers on all supported platforms.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

/// A connected stream, with or without TLS.
pub(crate) enum UpstreamStream {
    Plain(UpstreamSocket),
    Tls(Box<TlsStream<UpstreamSocket>>),
}

/// A socket with its connection permit, also after a protocol switch: a WebSocket is a connection, too.
type UpstreamSocket = ObservedStream<TcpStream, HeldPermit>;

/// Held until the socket is closed; it observes nothing.
pub(crate) struct HeldPermit(
    #[expect(dead_code, reason = "it is released when it is dropped")] Option<ConnectionPermit>,
);

impl StreamObserver for HeldPermit {}

pub(crate) async fn dial(
    address: &Address,
    permit: Option<ConnectionPermit>,
) -> Result<UpstreamStream, ConnectError> {
    let stream = connect(&address.config.host, address.config.port).await?;
    stream.set_nodelay(true).map_err(failed)?;
    let socket = ObservedStream { stream, observer: HeldPermit(permit) };
    match &address.tls {
        None => Ok(UpstreamStream::Plain(socket)),
        Some((connector, name)) => {
            let secured = connector.connect(name.clone(), socket).await.map_err(failed)?;
            Ok(UpstreamStream::Tls(Box::new(secured)))
        }
    }
}

/// Connects to the first address of a host that accepts.
async fn connect(host: &str, port: u16) -> Result<TcpStream, ConnectError> {
    let host = host.trim_matches(['[', ']']);
    // The operator wrote this address, and the configuration was validated.
    if let Ok(ip) = host.parse::<IpAddr>() {
        return TcpStream::connect((ip, port)).await.map_err(connect_error);
    }
    let found = lookup_host((host, port)).await.map_err(connect_error)?;
    connect_first(host, found).await
}

/// The owner of a DNS name chooses its addresses. Clouds serve machine credentials at link-local addresses, so those
/// are skipped.
async fn connect_first(
    host: &str,
    found: impl Iterator<Item = SocketAddr>,
) -> Result<TcpStream, ConnectError> {
    let mut error = failed(format!("{host} has no address"));
    for address in found {
        if ratekeeper_config::is_link_local(address.ip()) {
            error = failed(format!("{host} resolves to {}, a link-local address", address.ip()));
            continue;
        }
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(last) => error = connect_error(last),
        }
    }
    Err(error)
}

pub(crate) fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> ConnectError {
    ConnectError::Failed(error.into())
}

fn connect_error(error: io::Error) -> ConnectError {
    match error.raw_os_error() {
        Some(EMFILE | ENFILE) => ConnectError::OutOfDescriptors,
        _ => failed(error),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn link_local_addresses_of_a_name_are_skipped() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let good = listener.local_addr().expect("it is bound");
        let closed = SocketAddr::from(([127, 0, 0, 1], 1));
        let bad = ["169.254.169.254:80", "[fe80::1]:80", "[::ffff:169.254.169.254]:80", "169.254.0.1:80"];
        for bad in bad.map(|it| it.parse::<SocketAddr>().expect("it is an address")) {
            let error = connect_first("meta.test", [bad].into_iter()).await.expect_err("it is link-local");
            assert_eq!(
                error.to_string(),
                format!("meta.test resolves to {}, a link-local address", bad.ip())
            );
            // Other addresses of the same name are still tried, in order.
            let stream =
                connect_first("meta.test", [bad, closed, good].into_iter()).await.expect("one is good");
            assert_eq!(stream.peer_addr().expect("it is connected"), good);
        }
        assert!(connect_first("meta.test", [].into_iter()).await.is_err());
        let refused = connect_first("meta.test", [closed].into_iter()).await.expect_err("nothing listens");
        let ConnectError::Failed(cause) = &refused else { panic!("{refused}") };
        assert!(cause.is::<io::Error>() && cause.to_string() == refused.to_string(), "{refused}");
    }

    #[tokio::test]
    async fn names_and_literals_are_connected_to() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let port = listener.local_addr().expect("it is bound").port();
        for host in ["127.0.0.1", "localhost"] {
            assert!(connect(host, port).await.is_ok(), "{host}");
        }
    }
}
