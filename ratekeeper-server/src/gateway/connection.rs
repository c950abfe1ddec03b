//! Serves one client connection, from its first byte to its last.

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderValue, Response};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ratekeeper_rules::client::canonical;
use ratekeeper_rules::response::ResponseStatus;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use super::accept::GatewayListener;
use super::access::AccessRecord;
use super::body::ClientBody;
use super::client_socket::{ClientSocket, DisconnectWatch};
use super::client_timeouts::{ActivityObserver, Close, ConnectionActivity, Expiry};
use super::connection_setup::{ConnectionSetup, first_bytes, is_http2};
use super::frame_meter::FrameMeter;
use super::framing::{RequestScanner, ScannedRequests};
use super::hop_headers::address_value;
use super::min_rate::MinRate;
use super::proxy_protocol;
use super::request::handle;
use super::request_timeout::ReusableTimer;
use super::stream_stall::StreamExecutor;
use super::tunnel::Tunnel;
use super::worker::Worker;
use crate::runtime::backend::Backend;
use crate::runtime::connection_end::{DRAIN_GRACE, linger};
use crate::runtime::metrics::ConnectionRejection;
use crate::runtime::observed_stream::ObservedStream;

/// Largest request head; hyper separately limits its headers to 100.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most bytes of an HTTP/2 stream that wait for the client to read.
const SEND_BYTES_MAX: usize = 16 << 10;
/// Most bytes of an HTTP/2 upload that are received before the upstream reads them.
const STREAM_WINDOW_BYTES: u32 = 128 << 10;
/// The same over all streams of a connection: so many that a few uploads whose upstreams do not read leave the others
/// theirs.
const CONNECTION_WINDOW_BYTES: u32 = 8 * STREAM_WINDOW_BYTES;
/// Concurrent streams per HTTP/2 connection.
const STREAMS_MAX: u32 = 128;
/// Streams that a client may open and reset before the gateway has accepted them.
const RESETS_PENDING_MAX: usize = 20;

/// State shared by all requests of a connection.
#[derive(Debug)]
pub(crate) struct ClientConnection<S> {
    pub(crate) worker: Arc<Worker<S>>,
    pub(crate) activity: Arc<ConnectionActivity>,
    pub(crate) peer: IpAddr,
    pub(crate) is_tls: bool,
    pub(crate) request_timer: ReusableTimer,
    /// The peer's address and the listener's port, as sent to upstreams.
    pub(crate) peer_text: HeaderValue,
    pub(crate) port_text: HeaderValue,
    /// Set once both sides have agreed to switch protocols.
    tunnel: Mutex<Option<Tunnel>>,
}

impl<S> ClientConnection<S> {
    pub(crate) fn is_draining(&self) -> bool {
        self.worker.shared.drain.has_begun()
    }

    /// Makes the connection a tunnel after this response is sent.
    pub(crate) fn start_tunnel(&self, response: &mut Response<ClientBody>, record: Box<AccessRecord>) {
        let tunnel = Tunnel::new(response, record);
        *self.tunnel.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
    }

