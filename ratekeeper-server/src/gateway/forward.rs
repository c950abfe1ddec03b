//! Forwards a request to its upstream: the service behind the limits.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http::header::{CONNECTION, HOST, HeaderMap, HeaderValue, TE, TRANSFER_ENCODING, UPGRADE};
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Response, StatusCode, Version};
use hyper::body::{Body, Incoming};
use ratekeeper_config::{PathEdit, Protocol};
use ratekeeper_rules::path::{RequestPath, segment_range};
use ratekeeper_rules::response::ResponseStatus;
use smallvec::SmallVec;
use tower_service::Service;

use super::access::{RequestId, X_REQUEST_ID};
use super::body::{RequestBody, RequestBodyError, UpstreamBody, request_body_error};
use super::connection::ClientConnection;
use super::framing::check_framing;
use super::hop_headers::{Origin, accepts_trailers, remove_hop_by_hop, set_forwarded};
use super::request::{ErrorResponse, with_path};
use super::response::{problem, retry_later};
use super::screen::{list_members, offered_upgrade};
use super::state::Route;
use super::timer::Ticks;
use super::upstream::Address;
use super::upstream::pool::{ConnectError, Pool, SendError, UpstreamConnection};
use crate::runtime::backend::Backend;

/// Maximum attempts per request, including the first.
const ATTEMPTS_MAX: usize = 3;

/// Not the index of any address: no response is awaited yet.
const NO_ADDRESS: usize = usize::MAX;

/// The edit of a request's path, read from the path that selected the route.
#[derive(Debug)]
pub(crate) enum TargetEdit {
    Keep,
    /// Removes this many bytes from the front of the forwarded path.
    Strip(usize),
    Replace(String),
}

impl TargetEdit {
    pub(crate) fn new(route: &Route, path: &RequestPath<'_>) -> TargetEdit {
        let edit = match &route.path {
            PathEdit::Keep => None,
            PathEdit::Strip(prefix) => prefix_bytes(path, prefix).map(TargetEdit::Strip),
            PathEdit::Rewrite(template) => {
                let pattern = route.when.paths.first();
                let path = pattern.and_then(|it| template.expand_as(it, &path.matched, &path.forwarded));
                path.map(TargetEdit::Replace)
            }
        };
        edit.unwrap_or(TargetEdit::Keep)
    }
}

/// The bytes of the forwarded path that the segments of `prefix` take, if the matched path, which has the same segments,
/// begins with them.
fn prefix_bytes(path: &RequestPath<'_>, prefix: &str) -> Option<usize> {
    let rest = path.matched.strip_prefix(prefix)?;
    // `/api` is not a leading segment of `/apis`.
    if !rest.is_empty() && !rest.starts_with('/') {
        return None;
    }
    let segments = prefix.bytes().filter(|byte| *byte == b'/').count();
    Some(segment_range(&path.forwarded, 0, segments).end)
}

fn connect_error_response(error: &ConnectError) -> Response<UpstreamBody> {
    match error {
        ConnectError::LimitReached => {
            retry_later(ResponseStatus::ServiceUnavailable, "upstream connection limit reached")
        }
        ConnectError::OutOfDescriptors => {
            retry_later(ResponseStatus::ServiceUnavailable, "gateway out of connections")
        }
        ConnectError::TimedOut => problem(ResponseStatus::GatewayTimeout, "upstream connection timed out"),
        ConnectError::Failed(_) => problem(ResponseStatus::BadGateway, "upstream unreachable"),
    }
}

/// Whether the client offered the protocol that the upstream switched to.
fn is_offered(offered: Option<&HeaderValue>, chosen: Option<&HeaderValue>) -> bool {
    let (Some(offered), Some(chosen)) = (offered, chosen) else { return false };
    list_members(offered.as_bytes()).any(|name| name.eq_ignore_ascii_case(chosen.as_bytes().trim_ascii()))
}

/// Whether a request may be processed twice, and has no body to send twice.
fn is_idempotent(request: &Request<RequestBody>) -> bool {
    let is_idempotent = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE
    );
    is_idempotent && request.body().is_end_stream()
}

fn body_error_response(error: &RequestBodyError) -> Response<UpstreamBody> {
    match error {
        RequestBodyError::TimedOut => problem(ResponseStatus::RequestTimeout, "request body timed out"),
        RequestBodyError::Failed(_) => {
            problem(ResponseStatus::BadRequest, "request body incomplete or malformed")
        }
    }
}

