//! Further test peers: servers that follow a script byte by byte, clients that read one response at a time, and
//! certificates for both.

use std::fmt::Write as _;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{HeaderMap, Request, response};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use testbed::TEST_TIMEOUT;
use testbed::http2::kind::{GOAWAY, PING, RST_STREAM, SETTINGS};
use testbed::http2::{ACK, HEAD_BYTES, Head, PREFACE, frame};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A configuration with one upstream of several addresses and one route to it. Settings of the upstream, route and
/// listener begin with a comma, because they are appended to existing ones.
#[derive(Default)]
pub(crate) struct ConfigFile<'a> {
    pub(crate) limits: &'a str,
    pub(crate) listener: &'a str,
    pub(crate) gateway: &'a str,
    pub(crate) upstream: &'a str,
    pub(crate) route: &'a str,
}

impl ConfigFile<'_> {
    pub(crate) fn to(&self, addresses: &[SocketAddr]) -> String {
        let addresses: Vec<String> = addresses.iter().map(|at| format!("http://{at}")).collect();
        self.to_urls(&addresses)
    }

    pub(crate) fn to_urls(&self, urls: &[String]) -> String {
        let ConfigFile { limits, listener, gateway, upstream, route } = self;
        let mut text =
            format!("{limits}\ngateway:\n  listen: {{ address: 127.0.0.1:0{listener} }}\n  {gateway}\n");
        let _ = writeln!(text, "  upstreams: {{ pool: {{ addresses: [{}]{upstream} }} }}", urls.join(", "));
        let _ = writeln!(text, "  routes:\n    - {{ id: all, limits: all, upstream: pool{route} }}");
        text
    }
}

/// A server that runs `script` on each connection, with the number of connections before it.
pub(crate) async fn scripted<F>(script: impl Fn(TcpStream, usize) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for number in 0.. {
            let Ok((stream, _)) = listener.accept().await else { return };
            tokio::spawn(script(stream, number));
        }
    });
    address
}

/// An address without a listener.
pub(crate) fn closed_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub(crate) type Http2 = http2::SendRequest<Full<Bytes>>;

/// Starts an HTTP/2 client with prior knowledge.
pub(crate) async fn connect_http2(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Http2 {
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(io)).await.unwrap();
    tokio::spawn(async move {
        // The requests on the connection receive the error.
        let _ = connection.await;
    });
    sender
}

/// A response with its body and trailers.
pub(crate) struct Http2Response {
    pub(crate) head: response::Parts,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

pub(crate) async fn request_http2(sender: &mut Http2, request: Request<Full<Bytes>>) -> Http2Response {
    let response =
        timeout(TEST_TIMEOUT, sender.send_request(request)).await.expect("no response received").unwrap();
    let (head, body) = response.into_parts();
    let body = timeout(TEST_TIMEOUT, body.collect()).await.expect("no body received").unwrap();
    let trailers = body.trailers().cloned();
    Http2Response { head, body: body.to_bytes(), trailers }
}

/// An HTTP/2 frame that was received.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

/// An HTTP/2 client or server at frame level.
pub(crate) struct RawHttp2(pub(crate) TcpStream);

impl RawHttp2 {
    pub(crate) async fn connect(to: SocketAddr) -> RawHttp2 {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(PREFACE).await.unwrap();
        stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
        RawHttp2(stream)
    }

    /// The next frame, or None if the connection ends.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        let reading = async {
            let mut head = [0; HEAD_BYTES];
            self.0.read_exact(&mut head).await.ok()?;
            let Head { length, kind, stream, flags } = Head::of(head);
            let mut payload = vec![0; length];
            self.0.read_exact(&mut payload).await.ok()?;
            // The gateway closes connections that do not answer its pings.
            if kind == PING && flags & ACK == 0 {
                self.0.write_all(&frame(PING, ACK, 0, &payload)).await.ok()?;
            }
            Some(Frame { kind, stream, payload })
        };
        timeout(TEST_TIMEOUT, reading).await.expect("no frame received")
    }

    /// The next frame that ends a stream or the connection.
    pub(crate) async fn next_end(&mut self) -> Option<Frame> {
        loop {
            match self.next().await {
                Some(frame) if !matches!(frame.kind, RST_STREAM | GOAWAY) => {}
                frame => return frame,
            }
        }
    }

    pub(crate) async fn next_of(&mut self, kind: u8) -> Option<Frame> {
        loop {
            match self.next().await {
                Some(frame) if frame.kind != kind => {}
                frame => return frame,
            }
        }
    }
}

/// A directory that is deleted on drop.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new() -> TempDir {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ratekeeper-gateway-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    /// Writes a file and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A self-signed certificate for loopback, and its key.
pub(crate) struct Identity {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Identity {
    pub(crate) fn new() -> Identity {
        let generated =
            rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        Identity { certificate: generated.cert.pem(), key: generated.signing_key.serialize_pem() }
    }

    pub(crate) fn der(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes()).unwrap()
    }

    /// A TLS acceptor for a server with this certificate.
    pub(crate) fn acceptor(&self, protocol: &str) -> TlsAcceptor {
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_no_client_auth().with_single_cert(vec![self.der()], key).unwrap();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }

    /// Connects to a server that must have this certificate.
    pub(crate) async fn connect(
        &self,
        to: SocketAddr,
        protocol: &str,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        self.secure(TcpStream::connect(to).await?, protocol).await
    }

    /// Like `connect`, on an open connection.
    pub(crate) async fn secure(
        &self,
        stream: TcpStream,
        protocol: &str,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }
}
