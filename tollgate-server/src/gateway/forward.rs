//! A request goes to its upstream: the service behind the limits.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::{CONNECTION, HOST, HeaderValue, TE, UPGRADE};
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Response, StatusCode, Version};
use hyper::body::Body;
use smallvec::SmallVec;
use tokio::time::timeout;
use tollgate_config::{PathEdit, Protocol};
use tollgate_rules::path::normalise;
use tower_service::Service;

use super::answer::{problem, try_again};
use super::body::{Home, RequestBody, UpstreamBody, is_too_slow};
use super::heads::remove_hop_by_hop;
use super::pool::{Failed, NoConnection, Pool};
use super::request::{Refused, with_path};
use super::state::Route;
use super::ticks::Ticker;
use super::upstream::Address;

/// At most so many attempts, the first included.
const ATTEMPTS_MAX: usize = 3;

/// A path without its first segments.
fn stripped<'p>(path: &'p str, prefix: &str, ignore_case: bool) -> Option<Cow<'p, str>> {
    let (front, rest) = path.split_at_checked(prefix.len())?;
    let is_same = if ignore_case { front.eq_ignore_ascii_case(prefix) } else { front == prefix };
    match rest.is_empty() {
        _ if !is_same => None,
        true => Some(Cow::Borrowed("/")),
        // `/api` is not the beginning of `/apis`.
        false => rest.starts_with('/').then_some(Cow::Borrowed(rest)),
    }
}

fn unreachable(why: &NoConnection) -> Response<UpstreamBody> {
    match why {
        NoConnection::Full => {
            try_again(StatusCode::SERVICE_UNAVAILABLE, "all connections to the upstream are in use")
        }
        NoConnection::TimedOut => {
            problem(StatusCode::GATEWAY_TIMEOUT, "the upstream could not be reached in time")
        }
        NoConnection::Refused(_) => problem(StatusCode::BAD_GATEWAY, "the upstream could not be reached"),
    }
}

/// Sends a request of one route on.
#[derive(Clone, Debug)]
pub(crate) struct Forward {
    pub(crate) route: Arc<Route>,
    pub(crate) worker: usize,
    pub(crate) ticker: Arc<Ticker>,
    /// What the client wants to speak from now on.
    pub(crate) upgrade: Option<HeaderValue>,
    pub(crate) takes_trailers: bool,
}

impl Service<Request<RequestBody>> for Forward {
    type Response = Response<UpstreamBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<UpstreamBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody>) -> Self::Future {
        let forward = self.clone();
        Box::pin(async move {
            let answered = timeout(forward.route.timeout, forward.send(request)).await;
            Ok(answered
                .unwrap_or_else(|_| problem(StatusCode::GATEWAY_TIMEOUT, "the upstream took too long")))
        })
    }
}

impl Forward {
    async fn send(&self, mut request: Request<RequestBody>) -> Response<UpstreamBody> {
        let upstream = &self.route.upstream;
        if let Err(refused) = self.edit(&mut request) {
            return *refused;
        }
        upstream.earn_retry();
        let mut tried = SmallVec::<[usize; ATTEMPTS_MAX]>::new();
        loop {
            let now = self.ticker.now();
            let Some((number, address)) = upstream.choose(&tried, now) else {
                return problem(StatusCode::BAD_GATEWAY, "there is no upstream");
            };
            let (mut connection, is_used) = match Pool::connection(address, self.worker, now).await {
                Ok(connection) => connection,
                Err(why) => {
                    if !matches!(why, NoConnection::Full) {
                        self.failed(address, &why);
                    }
                    tried.push(number);
                    // Nothing was sent, so every request may go elsewhere, and no server has more to do for that; there
                    // is no use in trying here again.
                    if tried.len() < upstream.addresses().len().min(ATTEMPTS_MAX) {
                        continue;
                    }
                    return unreachable(&why);
                }
            };
            let copy = self.copy(&request);
            self.address(&mut request, address);
            let under_way = address.enter();
            let Failed { error, unsent } = match connection.send(request).await {
                Ok(response) => {
                    let is_failure = matches!(response.status().as_u16(), 502..=504);
                    if address.tell(!is_failure, upstream.config.eject.as_ref(), now) {
                        tracing::warn!(upstream = %address.authority, "gets no requests for a while: it fails");
                    }
                    let home =
                        Home { address: address.clone(), worker: self.worker, ticker: self.ticker.clone() };
                    return self.answered(
                        response.map(|body| UpstreamBody::streamed(body, connection, home, under_way)),
                    );
                }
                Err(failed) => failed,
            };
            match unsent {
                // The server had closed a connection that we had kept: it has seen nothing of the request, and has not
                // failed. The next may be closed, too, but that is one fewer.
                Some(unsent) if is_used => request = unsent,
                _ if is_too_slow(&error) => {
                    return problem(StatusCode::REQUEST_TIMEOUT, "the request's body did not come");
                }
                unsent => {
                    if !is_used {
                        self.failed(address, &error);
                    }
                    tried.push(number);
                    match unsent.or(copy) {
                        Some(again) if self.may_try_again(&tried) => request = again,
                        _ => return problem(StatusCode::BAD_GATEWAY, "the upstream broke off"),
                    }
                }
            }
        }
    }

    /// What the route does to requests.
    fn edit(&self, request: &mut Request<RequestBody>) -> Result<(), Refused> {
        self.route.request_edits.apply(request.headers_mut());
        let path = request.uri().path();
        let edited = match &self.route.path {
            PathEdit::Keep => return Ok(()),
            PathEdit::Strip(prefix) => stripped(path, prefix, self.route.spelling.ignore_case),
            PathEdit::Rewrite(template) => {
                // Patterns are for the spelling that the route was found by.
                let normal = normalise(path, self.route.spelling).ok();
                let pattern = self.route.when.paths.first();
                normal
                    .zip(pattern)
                    .and_then(|(path, pattern)| template.expand(pattern, &path))
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
        tracing::debug!(upstream = %address.authority, %why, "an attempt failed");
        let eject = self.route.upstream.config.eject.as_ref();
        if address.tell(false, eject, self.ticker.now()) {
            tracing::warn!(upstream = %address.authority, %why, "gets no requests for a while: it fails");
        }
    }

    /// The same request once more, if a server may get it twice.
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

    /// Makes the request one for this server.
    fn address(&self, request: &mut Request<RequestBody>, address: &Address) {
        let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let prefix = &address.config.path;
        let path = match prefix.is_empty() {
            true => path,
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
        // There the host is part of the target.
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

    /// What an upstream has answered, as the client gets it.
    fn answered(&self, mut response: Response<UpstreamBody>) -> Response<UpstreamBody> {
        let is_switch = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if is_switch && self.upgrade.is_none() {
            return problem(
                StatusCode::BAD_GATEWAY,
                "the upstream changed the protocol, which nobody had asked for",
            );
        }
        let spoken = response.headers().get(UPGRADE).cloned();
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
