//! Forwards a request to its upstream: the service behind the limits.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http::header::{CONNECTION, HOST, HeaderMap, HeaderValue, TE, UPGRADE};
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Response, StatusCode, Version};
use hyper::body::Body;
use ratekeeper_config::{PathEdit, Protocol};
use ratekeeper_rules::path::normalise;
use smallvec::SmallVec;
use tower_service::Service;

use super::access::{Id, X_REQUEST_ID};
use super::answer::{problem, try_again};
use super::body::{BodyError, RequestBody, UpstreamBody, client_fault};
use super::connection::Connection;
use super::hop_headers::{Origin, remove_hop_by_hop, set_forwarded};
use super::pool::{Failed, NoConnection, Pool};
use super::request::{Refused, with_path};
use super::screen::listed;
use super::state::Route;
use super::timer::Ticks;
use super::upstream::Address;
use crate::backend::Backend;

/// Maximum attempts per request, including the first.
const ATTEMPTS_MAX: usize = 3;

/// Not the index of any address: no response is awaited yet.
const NOBODY: usize = usize::MAX;

/// The path without `prefix`, if it begins with these segments.
fn stripped<'p>(path: &'p str, prefix: &str, ignore_case: bool) -> Option<Cow<'p, str>> {
    let (front, rest) = path.split_at_checked(prefix.len())?;
    let is_same = if ignore_case { front.eq_ignore_ascii_case(prefix) } else { front == prefix };
    match rest.is_empty() {
        _ if !is_same => None,
        true => Some(Cow::Borrowed("/")),
        // `/api` is not a leading segment of `/apis`.
        false => rest.starts_with('/').then_some(Cow::Borrowed(rest)),
    }
}

fn unreachable(why: &NoConnection) -> Response<UpstreamBody> {
    match why {
        NoConnection::Full => {
            try_again(StatusCode::SERVICE_UNAVAILABLE, "all connections to the upstream are in use")
        }
        NoConnection::Exhausted => {
            try_again(StatusCode::SERVICE_UNAVAILABLE, "the gateway has too many connections")
        }
        NoConnection::TimedOut => {
            problem(StatusCode::GATEWAY_TIMEOUT, "the upstream could not be reached in time")
        }
        NoConnection::Refused(_) => problem(StatusCode::BAD_GATEWAY, "the upstream could not be reached"),
    }
}

/// Whether the client offered the protocol that the upstream switched to.
fn is_wanted(wanted: Option<&HeaderValue>, spoken: Option<&HeaderValue>) -> bool {
    let (Some(wanted), Some(spoken)) = (wanted, spoken) else { return false };
    listed(wanted.as_bytes()).any(|name| name.eq_ignore_ascii_case(spoken.as_bytes().trim_ascii()))
}

fn faulty(fault: &BodyError) -> Response<UpstreamBody> {
    match fault {
        BodyError::TooSlow => problem(StatusCode::REQUEST_TIMEOUT, "the request's body did not come"),
        BodyError::Broken(_) => problem(StatusCode::BAD_REQUEST, "the request's body broke off"),
    }
}

/// The service that forwards one request.
#[derive(Debug)]
pub(crate) struct Forward<S>(Option<Errand<S>>);

/// Context of a request to forward.
#[derive(Debug)]
pub(crate) struct Errand<S> {
    pub(crate) route: Arc<Route>,
    /// The client's connection.
    pub(crate) connection: Arc<Connection<S>>,
    pub(crate) client: IpAddr,
    pub(crate) id: Id,
    /// Protocols that the client offers to switch to.
    pub(crate) upgrade: Option<HeaderValue>,
    pub(crate) takes_trailers: bool,
    /// Whether the forwarding headers are already set.
    pub(crate) is_forwarded: bool,
    /// Whether no read timeout applies, as for gRPC streams.
    pub(crate) may_be_silent: bool,
}

