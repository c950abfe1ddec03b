//! How byte streams to servers are opened: TCP, TLS and Unix sockets.
//!
//! [`Network`] is the seam at which tests and simulations replace the network.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::select_ok;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::address::{Address, Endpoint};
use super::{Settings, SettingsError};

/// A connected byte stream.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

pub(crate) type OpenFuture<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send + 'a>>;

/// Opens byte streams.
pub(crate) trait Network: fmt::Debug + Send + Sync {
    fn open<'a>(&'a self, endpoint: &'a Endpoint) -> OpenFuture<'a>;
}

/// The network of the operating system.
pub(crate) struct SystemNetwork {
    /// Set if the scheme of the address is one with TLS.
    tls: Option<TlsConnector>,
}

impl fmt::Debug for SystemNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SystemNetwork").field("has_tls", &self.tls.is_some()).finish()
    }
}

impl SystemNetwork {
    /// Reads the certificates if connections use TLS.
    pub(crate) fn new(settings: &Settings, has_tls: bool) -> Result<SystemNetwork, SettingsError> {
        let tls = has_tls.then(|| client_config(settings)).transpose();
        let tls = tls.map_err(|why| SettingsError::Tls(why.to_string()))?;
        Ok(SystemNetwork { tls: tls.map(|config| TlsConnector::from(Arc::new(config))) })
    }

    async fn open_tcp(&self, address: &Address) -> io::Result<Box<dyn ByteStream>> {
        let found = tokio::net::lookup_host((address.host.as_str(), address.port)).await?;
        // A name may have addresses of both families, of which one does not answer.
        let attempts: Vec<_> =
            found.map(|address: SocketAddr| Box::pin(TcpStream::connect(address))).collect();
        if attempts.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
        }
        let (stream, _) = select_ok(attempts).await?;
        // Without `TCP_NODELAY`, a call larger than one packet would wait for the acknowledgement of its first packet.
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else { return Ok(Box::new(stream)) };
        let name = ServerName::try_from(address.host.clone()).map_err(io::Error::other)?;
        Ok(Box::new(tls.connect(name, stream).await?))
    }
}

impl Network for SystemNetwork {
    fn open<'a>(&'a self, endpoint: &'a Endpoint) -> OpenFuture<'a> {
        Box::pin(async move {
            match endpoint {
                Endpoint::Tcp(address) => self.open_tcp(address).await,
                Endpoint::Unix(path) => open_socket(path).await,
            }
        })
    }
}

#[cfg(unix)]
async fn open_socket(path: &Path) -> io::Result<Box<dyn ByteStream>> {
    Ok(Box::new(tokio::net::UnixStream::connect(path).await?))
}

#[cfg(not(unix))]
async fn open_socket(_path: &Path) -> io::Result<Box<dyn ByteStream>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this system has no Unix sockets"))
}

/// The TLS configuration of the settings.
fn client_config(settings: &Settings) -> Result<ClientConfig, Box<dyn std::error::Error>> {
    let mut roots = RootCertStore::empty();
    match &settings.ca {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem) {
                roots.add(certificate?)?;
            }
            if roots.is_empty() {
                return Err("tls_ca has no certificate".into());
            }
        }
        None => {
            let loaded = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(loaded.certs);
            // Single certificates that cannot be read do no harm.
            if let (true, Some(error)) = (roots.is_empty(), loaded.errors.into_iter().next()) {
                return Err(error.into());
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let builder = builder.with_root_certificates(roots);
    Ok(match &settings.certificate {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = CertificateDer::pem_slice_iter(certificate).collect::<Result<_, _>>()?;
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key)?)?
        }
    })
}
