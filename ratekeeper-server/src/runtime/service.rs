//! The interface of the services: the gateway, the APIs and the admin listener.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ratekeeper_config::Config;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::BoundSocket;
use super::engine::EngineState;
use super::error::StartError;
use super::metrics::{Exposition, MetricsDraft};

/// A network service. It knows the runtime and no other service.
pub(crate) trait Service<S>: Send + Sync + 'static {
    /// The addresses that it listens on.
    fn addresses(&self) -> Vec<ServiceAddress>;

    /// Prepares a reload. On an error, nothing has changed.
    fn prepare<'a>(&'a self, config: &'a Config, metrics: &mut MetricsDraft) -> PreparedReload<'a, S>;

    /// Writes its metrics. By default, there are none.
    fn write_metrics(&self, _: &mut Exposition) {}

    /// The listener that a graceful shutdown closes.
    fn drained_listener(&self) -> Option<&ListenerTask> {
        None
    }

    /// Shuts down gracefully: accepts no more connections and answers the requests in flight, for at most
    /// `drain_timeout`. The result is the number of connections that were still open then, if they are counted.
    fn drain(self: Arc<Self>, drain_timeout: Duration) -> DrainFuture {
        Box::pin(async move {
            if let Some(listener) = self.drained_listener() {
                listener.drain(drain_timeout).await;
            }
            0
        })
    }

    /// Closes, before the graceful shutdown, what the successor of this process serves.
    fn close_for_successor(&self) {}
}

/// An address that a service listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAddress {
    /// The service, as people call it.
    pub service: &'static str,
    /// The address.
    pub address: SocketAddr,
    /// The address as a URL.
    pub url: String,
}

/// Applies a prepared reload, with the limits of the new configuration. It cannot fail.
pub(crate) type ApplyReload<'a, S> = Box<dyn FnOnce(&Arc<EngineState<S>>) + 'a>;

/// A prepared reload, or why the new configuration cannot be applied.
pub(crate) type PreparedReload<'a, S> = Result<ApplyReload<'a, S>, StartError>;

pub(crate) type DrainFuture = Pin<Box<dyn Future<Output = usize> + Send>>;

/// A listener that a task serves until it is told to close.
#[derive(Debug)]
pub(crate) struct ListenerTask {
    address: SocketAddr,
    closing: watch::Sender<bool>,
    serving: Mutex<Option<JoinHandle<()>>>,
}

impl ListenerTask {
    /// Serves on the runtime. The future ends some time after the value that it is made with has become true; an error is
    /// logged.
    pub(crate) fn spawn<F: Future<Output = io::Result<()>> + Send + 'static>(
        runtime: &Handle,
        socket: BoundSocket,
        serve: impl FnOnce(TcpListener, watch::Receiver<bool>) -> io::Result<(SocketAddr, F)>,
    ) -> Result<ListenerTask, StartError> {
        let (closing, is_closing) = watch::channel(false);
        let _entered = runtime.enter();
        let setting = socket.setting;
        let (address, serving) = socket.serve(|listener| serve(listener, is_closing))?;
        let serving = runtime.spawn(async move {
            if let Err(error) = serving.await {
                tracing::error!(setting, %error, "listener stopped unexpectedly");
            }
        });
        Ok(ListenerTask { address, closing, serving: Mutex::new(Some(serving)) })
    }

    /// The address of the service; the URL has this scheme and path.
    pub(crate) fn address(&self, service: &'static str, scheme: &str, path: &str) -> ServiceAddress {
        let address = self.address;
        ServiceAddress { service, address, url: format!("{scheme}://{address}{path}") }
    }

    /// Closes the listener and its connections.
    pub(crate) fn abort(&self) {
        if let Some(serving) = self.take_serving() {
            serving.abort();
        }
    }

    fn take_serving(&self) -> Option<JoinHandle<()>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Closes the listener, and waits until the requests in flight are answered.
    pub(crate) async fn drain(&self, drain_timeout: Duration) {
        self.closing.send_replace(true);
        if let Some(serving) = self.take_serving() {
            let _ = timeout(drain_timeout, serving).await;
        }
    }
}
