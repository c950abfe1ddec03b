//! Who listens, and who gets the connections.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tollgate_config as config;

use super::StartError;
use super::draining::Waiting;
use super::tls::{self, Certificate};
use super::worker::Worker;
use crate::sockets::Sockets;

/// When there are no more file descriptors, it is no use to ask again at once.
const NO_DESCRIPTORS_PAUSE: Duration = Duration::from_millis(50);

/// Where clients connect.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) port: u16,
    pub(crate) proxy_protocol: bool,
    pub(crate) tls: Option<Acceptor>,
    pub(crate) certificate: Option<Arc<Certificate>>,
}

/// Speaks TLS with clients.
pub(crate) struct Acceptor(TlsAcceptor);

impl std::ops::Deref for Acceptor {
    type Target = TlsAcceptor;

    fn deref(&self) -> &TlsAcceptor {
        &self.0
    }
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

/// Listens as a configuration says.
pub(crate) fn listen(
    config: &config::Listener,
    sockets: &mut Sockets,
) -> Result<(std::net::TcpListener, Arc<Listening>), StartError> {
    let (acceptor, certificate) = match &config.tls {
        None => (None, None),
        Some(files) => {
            let certificate = Arc::new(Certificate::read(files).map_err(StartError::Tls)?);
            let acceptor = tls::acceptor(certificate.clone()).map_err(StartError::Tls)?;
            (Some(Acceptor(acceptor)), Some(certificate))
        }
    };
    let unable = |error| StartError::Listen(config.address, error);
    let listener = sockets.listen(config.address).map_err(unable)?;
    let port = listener.local_addr().map_err(unable)?.port();
    let proxy_protocol = config.proxy_protocol;
    Ok((listener, Arc::new(Listening { port, proxy_protocol, tls: acceptor, certificate })))
}

/// Gives every connection to the worker that has the fewest, until the gateway ends and nobody is left in the queue.
pub(crate) async fn accept<S>(
    listener: TcpListener,
    listening: Arc<Listening>,
    workers: Arc<[Arc<Worker<S>>]>,
    mut draining: Waiting,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = listener.accept() => accepted,
            () = &mut draining => return,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // A client that is gone already is nothing to wait for.
                if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
                {
                    tracing::warn!(%error, "no connection can be accepted");
                    sleep(NO_DESCRIPTORS_PAUSE).await;
                }
                continue;
            }
        };
        let open = |worker: &&Arc<Worker<S>>| worker.connections.load(Ordering::Relaxed);
        let Some(worker) = workers.iter().min_by_key(open) else { return };
        let most = worker.shared.state.load().max_connections;
        if workers.iter().map(|worker| open(&worker)).sum::<usize>() >= most {
            // Closing it tells the client at once, where leaving it in the queue would keep it waiting.
            worker.shared.turned_away.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        // Its first line would say from where it comes, and clients must not choose that themselves.
        if listening.proxy_protocol && !worker.shared.state.load().client.trusts(from.ip()) {
            worker.shared.untrusted.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(peer = %from.ip(), "closed: it is none of the proxies whose PROXY header counts");
            continue;
        }
        // A connection that cannot be told to hurry is slow, not broken.
        let _ = stream.set_nodelay(true);
        worker.take(stream, from, listening.clone());
    }
}
