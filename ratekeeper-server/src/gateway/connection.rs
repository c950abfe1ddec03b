//! Serves one client connection, from its first byte to its last.

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use ratekeeper_rules::client::canonical;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use super::accept::Listening;
use super::access::Passage;
use super::body::Outgoing;
use super::deadline::Alarm;
use super::hop_headers::address_value;
use super::opening::{LAST_CALL, Opening, first_bytes, speaks_http2};
use super::proxy_protocol;
use super::request::{Serving, serve};
use super::stream_stall::Streams;
use super::tunnel::Switched;
use super::watch::{Patience, Watch, Watched};
use super::worker::Worker;
use crate::backend::Backend;

/// Largest request head; hyper separately limits its headers to 100.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Concurrent streams per HTTP/2 connection.
const STREAMS_MAX: u32 = 128;
/// Streams that a client may open and reset before the gateway has accepted them.
const RESETS_PENDING_MAX: usize = 20;
/// Bytes read and discarded after the last response, so that the client can still read that response.
const LINGER_BYTES_MAX: usize = 1 << 20;
const LINGER: Duration = Duration::from_secs(2);

/// State shared by all requests of a connection.
#[derive(Debug)]
pub(crate) struct Connection<S> {
    pub(crate) worker: Arc<Worker<S>>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) peer: IpAddr,
    pub(crate) is_tls: bool,
    pub(crate) alarm: Alarm,
    /// The peer's address and the listener's port, as sent to upstreams.
    pub(crate) peer_text: HeaderValue,
    pub(crate) port_text: HeaderValue,
    /// Set once both sides have agreed to switch protocols.
    switched: Mutex<Option<Switched>>,
}

impl<S> Connection<S> {
    pub(crate) fn is_draining(&self) -> bool {
        self.worker.shared.draining.has_begun()
    }

    /// Makes the connection a tunnel after this response is sent.
    pub(crate) fn switch(&self, response: &mut Response<Outgoing>, passage: Passage) {
        let switched = Switched::new(response, passage);
        *self.switched.lock().unwrap_or_else(PoisonError::into_inner) = Some(switched);
    }