impl<S> Forward<S> {
    pub(crate) fn new(errand: Errand<S>) -> Forward<S> {
        Forward(Some(errand))
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
        let errand = self.0.take();
        Box::pin(async move {
            Ok(match errand {
                Some(errand) => errand.run(request).await,
                None => problem(StatusCode::INTERNAL_SERVER_ERROR, "the request was sent already"),
            })
        })
    }
}

impl<S: Backend> Errand<S> {
    async fn run(self, mut request: Request<RequestBody>) -> Response<UpstreamBody> {
        remove_hop_by_hop(request.headers_mut());
        if !self.is_forwarded {
            self.set_forwarded(request.headers_mut());
        }
        let (upload, asked) = (request.body().upload(), AtomicUsize::new(NOBODY));
        let sending = pin!(self.send(&mut request, &asked));
        let answered = self.connection.alarm.within(self.route.timeout, upload.as_deref(), sending).await;
        answered.unwrap_or_else(|| {
            if let Some(address) = self.route.upstream.addresses().get(asked.load(Ordering::Relaxed)) {
                self.failed(address, &"it took too long");
                address.pool(self.connection.worker.number).doubt(self.route.timeout);
            }
            problem(StatusCode::GATEWAY_TIMEOUT, "the upstream took too long")
        })
    }

    /// Sets the forwarding headers and the request id.
    pub(crate) fn set_forwarded(&self, headers: &mut HeaderMap) {
        let Connection { peer, is_tls, ref peer_text, ref port_text, .. } = *self.connection;
        let (client, trust) = (self.client, &self.route.trust);
        set_forwarded(headers, Origin { peer, peer_text, client, port_text, is_tls, trust });
        if let Some(id) = self.id.value() {
            headers.insert(X_REQUEST_ID, id);
        }
    }

    fn now(&self) -> Ticks {
        self.connection.worker.shared.ticker.now()
    }

    /// Sends the request, with retries. During an attempt, `request` holds a copy for the next one, so that all
    /// attempts share the same memory.
    ///
    /// `asked` receives the index of the address whose response is awaited.
    async fn send(&self, request: &mut Request<RequestBody>, asked: &AtomicUsize) -> Response<UpstreamBody> {
        let upstream = &self.route.upstream;
        if let Err(refused) = self.edit(request) {
            return *refused;
        }
        upstream.earn_retry();
        let mut tried = SmallVec::<[usize; ATTEMPTS_MAX]>::new();
        loop {
            let (now, worker) = (self.now(), self.connection.worker.number);
            let Some((number, address)) = upstream.choose(&tried, now) else {
                return problem(StatusCode::BAD_GATEWAY, "there is no upstream");
            };
            let (mut connection, is_used) = match Pool::connection(address, worker, now).await {
                Ok(connection) => connection,
                Err(why) => {
                    if !matches!(why, NoConnection::Full | NoConnection::Exhausted) {
                        self.failed(address, &why);
                    }
                    tried.push(number);
                    // Nothing was sent, so any request may go to another address, and no server gets extra load. The
                    // same address is not tried again.
                    if tried.len() < upstream.addresses().len().min(ATTEMPTS_MAX) {
                        continue;
                    }
                    return unreachable(&why);
                }
            };
            let copy = self.copy(request);
            let has_copy = copy.is_some();
            let none = || Request::new(RequestBody::empty());
            let mut addressed = std::mem::replace(request, copy.unwrap_or_else(none));
            self.address(&mut addressed, address);
            let under_way = upstream.enter(address);
            asked.store(number, Ordering::Relaxed);
            let Failed { error, unsent } = match connection.send(addressed).await {
                Ok(response) => {
                    let is_failure = matches!(response.status().as_u16(), 502..=504);
                    if address.tell(!is_failure, upstream.config.outlier_ejection.as_ref(), now) {
                        tracing::warn!(upstream = %address.authority, "upstream ejected");
                    }
                    let home = address.pool(worker).clone();
                    let patience = (!self.may_be_silent).then_some(upstream.config.timeouts.read);
                    let is_switch = response.status() == StatusCode::SWITCHING_PROTOCOLS;
                    return self.answered(response.map(|body| match is_switch {
                        true => UpstreamBody::switched(under_way),
                        false => UpstreamBody::streamed(body, patience, connection, home, under_way),
                    }));
                }
                Err(failed) => failed,
            };
            // The client's fault does not count as a failure of the server.
            if let Some(fault) = client_fault(&error) {
                return faulty(fault);
            }
            match unsent {
                // The server had closed a kept connection: it has received nothing of the request, and has not
                // failed. The next kept connection may be closed, too, but each attempt leaves one fewer.
                Some(unsent) if is_used => *request = unsent,
                unsent => {
                    if !is_used {
                        self.failed(address, &error);
                    }
                    tried.push(number);
                    let has_another = has_copy || unsent.is_some();
                    if let Some(unsent) = unsent {
                        *request = unsent;
                    }
                    if !has_another || !self.may_try_again(&tried) {
                        return problem(StatusCode::BAD_GATEWAY, "the upstream broke off");
                    }
                }
            }
        }
    }