/// The service that forwards one request.
#[derive(Debug)]
pub(crate) struct Forward<S>(Option<ForwardContext<S>>);

/// Context of a request to forward.
#[derive(Debug)]
pub(crate) struct ForwardContext<S> {
    pub(crate) route: Arc<Route>,
    /// The client's connection.
    pub(crate) connection: Arc<ClientConnection<S>>,
    pub(crate) client: IpAddr,
    pub(crate) id: RequestId,
    /// Whether the forwarding headers are already set.
    pub(crate) is_forwarded: bool,
    /// A gRPC stream has no read timeout: it may be silent for hours.
    pub(crate) is_grpc_stream: bool,
    pub(crate) path_edit: TargetEdit,
}

impl<S> Forward<S> {
    pub(crate) fn new(context: ForwardContext<S>) -> Forward<S> {
        Forward(Some(context))
    }
}

impl<S: Backend> Service<Request<RequestBody>> for Forward<S> {
    type Response = Response<UpstreamBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<UpstreamBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    /// May be called only once; later calls respond with status 500.
    fn call(&mut self, request: Request<RequestBody>) -> Self::Future {
        match self.0.take() {
            Some(context) => Box::pin(ForwardRequest::new(context, &request).run(Box::new(request))),
            None => {
                let response = problem(ResponseStatus::InternalServerError, "request already forwarded");
                Box::pin(std::future::ready(Ok(response)))
            }
        }
    }
}

impl<S> ForwardContext<S> {
    /// Sets the forwarding headers and the request id.
    pub(crate) fn set_forwarded(&self, headers: &mut HeaderMap) {
        let ClientConnection { peer, is_tls, ref peer_text, ref port_text, .. } = *self.connection;
        let (client, trusted_proxies) = (self.client, &self.route.trusted_proxies);
        set_forwarded(headers, Origin { peer, peer_text, client, port_text, is_tls, trusted_proxies });
        if let Some(id) = self.id.value() {
            headers.insert(X_REQUEST_ID, id);
        }
    }
}

/// A request that is forwarded now.
#[derive(Debug)]
struct ForwardRequest<S> {
    context: ForwardContext<S>,
    /// Protocols that the client offers to switch to.
    upgrade: Option<HeaderValue>,
    accepts_trailers: bool,
}

impl<S: Backend> ForwardRequest<S> {
    fn new(context: ForwardContext<S>, request: &Request<RequestBody>) -> ForwardRequest<S> {
        let (upgrade, accepts_trailers) = (offered_upgrade(request), accepts_trailers(request.headers()));
        ForwardRequest { context, upgrade, accepts_trailers }
    }

    /// Not an `async fn`, whose future would have room for its parameters twice. A future of at most 1 kB is allocated
    /// several times faster than a larger one, so the request is boxed on its own.
    fn run(
        self,
        mut request: Box<Request<RequestBody>>,
    ) -> impl Future<Output = Result<Response<UpstreamBody>, Infallible>> + Send {
        remove_hop_by_hop(request.headers_mut());
        if !self.context.is_forwarded {
            self.context.set_forwarded(request.headers_mut());
        }
        async move {
            let (upload, awaited) = (request.body().upload(), AtomicUsize::new(NO_ADDRESS));
            let ForwardContext { connection, route, .. } = &self.context;
            let sending = pin!(self.send(&mut request, &awaited));
            let response = connection.request_timer.timeout(route.timeout, upload.as_deref(), sending).await;
            if let Some(upload) = upload {
                upload.response_begins();
            }
            Ok(response.unwrap_or_else(|| {
                if let Some(address) = route.upstream.addresses().get(awaited.load(Ordering::Relaxed)) {
                    self.record_failure(address, &"response timeout");
                    address.pool(connection.worker.number).retire_if_silent(route.timeout);
                }
                problem(ResponseStatus::GatewayTimeout, "upstream timed out")
            }))
        }
    }

    fn now(&self) -> Ticks {
        self.context.connection.worker.shared.ticker.now()
    }

