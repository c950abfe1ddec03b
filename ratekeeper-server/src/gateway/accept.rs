//! Listens, accepts connections and assigns them to workers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ratekeeper_config as config;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::client_connections::{Reaper, reap_from};
use super::drain::DrainBegun;
use super::worker::Worker;
use crate::runtime::accept::accepted;
use crate::runtime::error::StartError;
use crate::runtime::metrics::ConnectionRejection;
use crate::runtime::tls::{self, Certificate};
use crate::runtime::{BoundSocket, Sockets};

/// How long a connection that is closed for a new one may take to end, and how many are tried before the new one is
/// rejected.
const REAP_TIMEOUT: Duration = Duration::from_millis(50);
const REAP_ATTEMPTS_MAX: usize = 3;

/// A listener: its port, and what it expects before HTTP.
#[derive(Debug)]
pub(crate) struct GatewayListener {
    pub(crate) port: u16,
    pub(crate) proxy_protocol: bool,
    pub(crate) tls: Option<Acceptor>,
    pub(crate) certificate: Option<Arc<Certificate>>,
}

/// A TLS acceptor that implements `Debug`.
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

/// Binds the listener that `config` describes.
pub(crate) fn listen(
    config: &config::Listener,
    sockets: &mut Sockets,
) -> Result<(std::net::TcpListener, Arc<GatewayListener>), StartError> {
    let (acceptor, certificate) = match &config.tls {
        None => (None, None),
        Some(files) => {
            let certificate = Arc::new(Certificate::read(files)?);
            let acceptor = tls::acceptor(certificate.clone())?;
            (Some(Acceptor(acceptor)), Some(certificate))
        }
    };
    let socket = BoundSocket::bind("gateway.listen", config.address, sockets)?;
    let (listener, port) = socket.serve(|listener| {
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    })?;
    let proxy_protocol = config.proxy_protocol;
    Ok((listener, Arc::new(GatewayListener { port, proxy_protocol, tls: acceptor, certificate })))
}

/// Assigns each connection to the worker with the fewest, until draining begins and the listen queue is empty.
pub(crate) async fn accept<S>(
    listener: TcpListener,
    info: Arc<GatewayListener>,
    workers: Arc<[Arc<Worker<S>>]>,
    mut draining: DrainBegun,
) {
    let mut reaper = Reaper::default();
    loop {
        let result = tokio::select! {
            biased;
            result = listener.accept() => result,
            () = &mut draining => return,
        };
        let Some((stream, peer)) = accepted(result).await else { continue };
        let open = |worker: &&Arc<Worker<S>>| worker.connections.load(Ordering::Relaxed);
        let Some(worker) = workers.iter().min_by_key(open) else { return };
        let max = worker.shared.state.load().max_connections;
        let total = workers.iter().map(|worker| open(&worker)).sum::<usize>();
        if (reap_from(max)..max).contains(&total) {
            keep_free(&workers, max);
        }
        if total >= max && !free_capacity(&workers, max, &mut reaper).await {
            // Closing the connection fails the client immediately; in the listen queue it would wait until its timeout.
            worker.shared.rejected_connections.count(ConnectionRejection::MaxConnections);
            continue;
        }
        // The PROXY header names the client address, which an untrusted peer must not choose.
        if info.proxy_protocol && !worker.shared.state.load().trusted_proxies.trusts(peer.ip()) {
            worker.shared.rejected_connections.count(ConnectionRejection::UntrustedProxy);
            tracing::debug!(peer = %peer.ip(), "connection closed: peer is not a trusted proxy");
            continue;
        }
        worker.assign(stream, peer, info.clone());
    }
}

/// Closes connections that wait, at most once per step of the clock: finding them takes longer than accepting one.
fn keep_free<S>(workers: &[Arc<Worker<S>>], max_connections: usize) {
    let Some(first) = workers.first() else { return };
    let (shared, now) = (&first.shared, first.shared.ticker.now());
    // Counted from 1, so that the first time differs from the initial value.
    let millis = now.as_millis() + 1;
    if shared.last_reaped.swap(millis, Ordering::Relaxed) != millis {
        let registries = workers.iter().map(|worker| &worker.registry);
        Reaper::keep_free(registries, max_connections, now);
    }
}

/// Closes the connection that has waited longest, and waits until it has ended. Returns whether there is capacity
/// for a new one.
async fn free_capacity<S>(workers: &[Arc<Worker<S>>], max_connections: usize, reaper: &mut Reaper) -> bool {
    let Some(first) = workers.first() else { return false };
    let shared = &first.shared;
    let is_full = || {
        let total: usize = workers.iter().map(|worker| worker.connections.load(Ordering::Relaxed)).sum();
        total >= max_connections
    };
    for _ in 0..REAP_ATTEMPTS_MAX {
        let registries = workers.iter().map(|worker| &worker.registry);
        if !reaper.close_one(registries, max_connections, shared.ticker.now()) {
            break;
        }
        let wait = async {
            while is_full() {
                shared.connection_ended.notified().await;
            }
        };
        // A connection whose request has arrived in the meantime stays open; then another one is closed.
        if timeout(REAP_TIMEOUT, wait).await.is_ok() {
            break;
        }
    }
    !is_full()
}