    fn take_switched(&self) -> Option<Switched> {
        self.switched.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Serves a connection until it ends.
pub(crate) async fn run<S: Backend>(
    worker: Arc<Worker<S>>,
    mut stream: TcpStream,
    from: SocketAddr,
    listening: Arc<Listening>,
) {
    let shared = &worker.shared;
    let opening = Opening::new(&shared.ticker, shared.state.load().timeouts.header);
    let draining = &shared.draining;
    let mut peer = from.ip();
    if listening.proxy_protocol {
        match opening.step(draining, proxy_protocol::read(&mut stream)).await {
            Some(Ok(Some(source))) => peer = source,
            Some(Ok(None)) => {}
            _ => return,
        }
    }
    let connection = |is_tls| {
        Arc::new(Connection {
            watch: opening.watch(shared.ticker.clone()),
            peer: canonical(peer),
            peer_text: address_value(canonical(peer)),
            port_text: HeaderValue::from(listening.port),
            alarm: Alarm::default(),
            is_tls,
            switched: Mutex::default(),
            worker: worker.clone(),
        })
    };
    match &listening.tls {
        None => {
            let Some(Ok(first)) = opening.step(draining, first_bytes(&mut stream)).await else { return };
            match speaks_http2(&first) {
                _ if first.is_empty() => {}
                true => http2(stream, first, &opening, connection(false)).await,
                false => http1(stream, first, &opening, connection(false)).await,
            }
        }
        Some(acceptor) => {
            let Some(Ok(mut stream)) = opening.step(draining, acceptor.accept(stream)).await else { return };
            let Some(Ok(first)) = opening.step(draining, first_bytes(&mut stream)).await else { return };
            match stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                _ if first.is_empty() => {}
                true => http2(stream, first, &opening, connection(true)).await,
                false => http1(stream, first, &opening, connection(true)).await,
            }
        }
    }
}

fn service<S: Backend>(connection: &Arc<Connection<S>>) -> impl Fn(Request<Incoming>) -> Serving<S> + use<S> {
    let connection = connection.clone();
    move |request| serve(&connection, request)
}

async fn http1<S: Backend, I>(io: I, first: Bytes, opening: &Opening, connection: Arc<Connection<S>>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let watch = &connection.watch;
    let io = Watched::new(TokioIo::new(io), first, watch.clone());
    let mut builder = http1::Builder::new();
    builder.max_header_size(HEAD_BYTES_MAX).header_read_timeout(None).writev(false);
    let mut conversation = builder.serve_connection(io, service_fn(service(&connection)));
    let mut draining = connection.worker.shared.draining.wait();
    let mut is_last_call = false;
    let mut alarm = pin!(sleep_until(opening.deadline));
    loop {
        tokio::select! {
            biased;
            // Only parse errors are recorded: no access record exists for them yet.
            ended = poll_fn(|context| conversation.poll_without_shutdown(context)) => {
                if let Err(error) = ended
                    && error.is_parse()
                {
                    unread(&connection, &error);
                }
                break;
            }
            () = &mut alarm => {
                if is_last_call && watch.is_idle() {
                    Pin::new(&mut conversation).graceful_shutdown();
                }
                match watch.patience(&connection.worker.shared.state.load().timeouts) {
                    Patience::Over => return,
                    Patience::For(more) => {
                        let more = if is_last_call { more.min(LAST_CALL) } else { more };
                        alarm.as_mut().reset(Instant::now() + more);
                    }
                }
            }
            () = &mut draining, if !is_last_call => {
                is_last_call = true;
                alarm.as_mut().reset(Instant::now() + LAST_CALL);
            }
        }
    }
    let http1::Parts { io, read_buf, .. } = conversation.into_parts();
    let io = io.io.into_inner();
    match connection.take_switched() {
        Some(switched) => switched.run(io, read_buf, &connection.worker.shared).await,
        None => linger(io).await,
    }
}

/// Records a request with a malformed or oversized head: hyper answered it, and the service never saw it.
fn unread<S: Backend>(connection: &Connection<S>, error: &hyper::Error) {
    let Connection { worker, peer, watch, .. } = connection;
    let status = match error.is_parse_too_large() {
        true => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        false => StatusCode::BAD_REQUEST,
    };
    let is_logged = worker.shared.state.load().has_access_log;
    Passage::new(&worker.desk, *peer, watch.begin()).unread(status, is_logged);
}

/// Shuts down the write side and reads on for a while: closing a connection with unread data resets it, and the
/// client may lose the response.
async fn linger<I: AsyncRead + AsyncWrite + Unpin>(mut io: I) {
    let reading = async {
        io.shutdown().await.ok()?;
        let (mut bytes, mut left) = ([0; 4096], LINGER_BYTES_MAX);
        while left > 0 {
            let read = io.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
            left = left.saturating_sub(read);
        }
        Some(())
    };
    let _ = timeout(LINGER, reading).await;
}

async fn http2<S: Backend, I>(io: I, first: Bytes, opening: &Opening, connection: Arc<Connection<S>>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let watch = &connection.watch;
    let shared = &connection.worker.shared;
    let timeouts = shared.state.load().timeouts;
    let io = Watched::in_frames(TokioIo::new(io), first, watch.clone());
    let mut builder = http2::Builder::new(Streams::new(shared.ticker.clone(), timeouts.idle));
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .max_pending_accept_reset_streams(RESETS_PENDING_MAX)
        .max_send_buf_size(HEAD_BYTES_MAX)
        // A client can disappear without closing the connection.
        .keep_alive_interval(timeouts.idle)
        .keep_alive_timeout(timeouts.header);
    let mut conversation = pin!(builder.serve_connection(io, service_fn(service(&connection))));
    let mut draining = shared.draining.wait();
    let mut is_ending = false;
    let mut alarm = pin!(sleep_until(opening.deadline));
    loop {
        tokio::select! {
            biased;
            _ = &mut conversation => return,
            () = &mut alarm => match watch.patience(&shared.state.load().timeouts) {
                Patience::Over if is_ending => return,
                Patience::Over => {
                    is_ending = true;
                    conversation.as_mut().graceful_shutdown();
                    alarm.as_mut().reset(Instant::now() + LAST_CALL);
                }
                Patience::For(more) => alarm.as_mut().reset(Instant::now() + more),
            },
            // GOAWAY names the last request that is served.
            () = &mut draining, if !is_ending => {
                is_ending = true;
                conversation.as_mut().graceful_shutdown();
            }
        }
    }
}