    fn take_tunnel(&self) -> Option<Tunnel> {
        self.tunnel.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Serves a connection until it ends.
pub(crate) async fn serve<S: Backend>(
    worker: Arc<Worker<S>>,
    stream: TcpStream,
    peer: SocketAddr,
    listener: Arc<GatewayListener>,
    activity: Arc<ConnectionActivity>,
) {
    let mut stream = ClientSocket::new(stream);
    let watch = stream.watch();
    let shared = &worker.shared;
    let setup = ConnectionSetup::new(activity, shared.state.load().timeouts.header);
    let drain = &shared.drain;
    let mut peer = peer.ip();
    if listener.proxy_protocol {
        match setup.step(drain, proxy_protocol::read(&mut stream)).await {
            Some(Ok(Some(source))) => peer = source,
            Some(Ok(None)) => {}
            _ => return,
        }
    }
    // Trusted proxies connect on behalf of many clients.
    let state = shared.state.load();
    let is_proxy = state.trusted_proxies.trusts(peer);
    let max = if is_proxy { usize::MAX } else { state.max_connections_per_client };
    drop(state);
    let Some(_client) = shared.clients.acquire(canonical(peer), max) else {
        shared.rejected_connections.count(ConnectionRejection::MaxConnectionsPerClient);
        return;
    };
    let connection = |is_tls| {
        Arc::new(ClientConnection {
            activity: setup.activity.clone(),
            peer: canonical(peer),
            peer_text: address_value(canonical(peer)),
            port_text: HeaderValue::from(listener.port),
            request_timer: ReusableTimer::default(),
            is_tls,
            tunnel: Mutex::default(),
            worker: worker.clone(),
        })
    };
    match &listener.tls {
        None => {
            let Some(Ok(read_ahead)) = setup.step(drain, first_bytes(&mut stream)).await else { return };
            match is_http2(&read_ahead) {
                _ if read_ahead.is_empty() => {}
                true => http2(stream, read_ahead, &setup, connection(false)).await,
                false => http1(stream, read_ahead, &setup, watch, connection(false)).await,
            }
        }
        Some(acceptor) => {
            let Some(Ok(mut stream)) = setup.step(drain, acceptor.accept(stream)).await else { return };
            let Some(Ok(read_ahead)) = setup.step(drain, first_bytes(&mut stream)).await else { return };
            match stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                _ if read_ahead.is_empty() => {}
                true => http2(stream, read_ahead, &setup, connection(true)).await,
                false => http1(stream, read_ahead, &setup, watch, connection(true)).await,
            }
        }
    }
}

async fn http1<S: Backend, I>(
    stream: I,
    read_ahead: Bytes,
    setup: &ConnectionSetup,
    mut watch: DisconnectWatch,
    connection: Arc<ClientConnection<S>>,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let activity = &connection.activity;
    let scanned = Arc::<ScannedRequests>::default();
    let observer = ActivityObserver::http1(read_ahead, activity.clone());
    let stream = ObservedStream { stream, observer };
    let stream = ObservedStream { stream, observer: RequestScanner::new(scanned.clone()) };
    let mut builder = http1::Builder::new();
    builder
        .max_header_size(HEAD_BYTES_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .header_read_timeout(None)
        .writev(false);
    let serving = connection.clone();
    let service = move |request| handle(&serving, request, scanned.check_next());
    let mut http = builder.serve_connection(TokioIo::new(stream), service_fn(service));
    let mut draining = connection.worker.shared.drain.wait_begun();
    let mut is_draining = false;
    let mut timer = pin!(sleep_until(setup.deadline));
    loop {
        tokio::select! {
            biased;
            // Only parse errors are recorded: no access record exists for them yet.
            result = poll_fn(|context| http.poll_without_shutdown(context)) => {
                if let Err(error) = result
                    && error.is_parse()
                {
                    record_malformed(&connection, &error);
                }
                break;
            }
            () = &mut timer => {
                if is_draining && activity.is_idle() {
                    activity.begin_close();
                    Pin::new(&mut http).graceful_shutdown();
                }
                match activity.expiry(&connection.worker.shared.state.load().timeouts) {
                    Expiry::Expired => return,
                    Expiry::In(left) => {
                        let left = if is_draining { left.min(DRAIN_GRACE) } else { left };
                        timer.as_mut().reset(Instant::now() + left);
                    }
                }
            }
            () = &mut draining, if !is_draining => {
                is_draining = true;
                timer.as_mut().reset(Instant::now() + DRAIN_GRACE);
            }
            () = poll_fn(|context| watch.poll(context, activity)) => return,
            _ = poll_fn(|context| activity.poll_close(context)) => return,
        }
    }
    let http1::Parts { io, read_buf, .. } = http.into_parts();
    let stream = io.into_inner().stream.stream;
    match connection.take_tunnel() {
        Some(tunnel) => tunnel.run(stream, read_buf, &connection.worker.shared).await,
        None => {
            activity.begin_close();
            tokio::select! {
                () = linger(stream) => {}
                _ = poll_fn(|context| activity.poll_close(context)) => {}
            }
        }
    }
}

/// Records a request with a malformed or oversized head: hyper answered it, and the service never saw it.
fn record_malformed<S: Backend>(connection: &ClientConnection<S>, error: &hyper::Error) {
    let ClientConnection { worker, peer, activity, .. } = connection;
    let status = match error.is_parse_too_large() {
        true => ResponseStatus::HeaderFieldsTooLarge,
        false => ResponseStatus::BadRequest,
    };
    let is_logged = worker.shared.state.load().has_access_log;
    AccessRecord::new(&worker.recorder, *peer, activity.begin_request()).reject_malformed(status, is_logged);
}

async fn http2<S: Backend, I>(
    stream: I,
    read_ahead: Bytes,
    setup: &ConnectionSetup,
    connection: Arc<ClientConnection<S>>,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let activity = &connection.activity;
    let shared = &connection.worker.shared;
    let timeouts = shared.state.load().timeouts;
    let observer = ActivityObserver::http2(read_ahead, activity.clone());
    let stream = ObservedStream { stream, observer };
    let stream = ObservedStream { stream, observer: FrameMeter::new(activity.clone()) };
    let min_rate = MinRate(timeouts.min_rate);
    let mut builder =
        http2::Builder::new(StreamExecutor::new(shared.ticker.clone(), timeouts.idle, min_rate));
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .max_pending_accept_reset_streams(RESETS_PENDING_MAX)
        .max_send_buf_size(SEND_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        // A client can disappear without closing the connection.
        .keep_alive_interval(timeouts.idle)
        .keep_alive_timeout(timeouts.header);
    let serving = connection.clone();
    let service = service_fn(move |request| handle(&serving, request, Ok(())));
    let mut http = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut draining = shared.drain.wait_begun();
    let mut is_closing = false;
    let mut timer = pin!(sleep_until(setup.deadline));
    loop {
        tokio::select! {
            biased;
            _ = &mut http => return,
            () = &mut timer => match activity.expiry(&shared.state.load().timeouts) {
                // Requests in flight had the grace period; nothing more is read.
                _ if activity.is_flood() => return,
                Expiry::Expired if is_closing => return,
                // A client that does not take part in the shutdown cannot delay it.
                Expiry::In(_) if is_closing && activity.is_reaped() && activity.waiting().is_some() => return,
                Expiry::Expired => {
                    is_closing = true;
                    activity.begin_close();
                    http.as_mut().graceful_shutdown();
                    timer.as_mut().reset(Instant::now() + DRAIN_GRACE);
                }
                Expiry::In(left) => timer.as_mut().reset(Instant::now() + left),
            },
            close = poll_fn(|context| activity.poll_close(context)) => {
                if close == Close::Immediate {
                    return;
                }
                is_closing = true;
                activity.begin_close();
                http.as_mut().graceful_shutdown();
                timer.as_mut().reset(Instant::now() + DRAIN_GRACE);
            }
            // GOAWAY names the last request that is served.
            () = &mut draining, if !is_closing => {
                is_closing = true;
                activity.begin_close();
                http.as_mut().graceful_shutdown();
            }
        }
    }
}
