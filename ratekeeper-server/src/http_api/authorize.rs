//! `/v1/authorize`: a proxy requests a decision about each request before it forwards it.
//!
//! | proxy | passes to its client | use |
//! |---|---|---|
//! | nginx, `auth_request` | only 401 and 403; the rest becomes 500 | 403; real status in `X-RateLimit-Denied` |
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
//! Callers are authorized by address and not by a token, because the client's `Authorization` has to pass through.
//! Concurrency limits do not apply here: a subrequest ends before the request begins.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, HeaderName, HeaderValue};
use axum::http::{Response, StatusCode};
use http_body_util::Empty;
use ratekeeper::Store;
use ratekeeper::tower::{ConcurrencySet, LimitedCall, Peer, RequestContext, RuleSet, status_code};
use ratekeeper_config::Authorize;
use ratekeeper_rules::response::ResponseStatus;
use tower_service::Service;

use super::error::HttpApiError;
use super::request_body::DenyStatus;
use super::response::EndpointResponse;
use super::{HttpApi, original_request};
use crate::runtime::metrics::{Endpoint, EndpointResult};
use crate::runtime::records::RecordStore;

/// The real status of a denial whose status was replaced: it distinguishes a denial from an application's 403.
const DENIED: HeaderName = HeaderName::from_static("x-ratelimit-denied");

/// Responds to a proxy.
pub(super) async fn authorize<S: Store + Send + Sync + 'static, R: RecordStore>(
    State(api): State<Arc<HttpApi<S, R>>>,
    request: Request,
) -> Response<Body> {
    let result = authorize_request(&*api, request).await;
    let EndpointResponse { response, outcome } = result.unwrap_or_else(HttpApiError::into_response);
    api.metrics.count(Endpoint::Authorize, outcome);
    response
}

async fn authorize_request<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: &HttpApi<S, R>,
    request: Request,
) -> Result<EndpointResponse, HttpApiError> {
    let snapshot = api.snapshot();
    let settings = &*snapshot.settings;
    let peer = request.extensions().get::<Peer>().copied();
    let Some(Peer(peer)) = peer.filter(|peer| settings.trusted_proxies.trusts(peer.0)) else {
        let reason = "this address is not a trusted proxy; add it to the configuration: \
                      `client: { trusted_proxies: [...] }`";
        return Err(HttpApiError::new(ResponseStatus::Forbidden, reason));
    };
    let in_query = DenyStatus::in_query(request.uri().query(), &Authorize::DENY_STATUSES)?;
    let deny_status = in_query.or_else(|| DenyStatus::of(settings.deny_status, &Authorize::DENY_STATUSES));
    let deny_status = deny_status.unwrap_or(DenyStatus(status_code(Authorize::DENY_STATUS_DEFAULT)));
    let (parts, _) = request.into_parts();
    let lines = parts.headers.get_all(settings.trusted_proxies.source().header_name());
    let client = settings.trusted_proxies.client(peer, lines.iter().map(HeaderValue::as_bytes));
    let original = original_request::parse(parts, &settings.trusted_proxies)?;
    let Some(layer) = &snapshot.layer else { return Ok(allowed(Response::new(Body::empty()))) };

    let all = || RuleSet((0..settings.limits).collect());
    let rules = settings.authorize_limits.clone().unwrap_or_else(all);
    let concurrency = ConcurrencySet([].into());
    let context = RequestContext {
        client: Some(client),
        rules: Some(&rules),
        concurrency: Some(&concurrency),
        ..RequestContext::default()
    };
    let LimitedCall { response, event } = layer.call_with(AllowService, original, context);
    let mut answering = pin!(response);
    let Ok(response) = answering.as_mut().await;
    let event = event.or_else(|| answering.take_event());
    let response = response.map(Body::new);
    Ok(match event.is_some_and(|event| event.is_allowed()) {
        true => allowed(response),
        false => denied(response, deny_status),
    })
}

fn allowed(mut response: Response<Body>) -> EndpointResponse {
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    EndpointResponse { response, outcome: EndpointResult::Allowed }
}

/// A `deny_status` of 429 passes the denial on with its real status; the others replace the status of any denial.
fn denied(mut response: Response<Body>, deny_status: DenyStatus) -> EndpointResponse {
    let real = real_status(&response);
    let is_real = deny_status.0 == status_code(ResponseStatus::TooManyRequests);
    let status = if is_real { real } else { deny_status.0 };
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(DENIED, HeaderValue::from(real.as_u16()));
    EndpointResponse { response, outcome: EndpointResult::Denied }
}

/// The real status of a denial. A gRPC denial has status 200 and its code in `grpc-status`; a proxy would take the
/// 200 for an allowed request.
fn real_status(response: &Response<Body>) -> StatusCode {
    match response.headers().get("grpc-status").map(HeaderValue::as_bytes) {
        Some(code) => status_code(ResponseStatus::of_grpc(code).unwrap_or(ResponseStatus::TooManyRequests)),
        // A denial configured with a success status must still deny.
        None if response.status().is_success() => status_code(ResponseStatus::TooManyRequests),
        None => response.status(),
    }
}

/// Takes the place of the application.
#[derive(Clone, Copy, Debug)]
struct AllowService;

impl Service<http::Request<()>> for AllowService {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<()>) -> Self::Future {
        ready(Ok(Response::new(Empty::new())))
    }
}