    /// Sends the request, with retries. During an attempt, `request` holds a copy for the next one, so that all
    /// attempts share the same memory.
    ///
    /// `awaited` receives the index of the address whose response is awaited.
    async fn send(
        &self,
        request: &mut Request<RequestBody>,
        awaited: &AtomicUsize,
    ) -> Response<UpstreamBody> {
        let upstream = &self.context.route.upstream;
        if let Err(response) = self.edit(request) {
            return *response;
        }
        upstream.credit_retry();
        let mut tried = SmallVec::<[usize; ATTEMPTS_MAX]>::new();
        let mut was_stale = false;
        loop {
            let (now, worker) = (self.now(), self.context.connection.worker.number);
            let Some((number, address)) = upstream.choose(&tried, now) else {
                return problem(ResponseStatus::BadGateway, "no upstream address");
            };
            let (mut connection, is_reused) = match Pool::connection(address, worker, now, was_stale).await {
                Ok(connection) => connection,
                Err(error) => {
                    if !matches!(error, ConnectError::LimitReached | ConnectError::OutOfDescriptors) {
                        self.record_failure(address, &error);
                    }
                    tried.push(number);
                    // Nothing was sent, so any request may go to another address, and no server gets extra load. The
                    // same address is not tried again.
                    if tried.len() < upstream.addresses().len().min(ATTEMPTS_MAX) {
                        continue;
                    }
                    return connect_error_response(&error);
                }
            };
            let is_idempotent = is_idempotent(request);
            let in_flight = upstream.count_in_flight(address);
            awaited.store(number, Ordering::Relaxed);
            let (sending, has_copy) = self.begin(request, is_idempotent, address, &mut connection);
            let failed = match sending.await {
                Ok(response) => {
                    // The connection is closed: the end of this response may not be where hyper has read it.
                    if let Err(error) = check_framing(response.headers()) {
                        self.record_failure(address, &error.text());
                        return problem(
                            ResponseStatus::BadGateway,
                            "upstream response with ambiguous framing",
                        );
                    }
                    request.body().end_replay();
                    match response.status().as_u16() {
                        502..=504 => self.record_failure(address, &response.status()),
                        _ => address.record_success(),
                    }
                    let pool = address.pool(worker).clone();
                    let read_timeout =
                        (!self.context.is_grpc_stream).then_some(upstream.config.timeouts.read);
                    let is_switch = response.status() == StatusCode::SWITCHING_PROTOCOLS;
                    return self.prepare_response(response.map(|body| match is_switch {
                        true => UpstreamBody::upgraded(in_flight),
                        false => UpstreamBody::streaming(body, read_timeout, connection, pool, in_flight),
                    }));
                }
                Err(failed) => failed,
            };
            // The client's fault does not count as a failure of the server.
            if let Some(cause) = request_body_error(&failed.error) {
                return body_error_response(cause);
            }
            if failed.is_unprocessed() {
                tried.push(number);
                // Nothing can happen twice, and no server gets extra load, so any request may be sent again.
                if has_copy && request.body().can_replay() && tried.len() < ATTEMPTS_MAX {
                    continue;
                }
                self.record_failure(address, &failed.error);
                return retry_later(ResponseStatus::ServiceUnavailable, "upstream refused the request");
            }
            // The server has closed a pooled connection, perhaps just as it received the request. Once, this is neither
            // a failure nor a use of the retry budget.
            if is_reused && has_copy && is_idempotent && !was_stale && failed.is_connection_lost() {
                was_stale = true;
                continue;
            }
            let SendError { error, unsent } = failed;
            match unsent {
                // The server had closed a pooled connection: it has received nothing of the request, and has not
                // failed. The next pooled connection may be closed, too, but each attempt leaves one fewer.
                Some(unsent) if is_reused => *request = *unsent,
                unsent => {
                    if !is_reused {
                        self.record_failure(address, &error);
                    }
                    tried.push(number);
                    let has_another = (has_copy && is_idempotent) || unsent.is_some();
                    if let Some(unsent) = unsent {
                        *request = *unsent;
                    }
                    if !has_another || !self.may_retry(&tried) {
                        return problem(
                            ResponseStatus::BadGateway,
                            "upstream closed the connection without a response",
                        );
                    }
                }
            }
        }
    }