    /// Applies the route's header and path edits.
    fn edit(&self, request: &mut Request<RequestBody>) -> Result<(), Refused> {
        self.route.request_edits.apply(request.headers_mut());
        let path = request.uri().path();
        let edited = match &self.route.path {
            PathEdit::Keep => return Ok(()),
            PathEdit::Strip(prefix) => stripped(path, prefix, self.route.spelling.ignore_case),
            PathEdit::Rewrite(template) => {
                // Patterns match the normalised path that selected the route.
                let normal = normalise(path, self.route.spelling).ok();
                let pattern = self.route.when.paths.first();
                normal
                    .zip(pattern)
                    .and_then(|(normal, pattern)| template.expand_as(pattern, &normal, path))
                    .map(Cow::Owned)
            }
        };
        if let Some(edited) = edited {
            *request.uri_mut() = with_path(request.uri(), &edited)?;
        }
        Ok(())
    }

    fn may_try_again(&self, tried: &[usize]) -> bool {
        tried.len() < ATTEMPTS_MAX && self.route.upstream.pay_retry()
    }

    fn failed(&self, address: &Address, why: &dyn fmt::Display) {
        tracing::debug!(upstream = %address.authority, %why, "upstream attempt failed");
        let eject = self.route.upstream.config.outlier_ejection.as_ref();
        if address.tell(false, eject, self.now()) {
            tracing::warn!(upstream = %address.authority, %why, "upstream ejected");
        }
    }

    /// A copy for a retry, if the request is idempotent, has no body and is not an upgrade.
    fn copy(&self, request: &Request<RequestBody>) -> Option<Request<RequestBody>> {
        let is_idempotent = matches!(
            *request.method(),
            Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE
        );
        if !is_idempotent || !request.body().is_end_stream() || self.upgrade.is_some() {
            return None;
        }
        let mut copy = Request::new(RequestBody::empty());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        Some(copy)
    }

    /// Sets the version, target and host for this address.
    fn address(&self, request: &mut Request<RequestBody>, address: &Address) {
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
            let headers = request.headers_mut();
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
        if self.takes_trailers {
            request.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
        }
    }

    /// Prepares an upstream's response for the client.
    fn answered(&self, mut response: Response<UpstreamBody>) -> Response<UpstreamBody> {
        let is_switch = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let spoken = response.headers().get(UPGRADE).cloned();
        if is_switch && !is_wanted(self.upgrade.as_ref(), spoken.as_ref()) {
            return problem(
                StatusCode::BAD_GATEWAY,
                "the upstream changed the protocol, which nobody had asked for",
            );
        }
        let headers = response.headers_mut();
        remove_hop_by_hop(headers);
        if is_switch {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            if let Some(spoken) = spoken {
                headers.insert(UPGRADE, spoken);
            }
        }
        self.route.response_edits.apply(headers);
        response
    }
}
