//! `/v1/authorize`: a proxy asks about each request that it gets before it lets it pass.
//!
//! | proxy | passes on to its client | so |
//! |---|---|---|
//! | nginx, `auth_request` | nothing but 401 and 403; all else becomes 500 | the usual `deny_status` of 403, and `X-RateLimit-Denied` says what it is about |
//! | Traefik, `forwardAuth` | the whole denial | `?deny_status=429` |
//! | Caddy, `forward_auth` | the whole denial | `?deny_status=429` |
//!
//! For nginx:
//!
//! ```nginx
//! location / {
//!     auth_request     /_limit;
//!     auth_request_set $ratelimit        $upstream_http_ratelimit;
//!     auth_request_set $ratelimit_policy $upstream_http_ratelimit_policy;
//!     auth_request_set $retry_after      $upstream_http_retry_after;
//!     auth_request_set $denied           $upstream_http_x_ratelimit_denied;
//!     error_page 403 = @denied;
//!     add_header RateLimit        $ratelimit        always;
//!     add_header RateLimit-Policy $ratelimit_policy always;
//!     proxy_pass http://application;
//! }
//! location = /_limit {
//!     internal;
//!     proxy_pass http://127.0.0.1:9181/v1/authorize;
//!     proxy_pass_request_body off;
//!     proxy_set_header Content-Length     "";
//!     proxy_set_header X-Original-Method  $request_method;
//!     proxy_set_header X-Original-URI     $request_uri;
//!     proxy_set_header X-Original-Host    $http_host;
//!     proxy_set_header X-Original-URL     "";
//!     proxy_set_header X-Forwarded-Method "";
//!     proxy_set_header X-Forwarded-Uri    "";
//!     proxy_set_header X-Forwarded-For    $proxy_add_x_forwarded_for;
//! }
//! location @denied {
//!     if ($denied = "") { return 403; }
//!     add_header Retry-After      $retry_after      always;
//!     add_header RateLimit        $ratelimit        always;
//!     add_header RateLimit-Policy $ratelimit_policy always;
//!     return 429;
//! }
//! ```
//!
//! Who may ask is said by address and not by a token: a client's own `Authorization` has to come through. Limits on
//! requests under way do not count here, for a subrequest ends before the request begins.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, HeaderName, HeaderValue};
use axum::http::{Response, StatusCode};
use http_body_util::Empty;
use tollgate::tower::{About, Chosen, ChosenSlots, Peer};
use tower_service::Service;

use super::asked::DenyStatus;
use super::counts::{Endpoint, Said};
use super::refusal::Refusal;
use super::{Source, original};

/// What a proxy may want to get for a denied request. With 429 the denial comes as it is, whatever its own status; the
/// others stand for any denial.
const DENY_STATUSES: [u16; 3] = [401, 403, 429];

/// The status that is meant, where another stands for it: tells a denial of ours from an application's own 403.
const DENIED: HeaderName = HeaderName::from_static("x-ratelimit-denied");

/// Answers a proxy.
pub(super) async fn authorize<T: Source>(State(door): State<Arc<T>>, request: Request) -> Response<Body> {
    let response = decide(&*door, request).await.unwrap_or_else(Refusal::into_response);
    door.counts().count(Endpoint::Authorize, &response);
    response
}

async fn decide<T: Source>(door: &T, request: Request) -> Result<Response<Body>, Refusal> {
    let snapshot = door.snapshot();
    let settings = &*snapshot.settings;
    let peer = request.extensions().get::<Peer>().copied();
    let Some(Peer(peer)) = peer.filter(|peer| settings.trusted.trusts(peer.0)) else {
        let why = "only proxies ask here, and this address is none of them; add it to the file: \
                   `client: { trusted: [...] }`";
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    };
    let in_query = DenyStatus::in_query(request.uri().query(), &DENY_STATUSES)?;
    let deny_status = in_query.or_else(|| DenyStatus::of(settings.deny_status, &DENY_STATUSES));
    let deny_status = deny_status.unwrap_or(DenyStatus(StatusCode::FORBIDDEN));
    let (parts, _) = request.into_parts();
    let lines = parts.headers.get_all(settings.trusted.source().header_name());
    let client = settings.trusted.client(peer, lines.iter().map(HeaderValue::as_bytes));
    let original = original::request(parts, &settings.trusted)?;
    let Some(layer) = &snapshot.layer else { return Ok(allowed(Response::new(Body::empty()))) };

    let all = || Chosen((0..settings.limits).collect());
    let chosen = settings.authorize_limits.clone().unwrap_or_else(all);
    let slots = ChosenSlots([].into());
    let about =
        About { client: Some(client), chosen: Some(&chosen), slots: Some(&slots), ..About::default() };
    let Ok(response) = layer.call_about(Passing, original, about).await;
    let response = response.map(Body::new);
    Ok(match response.extensions().get::<Passed>() {
        Some(Passed) => allowed(response),
        None => denied(response, deny_status),
    })
}

fn allowed(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response.extensions_mut().insert(Said::Yes);
    response
}

fn denied(mut response: Response<Body>, deny_status: DenyStatus) -> Response<Body> {
    let own = own_status(&response);
    let status = if deny_status.0 == StatusCode::TOO_MANY_REQUESTS { own } else { deny_status.0 };
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(DENIED, HeaderValue::from(own.as_u16()));
    response.extensions_mut().insert(Said::No);
    response
}

/// What a denial is. That of a gRPC call says 200 and the rest in a trailer, and a proxy would take it for a yes.
fn own_status(response: &Response<Body>) -> StatusCode {
    match response.headers().get("grpc-status").map(HeaderValue::as_bytes) {
        Some(b"3") => StatusCode::BAD_REQUEST,
        Some(b"7") => StatusCode::FORBIDDEN,
        Some(b"13") => StatusCode::INTERNAL_SERVER_ERROR,
        Some(b"14") => StatusCode::SERVICE_UNAVAILABLE,
        Some(_) => StatusCode::TOO_MANY_REQUESTS,
        // Whatever somebody has configured for a denial, it is none if it says yes.
        None if response.status().is_success() => StatusCode::TOO_MANY_REQUESTS,
        None => response.status(),
    }
}

/// Stands for the application: what comes here may pass.
#[derive(Clone, Copy, Debug)]
struct Passing;

/// Marks a response that came from there.
#[derive(Clone, Copy, Debug)]
struct Passed;

impl Service<http::Request<()>> for Passing {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<()>) -> Self::Future {
        let mut response = Response::new(Empty::new());
        response.extensions_mut().insert(Passed);
        ready(Ok(response))
    }
}