    /// Begins an attempt, and returns whether a copy for the next one is left in `request`.
    fn begin<'c>(
        &self,
        request: &mut Request<RequestBody>,
        is_idempotent: bool,
        address: &Address,
        connection: &'c mut UpstreamConnection,
    ) -> (impl Future<Output = Result<Response<Incoming>, SendError>> + Send + use<'c, S>, bool) {
        let copy = self.retry_copy(request, is_idempotent, address.protocol);
        let has_copy = copy.is_some();
        self.set_target(request, address);
        let none = || Request::new(RequestBody::Empty);
        (connection.send(std::mem::replace(request, copy.unwrap_or_else(none))), has_copy)
    }

    /// Applies the route's header and path edits.
    fn edit(&self, request: &mut Request<RequestBody>) -> Result<(), ErrorResponse> {
        self.context.route.request_edits.apply(request.headers_mut());
        let edited = match &self.context.path_edit {
            TargetEdit::Keep => None,
            TargetEdit::Strip(bytes) => {
                let rest = request.uri().path().get(*bytes..);
                rest.map(|rest| if rest.is_empty() { "/" } else { rest })
            }
            TargetEdit::Replace(path) => Some(path.as_str()),
        };
        if let Some(edited) = edited {
            *request.uri_mut() = with_path(request.uri(), edited)?;
        }
        Ok(())
    }

    fn may_retry(&self, tried: &[usize]) -> bool {
        tried.len() < ATTEMPTS_MAX && self.context.route.upstream.take_retry()
    }

    fn record_failure(&self, address: &Address, error: &dyn fmt::Display) {
        address.record_failure(&self.context.route.upstream.config, error, self.now());
    }

    /// A copy for a retry, if there may be one: of an idempotent request, or for a server that may state that it has
    /// not processed the request, as HTTP/2 servers can.
    fn retry_copy(
        &self,
        request: &mut Request<RequestBody>,
        is_idempotent: bool,
        protocol: Protocol,
    ) -> Option<Request<RequestBody>> {
        if self.upgrade.is_some() || !(is_idempotent || protocol == Protocol::Http2) {
            return None;
        }
        let mut copy = Request::new(request.body_mut().replay());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        Some(copy)
    }

    /// Sets the version, target and host for this address.
    fn set_target(&self, request: &mut Request<RequestBody>, address: &Address) {
        let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let prefix = &address.config.path;
        let path = match prefix.is_empty() {
            true => path,
            // `*` means the server as a whole.
            false if path == "*" => path,
            false => PathAndQuery::try_from(format!("{prefix}{path}")).unwrap_or(path),
        };
        if address.protocol == Protocol::Http1 {
            *request.version_mut() = Version::HTTP_11;
            *request.uri_mut() = Uri::from(path);
            let has_unknown_length = request.body().size_hint().exact().is_none();
            let headers = request.headers_mut();
            // Without framing headers, hyper sends a GET or HEAD without its body.
            if has_unknown_length {
                headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
            if !headers.contains_key(HOST)
                && let Ok(host) = HeaderValue::from_str(address.authority.as_str())
            {
                headers.insert(HOST, host);
            }
            if let Some(upgrade) = &self.upgrade {
                headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
                headers.insert(UPGRADE, upgrade.clone());
            }
            return;
        }
        *request.version_mut() = Version::HTTP_2;
        // In HTTP/2, the host is part of the target.
        let host = request.headers_mut().remove(HOST);
        let authority =
            host.and_then(|host| host.as_bytes().try_into().ok()).unwrap_or(address.authority.clone());
        let mut parts = http::uri::Parts::default();
        (parts.scheme, parts.authority, parts.path_and_query) =
            (Some(address.scheme.clone()), Some(authority), Some(path));
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
        if self.accepts_trailers {
            request.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
        }
    }

    /// Prepares an upstream's response for the client.
    fn prepare_response(&self, mut response: Response<UpstreamBody>) -> Response<UpstreamBody> {
        let is_switch = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let chosen = response.headers().get(UPGRADE).cloned();
        if is_switch && !is_offered(self.upgrade.as_ref(), chosen.as_ref()) {
            return problem(
                ResponseStatus::BadGateway,
                "upstream switched to a protocol that the client did not offer",
            );
        }
        // An HTTP/1.0 upstream does not make the client's connection HTTP/1.0.
        *response.version_mut() = Version::HTTP_11;
        let headers = response.headers_mut();
        remove_hop_by_hop(headers);
        if is_switch {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            if let Some(chosen) = chosen {
                headers.insert(UPGRADE, chosen);
            }
        }
        self.context.route.response_edits.apply(headers);
        response
    }
}
