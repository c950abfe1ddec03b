//! Connections of the HTTP API and the admin listener: bounded in number, cut off when slow, and drained when the
//! listener closes.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ratekeeper::tower::Peer;
use tokio::net::{TcpListener, TcpStream};
use tokio::select;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower_service::Service;

use super::connection_timeouts::{ClientTimeoutIo, ConnectionState};
use super::open_files;

/// How long a connection may be idle after a request: longer than proxies keep theirs, so that the proxy closes first
/// and never sends into a connection that is being closed. A head that has begun has less time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// How long a request's body may take.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long requests in flight may take when the listener closes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before the next attempt if the system cannot accept a connection.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Serves connections until the listener closes: at most `connections_max`, further ones are closed immediately.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    connections_max: usize,
    drain: watch::Receiver<bool>,
) -> io::Result<()> {
    let permits = Arc::new(Semaphore::new(connections_max.min(open_files::connections_max())));
    let mut connections = JoinSet::new();
    let mut closing = drain.clone();
    loop {
        let accepted = select! {
            () = is_closing(&mut closing) => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, peer)) = accepted else {
            sleep(ACCEPT_RETRY_DELAY).await;
            continue;
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else { continue };
        let (router, drain) = (router.clone(), drain.clone());
        connections.spawn(async move {
            connection(stream, peer, router, drain).await;
            drop(permit);
        });
    }
    drop(listener);
    let _ = timeout(DRAIN_TIMEOUT, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

/// Resolves when the listener closes, or when the sender is dropped.
pub(crate) async fn is_closing(drain: &mut watch::Receiver<bool>) {
    let _ = drain.wait_for(|is_closing| *is_closing).await;
}

async fn connection(stream: TcpStream, peer: SocketAddr, router: Router, mut drain: watch::Receiver<bool>) {
    // Responses are small, and the client waits for them.
    let _ = stream.set_nodelay(true);
    let state = ConnectionState::default();
    let stream = ClientTimeoutIo::new(stream, state.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        state.head_complete();
        let (mut router, state) = (router.clone(), state.clone());
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Peer(peer.ip()));
        async move {
            let response = into_ok(router.call(request).await);
            state.response_complete();
            Ok::<_, Infallible>(response)
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
