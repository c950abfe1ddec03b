//! Connections of the HTTP API and the admin listener: bounded in number, cut off when slow, and drained when the
//! listener closes.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ratekeeper::tower::Peer;
use tokio::net::{TcpListener, TcpStream};
use tokio::select;
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::{Instant, timeout};
use tower_service::Service;

use super::accept::accepted;
use super::connection_timeouts::{ClientDeadlines, ConnectionState, TrackedBody};
use super::observed_stream::ObservedStream;
use super::open_files;

/// How long a connection may be idle after a request: longer than proxies keep theirs, so that the proxy closes first
/// and never sends into a connection that is being closed. A head that has begun has less time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// How long a request's body may take.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long requests in flight may take when the listener closes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers the requests of a listener.
pub(crate) trait RequestHandler: Clone + Send + Sync + 'static {
    fn handle(&self, request: Request<Body>) -> impl Future<Output = Response> + Send;
}

impl RequestHandler for Router {
    fn handle(&self, request: Request<Body>) -> impl Future<Output = Response> + Send {
        let called = self.clone().call(request);
        async { into_ok(called.await) }
    }
}

/// Serves connections until the listener closes: at most `connections_max`. For a further one, the connection that has
/// waited longest for a request head is closed; if all of them serve requests, the further one is closed immediately.
pub(crate) async fn serve(
    listener: TcpListener,
    handler: impl RequestHandler,
    connections_max: usize,
    drain: watch::Receiver<bool>,
) -> io::Result<()> {
    let connections_max = connections_max.min(open_files::connections_max());
    let started = Instant::now();
    let mut connections = JoinSet::new();
    let mut open = OpenConnections::default();
    let mut closing = drain.clone();
    loop {
        let result = select! {
            () = is_closing(&mut closing) => break,
            Some(ended) = connections.join_next_with_id() => {
                open.remove(ended);
                continue;
            }
            result = listener.accept() => result,
        };
        let Some((stream, peer)) = accepted(result).await else { continue };
        while let Some(ended) = connections.try_join_next_with_id() {
            open.remove(ended);
        }
        if open.0.len() >= connections_max && !open.close_one() {
            continue;
        }
        let (handler, drain, state) = (handler.clone(), drain.clone(), ConnectionState::new(started));
        let task = connections.spawn(connection(stream, peer, handler, drain, state.clone()));
        open.0.insert(task.id(), (state, task));
    }
    drop(listener);
    let _ = timeout(DRAIN_TIMEOUT, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

/// The open connections, by their tasks.
#[derive(Default)]
struct OpenConnections(HashMap<Id, (ConnectionState, AbortHandle)>);

impl OpenConnections {
    /// Removes a connection whose task has ended.
    fn remove(&mut self, ended: Result<(Id, ()), JoinError>) {
        self.0.remove(&ended.map_or_else(|error| error.id(), |(id, ())| id));
    }

    /// Closes the connection that has waited longest for its client. Returns false if none waits.
    fn close_one(&mut self) -> bool {
        loop {
            let waiting = self.0.iter().filter_map(|(id, (state, _))| Some((state.waits_since()?, *id)));
            let Some((_, id)) = waiting.min_by_key(|(since, _)| *since) else { return false };
            // Another one is chosen if a head has arrived in the meantime.
            if let Some((state, task)) = self.0.get(&id)
                && state.close()
            {
                task.abort();
                self.0.remove(&id);
                return true;
            }
        }
    }
}

/// Resolves when the listener closes, or when the sender is dropped.
pub(crate) async fn is_closing(drain: &mut watch::Receiver<bool>) {
    let _ = drain.wait_for(|is_closing| *is_closing).await;
}

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    handler: impl RequestHandler,
    mut drain: watch::Receiver<bool>,
    state: ConnectionState,
) {
    let stream = ObservedStream { stream, observer: ClientDeadlines::new(state.clone()) };
    let service = service_fn(move |request: Request<Incoming>| {
        let is_open = state.head_complete();
        let (handler, state) = (handler.clone(), state.clone());
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Peer(peer.ip()));
        async move {
            if !is_open {
                return Err(io::Error::from(io::ErrorKind::ConnectionAborted));
            }
            let response = handler.handle(request).await;
            Ok(response.map(|body| TrackedBody::new(body, state)))
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    // A client that disconnects is not an error.
    let _ = select! {
        ended = connection.as_mut() => ended,
        () = is_closing(&mut drain) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
}

fn into_ok<T>(result: Result<T, Infallible>) -> T {
    match result {
        Ok(value) => value,
    }
}
