//! Certificates: those required of upstreams, and the gateway's, which every reload reads again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use ratekeeper_config as config;
use ratekeeper_config::Protocol;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Why certificates cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read or parsed.
    #[error("cannot read {path}: {1}", path = .0.display())]
    File(PathBuf, String),
    /// A certificate does not match its key or cannot be used.
    #[error("cannot use certificate {path}: {1}", path = .0.display())]
    Certificate(PathBuf, String),
    /// The CA certificates for upstreams cannot be used.
    #[error("invalid CA certificate for an upstream: {0}")]
    Ca(String),
    /// An upstream's host is not a valid certificate name.
    #[error("invalid upstream host {0:?}")]
    Host(String),
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The TLS connector for one upstream address, and the name its certificate must have.
pub(crate) fn connector(
    upstream: &config::Upstream,
    address: &config::Address,
) -> Result<(TlsConnector, ServerName<'static>), TlsError> {
    let mut roots = RootCertStore::empty();
    match &upstream.ca {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem.reveal().as_bytes()) {
                let certificate = certificate.map_err(|error| TlsError::Ca(error.to_string()))?;
                roots.add(certificate).map_err(|error| TlsError::Ca(error.to_string()))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err(TlsError::Ca("no certificate found".to_owned()));
    }
    let tls_error = |error: rustls::Error| TlsError::Ca(error.to_string());
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let mut tls = builder.map_err(tls_error)?.with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![match upstream.protocol {
        Protocol::Http1 => b"http/1.1".to_vec(),
        Protocol::Http2 => b"h2".to_vec(),
    }];
    let host = address.host.trim_matches(['[', ']']);
    let name = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Host(address.host.clone()))?;
    Ok((TlsConnector::from(Arc::new(tls)), name))
}

/// A certificate that can be replaced while it is in use.
#[derive(Debug)]
pub(crate) struct Certificate {
    files: config::Tls,
    current: ArcSwap<CertifiedKey>,
}

impl Certificate {
    pub(crate) fn read(files: &config::Tls) -> Result<Certificate, TlsError> {
        let current = ArcSwap::from_pointee(read(files)?);
        Ok(Certificate { files: files.clone(), current })
    }

    /// Reads the files again. The current certificate stays in use until [`replace`](Certificate::replace).
    pub(crate) fn reread(&self) -> Result<CertifiedKey, TlsError> {
        read(&self.files)
    }

    /// Replaces the certificate for new connections.
    pub(crate) fn replace(&self, fresh: CertifiedKey) {
        self.current.store(Arc::new(fresh));
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _client: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load_full())
    }
}

/// The TLS acceptor for client connections.
pub(crate) fn acceptor(certificate: Arc<Certificate>) -> Result<TlsAcceptor, TlsError> {
    let tls_error = |error: rustls::Error| {
        TlsError::Certificate(certificate.files.certificate.clone(), error.to_string())
    };
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let mut tls = builder.map_err(tls_error)?.with_no_client_auth().with_cert_resolver(certificate);
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(tls)))
}

fn read(files: &config::Tls) -> Result<CertifiedKey, TlsError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |error: rustls::pki_types::pem::Error| TlsError::File(path, error.to_string())
    };
    let chain = CertificateDer::pem_file_iter(&files.certificate).map_err(unreadable(&files.certificate))?;
    let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(unreadable(&files.certificate))?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(unreadable(&files.key))?;
    CertifiedKey::from_der(chain, key, &provider())
        .map_err(|error| TlsError::Certificate(files.certificate.clone(), error.to_string()))
}
